"""Our own standard streams, used so that nothing blocks the event loop: a reader that stops must not stop Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import select
import stat
from collections.abc import AsyncIterator

# A pipe that is writable takes this much without blocking: pipe(7).
_PIPE_BUF = 4096
_PIECE = 256 << 10


def input_is_passed() -> bool:
    """Whether standard input is a pipe, a socket or a file: it is passed on then."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


async def read_input() -> AsyncIterator[bytes]:
    """Standard input to its end, as it comes. No more is taken than is asked for."""
    while True:
        await _until(0, select.POLLIN)
        data = os.read(0, _PIECE)
        if not data:
            return
        yield data


async def write_output(fd: int, data: bytes) -> None:
    """All of `data`, in order. Raises BrokenPipeError when nobody reads any more."""
    piece = _PIECE if stat.S_ISREG(os.fstat(fd).st_mode) else _PIPE_BUF
    view = memoryview(data)
    while view:
        await _until(fd, select.POLLOUT)
        view = view[os.write(fd, view[:piece]) :]


async def _until(fd: int, event: int) -> None:
    """Until the event, or an error or hang-up, which the read or write then tells."""
    poll = select.poll()
    poll.register(fd, event)
    if poll.poll(0):
        return
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    add, remove = (
        (loop.add_reader, loop.remove_reader) if event == select.POLLIN else (loop.add_writer, loop.remove_writer)
    )
    add(fd, ready.set)
    try:
        await ready.wait()
    finally:
        remove(fd)
