"""The Session stream: the messages of one owner, its leases' end as events, and its own end.

Requests are acted on as they come; one that a failpoint holds goes on beside the others. One task writes, from a
bounded queue: an owner that doesn't read its answers loses the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from tightship.common import failpoints
from tightship.common.errors import Code, ServiceError, invalid
from tightship.switchboard import requests
from tightship.switchboard.leases import Leases
from tightship.switchboard.ledger import shutting_down
from tightship.v1 import switchboard_pb2 as pb

SESSIONS_MAX = 64
_OUTBOX_MAX = 8192
_TASKS_MAX = 1024
_LAST_WRITES_S = 0.2

_log = logging.getLogger(__name__)

Write = Callable[[pb.SessionResponse], Awaitable[None]]


class Sessions:
    """The one session of each owner that has one."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._sessions: dict[str, Session] = {}
        self._next = 1

    async def serve(self, messages: AsyncIterator[pb.SessionRequest], write: Write) -> None:
        """One session, from its hello to its end. Raises ServiceError for the end that is not the owner's."""
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid("message", "the first message must be hello")
        owner = requests.check_owner(first.hello.owner)
        if self._leases.stopping:
            raise shutting_down()
        old = self._sessions.get(owner)
        if old is not None:
            old.end(ServiceError(Code.ABORTED, "SESSION_REPLACED", f"{owner} has begun another session"))
        elif len(self._sessions) >= SESSIONS_MAX:
            raise ServiceError(Code.RESOURCE_EXHAUSTED, "SESSIONS", f"{SESSIONS_MAX} sessions live, which is the limit")
        session = Session(self._leases, owner, self._next)
        self._next += 1
        self._sessions[owner] = session
        session.begin(first.request)
        try:
            await session.run(messages, write)
        finally:
            session.end(None)
            if self._sessions.get(owner) is session:
                del self._sessions[owner]

    def end_all(self) -> None:
        """At the end of the service, when all leases are closed and told."""
        for session in list(self._sessions.values()):
            session.end(shutting_down())


class Session:
    def __init__(self, leases: Leases, owner: str, number: int) -> None:
        self.ended = False
        self._leases = leases
        self._owner = owner
        self._number = number
        self._outbox: asyncio.Queue[pb.SessionResponse] = asyncio.Queue(_OUTBOX_MAX)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: int) -> None:
        self._leases.session_begun(self._owner, self._number, self._closed)
        welcome = pb.SessionWelcome(
            epoch=self._leases.epoch, leases=self._leases.all(self._owner), session=self._number
        )
        self._put(pb.SessionResponse(request=request, welcome=welcome))

    def end(self, error: ServiceError | None) -> None:
        """The owner's end, at once: its leases that no process is bound to end."""
        if self.ended:
            return
        self.ended = True
        self._leases.session_ended(self._owner, self._number, self._closed)
        if not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)

    async def run(self, messages: AsyncIterator[pb.SessionRequest], write: Write) -> None:
        reading = asyncio.create_task(self._read(messages))
        writing = asyncio.create_task(self._write(write))
        try:
            await asyncio.wait((reading, writing, self._over), return_when=asyncio.FIRST_COMPLETED)
            self.end(None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._outbox.join(), _LAST_WRITES_S)
        finally:
            tasks = (reading, writing, *self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._over.done():
                self._over.exception()  # seen, also where this was cancelled
        for outcome in (self._over, reading):
            if outcome.done() and not outcome.cancelled():
                outcome.result()

    async def _read(self, messages: AsyncIterator[pb.SessionRequest]) -> None:
        async for message in messages:
            if message.WhichOneof("message") == "bye":
                return
            if message.request == 0:
                raise invalid("request", "0 is for events")
            if self.ended:
                return
            self._act(message)

    async def _write(self, write: Write) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await write(message)
            finally:
                self._outbox.task_done()

    def _closed(self, lease: pb.Lease) -> None:
        self._put(pb.SessionResponse(closed=lease))

    def _put(self, response: pb.SessionResponse) -> None:
        try:
            self._outbox.put_nowait(response)
        except asyncio.QueueFull:
            error = ServiceError(Code.RESOURCE_EXHAUSTED, "OUTBOX", "the owner does not read its answers")
            if not self._over.done():
                self._over.set_exception(error)

    # Requests

    def _act(self, message: pb.SessionRequest) -> None:
        kind = message.WhichOneof("message")
        number = message.request
        try:
            match kind:
                case "acquire":
                    if failpoints.DIRECTORY is None:
                        response = self._leases.acquire(message.acquire, self._owner, self._number)
                        self._put(pb.SessionResponse(request=number, acquire=response))
                    else:
                        self._spawn(number, self._acquire(message))
                case "renew":
                    self._put(pb.SessionResponse(request=number, renew=self._leases.renew(message.renew)))
                case "release":
                    self._put(pb.SessionResponse(request=number, release=self._leases.release(message.release)))
                case "revoke":
                    self._put(pb.SessionResponse(request=number, revoke=self._leases.revoke(message.revoke)))
                case "get":
                    got = pb.GetLeaseResponse(lease=self._leases.get(message.get.lease_id))
                    self._put(pb.SessionResponse(request=number, get=got))
                case "list":
                    owner = message.list.owner or self._owner
                    listed = pb.ListLeasesResponse(leases=self._leases.all(owner, message.list.closed))
                    self._put(pb.SessionResponse(request=number, list=listed))
                case "forget":
                    self._spawn(number, self._forget(message))
                case "hello":
                    raise invalid("hello", "is for the first message alone")
                case _:
                    raise invalid("message", "is empty or unknown")
        except Exception as error:  # noqa: BLE001  one request must not end the session
            self._refuse(number, error)

    async def _acquire(self, message: pb.SessionRequest) -> None:
        response = await self._leases.acquire_held(message.acquire, self._owner, self._number, lambda: self.ended)
        self._put(pb.SessionResponse(request=message.request, acquire=response))

    async def _forget(self, message: pb.SessionRequest) -> None:
        forgotten = await self._leases.forget(message.forget.lease_id)
        self._put(pb.SessionResponse(request=message.request, forget=pb.ForgetResponse(forgotten=forgotten)))

    def _spawn(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        if len(self._tasks) >= _TASKS_MAX:
            work.close()
            raise ServiceError(Code.RESOURCE_EXHAUSTED, "REQUESTS", "too many requests are open")
        task = asyncio.create_task(self._answering(number, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answering(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  as above
            self._refuse(number, error)

    def _refuse(self, number: int, error: Exception) -> None:
        if not isinstance(error, ServiceError):
            _log.error("a request of %s failed", self._owner, exc_info=error)
            error = ServiceError(Code.INTERNAL, "INTERNAL", f"{type(error).__name__}: {error}")
        code: int = error.code.value[0]
        told = pb.SessionError(code=code, message=error.message, reason=error.reason, metadata=error.metadata)
        self._put(pb.SessionResponse(request=number, error=told))
