"""One launch as the caller holds it: begun on entry, gone on every way out.

The call's stream is read by one task, so that a waiter that is cancelled cancels only itself. When the containerizer is
started anew meanwhile, the task joins the launch again by its request id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from tightship.client import retry, streams
from tightship.client.errors import TightshipError
from tightship.telemetry import conventions
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import switchboard_pb2

if TYPE_CHECKING:
    from tightship.client.aio import AsyncClient

Call = grpc.aio.UnaryStreamCall[pb.LaunchRequest, pb.LaunchResponse]

# The service bounds each step (5 to 10 s); this is for one that answers nothing at all.
_START_S = 60.0

# How long a containerizer that went away is waited for; it keeps a launch 5 s for its caller.
_REJOIN_S = 8.0

# For what is left when the block is left: over the service's longest cleanup budget.
_END_S = 65.0
_POLL_S = (0.005, 0.2)

_log = logging.getLogger("tightship.client")


class AsyncLaunch:
    """A running command. `async with` it; made by `AsyncClient.launch`.

    `started` says where it is (id, name, lease_id, pid, in_force), `wait` gives its record when nothing of it is left.
    Leaving the block earlier cancels it and waits until it is gone. A detached one stays.
    """

    def __init__(self, client: AsyncClient, request: pb.LaunchRequest) -> None:
        self.request = request
        self.started = pb.LaunchResponse.Started()
        self.output_end: switchboard_pb2.AttachOutputResponse.AttachEnd | None = None
        """How a followed `output` ended."""
        self._client = client
        self._span = client.span("ContainerizerService/Launch")
        self._trace = self._span.traceparent
        self._metadata = self._span.metadata
        self._call: Call | None = None
        self._pump: asyncio.Task[None] | None = None
        self._exited: asyncio.Future[pb.Record] = asyncio.get_running_loop().create_future()
        self._gone: asyncio.Future[pb.Cleanup] = asyncio.get_running_loop().create_future()
        self._input: streams.AsyncInput | None = None

    @property
    def id(self) -> str:
        return self.started.id

    @property
    def name(self) -> str:
        return self.started.name

    @property
    def pid(self) -> int:
        return self.started.pid

    async def start(self) -> Self:
        """Runs the command, as `async with` does first. Raises TightshipError when it did not run."""
        try:
            async with asyncio.timeout(_START_S):
                await self._start()
        except TightshipError as error:
            self._finish(error.code.name, error.message)
            raise
        except TimeoutError:
            self._finish("DEADLINE_EXCEEDED", "no answer")
            raise TightshipError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no STARTED within {_START_S:.0f} s") from None
        except BaseException:
            self._finish("CANCELLED", "cancelled by the caller")
            raise
        if self.request.detach:
            self._finish()
        else:
            self._pump = asyncio.create_task(self._read_all(), name=f"launch {self.id}")
        return self

    async def exited(self) -> pb.Record:
        """The record as soon as the process has ended; cleanup may still run. Raises TightshipError."""
        if self.request.detach:
            return await self._client.wait(self.id)
        return await asyncio.shield(self._exited)

    async def wait(self) -> pb.Record:
        """The record when the process has ended and nothing of the container is left. Raises TightshipError."""
        if self.request.detach:
            return await self._client.wait(self.id)
        await asyncio.shield(self._gone)
        return self._exited.result()

    async def gone(self) -> pb.Cleanup:
        """What the cleanup did, when it has ended. Raises TightshipError."""
        return await asyncio.shield(self._gone)

    def output(
        self, *names: streams.StreamName, stdout_offset: int = 0, stderr_offset: int = 0, follow: bool = True
    ) -> AsyncIterator[streams.Chunk]:
        """Output from the start, both streams unless named, until its end. Raises TightshipError."""
        return streams.output(
            self._client,
            self.started.lease_id,
            streams=names,
            offsets=(stdout_offset, stderr_offset),
            follow=follow,
            parent=self._trace,
            on_end=self._ended,
        )

    def stdin(self) -> streams.AsyncInput:
        """Standard input of a launch with `stdin`: what `write` and `close_stdin` use."""
        if self._input is None:
            self._input = streams.AsyncInput(self._client, self.started.lease_id, self._trace)
        return self._input

    async def write(self, data: bytes) -> None:
        """To standard input. Raises BrokenPipeError when the process reads no more; TightshipError."""
        await self.stdin().write(data)

    async def close_stdin(self) -> int:
        """End of file on standard input; the bytes that were taken. Raises BrokenPipeError, TightshipError."""
        return await self.stdin().close()

    async def kill(self, signal: str = "") -> None:
        """A signal to the main process: name or number; KILL when empty."""
        await self._client.kill(self.id, signal)

    async def cancel(self) -> None:
        """Ends the launch and waits until nothing is left. Raises TightshipError when the cleanup is pending."""
        if self._pump is None or self.request.detach:
            return
        if not self._exited.done() and self._call is not None:
            self._call.cancel()
            await asyncio.wait([self._pump])
            await self._until_gone()
        await asyncio.wait([self._pump], timeout=_END_S)
        self._pump.cancel()
        if self._input is not None:
            self._input.abandon()
        self._finish()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ending = asyncio.create_task(self.cancel())
        try:
            # A second cancel leaves at once; the call is cancelled by then, and the service cleans up.
            await asyncio.shield(ending)
        except TightshipError as failed:
            if error is None:
                raise
            _log.warning("leaving %s: %s", self.name, failed)

    async def _start(self) -> None:
        try:
            await self._begin()
        except TightshipError as error:
            safe = retry.away if self._client.answered else retry.refused
            if not safe(error):
                raise
            await retry.again(self._begin, error, safe, self._client.patience_s)
        self._client.answered = True
        self._span.event("started")

    async def _begin(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._call = self._client.containerizer.Launch(self.request, metadata=self._metadata)
        event = await self._read(self._call)
        if event.WhichOneof("event") != "started":
            raise TightshipError(grpc.StatusCode.INTERNAL, "the launch's first message is not STARTED")
        self.started = event.started

    async def _read(self, call: Call) -> pb.LaunchResponse:
        try:
            event = await call.read()
        except grpc.aio.AioRpcError as error:
            raise TightshipError.of(error) from None
        if not isinstance(event, pb.LaunchResponse):
            raise TightshipError(grpc.StatusCode.INTERNAL, "the launch's stream ended early")
        return event

    async def _read_all(self) -> None:
        try:
            while not self._gone.done():
                assert self._call is not None
                try:
                    event = await self._read(self._call)
                except TightshipError as error:
                    if not retry.away(error):
                        raise
                    await retry.again(self._rejoin, error, retry.away, _REJOIN_S)
                    continue
                match event.WhichOneof("event"):
                    case "exited" if not self._exited.done():
                        self._span.event("exited")
                        self._exited.set_result(event.exited.record)
                    case "gone":
                        self._gone.set_result(event.gone.cleanup)
                    case _:
                        pass
            self._finish()
        except TightshipError as error:
            self._fail(error)
        except asyncio.CancelledError:
            self._fail(TightshipError(grpc.StatusCode.CANCELLED, "the launch was cancelled by its caller"))

    async def _rejoin(self) -> None:
        mine = self.started
        await self._begin()
        if self.started.id != mine.id:
            assert self._call is not None
            self._call.cancel()
            other, self.started = self.started.id, mine
            raise TightshipError(
                grpc.StatusCode.DATA_LOSS,
                f"launch {mine.id} is not known any more; {other}, begun instead, is cancelled",
            )

    async def _until_gone(self) -> None:
        """After a cancel: until the service calls it ended. It goes on by itself whatever happens here."""
        pause, longest = _POLL_S
        end = asyncio.get_running_loop().time() + _END_S
        while True:
            try:
                container = await self._client.get(self.id)
            except TightshipError as error:
                if error.code is grpc.StatusCode.NOT_FOUND:
                    return
                raise
            if container.state == pb.Container.ENDED:
                return
            if container.state == pb.Container.CLEANUP_PENDING or asyncio.get_running_loop().time() > end:
                raise TightshipError(
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    f"cleanup of {self.name} is pending: {container.pending_reason or 'no answer'}",
                    "CLEANUP_PENDING",
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    def _fail(self, error: TightshipError) -> None:
        for future in (self._exited, self._gone):
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting
        self._finish(error.code.name, error.message)

    def _finish(self, status: str = "OK", error: str | None = None) -> None:
        if self._call is not None:
            self._call.cancel()
        self._span.end(status, error, {conventions.CONTAINER_NAME: self.name, conventions.CONTAINER_ID: self.id})

    def _ended(self, end: switchboard_pb2.AttachOutputResponse.AttachEnd) -> None:
        self.output_end = end
