"""One launch as the caller holds it: begun on entry, gone on every way out.

A handle that is dropped without that ends its launch too, as a file that is dropped is closed.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Awaitable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import grpc

from tightship.client import forks, streams
from tightship.client.errors import TightshipError
from tightship.client.running import Running
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import switchboard_pb2

if TYPE_CHECKING:
    from tightship.client.aio import AsyncClient

T = TypeVar("T")

_log = logging.getLogger("tightship.client")


class AsyncLaunch:
    """A running command. `async with` it; made by `AsyncClient.launch`.

    `started` says where it is (id, name, lease_id, pid, in_force), `wait` gives its record when nothing of it is left.
    Leaving the block cancels it where it runs, and waits until it is gone: 65 s at most, over the longest budget of a
    cleanup (60 s). Cancelling the task that leaves returns at once; the service goes on cleaning up. A detached one
    stays. Where the containerizer is started anew meanwhile, it is joined again.

    Time-outs are in seconds; what they end is the waiting, never the launch. They raise TimeoutError.
    """

    _running: Running | None = None

    def __init__(self, client: AsyncClient, request: pb.LaunchRequest) -> None:
        self.request = request
        self.output_end: switchboard_pb2.AttachOutputResponse.AttachEnd | None = None
        """How a followed `output` ended: exit, state of the lease, and why it ended."""
        self._client = client
        self._input: streams.AsyncInput | None = None

    @property
    def started(self) -> pb.LaunchResponse.Started:
        """What STARTED told. Raises RuntimeError where the launch has not begun."""
        return self._begun().started

    @property
    def id(self) -> str:
        """The container's id, never used again."""
        return self.started.id

    @property
    def name(self) -> str:
        """The container's absolute name."""
        return self.started.name

    @property
    def pid(self) -> int:
        """Of the main process, in the service's pid namespace."""
        return self.started.pid

    async def start(self) -> Self:
        """Runs the command, as `async with` does first. Raises TightshipError when it did not run.

        A handle that is started without `async with` ends with `cancel`, or when it is dropped (ResourceWarning).
        """
        if self._running is not None:
            raise RuntimeError("a launch is started once")
        running = Running(self._client, self.request)
        await running.start()
        self._running = running
        return self

    async def exited(self, timeout: float | None = None) -> pb.Record:
        """The record as soon as the process has ended; cleanup may still run. Raises TightshipError, TimeoutError."""
        running = self._begun()
        if self.request.detach:
            return await _within(timeout, self._client.wait(self.id))
        return await _within(timeout, running.until(running.exited))

    async def wait(self, timeout: float | None = None) -> pb.Record:
        """The record when the process has ended and nothing of the container is left (of a detached one: when the
        process has ended). After a cancel, its record (reason CANCELLED).

        Raises TimeoutError, and TightshipError: with reason CLEANUP_PENDING where something is left.
        """
        running = self._begun()
        if self.request.detach:
            return await _within(timeout, self._client.wait(self.id))
        try:
            await _within(timeout, running.until(running.gone))
        except TightshipError as error:
            if error.code is not grpc.StatusCode.CANCELLED or not running.exited.done():
                raise
        return running.exited.result()

    async def gone(self, timeout: float | None = None) -> pb.Cleanup:
        """What the cleanup did, when it has ended. Raises TightshipError, TimeoutError.

        Not told of a launch that its caller cancelled (code CANCELLED), nor of a detached one (RuntimeError).
        """
        if self.request.detach:
            raise RuntimeError("a detached launch has no cleanup of its own: destroy it by its name")
        running = self._begun()
        return await _within(timeout, running.until(running.gone))

    def output(
        self, *names: streams.StreamName, stdout_offset: int = 0, stderr_offset: int = 0, follow: bool = True
    ) -> AsyncIterator[streams.Chunk]:
        """Output from the offsets (bytes), both streams unless named, until its end; without `follow`, what there is.

        Goes on by offset over a new switchboard. A step that is cancelled ends the iteration; another one goes on from
        `Chunk.next_offset`. Raises TightshipError.
        """
        running = self._begun()
        return streams.output(
            self._client,
            running.started.lease_id,
            streams=names,
            offsets=(stdout_offset, stderr_offset),
            follow=follow,
            parent=running.trace,
            on_end=self._ended,
        )

    def stdin(self) -> streams.AsyncInput:
        """Standard input of a launch with `stdin`: what `write` and `close_stdin` use."""
        if self._input is None:
            running = self._begun()
            if running.request.stdin != pb.STDIN_MODE_PIPE:
                raise RuntimeError("the launch has no standard input: launch it with stdin=True")
            self._input = streams.AsyncInput(self._client, running.started.lease_id, running.trace)
        return self._input

    async def write(self, data: bytes) -> None:
        """To standard input. Raises BrokenPipeError when the process reads no more; TightshipError."""
        await self.stdin().write(data)

    async def close_stdin(self) -> int:
        """End of file on standard input; the bytes that were taken. Raises BrokenPipeError, TightshipError."""
        return await self.stdin().close()

    async def kill(self, signal: str = "") -> None:
        """A signal to the main process: name or number; KILL when empty. Raises TightshipError."""
        await self._client.kill(self.id, signal)

    async def cancel(self) -> None:
        """Ends the launch and waits until nothing is left (65 s at most). Of a detached one, nothing.

        Raises TightshipError with reason CLEANUP_PENDING where something is: the service goes on with it.
        """
        if self._running is None:
            return
        try:
            await self._running.cancel()
        finally:
            if self._input is not None:
                self._input.abandon()

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
        except asyncio.CancelledError:
            self._begun().abandon()
            ending.cancel()
            raise

    def __del__(self) -> None:
        if self._running is not None and self._running.living and not forks.is_child():
            warnings.warn(f"launch {self.name} was dropped while it ran", ResourceWarning, source=self, stacklevel=2)
            self._running.abandon()

    def _begun(self) -> Running:
        if self._running is None:
            raise RuntimeError("the launch has not begun: use it in a `with`, or call start()")
        return self._running

    @property
    def output_cut(self) -> str:
        """Why an output that was read to its end may not be whole ("switchboard died"); empty where it is."""
        reason = self.output_end.end_reason if self.output_end is not None else ""
        return "" if reason in ("exit", "released") else reason

    def _ended(self, end: switchboard_pb2.AttachOutputResponse.AttachEnd) -> None:
        self.output_end = end


async def _within(timeout: float | None, waiting: Awaitable[T]) -> T:
    async with asyncio.timeout(timeout):
        return await waiting
