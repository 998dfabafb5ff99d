"""After a start: every container of the journal adopted or undone, each by itself and within its own bound.

The truth of processes is the spawner's: what it told in its answer to HELLO, or, for a new spawner, finds by ADOPT.

A row is written before the first directory and goes after the last, so what has none was in a journal that is lost.
Launches that the spawner has are made rows again in any case, and so is what is above a container. Other directories
with our mark are rebuilt only where the journal was new, empty or damaged; beside a good one they are residue, which
audit finds and cleanup takes: nobody can say then that they were in use.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Collection
from typing import Any

from tightship.common import logs
from tightship.common.packets import Packet
from tightship.containerizer import names, plan, steps, updating
from tightship.containerizer.apply import OPEN_TIMEOUT_S
from tightship.containerizer.journal import Kind, Phase, Row
from tightship.containerizer.operations import Operation, Parts
from tightship.containerizer.records import Exit
from tightship.containerizer.spawner_link import OrderFailed
from tightship.kernel import cgroup

log = logging.getLogger(__name__)

_ADOPT_TIMEOUT_S = 10.0


def load(parts: Parts) -> list[Operation]:
    """The containers of the journal, known and not begun: their names answer that they are under recovery."""
    operations = []
    for row in parts.journal.rows:
        if row.kind is Kind.CLEANUP or row.phase is Phase.INTENDED or (row.kind is Kind.LAUNCH and not row.detach):
            row.parent_trace = row.caller_trace  # its call died with us, and nobody sends its span
        operation = Operation(parts, row, recovering=True)
        if row.phase is Phase.COMMITTED and row.live.times.keys() & {"open", "commit"}:
            # Only what had settled has these: its spans were sent.
            operation.launch_told = operation.begun_told = operation.settled = True
            row.live.times = {}
        operations.append(operation)
    parts.journal.rows = []
    parts.journal.living = lambda: [each.row for each in parts.registry.by_id.values()]
    for operation in operations:
        parts.registry.add(operation)
    return operations


def begin(parts: Parts, operations: list[Operation], hello: Packet) -> list[asyncio.Task[None]]:
    """Starts the recovery of each, in parallel; also of launches that only the spawner knows."""
    launches = {str(launch["launch"]): launch for launch in hello.get("launches") or ()}
    for launch in launches.values():
        _rebuild(parts, operations, launch)
    _rebuild_from_directories(parts, operations, launches.keys())
    return [
        asyncio.create_task(_recover(parts, operation, launches.get(operation.row.id)), name="recovery")
        for operation in operations
    ]


async def _recover(parts: Parts, operation: Operation, launch: Packet | None) -> None:
    row = operation.row
    await updating.recover(operation)
    if row.kind is Kind.LAUNCH and row.phase is not Phase.INTENDED:
        if launch is None and row.live.pid and row.live.spawner != parts.spawner.identity:
            # The same spawner forgets only what was aborted at its gate, or acknowledged with its row gone.
            launch = await _adopt(parts, row)
        state = launch.get("state") if launch is not None else None
        if state == "opening":
            state = await _opening(parts, row)
        if state == "exited" and launch is not None:
            operation.on_exit(Exit.from_packet(launch))
        elif state == "opened" and row.phase is Phase.COMMITTED:
            operation.adopt()
            if not row.detach:
                grace = parts.settings.rejoin_grace if row.request_id else 0.0
                asyncio.get_running_loop().call_later(grace, _cancel_unjoined, operation)
        elif state == "opened":
            row.live.opened = True
        elif row.record or row.live.opened:
            operation.on_exit(Exit("unknown"))
        else:
            # Never opened: its gate stayed shut, and the spawner has ended it.
            operation.asked = operation.asked or "recovered"
    elif row.kind is Kind.CREATE and row.phase is Phase.COMMITTED:
        operation.adopt()
    operation.start()


async def _opening(parts: Parts, row: Row) -> str:
    """A launch whose gate was open and its command not told to run: asked again, since OPEN is idempotent."""
    try:
        await asyncio.wait_for(parts.spawner.order("OPEN", launch=row.id), OPEN_TIMEOUT_S)
    except (TimeoutError, OrderFailed, ConnectionError):
        return "failed"
    return "opened"


async def _adopt(parts: Parts, row: Row) -> Packet | None:
    """Asks a new spawner for a process of the one before, in terms of HELLO's list; None where it never ran."""
    order = parts.spawner.order(
        "ADOPT",
        launch=row.id,
        pid=row.live.pid,
        start=row.live.start,
        boot=parts.machine.boot,
        pidns=int(row.live.spawner.rpartition(":")[2] or 0),
        meta=row.meta(),
    )
    try:
        answer = await asyncio.wait_for(order, _ADOPT_TIMEOUT_S)
    except (TimeoutError, OrderFailed, ConnectionError) as error:
        log.warning("it can't be adopted: %s", error, extra=logs.about(row.id, row.name, row.trace))
        return {"state": "exited"}  # of unknown status; the walk kills what its cgroup holds
    execed = bool(answer.get("execed", True))
    if answer.get("alive") and execed:
        return {"state": "opened"}
    if not execed:
        return None
    return {**answer, "state": "exited"}


