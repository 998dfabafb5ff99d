"""One walk of undo over the plan of an operation, backwards: what error, cancel, crash, destroy and cleanup all are.

A walk has an absolute monotonic deadline. An undo that fails is noted and the walk goes on; what it could not take
away it returns, and a later walk begins again at the end of the plan, since every undo is idempotent.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tightship.common import failpoints
from tightship.common.errors import ServiceError, errno_name
from tightship.containerizer import isolation, names, steps
from tightship.containerizer.journal import Kind
from tightship.containerizer.plan import Step
from tightship.containerizer.spawner_link import OrderFailed
from tightship.containerizer.spec import seconds, signal_number
from tightship.kernel import cgroup, process
from tightship.v1 import switchboard_pb2 as sb

if TYPE_CHECKING:
    from tightship.containerizer.operations import Operation

# After a natural exit the switchboard drains and closes by itself: 2 s at most, and some.
_CLOSE_WAIT_S = 3.0
# Of a budget, for what comes after the processes.
_RESERVE_S = 0.5
_CGROUP_TIMEOUT_S = 5.0


class Walk:
    """`run` it once. It changes what the operation knows of itself, and `left`."""

    def __init__(self, operation: Operation, budget: float) -> None:
        self.budget = budget
        self.left: dict[str, str] = {}
        """What stayed, with why; empty when all is gone."""
        self._op = operation
        self._deadline = time.monotonic() + budget
        self._soon = self._deadline - min(_RESERVE_S, budget / 10)

    async def run(self) -> None:
        op = self._op
        if op.stuck is not None:
            if not await op.until(op.stuck.done, self._remaining()):
                self.left["cgroup"] = "a system call has not returned"
                return
            op.stuck = None
        backwards = [step for step in reversed(op.row.plan) if step.name in op.begun]
        await self._end_children()
        leases = [step for step in backwards if step.kind == "lease"]
        if not op.row.live.opened and op.row.kind is Kind.LAUNCH:
            # A switchboard that holds the claim lets go of it, so that the spawner can.
            for step in leases:
                if step.target not in op.closed_leases:
                    op.parts.switchboard.release(step.target, op.row.reason)
        for step in backwards:
            if step.kind == "spawn":
                await self._undo(step, self._spawn)
                if op.record is None and step.name in self.left:
                    op.note_counters()
        closing = [asyncio.ensure_future(self._undo(step, self._lease)) for step in leases]
        try:
            await self._cgroups([step for step in backwards if step.kind == "mkdir"])
        except ServiceError as error:
            self.left["cgroup"] = error.message
        for each in closing:
            await each

    async def _end_children(self) -> None:
        op = self._op
        below = op.parts.registry.below(op.row.name)
        for child in below:
            if not child.closing:
                child.ask("parent")
        for child in below:
            # A pending one is not waited for: its walk has had its time.
            await child.until(lambda child=child: child.over, max(0.0, self._soon - time.monotonic()))  # type: ignore[misc]
        for child in op.parts.registry.children(op.row.name):
            self.left[f"container {child.row.name}"] = "; ".join(child.left.values()) or "still closing"

    async def _undo(self, step: Step, undo: Callable[[str], Awaitable[None]]) -> None:
        point = f"containerizer.undo.{step.name}"
        begun = time.time_ns()
        try:
            await failpoints.hold(point + ".before", self._hurried)
            await undo(step.target)
            await failpoints.hold(point + ".after", self._hurried)
        except OSError as error:
            self.left[step.name] = error.strerror or str(error)
        except (ServiceError, OrderFailed) as error:
            self.left[step.name] = error.message
        self._op.undo_times[f"undo.{step.name}"] = (begun, time.time_ns())

    # The process.

    async def _spawn(self, launch: str) -> None:
        op = self._op
        live = op.row.live
        if not live.opened:
            await self._abort(launch)
        if not live.opened:
            return
        if op.exit is None:
            await self._stop(launch)
        if op.exit is None:
            raise OSError(errno.ETIMEDOUT, f"process {live.pid} has not ended")
        op.conclude()
        tracker = op.parts.machine.tracker.path(op.row.name)
        if cgroup.populated(tracker):
            op.done.killed |= await op.hop(lambda: self._kill(tracker), _CGROUP_TIMEOUT_S)

    async def _abort(self, launch: str) -> None:
        """Ends a launch that is not opened, or finds that it is. Raises OSError when it goes on."""
        op = self._op
        while not op.row.live.opened:
            remaining = max(0.05, self._soon - time.monotonic())
            order = op.parts.spawner.order("ABORT", launch=launch, timeout_ms=int(remaining * 1000))
            order.add_done_callback(lambda _: op.changed())
            if not await op.until(order.done, remaining + 0.2):
                raise OSError(errno.ETIMEDOUT, "the spawner does not answer")
            try:
                order.result()
                return
            except OrderFailed as error:
                if error.errno != errno.EBUSY:
                    why = error.message or errno_name(error.errno)
                    raise OSError(error.errno, f"launch {launch}: {why}") from error
            op.parts.spawner.tell("KILL", launch=launch)
            if op.row.kind is Kind.LAUNCH:
                await self._settle_opening(launch)
            if time.monotonic() > self._soon:
                raise OSError(errno.ETIMEDOUT, f"process of launch {launch} has not ended")
            if not op.row.live.opened:
                await asyncio.sleep(0.02)

    async def _settle_opening(self, launch: str) -> None:
        """Its gate is open, and whether the command ran is not known: killed, and asked again, OPEN tells."""
        op = self._op
        opening = op.parts.spawner.order("OPEN", launch=launch)
        opening.add_done_callback(lambda _: op.changed())
        await op.until(opening.done, self._remaining())
        if opening.done() and opening.exception() is None:
            op.row.live.opened = True

    async def _stop(self, launch: str) -> None:
        """Stop signal and grace, then the kill of the whole cgroup; until the spawner tells the exit."""
        op = self._op
        life = op.spec.lifecycle
        number = signal_number(life.stop_signal or "TERM", "lifecycle.stop_signal")
        grace = seconds(life.grace) if life.HasField("grace") else op.parts.settings.grace
        grace = min(grace, self.budget / 2)
        is_first = op.spec.HasField("virtual_host") or isolation.is_confined(op.spec)
        # An init waits for signals by ways that can't be seen.
        deaf = is_first and not op.spec.virtual_host.HasField("init") and not process.catches(op.row.live.pid, number)
        above = map(op.parts.registry.named, names.lineage(op.row.name))
        still = op.paused or any(each is not None and each.paused for each in above)
        if grace and not still and not deaf:
            op.parts.spawner.tell("SIGNAL", launch=launch, signal=number)
            if await op.until(lambda: op.exit, min(grace, self._remaining())):
                op.done.killed.add(op.row.live.pid)
                return
        tracker = op.parts.machine.tracker.path(op.row.name)
        op.done.killed |= await op.hop(lambda: self._kill(tracker), _CGROUP_TIMEOUT_S)
        op.parts.spawner.tell("KILL", launch=launch)
        await op.until(lambda: op.exit, max(0.0, self._soon - time.monotonic()))

    def _kill(self, path: str) -> set[int]:
        """Kills what is in the cgroup, but for living containers below; the pids. In a worker thread."""
        return cgroup.kill(path, lambda below: self._is_other_living(steps.identity_of(below)))

    # The lease.

    async def _lease(self, lease: str) -> None:
        op = self._op
        link = op.parts.switchboard

        def closed() -> bool:
            return lease in op.closed_leases

        if op.exit is not None and not op.asked and link.session:
            await op.until(closed, min(_CLOSE_WAIT_S, self._remaining()))
        why = ""
        while not closed():
            if why and not self._remaining():
                raise OSError(errno.ETIMEDOUT, f"lease {lease}: {why}")
            try:
                why = await self._release(lease, closed)
            except ServiceError as error:
                why = error.message
                await asyncio.sleep(min(0.05, self._remaining()))
        if lease not in op.done.leases:
            op.done.leases.add(lease)
            op.done.removed.append(f"lease {lease}")

    async def _release(self, lease: str, closed: Callable[[], bool]) -> str:
        """Asks for the end of the lease once, and waits a little for it; why it is not closed."""
        op = self._op
        link = op.parts.switchboard
        await link.wait_standing(max(0.05, self._remaining()))
        answer = link.release(lease, op.row.reason)
        answer.add_done_callback(lambda _: op.changed())
        if not await op.until(lambda: answer.done() or closed(), max(0.1, self._remaining())):
            return "the switchboard does not answer"
        if not closed():
            told = answer.result()
            if told.HasField("lease") and told.lease.state != sb.Lease.CLOSED:
                # The closed event ends the wait, unless its session breaks: then it is asked again.
                await op.until(closed, min(0.5, max(0.05, self._remaining())))
                return f"is {sb.Lease.State.Name(told.lease.state)}"
            op.closed_leases.add(lease)
        return ""

    # The directories.

    async def _cgroups(self, mkdirs: list[Step]) -> None:
        op = self._op
        if failpoints.DIRECTORY is None:
            # Nearly always they are empty by now, and a worker's hop would take longer than the loop is held.
            undone, mkdirs = steps.remove_empty(mkdirs, self._is_mine, op.undo_times)
            op.done.add(undone)
        if not mkdirs:
            return
        undone = await op.hop(
            lambda: steps.undo(
                mkdirs,
                mine=self._is_mine,
                living=self._is_other_living,
                deadline=self._deadline,
                impatient=self._hurried,
                times=op.undo_times,
            ),
            self._remaining() + _CGROUP_TIMEOUT_S,
        )
        op.done.add(undone)
        self.left.update(undone.left)

    def _is_mine(self, identity: str) -> bool:
        """Whether a directory of our name with this id in its mark is this operation's."""
        op = self._op
        return identity == op.row.id or (op.row.kind is Kind.CLEANUP and not self._is_other_living(identity))

    def _is_other_living(self, identity: str | None) -> bool:
        op = self._op
        return identity is not None and identity != op.row.id and op.parts.registry.is_living(identity)

    def _remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _hurried(self) -> bool:
        return self._op.impatient or not self._remaining()
