"""The call behind a launch: read by one task until the container is gone, joined again when the containerizer is new.

It knows nothing of the handle that callers hold, so that a handle nobody holds any more is collected, and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, TypeVar

import grpc

from tightship.client import retry
from tightship.client.errors import TightshipError, raised
from tightship.telemetry import conventions
from tightship.v1 import containerizer_pb2 as pb

if TYPE_CHECKING:
    from tightship.client.aio import AsyncClient

Call = grpc.aio.UnaryStreamCall[pb.LaunchRequest, pb.LaunchResponse]

T = TypeVar("T")

# The service bounds each step (5 to 10 s); this is for one that answers nothing at all.
_START_S = 60.0

# How long a containerizer that went away is waited for; it keeps a launch 5 s for its caller.
_REJOIN_S = 8.0

# For what is left when the launch is left: over the service's longest cleanup budget.
_END_S = 65.0
_POLL_S = (0.005, 0.2)


class Running:
    """One launch, begun by `start`. `exited` and `gone` are done in the end, whatever happens."""

    def __init__(self, client: AsyncClient, request: pb.LaunchRequest) -> None:
        self.request = request
        self.started = pb.LaunchResponse.Started()
        self.span = client.span("ContainerizerService/Launch")
        self.trace = self.span.traceparent
        self._metadata = self.span.metadata
        self.loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[pb.Record] = self.loop.create_future()
        self.gone: asyncio.Future[pb.Cleanup] = self.loop.create_future()
        self._client = client
        self._call: Call | None = None
        self._reader: asyncio.Task[None] | None = None
        self._cancelling = False
        self._told = False

    @property
    def living(self) -> bool:
        """Whether it ends with its caller, and has not ended yet."""
        return self._reader is not None and not self._reader.done()

    async def start(self) -> None:
        """To STARTED. Raises TightshipError where it did not run; then, and when cancelled, the service undoes it."""
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
            self._reader = asyncio.create_task(self._read_all(), name=f"launch {self.started.id}")

    async def until(self, future: asyncio.Future[T]) -> T:
        """The result of `exited` or `gone`; cancelling a waiter leaves the launch alone. Raises TightshipError."""
        try:
            return await asyncio.shield(future)
        except TightshipError:
            self._told = True
            raise

    async def cancel(self) -> None:
        """Ends it and waits until nothing is left. Raises TightshipError where that failed, and nobody knows yet."""
        if self._reader is None:
            return
        if self.exited.done():
            await asyncio.wait([self._reader], timeout=_END_S)
            self._reader.cancel()
        else:
            self._cancelling = True
            self._end_call()
            self._reader.cancel()  # it may be on its way to join again
            try:
                await asyncio.wait([self._reader], timeout=_END_S)
                self._end_call()
                self._note(await self._until_gone())
            except TightshipError as error:
                self._fail(error)
            except BaseException:
                self._fail(_cancelled("the launch was cancelled by its caller, who did not wait for its end"))
                raise
        self._finish()
        failed = self.gone.exception() if self.gone.done() else None
        if isinstance(failed, TightshipError) and failed.code is not grpc.StatusCode.CANCELLED and not self._told:
            self._told = True
            raise failed

    def abandon(self) -> None:
        """Ends it without waiting; from any thread."""
        with contextlib.suppress(RuntimeError):  # its loop is closed, and with it the call
            self.loop.call_soon_threadsafe(self._end_call)

    async def _start(self) -> None:
        try:
            await self._begin()
        except TightshipError as error:
            safe = retry.away if self._client.answered else retry.refused
            if not safe(error):
                raise
            await retry.again(self._begin, error, safe, self._client.patience_s)
        self._client.answered = True
        self.span.event("started")

    async def _begin(self) -> None:
        self._end_call()
        self._call = self._client.containerizer.Launch(self.request, metadata=self._metadata)
        event = await self._read(self._call)
        if event.WhichOneof("event") != "started":
            raise TightshipError(grpc.StatusCode.INTERNAL, "the launch's first message is not STARTED")
        self.started = event.started

    async def _read(self, call: Call) -> pb.LaunchResponse:
        with raised():
            event = await call.read()
        if not isinstance(event, pb.LaunchResponse):
            raise TightshipError(grpc.StatusCode.INTERNAL, "the launch's stream ended early")
        return event

    async def _read_all(self) -> None:
        try:
            while not self.gone.done():
                assert self._call is not None
                try:
                    event = await self._read(self._call)
                except TightshipError as error:
                    if self._cancelling or not retry.away(error):
                        raise
                    rejoin = functools.partial(self._rejoin, self.started)
                    await retry.again(rejoin, error, retry.away, _REJOIN_S)
                    continue
                match event.WhichOneof("event"):
                    case "exited" if not self.exited.done():
                        self.span.event("exited")
                        self.exited.set_result(event.exited.record)
                    case "gone":
                        self.gone.set_result(event.gone.cleanup)
                    case _:
                        pass
            self._finish()
        except TightshipError as error:
            if not self._cancelling:
                self._fail(error)
        except asyncio.CancelledError:
            if not self._cancelling:  # else `cancel` tells the end
                self._fail(_cancelled("the launch was cancelled by its caller"))

    async def _rejoin(self, mine: pb.LaunchResponse.Started) -> None:
        await self._begin()
        if self.started.id != mine.id:
            self._end_call()
            other, self.started = self.started.id, mine
            raise TightshipError(
                grpc.StatusCode.DATA_LOSS,
                f"launch {mine.id} is not known any more; {other}, begun instead, is cancelled",
            )

    async def _until_gone(self) -> pb.Container | None:
        """After a cancel: until the service calls it ended. It goes on by itself whatever happens here.

        None where it is not known any more. Raises TightshipError.
        """
        pause, longest = _POLL_S
        end = self.loop.time() + _END_S
        while True:
            try:
                container = await self._client.get(self.started.id)
            except TightshipError as error:
                if error.code is grpc.StatusCode.NOT_FOUND:
                    return None
                raise
            if container.state == pb.Container.ENDED:
                return container
            if container.state == pb.Container.CLEANUP_PENDING or self.loop.time() > end:
                raise TightshipError(
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    f"cleanup of {self.started.name} is pending: {container.pending_reason or 'no answer'}",
                    "CLEANUP_PENDING",
                    {"name": self.started.name},
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    def _note(self, container: pb.Container | None) -> None:
        """Of a launch that was cancelled the record is told, not what its cleanup did."""
        if container is not None and not self.exited.done():
            self.exited.set_result(container.record)
        self._fail(_cancelled("the launch was cancelled by its caller"))

    def _fail(self, error: TightshipError) -> None:
        for future in (self.exited, self.gone):
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting
        self._finish(error.code.name, error.message)

    def _end_call(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _finish(self, status: str = "OK", error: str | None = None) -> None:
        self._end_call()
        told = {conventions.CONTAINER_NAME: self.started.name, conventions.CONTAINER_ID: self.started.id}
        self.span.end(status, error, told)


def _cancelled(message: str) -> TightshipError:
    return TightshipError(grpc.StatusCode.CANCELLED, message)
