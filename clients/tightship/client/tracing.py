"""Client spans around calls: their trace context goes out as metadata, the spans are emitted after the answer."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from tightship.telemetry import Attributes, Tracer
from tightship.telemetry import conventions as names

Metadata = tuple[tuple[str, str], ...]


class CallSpan:
    """The span of one call. `metadata` goes with the call; `end` sends the span. `target` is the channel's."""

    __slots__ = ("_begun", "_events", "_method", "_parent", "_target", "_tracer", "metadata", "traceparent")

    def __init__(self, tracer: Tracer, method: str, parent: str = "", target: str = "") -> None:
        self._tracer = tracer
        self._method = method
        self._target = target
        self._parent = self.traceparent = ""
        self.metadata: Metadata | None = None
        self._begun = 0
        self._events: list[tuple[str, int, Mapping[str, str]]] = []
        if tracer.enabled:
            self._parent = parent or current()
            self.traceparent = tracer.context(self._parent)
            self.metadata = (("traceparent", self.traceparent),)
            self._begun = time.time_ns()

    def event(self, name: str) -> None:
        if self.traceparent:
            self._events.append((name, time.time_ns(), {}))

    def end(self, status: str = "OK", error: str | None = None, attributes: Attributes | None = None) -> None:
        """`status` is the name of the gRPC code; `error` its message when it failed. Only the first end counts."""
        if not self.traceparent:
            return
        self._tracer.emit(
            self.traceparent,
            self._parent,
            self._method,
            self._begun,
            time.time_ns(),
            kind="client",
            attributes={
                names.RPC_SYSTEM: "grpc",
                names.RPC_METHOD: self._method,
                names.RPC_STATUS: status,
                **_server(self._target),
                **(attributes or {}),
            },
            error=error,
            error_type=status,
            events=self._events,
        )
        self.traceparent = ""


def _server(target: str) -> dict[str, str | int]:
    """Attributes of a gRPC target: the path of a Unix socket, or host and port."""
    scheme, colon, rest = target.partition(":")
    if not colon:
        return {names.SERVER_ADDRESS: target} if target else {}
    if scheme == "unix":
        return {names.SERVER_ADDRESS: rest}
    host, _, port = target.rpartition("/")[2].rpartition(":")
    return {names.SERVER_ADDRESS: host, **({names.SERVER_PORT: int(port)} if port.isdigit() else {})}


def current() -> str:
    """The trace context that a call is made in: the caller's current span, else TRACEPARENT of the environment."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return os.environ.get("TRACEPARENT", "")
