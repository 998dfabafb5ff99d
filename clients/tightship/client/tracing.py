"""Client spans around calls: their trace context goes out as metadata, the spans are emitted after the answer."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from tightship.telemetry import Tracer

# Conventions of OpenTelemetry for RPCs.
_SYSTEM = "rpc.system.name"
_METHOD = "rpc.method"
_STATUS = "rpc.response.status_code"
_ERROR_TYPE = "error.type"

Metadata = tuple[tuple[str, str], ...]


class CallSpan:
    """The span of one call. `metadata` goes with the call; `end` sends the span."""

    __slots__ = ("_begun", "_events", "_method", "_parent", "_tracer", "metadata", "traceparent")

    def __init__(self, tracer: Tracer, method: str, parent: str | None = None) -> None:
        self._tracer = tracer
        self._method = method
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

    def end(self, status: str = "OK", error: str | None = None, **attributes: str) -> None:
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
                _SYSTEM: "grpc",
                _METHOD: self._method,
                _STATUS: status,
                _ERROR_TYPE: status if error is not None else None,
                **{f"tightship.{key}": value for key, value in attributes.items()},
            },
            error=error,
            events=self._events,
        )
        self.traceparent = ""


def current() -> str:
    """The trace context that a call is made in: the caller's current span, else TRACEPARENT of the environment."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return os.environ.get("TRACEPARENT", "")
