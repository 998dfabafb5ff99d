"""Pumps: threads that move what containers write from their pipes to the segments, by splice at explicit offsets.

A disk can stall a splice for long, so this never happens in the event loop; and a pump never stalls a container for
good: over the cap, or where the disk refuses, bytes are spliced to /dev/null and counted as a gap. A turn on one pipe
is 1 MiB at most. Streams of one lease share a pump and a budget.

A pump closes a pipe's near end itself at end-of-file, or after the last copy. `sever` ends one from the event loop at
once, even where the pump is stuck in it. Sources: splice(2), pipe(7), epoll(7).
"""

from __future__ import annotations

import array
import collections
import fcntl
import logging
import os
import select
import termios
import threading
import time
from collections.abc import Callable

from tightship.common.errors import errno_name
from tightship.switchboard.segments import Log, open_for_writing

TURN = 1 << 20
RETRY_S = 0.2
CAP_REASON = "log cap"
UNDRAINED_REASON = "not drained"

_EVENTS_MAX = 64
# fcntl.h; os has no name for it.
_SPLICE_F_NONBLOCK = 2

# Guards the one moment in which a pipe's number is closed or replaced.
_swap = threading.Lock()

_log = logging.getLogger(__name__)


class Budget:
    """Bytes that a lease may still keep, over all its streams."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class Source:
    """The near end of one output pipe, and where its bytes go. `owner` is for whoever made it."""

    __slots__ = (
        "_lock",
        "_refusal",
        "_retry_at",
        "_severed",
        "budget",
        "fd",
        "file",
        "log",
        "owner",
        "told",
        "watched",
    )

    def __init__(self, fd: int, log: Log, budget: Budget, owner: object) -> None:
        self.fd = fd
        self.log = log
        self.budget = budget
        self.owner = owner
        self.file = -1
        self.watched = False
        """Whether growth is told; set in the event loop."""
        self.told = False
        """Growth was told, and the event loop has not looked yet."""
        self._lock = threading.Lock()
        self._refusal = ""
        self._retry_at = 0.0
        self._severed = False

    def sever(self, dead: int) -> None:
        """Ends the stream now, from the event loop, without waiting. What is unread becomes a gap.

        Where a pump is in the middle of it, the number becomes that of `dead`, a pipe at its end, and the pump closes
        it when it comes back; what it moved meanwhile is not counted.
        """
        self._severed = True
        if self._lock.acquire(blocking=False):
            try:
                if self.fd >= 0:
                    self.log.lose(unread(self.fd), UNDRAINED_REASON)
                    self._finish()
            finally:
                self._lock.release()
        else:
            self.log.ended = True
            with _swap:
                if self.fd >= 0:
                    os.dup2(dead, self.fd, inheritable=False)

    def turn(self, null: int, readable: bool, last: bool) -> bool:
        """Moves what is there, 1 MiB at most, or as the `last` exactly what is there now; whether anything changed."""
        with self._lock:
            changed = self.fd >= 0 and self._turn(null, readable, last)
        if self._severed:
            # It was set while we had the lock: nobody else closes.
            with self._lock:
                self._finish()
        return changed

    def _turn(self, null: int, readable: bool, last: bool) -> bool:
        moved = 0
        at_end = last
        try:
            goal = unread(self.fd) if last else TURN
            # Hung up and empty: the file of a stream without a byte is never made. An event may be of the pipe that had
            # the number before, so the pipe itself is asked.
            at_end = last or (not readable and _at_end(self.fd))
            while readable and moved < goal and not self._severed:
                count = self._move(goal - moved, null)
                moved += count
                if count == 0:
                    at_end = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            _log.exception("stream %s ends early", self.log.path)
            at_end = True
        if at_end:
            self._finish()
        return at_end or moved > 0

    def _move(self, count: int, null: int) -> int:
        """Moves at most `count` bytes; 0 at end-of-file. Raises BlockingIOError on an empty pipe."""
        reason = CAP_REASON
        if self.budget.left > 0 and not self.log.full_of_gaps:
            if time.monotonic() >= self._retry_at:
                try:
                    return self._keep(min(count, self.budget.left))
                except BlockingIOError:
                    raise
                except OSError as error:
                    # The disk is full, or broken: the container must not feel it.
                    self._refusal = errno_name(error.errno)
                    self._retry_at = time.monotonic() + RETRY_S
            reason = self._refusal
        moved = os.splice(self.fd, null, count, flags=_SPLICE_F_NONBLOCK)
        if not self._severed:
            self.log.lose(moved, reason)
        return moved

    def _keep(self, count: int) -> int:
        if self.file < 0:
            self.file = open_for_writing(self.log.path)
        moved = os.splice(self.fd, self.file, count, offset_dst=self.log.size, flags=_SPLICE_F_NONBLOCK)
        if not self._severed:
            self.budget.left -= moved
            self.log.grow(moved)
        return moved

    def _finish(self) -> None:
        """Closes, with the lock held; harmless when it is done."""
        with _swap:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)
        self.log.ended = True


class Pump:
    """One thread. `tell` is called in it, with the sources that grew or ended; it must only pass them on."""

    def __init__(self, name: str, tell: Callable[[list[Source]], None]) -> None:
        self._tell = tell
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._dead, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.close(writer)
        self._sources: dict[int, Source] = {}
        self._table = threading.Lock()
        self._last: collections.deque[Source] = collections.deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # From the event loop

    def add(self, source: Source) -> None:
        """The source is the pump's from now on. Raises OSError, and then it is not."""
        self._epoll.register(source.fd, select.EPOLLIN)
        # After that: else the pump could end it first, by an event of the number's last owner.
        with self._table:
            self._sources[source.fd] = source

    def last_copy(self, source: Source) -> None:
        """Has the pump copy what is in the pipe at that moment, and end the stream."""
        self._last.append(source)
        os.eventfd_write(self._wake, 1)

    def sever(self, source: Source) -> None:
        """Ends the stream at once: see Source.sever."""
        self._forget(source.fd, source)
        source.sever(self._dead)

    def stop(self, timeout_s: float) -> None:
        """Ends the thread; its descriptors are closed unless it is stuck."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._epoll.close()
            for fd in (self._wake, self._null, self._dead):
                os.close(fd)

    # In the thread

    def _run(self) -> None:
        while not self._stopping:
            changed: list[Source] = []
            for fd, events in self._epoll.poll(maxevents=_EVENTS_MAX):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif (source := self._sources.get(fd)) is not None:
                    self._turn(source, bool(events & select.EPOLLIN), False, changed)
            while self._last:
                self._turn(self._last.popleft(), True, True, changed)
            if changed:
                self._tell(changed)

    def _turn(self, source: Source, readable: bool, last: bool, changed: list[Source]) -> None:
        fd = source.fd
        if not source.turn(self._null, readable, last):
            return
        if source.log.ended:
            self._forget(fd, source)
            changed.append(source)
        elif source.watched and not source.told:
            source.told = True
            changed.append(source)

    # In both

    def _forget(self, fd: int, source: Source) -> None:
        # The number may be another's already.
        with self._table:
            if self._sources.get(fd) is source:
                del self._sources[fd]


def _at_end(fd: int) -> bool:
    """Whether a pipe is empty and has no writer."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(events & select.POLLHUP and not events & select.POLLIN for _, events in poll.poll(0))


def unread(fd: int) -> int:
    """Bytes in a pipe: FIONREAD."""
    buffer = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, buffer)
    return buffer[0]
