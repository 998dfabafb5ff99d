"""The gRPC face: a handler owns nothing. It starts or joins an operation, waits, and at its end only asks.

Handlers answer from memory, the journal and a few control files; none waits for a peer without a bound, and List and
Get never wait. CancelledError always goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from tightship.common import rights
from tightship.common.errors import Code, ServiceError, invalid
from tightship.common.serving import Serving
from tightship.common.telemetry import CallTrace, why_ended
from tightship.containerizer import admission, audit, describe, listing, names, requests, spans, spec, story
from tightship.containerizer.handlers import Context, check_visible, not_found, shutting_down
from tightship.containerizer.journal import Ended, Kind
from tightship.containerizer.living import Living
from tightship.containerizer.operations import Operation, Parts
from tightship.containerizer.recovery import marked
from tightship.containerizer.spawner_link import OrderFailed
from tightship.kernel import cgroup
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import containerizer_pb2_grpc
from tightship.v1 import switchboard_pb2 as sb

# For clients of some names: these look at the caller's rights.
SHARED = frozenset(
    {
        "Launch", "Create", "Destroy", "Cleanup", "Kill", "Wait", "Get", "List", "Remove", "Trace", "KillAll", "Pause",
        "Resume", "Update", "Stats", "ListProcesses", "Detect",
    }
)  # fmt: skip

_ANSWER_TIMEOUT_S = 5.0
_RETRY_S = 2.0


class Service(Living, containerizer_pb2_grpc.ContainerizerServiceServicer):
    """Handlers of ContainerizerService."""

    def __init__(self, parts: Parts, serving: Serving) -> None:
        super().__init__(parts, serving)
        self._audits = audit.Audits(parts)
        self._creating: dict[str, _Creating] = {}
        """By request id, the Creates that wait before their container is let in."""

    async def Launch(self, request: pb.LaunchRequest, context: Any) -> AsyncIterator[pb.LaunchResponse]:
        async with self._call(context, "Launch", request) as trace:
            await self._mutating()
            operation, joined = await self._launch_or_join(request, context, trace)
            if isinstance(operation, Ended):
                for response in _replay(operation, request.detach, self._parts.settings.node):
                    yield response
                trace.link(self._parts.journal.trace_of(operation.id))
                return
            if joined:
                spans.link(trace, operation)
            operation.join()
            reason = "client_cancelled"
            try:
                await operation.until(lambda: (operation.started and operation.error is None) or operation.over)
                if operation.error is not None or not operation.started:
                    raise operation.failure()
                yield pb.LaunchResponse(
                    started=describe.started(operation, joined=joined, with_limits=request.report_in_force)
                )
                if request.detach:
                    return
                await operation.until(lambda: operation.record or operation.over)
                if operation.record is not None:
                    yield pb.LaunchResponse(exited=pb.LaunchResponse.Exited(record=operation.record))
                await operation.until(lambda: operation.over)
                if not operation.gone:
                    raise _pending(operation.cleanup(), operation.row.name)
                # A client need not read on after this, and may end the call first.
                trace.answered = True
                yield pb.LaunchResponse(gone=pb.LaunchResponse.Gone(cleanup=operation.cleanup()))
            except asyncio.CancelledError:
                reason = why_ended(context)
                raise
            finally:
                operation.leave(reason)

    async def _launch_or_join(
        self, request: pb.LaunchRequest, context: Context, trace: CallTrace
    ) -> tuple[Operation | Ended, bool]:
        """A container, or the record of what ran; and whether it is another call's."""
        caller = rights.current()
        if request.name:
            name = names.normalize(request.name)
            caller.check(name)
            await self._retry_pending(name)
        while True:
            known = self._parts.registry.requested(request.request_id)
            if known is None:
                if request.request_id:
                    requests.check_request_id(request.request_id)
                    ended = self._parts.journal.find_request(request.request_id)
                    if ended is not None and ended.ran:
                        _check_same(ended.request_hash, request, ended.name)
                        return ended, True
                operation = admission.launch(self._parts, request, context.time_remaining(), trace)
                if request.report_in_force and operation.apply is not None:
                    operation.apply.at_gate = describe.note_in_force
                operation.start()
                return operation, False
            _check_same(known.row.request_hash, request, known.row.name)
            if known.started or not known.closing:
                return known, True
            # Being undone without having run: the name is free afterwards.
            await known.until(lambda known=known: known.over or known.started)  # type: ignore[misc]
            if known.over and not known.gone:
                raise _pending(known.cleanup(), known.row.name)

    async def Create(self, request: pb.CreateRequest, context: Any) -> pb.CreateResponse:
        async with self._call(context, "Create", request) as trace:
            await self._mutating()
            requests.check_request_id(request.request_id)
            requests.check_labels(request.labels)
            name = names.container(request.name)
            rights.current().check(name)
            given = spec.parse(request.spec)
            spec.refuse_process(given, "with Create yet")
            known = await self._created_before(request)
            if known is not None:
                await self._made(known, context)
                return pb.CreateResponse(container=describe.living(known, with_limits=True))
            made: list[Operation] = []
            try:
                with self._announced(request):
                    await self._retry_pending(name)
                    await self._parents(request, name, trace, context, made)
                    operation = admission.create(self._parts, request, name, given, trace)
                operation.start()
                await self._made(operation, context)
            except BaseException as error:
                kept = self._take_back(made)
                if isinstance(error, ServiceError) and made:
                    error.metadata["parents_kept"] = " ".join(each.row.name for each in kept)
                    for each in made:
                        if each not in kept:
                            await each.until(lambda each=each: each.over, _ANSWER_TIMEOUT_S)  # type: ignore[misc]
                raise
            return pb.CreateResponse(
                container=describe.living(operation, with_limits=True), parents_made=[each.row.name for each in made]
            )

    async def _created_before(self, request: pb.CreateRequest) -> Operation | None:
        """The container that a call with this request id has made or makes; None where this call is to make it.

        What is being undone is waited for: its name is free afterwards.
        """
        while True:
            known = self._parts.registry.requested(request.request_id)
            creating = self._creating.get(request.request_id)
            if known is not None:
                _check_same(known.row.request_hash, request, known.row.name)
                if not known.closing:
                    return known
                await self._retry_pending(known.row.name)
                await known.until(lambda known=known: known.over)  # type: ignore[misc]
                if not known.gone:
                    raise _pending(known.cleanup(), known.row.name)
            elif creating is not None:
                _check_same(creating.hash, request, names.container(request.name))
                await creating.over.wait()
            else:
                return None

    @contextlib.contextmanager
    def _announced(self, request: pb.CreateRequest) -> Iterator[None]:
        """Around what a Create awaits before it is let in: the same request, sent again, waits for it."""
        if not request.request_id:
            yield
            return
        creating = self._creating[request.request_id] = _Creating(admission.hash_of(request))
        try:
            yield
        finally:
            del self._creating[request.request_id]
            creating.over.set()

    async def _parents(
        self, request: pb.CreateRequest, name: str, trace: CallTrace, context: Context, made: list[Operation]
    ) -> None:
        """Waits for the containers above that are being made, and with `parents` makes those that are not there; those
        that are being undone by then.

        What it makes it adds to `made`. Whether the container may be made below them is not checked here.
        """
        named = self._parts.registry.named
        for above in reversed(names.lineage(name)):
            while (there := named(above)) is not None:
                if there.state == pb.Container.LAUNCHING and there.row.kind is Kind.CREATE:
                    with contextlib.suppress(ServiceError):  # then it is closing, or gone
                        await self._made(there, context)
                elif request.parents and there.closing and not there.over:
                    await there.until(lambda there=there: there.over)  # type: ignore[misc]
                else:
                    break
            if there is None and request.parents:
                rights.current().check(above)
                made.append(admission.create(self._parts, request, above, spec.parse(pb.SpecInput()), trace))
                made[-1].start()
                await self._made(made[-1], context)

    async def _retry_pending(self, name: str) -> None:
        """A name whose cleanup is pending may be free by now: it is tried once more before it is said to be taken."""
        operation = self._parts.registry.named(name)
        if operation is not None and operation.left and operation.over:
            operation.ask("retry")
            await operation.until(lambda: operation.over, _RETRY_S)

    async def _made(self, operation: Operation, context: Context) -> None:
        """Waits for a Create to be committed. Raises why it failed."""
        operation.join()
        reason = "client_cancelled"
        try:
            await operation.until(lambda: operation.started or operation.over)
            if not operation.started:
                raise operation.failure()
        except asyncio.CancelledError:
            reason = why_ended(context)
            raise
        finally:
            if operation.started:
                operation.waiters -= 1
            else:
                operation.leave(reason)

    def _take_back(self, made: list[Operation]) -> list[Operation]:
        """Asks the parents to end that a failed Create made and nobody uses or waits for; the others."""
        kept = []
        for operation in reversed(made):
            below = self._parts.registry.below(operation.row.name)
            if not operation.waiters and all(child.closing for child in below):
                operation.ask("error")
            else:
                kept.append(operation)
        return kept

    async def Destroy(self, request: pb.DestroyRequest, context: Any) -> pb.DestroyResponse:
        async with self._call(context, "Destroy", request) as trace:
            await self._mutating()
            operation = self._living(request.name)
            self._check_made(operation)
            spans.link(trace, operation)
            if not request.force and not operation.closing:
                self._check_unused(operation)
            budget = self._budget(request, operation, context)
            return pb.DestroyResponse(cleanup=await self._destroy(operation, "destroy", budget))

    def _check_unused(self, operation: Operation) -> None:
        name = operation.row.name
        children = self._parts.registry.children(name)
        why = ""
        if children:
            why = f"it has {len(children)} containers below, {children[0].row.name} first"
        elif operation.row.kind is Kind.LAUNCH:
            why = f"its main process {operation.row.live.pid} runs"
        elif cgroup.populated(self._parts.machine.tracker.path(name)):
            why = "it has processes"
        if why:
            raise ServiceError(
                Code.FAILED_PRECONDITION, "IN_USE", f"{name} is not destroyed: {why}; use force", None, name=name
            )

    async def _destroy(self, operation: Operation, reason: str, budget: float) -> pb.Cleanup:
        """Asks for the end of the tree, waits for the budget; its Cleanup. Raises DEADLINE_EXCEEDED."""
        for each in (operation, *self._parts.registry.below(operation.row.name)):
            each.ask(reason, budget)
        await operation.until(lambda: operation.over, budget + 0.5)
        if not operation.gone:
            raise _pending(operation.cleanup(), operation.row.name)
        return operation.cleanup()

    async def Cleanup(self, request: pb.CleanupRequest, context: Any) -> pb.CleanupResponse:
        async with self._call(context, "Cleanup", request) as trace:
            await self._mutating()
            if bool(request.name) == request.all:
                raise invalid("name", "give a name, or all", "MISSING")
            budget = self._budget(request, None, context)
            if request.all:
                _check_whole()
                return pb.CleanupResponse(cleanup=await self._cleanup_all(budget, trace))
            name = names.container(request.name)
            rights.current().check(name)
            deadline = time.monotonic() + budget
            total = pb.Cleanup(outcome=pb.Cleanup.CLEAN)
            operation = self._parts.registry.named(name)
            if operation is not None:
                if operation.recovering:
                    raise admission.recovering(name)
                self._check_made(operation)
                _add(total, await self._destroy(operation, "cleanup", budget))
            rest = admission.cleanup(self._parts, name, trace)
            if rest is not None:
                rest.start()
                _add(total, await self._destroy(rest, "cleanup", max(0.1, deadline - time.monotonic())))
                total.left.extend(_foreign(self._parts, name))
            total.budget.FromNanoseconds(int(budget * 1e9))
            return pb.CleanupResponse(cleanup=total)

    async def _cleanup_all(self, budget: float, trace: CallTrace) -> pb.Cleanup:
        """The residue of all names; what lives stays."""
        parts = self._parts
        deadline = time.monotonic() + budget
        total = pb.Cleanup(outcome=pb.Cleanup.CLEAN)
        total.budget.FromNanoseconds(int(budget * 1e9))
        walks = []
        for name in sorted(marked(parts), reverse=True):
            if parts.registry.named(name) is None and (walk := admission.cleanup(parts, name, trace)) is not None:
                walk.start()
                walks.append(walk)
        with contextlib.suppress(ServiceError, TimeoutError):
            listed: sb.ListLeasesResponse = await asyncio.wait_for(parts.switchboard.list(), _ANSWER_TIMEOUT_S)
            for lease in listed.leases:
                if lease.state != sb.Lease.CLOSED and not parts.registry.is_living(lease.lease_id):
                    await asyncio.wait_for(parts.switchboard.release(lease.lease_id, "cleanup"), _ANSWER_TIMEOUT_S)
                    total.leases_closed += 1
                    total.removed.append(f"lease {lease.lease_id}")
        for walk in walks:
            _add(total, await self._destroy(walk, "cleanup", max(0.1, deadline - time.monotonic())))
        return total

    async def Kill(self, request: pb.KillRequest, context: Any) -> pb.KillResponse:
        async with self._call(context, "Kill", request) as trace:
            await self._mutating()
            number = spec.signal_number(request.signal or "KILL", "signal")
            operation = self._living(request.name)
            self._check_made(operation)
            spans.link(trace, operation)
            gone = ServiceError(
                Code.FAILED_PRECONDITION, "NO_PROCESS", f"{operation.row.name} has no running main process", None
            )
            if operation.row.kind is not Kind.LAUNCH or operation.exit is not None or not operation.started:
                raise gone
            order = self._parts.spawner.order("SIGNAL", launch=operation.row.id, signal=number)
            try:
                await asyncio.wait_for(asyncio.shield(order), _ANSWER_TIMEOUT_S)
            except OrderFailed:
                raise gone from None
            except (TimeoutError, ConnectionError) as error:
                raise ServiceError(Code.UNAVAILABLE, "SPAWNER_AWAY", "the spawner does not answer", 0.5) from error
            return pb.KillResponse()

    async def Wait(self, request: pb.WaitRequest, context: Any) -> pb.WaitResponse:
        async with self._call(context, "Wait", request) as trace:
            name, operation = self._find(request.name)
            if operation is None or operation.row.kind is Kind.CLEANUP:
                record = describe.ended(self._record(name)).record
                trace.link(self._parts.journal.trace_of(record.id))
                return pb.WaitResponse(record=record)
            spans.link(trace, operation)
            if operation.row.kind is Kind.CREATE:
                raise ServiceError(
                    Code.FAILED_PRECONDITION,
                    "NO_PROCESS",
                    f"{operation.row.name} has no main process to wait for",
                    None,
                )
            stopping = asyncio.ensure_future(self.stopping.wait())
            stopping.add_done_callback(lambda _: operation.changed())
            try:
                await operation.until(lambda: operation.record or stopping.done())
            finally:
                stopping.cancel()
            if operation.record is None:
                raise shutting_down()
            return pb.WaitResponse(record=operation.record)

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        async with self._call(context, "Get", request):
            name, operation = self._find(request.name)
            if operation is not None:
                return pb.GetResponse(container=describe.living(operation, with_limits=True))
            return pb.GetResponse(container=describe.ended(self._record(name)))

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListResponse:
        async with self._call(context, "List", request):
            response = listing.page(self._parts, request)
            if request.usage:
                await listing.add_usage(self._parts, response)
            return response

    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveResponse:
        async with self._call(context, "Remove", request):
            await self._mutating()
            name, operation = self._find(request.name)
            record = self._parts.journal.find_record(name)
            if record is not None:
                check_visible(record.name, name)
            caller = rights.current()
            gone = self._parts.journal.remove_records(name, "" if caller.whole else caller.client)
            if not gone:
                if record is not None:
                    raise caller.made_by_another(name, "may not forget it")
                if operation is not None:
                    raise ServiceError(
                        Code.FAILED_PRECONDITION, "LIVING", f"{name} has not ended; destroy it first", None, name=name
                    )
                raise not_found(name)
            for lease in gone:
                self._parts.switchboard.forget(lease)
            return pb.RemoveResponse(records=len(gone))

    async def Trace(self, request: pb.TraceRequest, context: Any) -> pb.TraceResponse:
        async with self._call(context, "Trace", request):
            return spans.answer(self._story(request.name))

    async def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditResponse:
        async with self._call(context, "Audit", request):
            await self._mutating()
            return await self._audits.run(fix=request.fix)

    # What handlers share.

    def _record(self, name: str) -> Ended:
        record = self._parts.journal.find_record(name)
        if record is None:
            raise not_found(name)
        check_visible(record.name, name)
        return record

    def _story(self, text: str) -> story.Story:
        """Of a container, living or ended; of "last" the one of the caller's that began, or ended, last."""
        journal, registry = self._parts.journal, self._parts.registry
        if text != "last":
            name, operation = self._find(text)
            kept = None if operation is not None else journal.find_story(name)
            if kept is not None:
                check_visible(kept[0], name)
        else:
            name = "that has begun yet"
            registry.finish()
            sees = rights.current().sees
            living = (each for each in registry.by_id.values() if sees(each.row.name))
            operation = max(living, key=lambda each: each.row.created, default=None)
            kept = next((each for each in journal.stories() if sees(each[0])), None)
            if operation is not None and kept is not None:
                age = time.clock_gettime(time.CLOCK_BOOTTIME) - kept[2]
                if operation.row.created < time.time_ns() - age * 1e9:
                    operation = None
        if operation is not None:
            times = journal.times(operation.row.id) if operation.settled else None
            return story.of(operation, times)
        told = story.from_json(kept[1]) if kept is not None else None
        if told is None:
            raise not_found(name)
        return told

    def _budget(
        self, request: pb.DestroyRequest | pb.CleanupRequest, operation: Operation | None, context: Context
    ) -> float:
        asked = spec.duration(request, "budget", "budget", positive=True)
        if asked is None and operation is not None:
            life = operation.spec.lifecycle
            asked = spec.seconds(life.cleanup_budget) if life.HasField("cleanup_budget") else None
        return self._parts.settings.budget_for(asked, context.time_remaining())


