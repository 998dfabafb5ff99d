"""Bytes of a container: output that goes on by offset when the switchboard is started anew, and standard input."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import grpc

from tightship.client import retry
from tightship.client.errors import TightshipError, raised
from tightship.v1 import switchboard_pb2 as pb

if TYPE_CHECKING:
    from tightship.client.aio import AsyncClient

StreamName = Literal["stdout", "stderr"]

STREAMS: dict[StreamName, pb.Stream.ValueType] = {"stdout": pb.STREAM_STDOUT, "stderr": pb.STREAM_STDERR}
_NAMES: dict[int, StreamName] = {value: name for name, value in STREAMS.items()}

# How long a reader waits for a switchboard that went away, without any byte.
_PATIENCE_S = 10.0

# The best message size up, measured.
_PIECE = 256 << 10


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output, or a gap in it."""

    stream: StreamName
    offset: int
    """Of its first byte, from the stream's begin."""
    data: bytes
    lost: int = 0
    """Bytes that were written here and not kept; `data` is empty then."""
    reason: str = ""
    """Why they were not kept."""

    @property
    def next_offset(self) -> int:
        """Where the stream goes on: the offset that an `output` begun anew would ask for."""
        return self.offset + len(self.data) + self.lost


async def output(
    client: AsyncClient,
    lease_id: str,
    *,
    streams: Sequence[StreamName] = (),
    offsets: tuple[int, int] = (0, 0),
    follow: bool = True,
    parent: str = "",
    on_end: Callable[[pb.AttachOutputResponse.AttachEnd], None] | None = None,
) -> AsyncIterator[Chunk]:
    """Output from the offsets (stdout, stderr); with `follow` until its end, else what there is now.

    A switchboard that shuts down or dies is waited for (10 s) and asked to go on where this stopped. `parent` is the
    traceparent that it belongs to. Raises TightshipError.
    """
    at = {pb.STREAM_STDOUT: offsets[0], pb.STREAM_STDERR: offsets[1]}
    span = client.span("SwitchboardService/AttachOutput", parent)

    def attach() -> grpc.aio.UnaryStreamCall[pb.AttachOutputRequest, pb.AttachOutputResponse]:
        return client.switchboard.AttachOutput(
            pb.AttachOutputRequest(
                lease_id=lease_id,
                streams=[STREAMS[name] for name in streams],
                stdout_offset=at[pb.STREAM_STDOUT],
                stderr_offset=at[pb.STREAM_STDERR],
                follow=follow,
            ),
            metadata=span.metadata,
        )

    call = attach()
    ended = False

    async def read() -> pb.AttachOutputResponse | None:
        with raised():
            response = await call.read()
        return response if isinstance(response, pb.AttachOutputResponse) else None

    async def reattach() -> pb.AttachOutputResponse | None:
        nonlocal call
        call.cancel()
        call = attach()
        return await read()

    try:
        while True:
            try:
                response = await read()
            except TightshipError as error:
                if not retry.away(error):
                    raise
                response = await retry.again(reattach, error, retry.away, _PATIENCE_S)
            if response is None:
                if follow and not ended:
                    raise TightshipError(grpc.StatusCode.DATA_LOSS, "the output broke off without an end")
                span.end()
                return
            match response.WhichOneof("event"):
                case "data":
                    data = response.data
                    at[data.stream] = data.offset + len(data.data)
                    yield Chunk(_NAMES[data.stream], data.offset, data.data)
                case "gap":
                    gap = response.gap
                    at[gap.stream] = gap.offset + gap.size
                    yield Chunk(_NAMES[gap.stream], gap.offset, b"", gap.size, gap.reason)
                case "end":
                    ended = True
                    if on_end is not None:
                        on_end(response.end)
                case _:
                    pass
    except TightshipError as error:
        span.end(error.code.name, error.message)
        raise
    finally:
        span.end("CANCELLED", "left by its reader")
        call.cancel()  # an abandoned stream is not cancelled before its channel closes


class AsyncInput:
    """Standard input of a container: written in order, ended by `close`. One writer at a time.

    A write that is cancelled has put an unknown part of its bytes, and ends the input: what follows raises Cancelled.
    """

    def __init__(self, client: AsyncClient, lease_id: str, parent: str = "") -> None:
        self._client = client
        self._lease_id = lease_id
        self._span = client.span("SwitchboardService/AttachInput", parent)
        self._call: grpc.aio.StreamUnaryCall[pb.AttachInputRequest, pb.AttachInputResponse] | None = None
        self._broken = False

    async def write(self, data: bytes) -> None:
        """Raises BrokenPipeError when the process has closed its end or has ended; TightshipError."""
        view = memoryview(data)
        for begin in range(0, len(view), _PIECE):
            await self._send(pb.AttachInputRequest(data=bytes(view[begin : begin + _PIECE])))

    async def close(self) -> int:
        """End of file for the process. The number of bytes that went into its pipe.

        Raises BrokenPipeError when it did not take them all; TightshipError.
        """
        await self._send(pb.AttachInputRequest(eof=True))
        assert self._call is not None
        await self._call.done_writing()
        return (await self._answer(self._call)).written

    def abandon(self) -> None:
        """Ends the call without an end of file: the pipe stays open."""
        if self._call is not None:
            self._span.end("CANCELLED", "left without an end of file")
            self._call.cancel()

    async def _send(self, request: pb.AttachInputRequest) -> None:
        if self._call is None:
            self._call = self._client.switchboard.AttachInput(metadata=self._span.metadata)
            request.lease_id = self._lease_id
        if self._broken:
            raise TightshipError(
                grpc.StatusCode.CANCELLED, "an earlier write was cancelled: how much it put is unknown"
            )
        try:
            with raised():
                await self._call.write(request)
        except asyncio.CancelledError:
            self._broken = True
            self.abandon()
            raise
        except (asyncio.InvalidStateError, TightshipError):
            # The call has ended: its answer says why.
            await self._answer(self._call)
            raise BrokenPipeError("the process reads no more input") from None

    async def _answer(
        self, call: grpc.aio.StreamUnaryCall[pb.AttachInputRequest, pb.AttachInputResponse]
    ) -> pb.AttachInputResponse:
        try:
            with raised():
                answer = await call
        except TightshipError as error:
            self._span.end(error.code.name, error.message)
            raise
        self._span.end()
        if answer.reader_gone:
            raise BrokenPipeError("the process reads no more input")
        return answer


@contextlib.asynccontextmanager
async def closing(chunks: AsyncIterator[Chunk]) -> AsyncIterator[AsyncIterator[Chunk]]:
    """Ends the call of an iteration that is left early, at once."""
    try:
        yield chunks
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
