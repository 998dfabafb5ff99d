"""The gRPC face of the switchboard. Handlers own nothing: what they begin goes on or ends by its lease."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tightship.common import failpoints, rights
from tightship.common.errors import Code, ServiceError, invalid
from tightship.common.serving import Serving
from tightship.common.telemetry import CallTrace, Tracer, called
from tightship.switchboard.attach import Attachments
from tightship.switchboard.audit import Audit
from tightship.switchboard.leases import Leases, no_lease
from tightship.switchboard.session import Sessions
from tightship.v1 import switchboard_pb2 as pb
from tightship.v1 import switchboard_pb2_grpc

Context = Any

# The label by which a lease names its container.
CONTAINER = "container"

# For clients of some containers: these look at the caller's rights.
SHARED = frozenset({"AttachOutput", "AttachInput", "GetLease", "ListLeases"})


class Service(switchboard_pb2_grpc.SwitchboardServiceServicer):
    def __init__(
        self, serving: Serving, leases: Leases, sessions: Sessions, attachments: Attachments, tracer: Tracer
    ) -> None:
        self.audit: Audit | None = None
        self._serving = serving
        self._leases = leases
        self._sessions = sessions
        self._attachments = attachments
        self._tracer = tracer
        serving.add(switchboard_pb2_grpc.add_SwitchboardServiceServicer_to_server, self, SHARED)

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        async with self._call(context, "Acquire", request):
            if failpoints.DIRECTORY is None:
                return self._leases.acquire(request, request.owner, None)
            return await self._leases.acquire_held(request, request.owner, None, lambda: False)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        async with self._call(context, "Renew", request):
            return self._leases.renew(request)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        async with self._call(context, "Release", request):
            return self._leases.release(request)

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeResponse:
        async with self._call(context, "Revoke", request):
            return self._leases.revoke(request)

    async def GetLease(self, request: pb.GetLeaseRequest, context: Context) -> pb.GetLeaseResponse:
        async with self._call(context, "GetLease", request):
            lease = self._leases.get(request.lease_id)
            _check_visible(lease.labels, request.lease_id)
            return pb.GetLeaseResponse(lease=lease)

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Context) -> pb.ListLeasesResponse:
        async with self._call(context, "ListLeases", request):
            leases = self._leases.all(request.owner, request.closed)
            caller = rights.current()
            if not caller.whole:
                leases = [lease for lease in leases if caller.sees(lease.labels.get(CONTAINER, ""))]
            return pb.ListLeasesResponse(leases=leases)

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        async with self._serving.guard(context):
            await self._sessions.serve(aiter(request_iterator), context.write)

    async def AttachOutput(  # type: ignore[override]
        self, request: pb.AttachOutputRequest, context: Context
    ) -> None:
        async with self._call(context, "AttachOutput", request, attach=True) as call:
            self._check_attach(request.lease_id)
            self._leases.link(request.lease_id, call)
            await self._attachments.output(request, context.write)

    async def AttachInput(
        self, request_iterator: AsyncIterator[pb.AttachInputRequest], context: Context
    ) -> pb.AttachInputResponse:
        async with self._call(context, "AttachInput", attach=True) as call:
            messages = aiter(request_iterator)
            first = await anext(messages, None)
            if first is None:
                raise invalid("lease_id", "the first message must name the lease")
            self._check_attach(first.lease_id)
            self._leases.link(first.lease_id, call)
            return await self._attachments.input(first.lease_id, _with(first, messages))

    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetResponse:
        async with self._call(context, "Forget", request):
            return pb.ForgetResponse(forgotten=await self._leases.forget(request.lease_id))

    async def AuditStreams(self, request: pb.AuditStreamsRequest, context: Context) -> pb.AuditStreamsResponse:
        async with self._call(context, "AuditStreams", request):
            if self.audit is None:
                raise ServiceError(Code.UNAVAILABLE, "STARTING", "the switchboard starts", 0.1)
            return await self.audit.run(request.fix)

    def _check_attach(self, lease_id: str) -> None:
        """Raises NOT_FOUND where the lease is of a container that the caller may not see."""
        if not rights.current().whole:
            _check_visible(self._leases.labels(lease_id), lease_id)

    @contextlib.asynccontextmanager
    async def _call(
        self, context: Context, method: str, request: object = None, *, attach: bool = False
    ) -> AsyncIterator[CallTrace]:
        """Around a handler: errors as statuses, and a server span afterwards where the caller sent a trace; of an
        `attach` in any case, since the launch's trace leads to it."""
        parent = self._tracer.traceparent_of(context.invocation_metadata()) if self._tracer.enabled else ""
        async with self._serving.guard(context, request):
            if not (parent or (attach and self._tracer.enabled)):
                yield CallTrace()
                return
            async with called(self._tracer, context, f"SwitchboardService/{method}", parent) as call:
                yield call


def _check_visible(labels: Mapping[str, str], lease_id: str) -> None:
    """A lease is its container's; one that tells of none is of those with all rights."""
    caller = rights.current()
    if not caller.whole and caller.hides(labels.get(CONTAINER, "")):
        raise no_lease(lease_id)


async def _with(first: pb.AttachInputRequest, rest: AsyncIterator[pb.AttachInputRequest]) -> AsyncIterator[Any]:
    yield first
    async for message in rest:
        yield message
