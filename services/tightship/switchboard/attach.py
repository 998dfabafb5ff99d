"""Readers and writers of a lease's streams.

A reader takes bytes from the segment files at its own pace, from any offset; it holds nothing and slows nobody, and
has at most one chunk in memory. A writer puts bytes into the pipe of standard input, and waits where the process
doesn't read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from tightship.common.errors import Code, ServiceError, invalid
from tightship.switchboard import requests
from tightship.switchboard.catalogue import NUMBERS
from tightship.switchboard.leases import Leases, as_service_error
from tightship.switchboard.ledger import Bound, Claimed, Offered
from tightship.switchboard.live import Live
from tightship.switchboard.segments import Log
from tightship.v1 import switchboard_pb2 as pb

CHUNK = 64 << 10
ATTACHED_MAX = 1024
GONE_REASON = "log gone"

_FIELDS = {pb.STREAM_STDOUT: "stdout_offset", pb.STREAM_STDERR: "stderr_offset"}

Send = Callable[[pb.AttachOutputResponse], Awaitable[None]]


class Attachments:
    """Every reader and writer there is, at most 1,024."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._count = 0

    async def output(self, request: pb.AttachOutputRequest, send: Send) -> None:
        """Sends bytes, gaps and ends of the streams asked for, in order within each, then AttachEnd."""
        with self._place():
            live = self._leases.find(request.lease_id)
            if live is None:
                ended = self._leases.ended(request.lease_id)
                cursors = _cursors(request, ended.logs)
                while await self._pass(cursors, send):
                    pass
                await _tell_ends(cursors, send)
                await send(_end(ended.lease))
                return
            with live.watched() as changed:
                await self._living(request, live, changed, send)

    async def _living(self, request: pb.AttachOutputRequest, live: Live, changed: asyncio.Event, send: Send) -> None:
        cursors = _cursors(request, live.logs)
        if not request.follow:
            for cursor in cursors:
                cursor.limit = cursor.log.size
        while True:
            changed.clear()
            over = self._leases.find(request.lease_id) is not live
            if await self._pass(cursors, send):
                continue
            await _tell_ends(cursors, send)
            if over and live.lease.end_reason == "shutdown":
                raise _resume()
            if over or not request.follow:
                message = pb.Lease()
                requests.describe(message, live.lease, 0.0)
                await send(_end(message))
                return
            await changed.wait()

    async def _pass(self, cursors: list[Cursor], send: Send) -> bool:
        """One chunk or gap of each stream; whether there was any."""
        any_sent = False
        for cursor in cursors:
            if self._leases.ending:
                raise _resume()
            message = await cursor.next()
            if message is not None:
                await send(message)
                any_sent = True
        return any_sent

    async def input(self, lease_id: str, messages: AsyncIterator[pb.AttachInputRequest]) -> pb.AttachInputResponse:
        """Writes what comes until its eof. `messages` includes the first, which named the lease."""
        with self._place():
            live = self._leases.find(lease_id)
            if live is None:
                self._leases.ended(lease_id)
                raise ServiceError(Code.FAILED_PRECONDITION, "LEASE_ENDED", f"lease {lease_id} has ended")
            if not live.lease.terms.stdin:
                raise ServiceError(Code.FAILED_PRECONDITION, "NO_STDIN", f"lease {lease_id} has no standard input")
            if live.writing:
                raise ServiceError(Code.FAILED_PRECONDITION, "INPUT_TAKEN", f"lease {lease_id} has a writer")
            if live.stdin < 0:
                raise ServiceError(Code.FAILED_PRECONDITION, "INPUT_CLOSED", f"standard input of {lease_id} is closed")
            live.writing = True
            try:
                with live.watched() as changed:
                    return await self._write(live, changed, messages)
            finally:
                live.writing = False

    async def _write(
        self, live: Live, changed: asyncio.Event, messages: AsyncIterator[pb.AttachInputRequest]
    ) -> pb.AttachInputResponse:
        """Copies until the client's eof, the process' end, or the service's, whichever comes first."""
        writer = _Writer(self._leases, live)
        copying = asyncio.create_task(writer.copy(messages))
        leaving = asyncio.create_task(self._left(live, changed, writer))
        try:
            await asyncio.wait((copying, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (copying, leaving):
                task.cancel()
            await asyncio.gather(copying, leaving, return_exceptions=True)
        if not copying.cancelled():
            copying.result()
        elif self._leases.ending or live.lease.end_reason == "shutdown":
            raise _resume()
        return pb.AttachInputResponse(written=writer.written, reader_gone=writer.reader_gone or copying.cancelled())

    async def _left(self, live: Live, changed: asyncio.Event, writer: _Writer) -> None:
        """Until the lease is past BOUND."""
        while True:
            changed.clear()
            state = live.lease.state
            if self._leases.ending or not isinstance(state, Offered | Claimed | Bound):
                return
            if isinstance(state, Bound):
                writer.bound.set()
            await changed.wait()

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        if self._leases.ending:
            raise _resume()
        if self._count >= ATTACHED_MAX:
            raise ServiceError(Code.RESOURCE_EXHAUSTED, "ATTACHED", f"{ATTACHED_MAX} readers and writers are attached")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class Cursor:
    """Where a reader is in one stream. `limit` bounds one that does not follow."""

    def __init__(self, log: Log, offset: int) -> None:
        self.log = log
        self.offset = offset
        self.limit: int | None = None
        self.told_end = False

    @property
    def at_end(self) -> bool:
        return self.log.ended and self.offset == self.log.size

    async def next(self) -> pb.AttachOutputResponse | None:
        """The next bytes or gap; None where there is nothing more now."""
        end = self.log.size if self.limit is None else self.limit
        if self.offset >= end:
            return None
        gap = self.log.gap_at(self.offset)
        if gap is not None:
            return self._gap(min(gap.end, end), gap.reason)
        until = self.log.kept_until(self.offset, end)
        kept = await _read(self.log.path, self.offset, min(until - self.offset, CHUNK))
        if not kept:
            return self._gap(until, GONE_REASON)
        data = pb.AttachOutputResponse.Data(stream=NUMBERS[self.log.stream], offset=self.offset, data=kept)
        self.offset += len(kept)
        return pb.AttachOutputResponse(data=data)

    def _gap(self, until: int, reason: str) -> pb.AttachOutputResponse:
        gap = pb.AttachOutputResponse.Gap(
            stream=NUMBERS[self.log.stream], offset=self.offset, size=until - self.offset, reason=reason
        )
        self.offset = until
        return pb.AttachOutputResponse(gap=gap)


class _Writer:
    """Copies messages into the pipe."""

    def __init__(self, leases: Leases, live: Live) -> None:
        self.written = 0
        self.reader_gone = False
        self.bound = asyncio.Event()
        self._leases = leases
        self._live = live

    async def copy(self, messages: AsyncIterator[pb.AttachInputRequest]) -> None:
        """To the eof, or to the end of the reader. Raises ABORTED where the messages end without it."""
        await self.bound.wait()
        async for message in messages:
            if not await self._put(message.data):
                self.reader_gone = True
                self._leases.close_stdin(self._live)
                return
            if message.eof:
                self._leases.close_stdin(self._live)
                return
        raise ServiceError(
            Code.ABORTED, "NO_EOF", "the stream ended without eof; standard input stays open", None, offset=self.written
        )

    async def _put(self, data: bytes) -> bool:
        """All of it; False when nobody reads any more."""
        view = memoryview(data)
        while view:
            fd = self._live.stdin
            if fd < 0:
                return False
            try:
                count = os.write(fd, view)
            except BlockingIOError:
                await self._writable(fd)
                continue
            except BrokenPipeError:
                return False
            self.written += count
            self._leases.counts.stdin += count
            view = view[count:]
        return True

    async def _writable(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        with as_service_error():
            loop.add_writer(fd, ready.set)
        try:
            await ready.wait()
        finally:
            # Where the lease has closed it meanwhile, the number may be another's.
            if self._live.stdin == fd:
                loop.remove_writer(fd)


def _cursors(request: pb.AttachOutputRequest, logs: tuple[Log, ...]) -> list[Cursor]:
    wanted = list(dict.fromkeys(request.streams)) or [pb.STREAM_STDOUT, pb.STREAM_STDERR]
    cursors = []
    for number in wanted:
        if number not in _FIELDS:
            raise invalid("streams", "must be of STREAM_STDOUT and STREAM_STDERR")
        log = next(log for log in logs if NUMBERS[log.stream] == number)
        name = _FIELDS[number]
        offset: int = getattr(request, name)
        if not 0 <= offset <= log.size:
            raise invalid(name, f"{offset} is not within the stream, which has {log.size} bytes", value=offset)
        cursors.append(Cursor(log, offset))
    return cursors


async def _tell_ends(cursors: list[Cursor], send: Send) -> None:
    """Tells each end once."""
    for cursor in cursors:
        if cursor.at_end and not cursor.told_end:
            cursor.told_end = True
            ended = pb.AttachOutputResponse.StreamEnded(stream=NUMBERS[cursor.log.stream], size=cursor.log.size)
            await send(pb.AttachOutputResponse(ended=ended))


def _end(lease: pb.Lease) -> pb.AttachOutputResponse:
    end = pb.AttachOutputResponse.AttachEnd(state=lease.state, end_reason=lease.end_reason)
    if lease.HasField("exit"):
        end.exit.CopyFrom(lease.exit)
    return pb.AttachOutputResponse(end=end)


async def _read(path: str, offset: int, count: int) -> bytes:
    """Bytes of a segment; empty where the file ends or is gone. What is not in the page cache, a thread reads."""
    try:
        return _read_now(path, offset, count, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
            return b""
    try:
        return await asyncio.to_thread(_read_now, path, offset, count, 0)
    except OSError:
        return b""


def _read_now(path: str, offset: int, count: int, flags: int) -> bytes:
    """See preadv2(2)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        buffer = bytearray(count)
        return bytes(buffer[: os.preadv(fd, [buffer], offset, flags)])
    finally:
        os.close(fd)


def _resume() -> ServiceError:
    return ServiceError(
        Code.UNAVAILABLE, "RESUME", "the switchboard shuts down; attach again from the offset reached", 0.5
    )
