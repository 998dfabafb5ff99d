"""Calls on living containers: signals to all, pause, update, statistics, and which processes there are.

What changes something here is over in milliseconds, or put back; none of it waits for a peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from tightship.common import failpoints
from tightship.common.errors import Code, ServiceError, invalid
from tightship.containerizer import describe, names, refusals, spans, spec, statistics, updating
from tightship.containerizer.handlers import Handlers, check_visible
from tightship.containerizer.operations import Operation
from tightship.kernel import cgroup, freezer
from tightship.v1 import containerizer_pb2 as pb

_PAUSE_S = 5.0
_PAUSE_MAX_S = 60.0
_POLL_S = 0.002
_POLL_MAX_S = 0.05
_UPDATES_S = 10.0


class Living(Handlers):
    """Handlers of ContainerizerService."""

    async def KillAll(self, request: pb.KillAllRequest, context: Any) -> pb.KillAllResponse:
        async with self._call(context, "KillAll", request) as trace:
            await self._mutating()
            number = spec.signal_number(request.signal or "KILL", "signal")
            operation = self._living(request.name)
            self._check_made(operation)
            spans.link(trace, operation)
            try:
                count = await asyncio.to_thread(cgroup.signal_all, self._tracked(operation), number)
            except OSError as error:
                raise refusals.of_step("signal", error) from error
            return pb.KillAllResponse(processes=count)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        async with self._call(context, "Pause", request) as trace:
            await self._mutating()
            asked = spec.duration(request, "budget", "budget", positive=True)
            operation = self._steady(request.name)
            self._check_made(operation)
            spans.link(trace, operation)
            await self._freeze(operation, min(_PAUSE_S if asked is None else asked, _PAUSE_MAX_S))
            return pb.PauseResponse()

    async def _freeze(self, operation: Operation, budget: float) -> None:
        """Frozen, or as before: whatever ends this half-way thaws."""
        path = self._tracked(operation)
        was = operation.paused
        end = time.monotonic() + budget
        pause = _POLL_S
        operation.paused = True  # nothing is launched in it from now on
        try:
            await failpoints.hold("containerizer.pause.freeze.before", operation.interrupted)
            freezer.freeze(path)
            await failpoints.hold("containerizer.pause.freeze.after", operation.interrupted)
            while not freezer.is_frozen(path):
                if operation.closing:
                    raise updating.closing(operation.row.name)
                if time.monotonic() > end:
                    raise ServiceError(
                        Code.DEADLINE_EXCEEDED,
                        "PAUSE_TIMED_OUT",
                        f"{operation.row.name} did not stand still within {budget:g} s; it runs on",
                        None,
                        name=operation.row.name,
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, _POLL_MAX_S)
        except BaseException as error:
            if not was:
                operation.paused = False
                with contextlib.suppress(OSError):
                    freezer.thaw(path)
            if isinstance(error, OSError):
                raise refusals.of_step("pause", error) from error
            raise
        operation.changed()

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        async with self._call(context, "Resume", request) as trace:
            await self._mutating()
            operation = self._steady(request.name)
            self._check_made(operation)
            spans.link(trace, operation)
            above = map(self._parts.registry.named, names.lineage(operation.row.name))
            paused = next((each for each in above if each is not None and each.paused), None)
            if paused is not None:
                raise ServiceError(
                    Code.FAILED_PRECONDITION,
                    "PARENT_PAUSED",
                    f"{paused.row.name} above is paused: resume that",
                    None,
                    name=paused.row.name,
                )
            try:
                freezer.thaw(self._tracked(operation))
            except OSError as error:
                raise refusals.of_step("resume", error) from error
            operation.paused = False
            operation.changed()
            return pb.ResumeResponse()

    async def Update(self, request: pb.UpdateRequest, context: Any) -> pb.UpdateResponse:
        async with self._call(context, "Update", request) as trace:
            await self._mutating()
            if request.mode not in (pb.UpdateRequest.REPLACE, pb.UpdateRequest.DIFF):
                raise invalid("mode", "give REPLACE or DIFF", "MISSING")
            operation = self._steady(request.name)
            self._check_made(operation)
            spans.link(trace, operation)
            if not await operation.until(lambda: operation.changing is None, _UPDATES_S):
                raise ServiceError(Code.UNAVAILABLE, "UPDATING", "another update of it goes on", 0.5)
            if operation.closing:
                raise updating.closing(operation.row.name)
            new = updating.asked(operation.spec, request)
            written = await asyncio.shield(updating.begin(operation, new))
            return pb.UpdateResponse(
                container=describe.living(operation, with_limits=True), written=[step.target for step in written]
            )

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        async with self._call(context, "Stats", request):
            return statistics.read(self._parts.machine, self._living(request.name).row.name)

    async def ListProcesses(self, request: pb.ListProcessesRequest, context: Any) -> pb.ListProcessesResponse:
        async with self._call(context, "ListProcesses", request):
            operation = self._living(request.name)
            path = self._tracked(operation)
            spared = set()
            if not request.recursive:
                spared = {self._tracked(each) for each in self._parts.registry.children(operation.row.name)}

            def listed() -> list[int]:
                places = cgroup.tree(path, spared.__contains__)
                return sorted(pid for each in places for pid in cgroup.processes(each, threads=request.threads))

            return pb.ListProcessesResponse(ids=await asyncio.to_thread(listed))

    async def Detect(self, request: pb.DetectRequest, context: Any) -> pb.DetectResponse:
        async with self._call(context, "Detect", request):
            if request.pid <= 0:
                raise invalid("pid", f"{request.pid} is no process", "OUT_OF_RANGE")
            base = self._parts.machine.tracker.base
            try:
                path = cgroup.of_process(request.pid, base)
            except OSError:
                raise ServiceError(Code.NOT_FOUND, "NO_PROCESS", f"there is no process {request.pid}", None) from None
            name = "" if path is None else path.removeprefix(base)
            while name and (operation := self._parts.registry.named(name)) is None:
                name = name.rpartition("/")[0]  # what it has made itself in its container
            if not name or operation is None:
                raise ServiceError(Code.NOT_FOUND, "NOT_FOUND", f"process {request.pid} is in no container", None)
            check_visible(name, str(request.pid))
            return pb.DetectResponse(name=name, id=operation.row.id)

    def _steady(self, text: str) -> Operation:
        """Living, made, and not on its way out. Raises ServiceError."""
        operation = self._living(text)
        name = operation.row.name
        if operation.closing:
            raise updating.closing(name)
        if not operation.started:
            raise ServiceError(Code.FAILED_PRECONDITION, "NOT_READY", f"{name} is still being made", 0.1, name=name)
        return operation

    def _tracked(self, operation: Operation) -> str:
        return self._parts.machine.tracker.path(operation.row.name)
