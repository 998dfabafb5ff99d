"""The gRPC face of the switchboard. Handlers own nothing: what they begin goes on or ends by its lease."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from tightship.common import failpoints
from tightship.common.errors import Code, ServiceError, invalid
from tightship.common.serving import Serving
from tightship.common.telemetry import CallTrace, Tracer, called
from tightship.switchboard.attach import Attachments
from tightship.switchboard.audit import Audit
from tightship.switchboard.leases import Leases
from tightship.switchboard.session import Sessions
from tightship.v1 import switchboard_pb2 as pb
from tightship.v1 import switchboard_pb2_grpc

Context = Any


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
        serving.add(switchboard_pb2_grpc.add_SwitchboardServiceServicer_to_server, self)

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
            return pb.GetLeaseResponse(lease=self._leases.get(request.lease_id))

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Context) -> pb.ListLeasesResponse:
        async with self._call(context, "ListLeases", request):
            return pb.ListLeasesResponse(leases=self._leases.all(request.owner, request.closed))

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        async with self._serving.guard(context):
            await self._sessions.serve(aiter(request_iterator), context.write)

    async def AttachOutput(  # type: ignore[override]
        self, request: pb.AttachOutputRequest, context: Context
    ) -> None:
        async with self._call(context, "AttachOutput", request, attach=True) as call:
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


async def _with(first: pb.AttachInputRequest, rest: AsyncIterator[pb.AttachInputRequest]) -> AsyncIterator[Any]:
    yield first
    async for message in rest:
        yield message
