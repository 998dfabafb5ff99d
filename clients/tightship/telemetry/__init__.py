"""Traces of clients and services alike: spans made after the fact, with explicit ids and times.

On only when the standard OpenTelemetry variables ask for it; else nothing of OpenTelemetry is imported or started. On
the way of a launch a tracer only makes W3C traceparent strings; the spans are built later, from times the code keeps
anyway, and go to a bounded queue that a thread of the SDK exports. Nothing here blocks or fails its caller. This
package imports nothing of tightship.

Honoured: OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER (otlp, console, none), OTEL_EXPORTER_OTLP_* (protocol http/protobuf),
OTEL_TRACES_SAMPLER and its argument, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_*.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | bool | int | float | Sequence[str] | None
Attributes = Mapping[str, Value]

# W3C trace context, version 00; ids of zeros only are invalid.
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = 0x01

# Seconds for one export, where the environment says nothing: a dead collector must not hold an ending process.
_EXPORT_TIMEOUT_S = 2.0

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
        events: Iterable[tuple[str, int, Attributes]] = (),
        links: Iterable[str] = (),
    ) -> None:
        """Sends the span `traceparent` (made by `context`) on its way. Times are of `time.time_ns()`. Never blocks.

        `error` is the description of a failure; attributes that are None are left out.
        """

    def shutdown(self, timeout_s: float) -> None:
        """Exports what is queued, `timeout_s` seconds at most. Blocks: not for an event loop."""

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

        # The provider only reads the sampler from the environment; spans don't go through it.
        self._provider: TracerProvider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
        self._inherit = isinstance(self._provider.sampler, sampling.ParentBased)
        self._scope = InstrumentationScope(service)
        self._processor: SpanProcessor = BatchSpanProcessor(exporter)

    def context(self, parent: str | None = None) -> str:
        from opentelemetry.sdk.trace.sampling import Decision

        span = secrets.token_hex(8)
        if parent and _TRACEPARENT.fullmatch(parent):
            trace = parent[3:35]
            if self._inherit:
                return f"00-{trace}-{span}-{parent[53:]}"
        else:
            trace = secrets.token_hex(16)
        decision = self._provider.sampler.should_sample(None, int(trace, 16), "").decision
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
        events: Iterable[tuple[str, int, Attributes]] = (),
        links: Iterable[str] = (),
    ) -> None:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import Link, SpanKind
        from opentelemetry.trace.status import Status, StatusCode

        own = _context(traceparent, remote=False)
        if own is None or not own.trace_flags.sampled:
            return
        linked = [context for context in (_context(link, remote=True) for link in links) if context is not None]
        self._processor.on_end(
            ReadableSpan(
                name,
                context=own,
                parent=_context(parent, remote=True),
                resource=self._provider.resource,
                attributes=_present(attributes),
                events=[Event(label, _present(values), time_ns) for label, time_ns, values in events],
                links=[Link(context) for context in linked],
                kind=SpanKind[kind.upper()],
                status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error),
                start_time=start_ns,
                end_time=max(start_ns, end_ns),
                instrumentation_scope=self._scope,
            )
        )

    def shutdown(self, timeout_s: float) -> None:
        # The SDK's own bound is 30 s; a daemon thread that is still in it does not hold the process.
        thread = threading.Thread(target=self._processor.shutdown, name="telemetry-shutdown", daemon=True)
        thread.start()
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


def _resource(service: str) -> Resource:
    """The environment's attributes; `service` only where they name none."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours: dict[str, str | int] = {"process.pid": os.getpid()}
    if "service.name" not in OTELResourceDetector().detect().attributes:
        ours["service.name"] = service
    return Resource.create(ours)


def _context(traceparent: str | None, remote: bool) -> SpanContext | None:
    if not traceparent or not _TRACEPARENT.fullmatch(traceparent):
        return None
    from opentelemetry.trace import SpanContext, TraceFlags

    flags = TraceFlags(int(traceparent[53:], 16) & _SAMPLED)
    return SpanContext(int(traceparent[3:35], 16), int(traceparent[36:52], 16), is_remote=remote, trace_flags=flags)


def _present(attributes: Attributes | None) -> dict[str, str | bool | int | float | Sequence[str]]:
    return {key: value for key, value in (attributes or {}).items() if value is not None}
