"""The spans of a container, drawn from its story: sent to a collector, or told to whoever asks for the trace.

Span ids follow from the launch's own, which is in the journal: a span that is told again, after a crash or by `Trace`,
is the same span.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tightship.containerizer import story
from tightship.containerizer.journal import Kind
from tightship.containerizer.story import Story
from tightship.telemetry import child, sampled
from tightship.telemetry import conventions as names
from tightship.v1 import containerizer_pb2 as pb

if TYPE_CHECKING:
    from tightship.common.telemetry import CallTrace, Tracer
    from tightship.containerizer.operations import Operation

# What takes longer tells that it has begun, and launches that live longer have their times on disk alone.
SLOW_S = 1.0

# Calls that a trace is linked with, at most.
_LINKS_MAX = 32


@dataclass(slots=True)
class Span:
    """Times in ns of the wall clock; `ended` is 0 while it goes on."""

    traceparent: str
    parent: str
    name: str
    begun: int
    ended: int
    attributes: dict[str, str | int]
    error: str | None = None
    error_type: str = ""


def link(call: CallTrace, operation: Operation) -> None:
    """The call is about that container: each one's trace leads to the other's."""
    if call.link(operation.row.trace) and len(operation.links) < _LINKS_MAX:
        operation.links = (*operation.links, call.own)


def launched(told: Story) -> list[Span]:
    """The launch or create and its steps; none for a cleanup of a name."""
    if told["kind"] == Kind.CLEANUP:
        return []
    root = _root(told)
    steps, failed, walks = told["steps"], told["failed"], told["walks"]
    ended = 0
    if told["started"] or walks:
        ended = max((end for _, end in steps.values()), default=walks[0]["begun"] if walks else told["begun"])
    first = Span(root, told["parent"], told["kind"], told["begun"], ended, _whose(told))
    if failed is not None:
        first.error_type, first.error = failed[1], failed[2]
    spans = [first]
    for name, (begin, end) in steps.items():
        span = Span(child(root, name), root, name, begin, end, {})
        if failed is not None and failed[0] == name:
            span.error_type, span.error = failed[1], failed[2]
        spans.append(span)
    return spans


def walked(told: Story, number: int) -> list[Span]:
    """A cleanup, and what it undid."""
    walk = told["walks"][number]
    made_up = told["kind"] == Kind.CLEANUP
    root = _root(told)
    # By its time: of a cleanup that was pending for long the middle is not kept.
    own = root if made_up and number == 0 else child(root, f"{names.CLEANUP} {walk['begun']}")
    left = walk["left"]
    attributes = _whose(told) | {
        names.CANCEL_REASON: walk["reason"],
        names.CLEANUP_BUDGET_MS: walk["budget_ms"],
        names.CLEANUP_PROCESSES: walk["killed"],
        names.CLEANUP_CGROUPS: walk["cgroups"],
        names.CLEANUP_LEASES: walk["leases"],
    }
    if walk["step"]:
        attributes[names.CANCEL_STEP] = walk["step"]
    if told["ending"]:
        attributes[names.RECORD_REASON] = told["ending"]
    span = Span(own, (told["parent"] if own == root else root), names.CLEANUP, walk["begun"], walk["ended"], attributes)
    if walk["ended"]:
        attributes[names.CLEANUP_OUTCOME] = "pending" if left else "clean"
    if left:
        span.error_type = "CLEANUP_PENDING"
        span.error = "; ".join(f"{name}: {why}" for name, why in left.items())[:4096]
    spans = [span]
    for name, (begin, end) in walk["steps"].items():
        step = Span(child(own, name), own, name, begin, end, {})
        why = left.get(name.removeprefix("undo."))
        if why is not None:
            step.error_type, step.error = "CLEANUP_PENDING", why[:4096]
        spans.append(step)
    return spans


def answer(told: Story) -> pb.TraceResponse:
    """The whole trace, as far as this service knows it; parents before their children."""
    spans = launched(told)
    for number in range(len(told["walks"])):
        spans += walked(told, number)
    trace = told["trace"]
    response = pb.TraceResponse(id=told["id"], name=told["name"], trace_id=trace[3:35], sampled=sampled(trace))
    for span in spans:
        row = response.spans.add(
            name=span.name,
            span_id=span.traceparent[36:52],
            parent_span_id=span.parent[36:52],
            attributes={key: str(value) for key, value in span.attributes.items()},
        )
        row.start.FromNanoseconds(span.begun)
        if span.ended:
            row.end.FromNanoseconds(span.ended)
        if span.error is not None:
            row.error, row.error_type = span.error, span.error_type
    return response


# Sending. Nothing where the trace is not sampled.


def tell_going_on(operation: Operation) -> None:
    """What takes longer: the launch and its steps where they are over, and that it goes on where that is so."""
    if not sampled(operation.row.trace):
        return
    spans = launched(story.of(operation))
    if operation.started and not operation.launch_told:
        operation.launch_told = True
        _send(operation, spans)
    if not operation.begun_told and not (operation.started and operation.row.kind is Kind.CREATE):
        operation.begun_told = True
        _tell_begun(operation, spans[0])


def tell_end(operation: Operation) -> None:
    """The launch, where it was not told before, and the last walk."""
    if not sampled(operation.row.trace):
        return
    told = story.of(operation)
    if not operation.launch_told:
        operation.launch_told = True
        _send(operation, launched(told))
    _send(operation, walked(told, len(told["walks"]) - 1))


@contextlib.contextmanager
def walking(operation: Operation) -> Iterator[None]:
    """Around a walk: what is slow tells that it has begun."""
    operation.walking = True
    slow = sampled(operation.row.trace)
    timer = asyncio.get_running_loop().call_later(SLOW_S, _tell_walk_begun, operation) if slow else None
    try:
        yield
    finally:
        operation.walking = False
        if timer is not None:
            timer.cancel()


def _tell_walk_begun(operation: Operation) -> None:
    told = story.of(operation)
    _tell_begun(operation, walked(told, len(told["walks"]) - 1)[0])


def _tell_begun(operation: Operation, on: Span) -> None:
    """A span that is sent when it ends would say too late that it goes on."""
    own = child(on.traceparent, names.BEGUN)
    _send(operation, [Span(own, on.traceparent, names.BEGUN, on.begun, on.begun, on.attributes)])


def _send(operation: Operation, spans: list[Span]) -> None:
    tracer: Tracer = operation.parts.tracer
    links: tuple[str, ...] = ()
    if spans and spans[0].name != names.BEGUN:
        links, operation.links = operation.links, ()
    for span in spans:
        tracer.emit(
            span.traceparent,
            span.parent or None,
            span.name,
            span.begun,
            span.ended,
            attributes=span.attributes,
            error=span.error,
            error_type=span.error_type,
            links=links,
        )
        links = ()


def _root(told: Story) -> str:
    """The first span's traceparent, or what stands for it where nothing was traced."""
    return told["trace"] or f"00-{told['id'] * 2}-{told['id']}-00"


def _whose(told: Story) -> dict[str, str | int]:
    return {names.CONTAINER_ID: told["id"], names.CONTAINER_NAME: told["name"]}