def _cancel_unjoined(operation: Operation) -> None:
    if not operation.waiters:
        operation.ask("recovered")


def _rebuild(parts: Parts, operations: list[Operation], launch: dict[str, Any]) -> None:
    """A launch that the journal doesn't know: from its meta where it ran, else aborted."""
    identity = str(launch["launch"])
    if parts.registry.is_living(identity):
        return
    if launch.get("state") not in ("opened", "exited") or parts.journal.find_record(identity) is not None:
        parts.spawner.order("ABORT", launch=identity, timeout_ms=2000)
        return
    try:
        row = Row.from_meta(str(launch.get("meta")))
        if row.id != identity or parts.registry.named(row.name) is not None:
            raise ValueError("not ours")
    except (ValueError, KeyError, TypeError):
        log.error("launch %s has no meta of ours; it is ended", identity)
        parts.spawner.order("KILL", launch=identity)
        return
    row.phase = Phase.COMMITTED
    row.live.pid = int(launch.get("pid") or 0)
    row.live.start = int(launch.get("start") or 0)
    row.live.started = row.created
    row.live.opened = True
    row.live.spawner = parts.spawner.identity
    begun = row.live.start / os.sysconf("SC_CLK_TCK") or time.clock_gettime(time.CLOCK_BOOTTIME)
    row.live.deadline = begun + row.timeout if row.timeout is not None else None
    row.live.lifetime = begun + row.max_lifetime if row.max_lifetime is not None else None
    _add(parts, operations, row)


def _rebuild_from_directories(parts: Parts, operations: list[Operation], launches: Collection[str]) -> None:
    """A name with the same mark in every hierarchy, or with a committed container below, was a container: it is listed
    again as one made by Create, as far as anybody can tell. What is less than that, has a record, or was a launch that
    never ran (`launches` are those that the spawner knew), is undone."""
    above = {name for each in operations if each.row.phase is Phase.COMMITTED for name in names.lineage(each.row.name)}
    above = {name for name in above if parts.registry.named(name) is None}
    if not parts.journal.lost and not above:
        return
    found = marked(parts)
    wanted = found.keys() | above if parts.journal.lost else above
    for name in sorted(wanted, reverse=True):  # from below, so that what keeps its parents is known first
        identities = found.get(name, [])
        if parts.registry.named(name) is not None:
            continue
        identity = identities[0] if identities else secrets.token_hex(8)
        if parts.registry.is_living(identity):
            continue
        ended = identity in launches or parts.journal.find_record(identity) is not None
        # In the optional hierarchies only some are.
        whole = len(identities) >= len(parts.machine.hierarchies) and len(set(identities)) == 1 and not ended
        kept = whole or any(each.row.phase is Phase.COMMITTED for each in parts.registry.below(name))
        row = Row(
            id=identity,
            name=name,
            kind=Kind.CREATE if kept else Kind.CLEANUP,
            plan=_there(parts, plan.for_cleanup(parts.machine, name, [identity])),
            phase=Phase.COMMITTED if kept else Phase.UNDOING,
            reason="" if kept else "recovered",
        )
        fate = "listed again" if kept else "undone"
        log.warning("%s was in no journal; it is %s", name, fate, extra=logs.about(identity, name))
        _add(parts, operations, row)


def _there(parts: Parts, steps: tuple[plan.Step, ...]) -> tuple[plan.Step, ...]:
    """Without the optional hierarchies in which it has no directory: nothing below it has one there either."""
    optional = tuple(each.base for each in parts.machine.optional)
    return tuple(step for step in steps if not step.target.startswith(optional) or os.path.isdir(step.target))


def marked(parts: Parts) -> dict[str, list[str]]:
    """Container ids in the marks below our bases, by name; one for each hierarchy that has the directory."""
    found: dict[str, list[str]] = {}
    for hierarchy in parts.machine.trees:
        for path in cgroup.tree(hierarchy.base):
            identity = steps.identity_of(path)
            if identity is not None:
                found.setdefault("/" + os.path.relpath(path, hierarchy.base), []).append(identity)
    return found


def _add(parts: Parts, operations: list[Operation], row: Row) -> None:
    try:
        parts.journal.intend(row, row.meta())
    except sqlite3.Error as error:
        extra = logs.about(row.id, row.name, row.trace)
        log.error("it is not in the journal, and rebuilt again at the next start: %s", error, extra=extra)
    operation = Operation(parts, row, recovering=True)
    parts.registry.add(operation)
    operations.append(operation)
