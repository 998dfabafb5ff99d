"""The life of one container: its plan applied, lived, and undone. The one code for error, cancel, crash and cleanup.

An `Operation` is a task of the service, never of a call, and is never cancelled: calls wait on it with `until`, and
ask. What it was asked is a flag with a reason, read between steps. Whatever ended it, the same walk undoes the plan
backwards within a budget; what is left makes it pending, and the same task walks again later, until nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tightship.common import logs
from tightship.common.errors import Code, ServiceError
from tightship.common.rundir import RunDir
from tightship.common.telemetry import Tracer
from tightship.containerizer import records, spans, steps, story
from tightship.containerizer.apply import Apply
from tightship.containerizer.backoff import Backoff
from tightship.containerizer.counts import Counts
from tightship.containerizer.journal import Ended, Journal, Kind, Phase, Row
from tightship.containerizer.machine import Machine
from tightship.containerizer.records import Exit
from tightship.containerizer.registry import Registry
from tightship.containerizer.settings import Settings
from tightship.containerizer.spawner_link import SpawnerLink
from tightship.containerizer.spec import seconds
from tightship.containerizer.steps import Interrupted, Undone
from tightship.containerizer.switchboard_link import SwitchboardLink
from tightship.containerizer.walk import Walk
from tightship.kernel import freezer
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import spec_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_TIMEOUT_S = 5.0
SPAWN_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 5.0
CGROUP_TIMEOUT_S = 5.0
GATE_MS = 30_000

# Reasons of an undo that nobody asked for.
_NOT_ASKED = frozenset({"", "exit", "error"})


@dataclass(slots=True)
class Parts:
    """What every operation uses."""

    run_dir: RunDir
    settings: Settings
    machine: Machine
    journal: Journal
    registry: Registry
    spawner: SpawnerLink
    switchboard: SwitchboardLink
    tracer: Tracer
    pool: ThreadPoolExecutor
    counts: Counts


class Operation:
    """One container. Made with its row in the journal already, then `start`ed once."""

    # Set where it comes to that, so that a container that lives does not carry them.
    walk_begun_ns = 0
    walking = False
    walks: tuple[story.Walked, ...] = ()
    links: tuple[str, ...] = ()
    """Traces of calls about it, for its next span."""
    launch_told = begun_told = False
    """What of its spans is sent."""
    paused = False
    """It itself was asked to stand still, and not only one above it."""
    changing: asyncio.Task[Any] | None = None
    """The update that is on."""
    settled = False
    """It has lived for a while: the times of its steps are on disk alone."""

    def __init__(self, parts: Parts, row: Row, *, remaining: float | None = None, recovering: bool = False) -> None:
        self.parts = parts
        self.row = row
        self.apply: Apply | None = None
        """With what only a new container has; None once it has run."""
        self.in_force: list[pb.InForce] = []
        self.recovering = recovering
        self.asked = row.reason if row.phase is Phase.UNDOING and row.reason not in _NOT_ASKED else ""
        """Why it was asked to end; empty while it wasn't."""
        self.exit: Exit | None = None
        self.error: ServiceError | None = None
        self.started = False
        self.record: pb.Record | None = pb.Record.FromString(row.record) if row.record else None
        self.over = False
        """A walk has finished; `left` says whether something stayed."""
        self.gone = False
        self.left: dict[str, str] = {}
        self.over_budget = False
        """A walk has left something; told once."""
        self.waiters = 0
        self._remaining_until = None if remaining is None else time.monotonic() + remaining
        self._budget: float | None = None
        self.begun = {step.name for step in row.plan} if recovering or row.kind is Kind.CLEANUP else set[str]()
        self.closed_leases: set[str] = set()
        self.impatient = False
        self._again = False
        self.stuck: asyncio.Future[Any] | None = None
        self.done = Undone()
        self._undo_begun = 0.0
        self.undo_budget = 0.0
        self.undo_times: steps.Times = {}
        """Of the walk that is on, or was the last."""
        self.cancel_step = row.phase.value if recovering else ""
        """The step that was on when it ended, after a crash the phase that the journal tells; empty once it runs."""
        self._counters = records.Counters()
        """What was counted before directories went whose process had not been told to have ended."""
        self._timers: list[asyncio.TimerHandle] = []
        self.racing: asyncio.Future[Any] | None = None
        """What the apply waits for; an ask ends the wait."""
        self._watchers: set[asyncio.Future[None]] = set()
        self._task: asyncio.Task[None] | None = None

    # What others ask and see.

    @property
    def spec(self) -> spec_pb2.ContainerSpec:
        return spec_pb2.ContainerSpec.FromString(self.row.spec)

    @property
    def closing(self) -> bool:
        """Nothing new may begin in it or below it."""
        return bool(self.asked) or self.exit is not None or self.row.phase is Phase.UNDOING

    @property
    def state(self) -> pb.Container.State.ValueType:
        if self.left:
            return pb.Container.CLEANUP_PENDING
        if self.recovering:
            return pb.Container.RECOVERING
        if self.closing:
            return pb.Container.CLOSING
        if self.row.kind is Kind.CREATE:
            ready = pb.Container.CREATED if self.row.phase is Phase.COMMITTED else pb.Container.LAUNCHING
        else:
            ready = pb.Container.RUNNING if self.started else pb.Container.LAUNCHING
        return pb.Container.PAUSED if self.paused and ready != pb.Container.LAUNCHING else ready

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"operation {self.row.name}")

    def join(self) -> None:
        """A caller begins to wait."""
        self.waiters += 1

    def leave(self, reason: str) -> None:
        """A caller goes. The last one of an attached launch asks it to end."""
        self.waiters -= 1
        if self.waiters:
            return
        self._remaining_until = None
        if self.closing or not (self.row.detach and self.started):
            self.ask(reason)

    def ask(self, reason: str, budget: float | None = None) -> None:
        """Asks it to end, with seconds for the cleanup. Asked again, it hurries what only waits."""
        if self.gone:
            return
        if self.closing:
            self.impatient = True
        if self._budget is None or self.over:
            self._budget = budget
        if not self.asked and self.exit is None and self.row.phase is not Phase.UNDOING:
            self.asked = reason
            if self.racing is not None and not self.racing.done():
                self.racing.set_exception(Interrupted())
        if self.over:
            self.over = False
            self._again = True
        self.changed()

    def on_exit(self, ended: Exit) -> None:
        """The spawner's report on the main process."""
        if self.exit is None:
            self.exit = ended
            self.row.live.opened = True
            self.changed()

    def on_lease_closed(self, lease_id: str) -> None:
        self.closed_leases.add(lease_id)
        self.changed()

    def on_welcome(self, leases: frozenset[str]) -> None:
        """A session began: what of ours it does not list is closed."""
        if "lease" in self.begun:
            for step in self.row.plan:
                if step.kind == "lease" and step.target not in leases:
                    self.closed_leases.add(step.target)
        self.changed()

    def adopt(self) -> None:
        """It lives, found so at start."""
        self.recovering = False
        self.cancel_step = ""
        self.started = True
        self.row.live.opened = self.row.kind is Kind.LAUNCH
        self.paused = freezer.is_asked(self.parts.machine.tracker.path(self.row.name))
        self.changed()

    async def until(self, condition: Callable[[], object], timeout: float | None = None) -> bool:
        """Waits until the condition on this operation holds; False when `timeout` seconds went by first."""
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while not condition():
            if end is not None and loop.time() >= end:
                return False
            watcher: asyncio.Future[None] = loop.create_future()
            self._watchers.add(watcher)
            timer = loop.call_at(end, _wake, watcher) if end is not None else None
            try:
                await watcher
            finally:
                self._watchers.discard(watcher)
                if timer is not None:
                    timer.cancel()
        return True

    def cleanup(self) -> pb.Cleanup:
        """What the undo has done so far."""
        told = pb.Cleanup(
            outcome=pb.Cleanup.CLEAN if self.gone else pb.Cleanup.PENDING,
            removed=self.done.removed,
            left=[f"{name}: {why}" for name, why in self.left.items()],
            processes_killed=len(self.done.killed),
            cgroups_removed=self.done.cgroups,
            leases_closed=len(self.done.leases),
        )
        told.budget.FromNanoseconds(int(self.undo_budget * 1e9))
        if self._undo_begun:
            told.took.FromNanoseconds(int((time.monotonic() - self._undo_begun) * 1e9))
        return told

    def failure(self) -> ServiceError:
        """Why it never ran."""
        if self.error is not None:
            return self.error
        reason = self.asked or self.row.reason
        if reason == "deadline_exceeded":
            return ServiceError(
                Code.DEADLINE_EXCEEDED, "LAUNCH_TIMED_OUT", "the call's deadline was over before the start"
            )
        if reason == "shutdown":
            return ServiceError(Code.UNAVAILABLE, "SHUTTING_DOWN", "the containerizer is shutting down", 1.0)
        if reason == "recovered":
            return ServiceError(
                Code.UNAVAILABLE, "INTERRUPTED", f"the containerizer was restarted during the {self.row.kind}", 0.1
            )
        return ServiceError(Code.CANCELLED, "LAUNCH_CANCELLED", f"the launch was cancelled: {reason}")

    # Its life.

    async def _run(self) -> None:
        try:
            reason = await self._live()
        except Exception:
            log.exception("the operation failed", extra=self._about())
            self.error = ServiceError(
                Code.INTERNAL, "INTERNAL", "internal error; the log of the containerizer says more"
            )
            reason = "error"
        await self._undo(reason)

    async def _live(self) -> str:
        """Applies and lives; returns the reason of its end."""
        row = self.row
        if row.phase is Phase.UNDOING or row.kind is Kind.CLEANUP:
            return row.reason
        if row.phase is Phase.INTENDED:
            if self.recovering:
                return "recovered"
            apply = self.apply
            assert apply is not None
            try:
                await apply.run()
            except Interrupted:
                return self.asked
            except ServiceError as error:
                self.error = apply.explained(error)
                return "error"
            finally:
                self.apply = None
            self.cancel_step = ""
            self.started = True
            self.changed()
        self._arm("timeout", row.live.deadline)
        self._arm("max_lifetime", row.live.lifetime)
        await self.until(lambda: self.exit or self.asked)
        return "exit" if self.exit else self.asked

    def _arm(self, reason: str, at: float | None) -> None:
        if at is not None:
            delay = max(0.0, at - time.clock_gettime(time.CLOCK_BOOTTIME))
            # The loop's clock stands still in a suspend; the next wake-up is soon enough.
            self._timers.append(asyncio.get_running_loop().call_later(delay, self.ask, reason))

    # Undo.

    async def _undo(self, reason: str) -> None:
        row = self.row
        for timer in self._timers:
            timer.cancel()
        row.phase = Phase.UNDOING
        row.reason = reason
        self.recovering = False
        self._undo_begun = time.monotonic()
        self._unsettle()
        if self.exit is not None and self.record is None:
            self.conclude()
            await asyncio.sleep(0)  # who waits for it is told before the directories go
        else:
            self.write()
        backoff = Backoff(0.2, 30.0)
        while True:
            self._again = self.impatient = False
            self.undo_budget, self._budget = self._budget_now(), None
            self.undo_times, self.walk_begun_ns = {}, time.time_ns()
            with spans.walking(self):
                self.left = await self._walk()
            story.keep(self)
            if not self.left:
                # Told before it is written: after a crash in between there is nothing to undo, and the record is there.
                self.gone = self.over = True
                self.parts.registry.leaves(self)
                self.parts.counts.cleanup_took(time.monotonic() - self._undo_begun)
                self.changed()
                await asyncio.sleep(0)
                if self.finish():
                    return
            if not self.over_budget:
                self.over_budget = True
                left = "; ".join(f"{name}: {why}" for name, why in self.left.items())
                log.warning("the cleanup is pending and goes on: %s", left, extra=self._about())
            self.over = True
            spans.tell_end(self)
            self.changed()
            await self.until(lambda: self._again, backoff.next())
            self.over = False

    def finish(self) -> bool:
        """Forgets what is gone, once; False where the journal can't be written: then its cleanup is pending again."""
        if self.parts.registry.by_id.get(self.row.id) is not self:
            return True
        if not self._forget():
            self.gone = False
            return False
        self.parts.registry.remove(self)
        if self.row.live.opened:
            self.parts.spawner.tell("ACK", launch=self.row.id)
        self.changed()
        spans.tell_end(self)
        return True

    def settle(self) -> bool:
        """What lives for longer: the times of its steps go to the journal alone. False where it has not started yet."""
        spans.tell_going_on(self)
        if not self.started or self.closing:
            return self.closing
        with contextlib.suppress(sqlite3.Error):  # then they stay in memory
            self.parts.journal.update(self.row)
            self.row.live.times = {}
            self.settled = True
        return True

    def _unsettle(self) -> None:
        if self.settled:
            with contextlib.suppress(sqlite3.Error):
                self.row.live.times = self.parts.journal.times(self.row.id)
            self.settled = False

    async def _walk(self) -> dict[str, str]:
        walk = Walk(self, self.undo_budget)
        try:
            await walk.run()
        except Exception:
            # A bug. Nothing is forgotten: the row stays, and a later walk tries again.
            log.exception("the undo failed", extra=self._about())
            walk.left["undo"] = "internal error; the log of the containerizer says more"
        return walk.left

    def conclude(self) -> None:
        """Makes the record, once: after the exit, before the cgroups go, and before anybody is told."""
        if self.record is not None:
            return
        assert self.exit is not None
        counters = records.read_counters(self.parts.machine, self.row.name).joined(self._counters)
        self.record = records.of_exit(self.row, self.exit, self.asked, counters)
        self.row.record = self.record.SerializeToString()
        self.write()
        self.started = True
        self.changed()

    def note_counters(self) -> None:
        """Before directories go without a record: the exit may be told when they are gone."""
        self._counters = records.read_counters(self.parts.machine, self.row.name).joined(self._counters)

    def _budget_now(self) -> float:
        if self._budget is not None:
            return self._budget
        life = self.spec.lifecycle
        asked = seconds(life.cleanup_budget) if life.HasField("cleanup_budget") else None
        remaining = None if self._remaining_until is None else self._remaining_until - time.monotonic()
        return self.parts.settings.budget_for(asked, remaining)

    def _forget(self) -> bool:
        """Row out, record in. False where the journal can't be written: then nothing is forgotten."""
        row = self.row
        ended = None
        if row.kind is Kind.LAUNCH:
            if self.record is None:
                self.record = records.of_failure(row, self.error, "" if self.error else row.reason)
            ended = self._ended(self.record)
        try:
            self.parts.journal.forget(row, ended, story.to_json(story.of(self)))
        except sqlite3.Error as error:
            self.left = self.walks[-1]["left"] = {"journal": str(error)}
            return False
        if self.record is not None:
            self.parts.counts.launches[self.record.reason] += 1
        return True

    def _ended(self, record: pb.Record) -> Ended:
        row = self.row
        container = pb.Container(
            id=row.id,
            name=row.name,
            state=pb.Container.ENDED,
            node=self.parts.settings.node,
            spec=self.spec,
            lease_id=row.id,
            labels=row.labels,
            record=record,
            command=row.command,
        )
        container.created.FromNanoseconds(row.created)
        cleanup = self.cleanup()
        cleanup.outcome = pb.Cleanup.CLEAN
        return Ended(
            row.id,
            row.name,
            row.request_id,
            row.request_hash,
            container.SerializeToString(),
            cleanup.SerializeToString(),
            row.live.pid,
            row.live.opened,
        )

    # Small parts.

    async def hop(self, work: Callable[[], T], timeout: float) -> T:
        """Runs it in a worker thread. One that does not come back in time is left to come back later."""
        future = asyncio.get_running_loop().run_in_executor(self.parts.pool, work)
        done, _ = await asyncio.wait((future,), timeout=timeout)
        if not done:
            future.add_done_callback(self._came_back)
            self.stuck = future
            self.ask("error")
            raise ServiceError(
                Code.UNAVAILABLE, "STEP_TIMED_OUT", f"a cgroup operation took more than {timeout:g} s", 0.5
            )
        return future.result()

    def _came_back(self, future: asyncio.Future[Any]) -> None:
        future.exception()  # seen
        self.changed()

    def write(self) -> None:
        """Phase and record; a full disk must not stop an undo, which is idempotent anyway."""
        try:
            self.parts.journal.update(self.row)
        except sqlite3.Error as error:
            log.error("the journal can't be written: %s", error, extra=self._about())

    def _about(self) -> dict[str, dict[str, str]]:
        return logs.about(self.row.id, self.row.name, self.row.trace)

    def interrupted(self) -> bool:
        """Whether what only waits is to end; also asked when the main process has already ended by itself."""
        return bool(self.asked) or self.impatient

    def changed(self) -> None:
        for watcher in self._watchers:
            _wake(watcher)


def _wake(watcher: asyncio.Future[None]) -> None:
    if not watcher.done():
        watcher.set_result(None)
