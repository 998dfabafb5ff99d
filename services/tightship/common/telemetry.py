"""The services' tracer, under the name they use, and the span of a call as its server tells it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tightship.telemetry import Tracer
from tightship.telemetry import conventions as names

__all__ = ["Tracer", "emit_call"]


def emit_call(
    tracer: Tracer,
    traceparent: str,
    *,
    parent: str,
    method: str,
    begun_ns: int,
    status: str = "OK",
    message: str = "",
    links: Iterable[str] = (),
) -> None:
    """A server's span. `method` is "Service/Method"; `status` names the gRPC code, `message` says what went wrong."""
    name = f"tightship.v1.{method}"
    tracer.emit(
        traceparent,
        parent or None,
        name,
        begun_ns,
        time.time_ns(),
        kind="server",
        attributes={names.RPC_SYSTEM: "grpc", names.RPC_METHOD: name, names.RPC_STATUS: status},
        error=(message or status) if status in names.SERVER_ERRORS else None,
        error_type=status,
        links=links,
    )
