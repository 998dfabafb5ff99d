"""Spans that are kept as they were told, and built by the thread that exports them.

Imported only where tracing is on: it needs the SDK.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

Present = dict[str, str | bool | int | float | Sequence[str]]

_log = logging.getLogger("tightship.telemetry")

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
_KINDS = {kind.name.lower(): kind for kind in SpanKind}
_ANY = SpanContext(1, 1, is_remote=False, trace_flags=_SAMPLED)


class Late(ReadableSpan):
    """What `Tracer.emit` was told; to the SDK's queue it is a span that is sampled."""

    __slots__ = ("told",)

    def __init__(self, **told: Any) -> None:
        self.told = told

    @property
    def context(self) -> SpanContext:
        return _ANY


class _Hashed(Resource):
    """A resource whose hash is not made anew, by way of JSON, for each span that is encoded."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


class BuildingExporter(SpanExporter):
    """Builds the spans of a batch and exports them. Counts: `taken` from the queue, `failed` to be exported."""

    def __init__(self, exporter: SpanExporter, resource: Resource, scope: InstrumentationScope) -> None:
        self.taken = 0
        self.failed = 0
        self._over = False
        self._told = 0
        """`failed` when the last export succeeded."""
        self._exporter = exporter
        self._resource = _Hashed(resource)
        self._scope = scope

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        self.failed += len(spans)  # also where it raises
        built = [self._built(**each.told) for each in spans if isinstance(each, Late)]
        result = self._exporter.export(built)
        if result is SpanExportResult.SUCCESS:
            self.failed -= len(spans)
            if self.failed != self._told:
                _log.warning("spans are exported again; %d were lost", self.failed - self._told)
                self._told = self.failed
        elif self.failed - self._told == len(spans):  # the first time
            _log.warning("spans can't be exported, and are dropped until the collector answers")
        return result

    def shutdown(self) -> None:
        """Ends also the wait of an export that is to be tried again."""
        if not self._over:
            self._over = True
            self._exporter.shutdown()

    def _built(
        self,
        *,
        traceparent: str,
        parent: str | None,
        name: str,
        start_ns: int,
        end_ns: int,
        kind: str,
        attributes: Mapping[str, str | bool | int | float | Sequence[str] | None] | None,
        error: str | None,
        events: Iterable[tuple[str, int, Mapping[str, str]]],
        links: Iterable[str],
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context=_context(traceparent, remote=False),
            parent=_context(parent, remote=True),
            resource=self._resource,
            attributes=_present(attributes),
            events=[Event(label, _present(values), time_ns) for label, time_ns, values in events],
            links=[Link(context) for link in links if (context := _context(link, remote=True)) is not None],
            kind=_KINDS[kind],
            status=_UNSET if error is None else Status(StatusCode.ERROR, error),
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            instrumentation_scope=self._scope,
        )


@functools.lru_cache(64)  # of siblings the parent is the same
def _context(traceparent: str | None, remote: bool) -> SpanContext | None:
    """None for what is no valid traceparent."""
    try:
        _, trace_hex, span_hex, flags_hex = (traceparent or "").split("-")
        trace, span, flags = int(trace_hex, 16), int(span_hex, 16), int(flags_hex, 16)
    except ValueError:
        return None
    context = SpanContext(trace, span, is_remote=remote, trace_flags=TraceFlags(flags & TraceFlags.SAMPLED))
    return context if context.is_valid else None


def _present(attributes: Mapping[str, str | bool | int | float | Sequence[str] | None] | None) -> Present:
    return {key: value for key, value in (attributes or {}).items() if value is not None}