class _Creating:
    """A Create that is not let in yet."""

    def __init__(self, request_hash: str) -> None:
        self.hash = request_hash
        self.over = asyncio.Event()


def _check_whole() -> None:
    """Raises PERMISSION_DENIED for a caller of some names alone."""
    caller = rights.current()
    if not caller.whole:
        caller.refuse(Code.PERMISSION_DENIED, "a cleanup of all")
        raise ServiceError(
            Code.PERMISSION_DENIED, "ALL_NOT_ALLOWED", "all is for clients with all rights; give a name", field="all"
        )


def _check_same(known_hash: str, request: pb.LaunchRequest | pb.CreateRequest, name: str) -> None:
    """`name` is that of the container which the request id is known of; another client's is nobody's to join."""
    if known_hash != admission.hash_of(request) or rights.current().hides(name):
        raise ServiceError(
            Code.ALREADY_EXISTS,
            "REQUEST_ID_REUSED",
            f"request_id {request.request_id} was used for another request",
            None,
            field="request_id",
        )


def _replay(ended: Ended, detach: bool, node: str) -> list[pb.LaunchResponse]:
    """The events of what ran and is gone, from its record."""
    record = describe.ended(ended).record
    started = pb.LaunchResponse.Started(
        id=ended.id, name=ended.name, lease_id=ended.id, pid=ended.pid, time=record.started, joined=True, node=node
    )
    responses = [pb.LaunchResponse(started=started)]
    if not detach:
        cleanup = pb.Cleanup.FromString(ended.cleanup)
        responses.append(pb.LaunchResponse(exited=pb.LaunchResponse.Exited(record=record)))
        responses.append(pb.LaunchResponse(gone=pb.LaunchResponse.Gone(cleanup=cleanup)))
    return responses


def _pending(cleanup: pb.Cleanup, name: str) -> ServiceError:
    left = "; ".join(cleanup.left) or "still being closed"
    error = ServiceError(
        Code.DEADLINE_EXCEEDED,
        "CLEANUP_PENDING",
        f"the cleanup of {name} is not done within its budget and goes on: {left}"[:2000],
        None,
        name=name,
    )
    error.details.append(cleanup)
    return error


def _add(total: pb.Cleanup, part: pb.Cleanup) -> None:
    total.removed.extend(part.removed)
    total.left.extend(part.left)
    total.processes_killed += part.processes_killed
    total.cgroups_removed += part.cgroups_removed
    total.leases_closed += part.leases_closed
    total.took.FromNanoseconds(total.took.ToNanoseconds() + part.took.ToNanoseconds())


def _foreign(parts: Parts, name: str) -> list[str]:
    """Directories of the name that are not ours and stay."""
    paths = [each.path(name) for each in parts.machine.trees]
    return [f"cgroup {path}: not made by us" for path in paths if os.path.isdir(path)]
