"""The apply of a plan: its steps one after the other, up to a command that runs or a container that is committed.

What fails or is interrupted here is undone by a walk (walk.py). The remote steps, `lease` and `spawn`, are raced
against what the operation is asked: then the walk's Release and ABORT end them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tightship.common import failpoints
from tightship.common.errors import Code, ServiceError
from tightship.common.packets import Packet
from tightship.containerizer import records, refusals, steps
from tightship.containerizer.journal import Kind, Phase
from tightship.containerizer.plan import CGROUP_KINDS
from tightship.containerizer.spawner_link import OrderFailed
from tightship.containerizer.steps import Interrupted
from tightship.kernel.fdframes import TOKEN_SIZE
from tightship.v1 import switchboard_pb2 as sb

if TYPE_CHECKING:
    from tightship.containerizer.operations import Operation

T = TypeVar("T")

LEASE_TIMEOUT_S = 5.0
SPAWN_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 5.0
CGROUP_TIMEOUT_S = 5.0
GATE_MS = 30_000


class Apply:
    """`run` it once."""

    __slots__ = ("_op", "_session", "acquire", "at_gate", "order")

    def __init__(self, operation: Operation, meta: str) -> None:
        self._op = operation
        self._session = 0
        self.order: dict[str, Any] = {"meta": meta}
        """Fields of LAUNCH, and of the lease, that are known before."""
        self.acquire = sb.AcquireRequest()
        self.at_gate: Callable[[Operation], None] | None = None
        """Called when the process waits at its gate, in its cgroups."""

    async def run(self) -> None:
        op = self._op
        if op.row.kind is Kind.LAUNCH:
            await self._apply_launch()
            return
        await self._apply_cgroups()
        async with self._step("commit"):
            self._commit()

    async def _apply_launch(self) -> None:
        op = self._op
        spawner = op.parts.spawner
        # Its process is to be looked at while it waits at its gate, or the spawner is an older one.
        stepwise = self.at_gate is not None or not spawner.prepares
        async with self._step("lease"):
            await self._lease()
        if stepwise:
            await self._apply_cgroups()
        async with self._step("spawn"):
            spawned = self._spawn(prepare=not stepwise)
            if stepwise:
                self._identified(await self._race(spawned, SPAWN_TIMEOUT_S + 0.5, "spawn"))
            else:
                await self._apply_cgroups()  # while it claims
        async with self._step("commit"):
            self._commit()
        if self.at_gate is not None:
            self.at_gate(op)
        async with self._step("open"):
            if stepwise:
                opened = spawner.order("OPEN", launch=op.row.id)
            else:
                spawner.tell("OPEN", launch=op.row.id)
                opened = spawned
            self._opened(await self._race(opened, SPAWN_TIMEOUT_S + OPEN_TIMEOUT_S, "open"))

    def explained(self, error: ServiceError) -> ServiceError:
        """A launch whose process found no memory to start in is told so; its cgroups are there still."""
        op = self._op
        if op.row.kind is not Kind.LAUNCH or error.metadata.get("errno") not in refusals.STARVED:
            return error
        limit = next(
            (step for step in op.row.plan if step.field == "memory.limit" and step.value not in ("-1", "max")), None
        )
        killed = records.read_counters(op.parts.machine, op.row.name).oom_kills
        return refusals.of_memory(limit, error) if killed or (limit and limit.value == "0") else error

    async def _lease(self) -> None:
        """Its claimer makes the lease, where spawner and switchboard can do that; else it is acquired here."""
        op = self._op
        link = op.parts.switchboard
        if not await op.until(lambda: link.session or op.asked, LEASE_TIMEOUT_S):
            raise ServiceError(
                Code.UNAVAILABLE, "SWITCHBOARD_AWAY", "the switchboard can't be reached", 0.5, stage="lease"
            )
        self._check_asked()
        self._session = link.session
        op.closed_leases.discard(op.row.id)  # an earlier welcome could not list it
        acquire, self.acquire = self.acquire, sb.AcquireRequest()
        order = self.order
        order["epoch"] = link.epoch
        if op.parts.spawner.prepares and link.taking:
            acquire.session = link.taking
            order["acquire"] = base64.b64encode(acquire.SerializeToString()).decode()
            order["token"] = secrets.token_hex(TOKEN_SIZE)
        else:
            answer = await self._race(link.acquire(acquire), LEASE_TIMEOUT_S, "lease")
            order["token"] = answer.token.hex()

    async def _apply_cgroups(self) -> None:
        op = self._op
        mine = [step for step in op.row.plan if step.kind in CGROUP_KINDS]
        op.begun.update(step.name for step in mine)
        prefix = f"containerizer.{op.row.kind}"
        times: steps.Times = {}
        try:
            if failpoints.DIRECTORY is None:
                # New directories, tens of microseconds each: a worker's hop would take longer than the loop is held.
                steps.apply(mine, prefix, op.interrupted, times)
            else:
                await op.hop(lambda: steps.apply(mine, prefix, op.interrupted, times), CGROUP_TIMEOUT_S)
        finally:
            op.row.live.times.update(times)

    def _spawn(self, *, prepare: bool) -> asyncio.Future[Packet]:
        """To be answered when the process is at its gate; with `prepare` when OPEN has come and the command runs."""
        op = self._op
        order, self.order = self.order, {}
        if prepare:
            order["prepare"] = True
        return op.parts.spawner.order(
            "LAUNCH",
            launch=op.row.id,
            lease=op.row.id,
            traceparent=op.row.trace,
            timeout_ms=int(SPAWN_TIMEOUT_S * 1000),
            gate_ms=GATE_MS,
            **order,
        )

    def _identified(self, reply: Packet) -> None:
        op = self._op
        op.row.live.pid = int(reply.get("pid") or op.row.live.pid)
        op.row.live.start = int(reply.get("start") or op.row.live.start)

    def _commit(self) -> None:
        op = self._op
        row = op.row
        if row.kind is Kind.LAUNCH:
            if op.parts.switchboard.session != self._session:
                raise ServiceError(Code.UNAVAILABLE, "SWITCHBOARD_AWAY", "the session with the switchboard broke", 0.5)
            self._count_down()
            row.live.started = time.time_ns()
            row.live.started_monotonic = time.monotonic_ns()
            row.live.spawner = op.parts.spawner.identity
        row.phase = Phase.COMMITTED
        op.parts.journal.update(row)

    def _count_down(self) -> None:
        op = self._op
        row = op.row
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        row.live.deadline = now + row.timeout if row.timeout is not None else None
        row.live.lifetime = now + row.max_lifetime if row.max_lifetime is not None else None

    def _opened(self, reply: Packet) -> None:
        op = self._op
        live = op.row.live
        live.opened = True
        self._identified(reply)
        times: dict[str, int] = reply.get("times") or {}
        wall = time.time_ns() - time.monotonic_ns()
        live.started_monotonic = times.get("exec") or time.monotonic_ns()
        live.started = live.started_monotonic + wall
        # They were over later than what was sent for them.
        for step, ended in (("lease", "claim"), ("spawn", "ready")):
            if ended in times:
                live.times[step] = (live.times[step][0], times[ended] + wall)
        self._count_down()
        # With the pid: a spawner after this one finds the process by it.
        op.write()

    @contextlib.asynccontextmanager
    async def _step(self, name: str) -> AsyncIterator[None]:
        op = self._op
        point = f"containerizer.{op.row.kind}.{name}"
        op.cancel_step = name
        begun = time.time_ns()
        try:
            await failpoints.hold(point + ".before", op.interrupted)
            self._check_asked()
            op.begun.add(name)
            yield
            await failpoints.hold(point + ".after", op.interrupted)
            self._check_asked()
        except OrderFailed as error:
            program = "virtual_host.init.init_argv[0]" if op.spec.virtual_host.HasField("init") else "command[0]"
            raise refusals.of_order(name, error, program) from error
        except (OSError, sqlite3.Error) as error:
            raise refusals.of_step(name, error) from error
        finally:
            op.row.live.times.setdefault(name, (begun, time.time_ns()))

    async def _race(self, future: asyncio.Future[T], timeout: float, what: str) -> T:
        """The future's result. Raises Interrupted when asked first, or UNAVAILABLE after `timeout` seconds."""
        op = self._op
        self._check_asked()
        late = ServiceError(Code.UNAVAILABLE, "STEP_TIMED_OUT", f"{what} took more than {timeout:g} s", 0.5, stage=what)
        timer = asyncio.get_running_loop().call_later(timeout, _fail, future, late)
        op.racing = future
        try:
            return await future
        finally:
            op.racing = None
            timer.cancel()

    def _check_asked(self) -> None:
        if self._op.asked:
            raise Interrupted


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
