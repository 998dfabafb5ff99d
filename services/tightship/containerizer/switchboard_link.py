"""The containerizer's session with the switchboard: leases on one long-lived two-way stream.

One writer task per stream; requests get futures, closed leases are told by event. A session that ends is begun again
with backoff, and its welcome says which leases still live: all others are closed. The end of a session fails what waits
on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from tightship.common.errors import Code, ServiceError
from tightship.common.serving import MAX_MESSAGE
from tightship.containerizer.backoff import Backoff
from tightship.v1 import switchboard_pb2 as pb
from tightship.v1 import switchboard_pb2_grpc

if TYPE_CHECKING:
    from tightship.v1.switchboard_pb2_grpc import SwitchboardServiceAsyncStub as Stub

log = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 262144),
)
_OUTBOX_MAX = 4096
_WELCOME_TIMEOUT_S = 5.0
_BYE_TIMEOUT_S = 1.0
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class SwitchboardLink:
    """The session. `on_closed` gets each lease told as closed, `on_welcome` the ids that live at a session's begin."""

    def __init__(
        self,
        path: Path,
        owner: str,
        on_closed: Callable[[pb.Lease], None],
        on_welcome: Callable[[frozenset[str]], None],
    ) -> None:
        self._path = path
        self._owner = owner
        self._on_closed = on_closed
        self._on_welcome = on_welcome
        self._outbox: asyncio.Queue[pb.SessionRequest] = asyncio.Queue(_OUTBOX_MAX)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._next = 1
        self._standing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stub: Stub | None = None
        self._sessions = 0
        self.session = 0
        """Number of the session that stands; 0 while there is none."""
        self.epoch = ""
        """Of the switchboard of the last session."""
        self.taking = 0
        """The switchboard's number for the session, for leases that the claimer makes; 0 where it knows no TAKE."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="switchboard session")

    async def stop(self) -> None:
        """An orderly end of the session: unbound leases end with it."""
        if self.session:
            with contextlib.suppress(ServiceError, TimeoutError):
                await asyncio.wait_for(self._request(bye=pb.SessionBye()), _BYE_TIMEOUT_S)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=_BYE_TIMEOUT_S)

    async def wait_standing(self, timeout: float) -> None:
        """Waits for a session. Raises UNAVAILABLE after `timeout` seconds."""
        if self._standing.is_set():
            return
        try:
            await asyncio.wait_for(self._standing.wait(), max(0.0, timeout))
        except TimeoutError:
            raise _away("the switchboard can't be reached") from None

    def acquire(self, request: pb.AcquireRequest) -> asyncio.Future[pb.AcquireResponse]:
        return self._request(acquire=request)

    def release(self, lease_id: str, reason: str) -> asyncio.Future[pb.ReleaseResponse]:
        return self._request(release=pb.ReleaseRequest(lease_id=lease_id, cancel_reason=reason))

    def revoke(self, lease_id: str) -> asyncio.Future[pb.RevokeResponse]:
        return self._request(revoke=pb.RevokeRequest(lease_id=lease_id))

    def list(self) -> asyncio.Future[pb.ListLeasesResponse]:
        """Our living leases."""
        return self._request(list=pb.ListLeasesRequest(owner=self._owner))

    def forget(self, lease_id: str) -> asyncio.Future[pb.ForgetResponse]:
        return self._request(forget=pb.ForgetRequest(lease_id=lease_id))

    async def audit_streams(self, fix: bool, timeout: float) -> pb.AuditStreamsResponse:
        """Raises UNAVAILABLE where there is no switchboard, or none that answers in time."""
        await self.wait_standing(timeout)
        with self._calling() as stub:
            return await stub.AuditStreams(pb.AuditStreamsRequest(fix=fix), timeout=timeout)

    async def everybodys_leases(self, timeout: float) -> pb.ListLeasesResponse:
        """The living leases of all owners; a session tells its own alone. Raises like `audit_streams`."""
        with self._calling() as stub:
            return await stub.ListLeases(pb.ListLeasesRequest(), timeout=timeout)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[Stub]:
        if self._stub is None:
            raise _away("the switchboard can't be reached")
        try:
            yield self._stub
        except grpc.aio.AioRpcError as error:
            raise _away(f"the switchboard does not answer: {error.details()}") from error

    def _request(self, **message: Any) -> asyncio.Future[Any]:
        """Queues a request; the future has the answer or a ServiceError. A future nobody waits for may be dropped."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self.session:
            _fail(future, _away("the switchboard can't be reached"))
            return future
        number = self._next
        self._next += 1
        try:
            self._outbox.put_nowait(pb.SessionRequest(request=number, **message))
        except asyncio.QueueFull:
            _fail(future, _away("the switchboard does not read its requests"))
            return future
        self._answers[number] = future
        return future

    async def _run(self) -> None:
        backoff = Backoff(0.05, 1.0)
        while True:
            try:
                await self._session()
            except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as error:
                log.debug("no session with the switchboard: %r", error)
            finally:
                if self.session:
                    backoff.reset()
                self._fall()
            await asyncio.sleep(backoff.next())

    async def _session(self) -> None:
        """One session, until it ends."""
        async with grpc.aio.insecure_channel(f"unix:{self._path}", options=_OPTIONS) as channel:
            stub = switchboard_pb2_grpc.SwitchboardServiceStub(channel)
            call = stub.Session()
            writer: asyncio.Task[None] | None = None
            try:
                async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                    await call.write(pb.SessionRequest(request=0, hello=pb.SessionHello(owner=self._owner)))
                    welcome = await call.read()
                if not isinstance(welcome, pb.SessionResponse) or welcome.WhichOneof("message") != "welcome":
                    return
                self._outbox = asyncio.Queue(_OUTBOX_MAX)
                self._stub = stub
                self.epoch = welcome.welcome.epoch
                self.taking = welcome.welcome.session
                self._sessions += 1
                self.session = self._sessions
                self._on_welcome(frozenset(lease.lease_id for lease in welcome.welcome.leases))
                writer = asyncio.create_task(self._write(call, self._outbox), name="switchboard writer")
                self._standing.set()
                while isinstance(response := await call.read(), pb.SessionResponse):
                    self._dispatch(response)
            finally:
                self._stub = None
                call.cancel()
                if writer is not None:
                    writer.cancel()

    async def _write(
        self,
        call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse],
        outbox: asyncio.Queue[pb.SessionRequest],
    ) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await outbox.get())
        call.cancel()

    def _dispatch(self, response: pb.SessionResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "closed":
            self._on_closed(response.closed)
            return
        future = self._answers.pop(response.request, None)
        if kind is None or future is None or future.done():
            return
        if kind == "error":
            error = response.error
            code = _CODES.get(error.code, Code.UNKNOWN)
            known = {key: value for key, value in error.metadata.items() if key not in ("code", "reason", "message")}
            _fail(future, ServiceError(code, error.reason or "SWITCHBOARD", error.message, None, **known))
        else:
            future.set_result(getattr(response, kind))

    def _fall(self) -> None:
        self.session = 0
        self._standing.clear()
        for future in self._answers.values():
            _fail(future, _away("the session with the switchboard broke"))
        self._answers.clear()


def _away(message: str) -> ServiceError:
    return ServiceError(Code.UNAVAILABLE, "SWITCHBOARD_AWAY", message, 0.5)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    """The exception counts as seen: whoever waited may have gone."""
    if not future.done():
        future.set_exception(error)
        future.exception()
