"""Spans of a container's launch and cleanup, made after the fact from the times that its operation kept.

The launch's own traceparent is in the journal, so that a restarted containerizer emits the same span.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tightship.v1 import containerizer_pb2 as pb

if TYPE_CHECKING:
    from tightship.containerizer.operations import Operation
    from tightship.containerizer.steps import Times


@dataclass(slots=True)
class CallTrace:
    """Traceparents of a call of ours and of its caller; empty where tracing is off."""

    own: str = ""
    caller: str = ""
    answered: bool = False
    """The last message is on its way: an end by the client is none of an error."""


def times_json(times: Times) -> str:
    """Steps' times as the journal keeps them."""
    return json.dumps(times, separators=(",", ":"))


def emit_launch(operation: Operation) -> None:
    """The launch and its steps, once. Nothing where tracing is off."""
    row = operation.row
    tracer = operation.parts.tracer
    if not row.trace or operation.launch_emitted:
        return
    operation.launch_emitted = True
    times = row.live.times
    end = max((end for _, end in times.values()), default=row.created)
    error = operation.error.message if operation.error is not None else None
    tracer.emit(
        row.trace,
        row.parent_trace or None,
        str(row.kind),
        row.created,
        end,
        attributes={"tightship.container.id": row.id, "tightship.container.name": row.name},
        error=error,
    )
    for name, (begin, finish) in times.items():
        tracer.emit(tracer.context(row.trace), row.trace, name, begin, finish)


def emit_cleanup(operation: Operation) -> None:
    """The cleanup as it stands: a span for each walk that came to an end."""
    row = operation.row
    tracer = operation.parts.tracer
    if not row.trace:
        return
    cleanup = operation.cleanup()
    context = tracer.context(row.trace)
    tracer.emit(
        context,
        row.trace,
        "cleanup",
        operation.undo_begun_ns,
        time.time_ns(),
        attributes={
            "tightship.container.id": row.id,
            "tightship.container.name": row.name,
            "tightship.cancel.reason": row.reason,
            "tightship.cancel.step": operation.cancel_step,
            "tightship.cleanup.budget_ms": int(operation.undo_budget * 1000),
            "tightship.cleanup.outcome": pb.Cleanup.Outcome.Name(cleanup.outcome).lower(),
            "tightship.cleanup.processes_killed": cleanup.processes_killed,
            "tightship.cleanup.cgroups_removed": cleanup.cgroups_removed,
            "tightship.cleanup.leases_closed": cleanup.leases_closed,
        },
    )
    for name, (begin, finish) in operation.undo_times.items():
        tracer.emit(tracer.context(context), context, name, begin, finish)
