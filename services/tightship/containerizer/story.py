"""What happened to a container, as plain data: its trace is drawn from it, and the journal keeps it.

It holds the times of steps and of each walk of undo, why it ended, and the trace context. It is made from what the
operation knows anyway when somebody asks or the row goes; nothing is kept for it beside a living container.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, TypedDict

from tightship.containerizer.journal import Kind
from tightship.v1 import containerizer_pb2 as pb

if TYPE_CHECKING:
    from tightship.containerizer.operations import Operation
    from tightship.containerizer.steps import Times

# Walks that are kept of a cleanup that was pending for long: the first, and the last ones.
_WALKS_MAX = 8


class Walked(TypedDict):
    """One walk of undo. Times are of the wall clock, in ns; counts are of this walk and those before."""

    begun: int
    ended: int
    """0 while it goes on."""
    reason: str
    step: str
    """What was on when the container ended; after a crash the journal's phase."""
    budget_ms: int
    killed: int
    cgroups: int
    leases: int
    left: dict[str, str]
    """What stayed, with why, by step."""
    steps: Times


class Story(TypedDict):
    """One container, from its plan to its last walk."""

    id: str
    name: str
    kind: str
    trace: str
    """Traceparent of its first span; empty where tracing was off. `parent` is that of its call."""
    parent: str
    client: str
    """Who made it; empty for the main door."""
    begun: int
    started: bool
    """It came to run, or to be there."""
    steps: Times
    failed: tuple[str, str, str] | None
    """Why it never ran: the step, empty where none failed, class of the error, and what was told."""
    ending: str
    """The record's reason, in lower case; empty without a record."""
    walks: list[Walked]


def of(operation: Operation, steps: Times | None = None) -> Story:
    """As it stands. `steps`: the times of a container whose row in the journal has them."""
    row = operation.row
    known = row.live.times if steps is None else steps
    there = operation.started or (operation.error is None and "commit" in known)
    ran = row.live.opened if row.kind is Kind.LAUNCH else there
    return Story(
        id=row.id,
        name=row.name,
        kind=str(row.kind),
        trace=row.trace,
        parent=row.parent_trace,
        client=row.client,
        begun=row.created,
        started=ran,
        steps=known,
        failed=None if ran or row.kind is Kind.CLEANUP or not operation.walk_begun_ns else _failed(operation, known),
        ending="" if operation.record is None else pb.Record.Reason.Name(operation.record.reason).lower(),
        walks=[*operation.walks, *([walk(operation, 0)] if operation.walking else ())],
    )


def walk(operation: Operation, ended: int | None = None) -> Walked:
    """The walk that has just ended, or is on."""
    row = operation.row
    done = operation.done
    failed = _failed(operation, row.live.times)[0] if operation.error is not None else ""
    return Walked(
        begun=operation.walk_begun_ns,
        ended=time.time_ns() if ended is None else ended,
        reason=row.reason,
        step=failed or operation.cancel_step,
        budget_ms=int(operation.undo_budget * 1000),
        killed=len(done.killed),
        cgroups=done.cgroups,
        leases=len(done.leases),
        left=operation.left,
        steps=operation.undo_times,
    )


def keep(operation: Operation) -> None:
    """Notes the walk that has just ended, in bounds."""
    walks = (*operation.walks, walk(operation))
    operation.walks = walks if len(walks) <= _WALKS_MAX else (walks[0], *walks[2:])


def to_json(story: Story) -> str:
    return json.dumps(story, separators=(",", ":"))


def from_json(text: str) -> Story | None:
    """None for what an older version kept."""
    found = json.loads(text)
    return found if "walks" in found else None


def _failed(operation: Operation, steps: Times) -> tuple[str, str, str]:
    error = operation.failure()
    stage = error.metadata.get("stage", "")
    if operation.error is None:
        stage = ""
    elif stage not in steps:
        stage = operation.cancel_step if operation.cancel_step in steps else ""
    return stage, error.reason, error.message[:4096]
