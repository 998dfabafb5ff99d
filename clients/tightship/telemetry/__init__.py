"""Traces of clients and services alike: spans made after the fact, with explicit ids and times.

On only when the standard OpenTelemetry variables ask for it; else nothing of OpenTelemetry is imported or started. On
the way of a launch a tracer only makes W3C traceparent strings; the spans are built later, from times the code keeps
anyway, by the thread of the SDK that exports them from a bounded queue. Nothing here blocks or fails its caller. This
package imports nothing of tightship.

Honoured: OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER (otlp, console, none), OTEL_EXPORTER_OTLP_* (protocol http/protobuf),
OTEL_TRACES_SAMPLER and its argument, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_*.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from tightship.telemetry.conventions import ERROR_TYPE

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | bool | int | float | Sequence[str] | None
Attributes = Mapping[str, Value]

# W3C trace context, version 00; ids of zeros only are invalid.
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = 0x01

# Seconds for one export, where the environment says nothing: a dead collector must not hold an ending process.
_EXPORT_TIMEOUT_S = 2.0
# A try that is refused is over in less; the next one would be a second later.
_ONE_TRY_S = 0.15

# Of spans, where the environment says nothing: the SDK's own.
_QUEUE_MAX = 2048

_log = logging.getLogger("tightship.telemetry")


class Tracer:
    """What code that is traced calls. This class is tracing switched off, at no cost; `from_environment` gives one."""

    enabled = False
    dropped = 0
    """Spans that never reached the collector: the queue was full, or an export failed."""

    @staticmethod
    def from_environment(service: str) -> Tracer:
        """The tracer that the OTEL_* variables ask for. `service` is the service's name where they give none."""
        env = os.environ
        if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return Tracer()
        exporter = env.get("OTEL_TRACES_EXPORTER", "").strip().lower()
        endpoint = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        if exporter == "none" or not (exporter or endpoint):
            return Tracer()
        try:
            return _Exporting(service, _exporter(exporter or "otlp"))
        except Exception as error:  # noqa: BLE001  a wrong setting must not keep a service from starting
            _log.warning("tracing is off: %s", error)
            return Tracer()

    def context(self, parent: str | None = None) -> str:  # noqa: ARG002
        """A new traceparent: a child of `parent`, or the root of a new trace; empty when tracing is off."""
        return ""

    def emit(
        self,
        traceparent: str,
        parent: str | None,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        error: str | None = None,
        error_type: str = "",
        events: Iterable[tuple[str, int, Attributes]] = (),
        links: Iterable[str] = (),
    ) -> None:
        """Sends the span `traceparent` (of `context` or `child`) on its way. Times are of `time.time_ns()`.

        `error` describes a failure, and `error_type` is its class; attributes that are None are left out. Never blocks.
        """

    def shutdown(self, timeout_s: float, *, patient: bool = True) -> None:
        """Exports what is queued, `timeout_s` seconds at most; tries once alone where not `patient`. Blocks."""

    def traceparent_of(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:  # noqa: ARG002
        """The caller's traceparent in gRPC metadata; empty when tracing is off or there is no valid one."""
        return ""


class _Exporting(Tracer):
    """Spans to an exporter, through the SDK's batch processor."""

    enabled = True

    def __init__(self, service: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.trace import TracerProvider, sampling
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from tightship.telemetry.late import BuildingExporter, Late

        # The provider only reads the sampler from the environment; spans don't go through it.
        provider = TracerProvider(resource=resource(service), shutdown_on_exit=False)
        self._sampler = provider.sampler
        self._inherit = isinstance(provider.sampler, sampling.ParentBased)
        self._late = Late
        self._exporter = BuildingExporter(exporter, provider.resource, InstrumentationScope(service))
        self._processor = BatchSpanProcessor(self._exporter)
        self._queue_max = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or _QUEUE_MAX)
        self._emitted = 0
        self._refused = 0

    @property
    def dropped(self) -> int:  # type: ignore[override]
        return self._refused + self._exporter.failed

    def context(self, parent: str | None = None) -> str:
        from opentelemetry.sdk.trace.sampling import Decision

        span = secrets.token_hex(8)
        if parent and _TRACEPARENT.fullmatch(parent):
            trace = parent[3:35]
            if self._inherit:
                return f"00-{trace}-{span}-{parent[53:]}"
        else:
            trace = secrets.token_hex(16)
        decision = self._sampler.should_sample(None, int(trace, 16), "").decision
        return f"00-{trace}-{span}-{'01' if decision is Decision.RECORD_AND_SAMPLE else '00'}"

    def emit(
        self,
        traceparent: str,
        parent: str | None,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        error: str | None = None,
        error_type: str = "",
        events: Iterable[tuple[str, int, Attributes]] = (),
        links: Iterable[str] = (),
    ) -> None:
        if not sampled(traceparent):
            return
        # The SDK's own queue drops the oldest, with a line in the log for each.
        if self._emitted - self._exporter.taken >= self._queue_max:
            self._refused += 1
            return
        self._emitted += 1
        if error is not None:
            attributes = {**(attributes or {}), ERROR_TYPE: error_type or "_OTHER"}
        late = self._late(
            traceparent=traceparent,
            parent=parent,
            name=name,
            start_ns=start_ns,
            end_ns=end_ns,
            kind=kind,
            attributes=attributes,
            error=error,
            events=events,
            links=links,
        )
        self._processor.on_end(late)

    def shutdown(self, timeout_s: float, *, patient: bool = True) -> None:
        # The SDK's own bound is 30 s; a daemon thread that is still in it does not hold the process.
        thread = threading.Thread(target=self._processor.shutdown, name="telemetry-shutdown", daemon=True)
        thread.start()
        if not patient:
            thread.join(min(_ONE_TRY_S, timeout_s))
            self._exporter.shutdown()
        thread.join(timeout_s)

    def traceparent_of(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
        for key, value in metadata or ():
            if key == "traceparent" and isinstance(value, str) and _TRACEPARENT.fullmatch(value):
                return value
        return ""


def _exporter(name: str) -> SpanExporter:
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)  # a client's stdout is its command's
    if name != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER={name}: only otlp, console and none are known")
    env = os.environ
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol and protocol.strip().lower() != "http/protobuf":
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: only http/protobuf is supported")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    said = env.get("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT") or env.get("OTEL_EXPORTER_OTLP_TIMEOUT")
    return OTLPSpanExporter(timeout=None if said else _EXPORT_TIMEOUT_S)


def resource(service: str) -> Resource:
    """The environment's attributes; `service` only where they name none."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours: dict[str, str | int] = {"process.pid": os.getpid()}
    if "service.name" not in OTELResourceDetector().detect().attributes:
        ours["service.name"] = service
    return Resource.create(ours)


def sampled(traceparent: str) -> bool:
    """Whether spans of this trace are exported; False for an empty one."""
    return len(traceparent) == 55 and bool(int(traceparent[53:], 16) & _SAMPLED)


def child(parent: str, key: str) -> str:
    """A traceparent below `parent`, the same one for the same key: what tells of a span again tells of one span."""
    return f"{parent[:36]}{hashlib.blake2b((parent[36:52] + key).encode(), digest_size=8).hexdigest()}{parent[52:]}"
