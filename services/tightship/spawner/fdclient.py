"""The spawner's end of fd.sock: one connection to the switchboard, kept up, with requests answered by call-backs.

Exits are told again on each new connection until they are answered. What a lost connection left open is over:
the switchboard takes the connection's end for the claimer's.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable

from tightship.kernel import fdframes, fdpass
from tightship.kernel.fdframes import ExitKind, Frame, Type
from tightship.spawner.loop import IN, OUT, Loop, Timer
from tightship.spawner.notices import notice

# Told of its answer, with the descriptors that came and are its own now; None where the connection has ended.
Answered = Callable[[Frame | None, list[int]], None]

_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 1.0
_HELLO_S = 1.0
_REQUESTS_MAX = 4096
_UNSENT_MAX = 65536
_READ_AT_ONCE = 16


class Busy(Exception):
    """More requests are open than the bound allows."""


class Switchboard:
    """Connects by itself. `epoch` is the switchboard's while connected; `connection` counts the connections made."""

    def __init__(self, loop: Loop, path: str) -> None:
        self._loop = loop
        self._path = path
        self._sock: socket.socket | None = None
        self.epoch: str | None = None
        self.connection = 0
        self._version = 0
        self._request = 0
        self._open: dict[int, Answered] = {}
        # Frames that the socket didn't take yet, each with descriptors of its own.
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._exits: dict[bytes, tuple[ExitKind, int, Callable[[], None]]] = {}
        self._waiting: dict[Callable[[], None], None] = {}
        self._retry_s = _RETRY_FIRST_S
        self._timer: Timer | None = None

    def start(self) -> None:
        self._connect()

    def descriptors(self) -> list[int]:
        fds = [fd for _, fds in self._unsent for fd in fds]
        return fds if self._sock is None else [*fds, self._sock.fileno()]

    def wait_connected(self, wake: Callable[[], None]) -> None:
        """Wakes at the next connection, which is tried sooner for it."""
        self._waiting[wake] = None
        if self._sock is None and self._retry_s > _RETRY_FIRST_S:
            self._retry_s = _RETRY_FIRST_S
            self._connect_later()

    def stop_waiting(self, wake: Callable[[], None]) -> None:
        self._waiting.pop(wake, None)

    def claim(self, token: bytes, traceparent: str, answered: Answered) -> None:
        """Raises Busy. Call it while connected, as `bind`."""
        self._ask(fdframes.claim(self._number(), token, traceparent), answered)

    def take(self, token: bytes, traceparent: str, acquire: bytes, answered: Answered) -> None:
        """`claim` of a lease that is made by it. Raises Busy, or ValueError for what no switchboard takes."""
        if self._version < fdframes.TAKES:
            raise ValueError("the switchboard is of a version without TAKE")
        self._ask(fdframes.take(self._number(), token, traceparent, acquire), answered)

    def bind(self, token: bytes, pidfd: int, answered: Answered) -> None:
        """Raises Busy."""
        self._ask(fdframes.bind(self._number(), token), answered, (pidfd,))

    def letgo(self, token: bytes) -> None:
        """Where there is no connection, its end has said the same."""
        if self.epoch is not None:
            self._ask(fdframes.letgo(self._number(), token), _nothing, always=True)

    def exited(self, token: bytes, kind: ExitKind, value: int, closed: Callable[[], None]) -> None:
        """Tells the exit, now and on every new connection until it is answered; `closed` hears that the lease is."""
        self._exits[token] = (kind, value, closed)
        if self.epoch is not None:
            self._tell_exit(token)

    def _tell_exit(self, token: bytes) -> None:
        kind, value, closed = self._exits[token]

        def answered(frame: Frame | None, fds: list[int]) -> None:
            fdpass.close_all(fds)
            if frame is None or self._exits.pop(token, None) is None:
                return
            if frame.type is Type.OK and self._version >= fdframes.ANSWERS_CLOSED:
                closed()

        self._ask(fdframes.exited(self._number(), token, kind, value), answered, always=True)

    def _number(self) -> int:
        while True:
            self._request = self._request % 0xFFFFFFFF + 1
            if self._request not in self._open:
                return self._request

    def _ask(self, frame: Frame, answered: Answered, fds: tuple[int, ...] = (), *, always: bool = False) -> None:
        if len(self._open) >= _REQUESTS_MAX and not always:
            raise Busy
        self._open[frame.request] = answered
        self._send(frame.encode(), fds)

    def _send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        assert self._sock is not None
        if not self._unsent:
            try:
                fdpass.send(self._sock, data, fds)
                return
            except BlockingIOError:
                self._loop.change(self._sock.fileno(), IN | OUT)
            except OSError as error:
                # Ended from the loop: the caller may be a routine that the end wants to wake.
                self._end_later(error.strerror or str(error))
                return
        if len(self._unsent) >= _UNSENT_MAX:
            self._end_later("it reads nothing")
            return
        self._unsent.append((data, tuple(os.dup(fd) for fd in fds)))

    def _flush(self) -> None:
        assert self._sock is not None
        while self._unsent:
            data, fds = self._unsent[0]
            try:
                fdpass.send(self._sock, data, fds)
            except BlockingIOError:
                return
            self._unsent.popleft()
            fdpass.close_all(fds)
        self._loop.change(self._sock.fileno(), IN)

    def _connect(self) -> None:
        self._timer = None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            self._connect_later()
            return
        self._sock = sock
        self._loop.watch(sock.fileno(), self._ready)
        self._timer = self._loop.later(_HELLO_S, lambda: self._end("no answer to HELLO"))
        self._ask(fdframes.hello(self._number()), self._greeted)

    def _connect_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.later(self._retry_s, self._connect)
        self._retry_s = min(2 * self._retry_s, _RETRY_MOST_S)

    def _greeted(self, frame: Frame | None, fds: list[int]) -> None:
        fdpass.close_all(fds)
        if frame is None:
            return
        if frame.type is not Type.OK:
            notice(f"the switchboard refused HELLO: {fdframes.read_error(frame.payload)[1]}")
            self._end("it refused HELLO")
            return
        self._version, epoch = fdframes.read_hello_ok(frame.payload)
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        self._retry_s = _RETRY_FIRST_S
        self.epoch = epoch
        self.connection += 1
        for token in self._exits:
            self._tell_exit(token)
        waiting, self._waiting = self._waiting, {}
        for wake in waiting:
            wake()

    def _ready(self, events: int) -> None:
        try:
            if events & OUT:
                self._flush()
            for _ in range(_READ_AT_ONCE):
                assert self._sock is not None
                data, fds = fdpass.receive(self._sock, fdframes.FRAME_MAX)
                if not data and not fds:
                    self._end("it closed the connection")
                    return
                self._receive(data, fds)
                if self._sock is None:
                    return
        except BlockingIOError:
            pass
        except (OSError, fdpass.FramingError, fdframes.BadFrame) as error:
            self._end(str(error))

    def _receive(self, data: bytes, fds: list[int]) -> None:
        try:
            frame = fdframes.decode(data, len(fds))
            answered = self._open.pop(frame.request, None)
            if answered is None or frame.type < Type.OK:
                raise fdframes.BadFrame("an answer to nothing")
        except fdframes.BadFrame:
            fdpass.close_all(fds)
            raise
        answered(frame, fds)

    def _end_later(self, reason: str) -> None:
        self._loop.later(0, lambda: self._end(reason))

    def _end(self, reason: str) -> None:
        if self._sock is None:
            return
        if self.epoch is not None:
            notice(f"the connection to the switchboard ended: {reason}")
        self.epoch = None
        self._loop.forget(self._sock.fileno())
        self._sock.close()
        self._sock = None
        for _, fds in self._unsent:
            fdpass.close_all(fds)
        self._unsent.clear()
        self._connect_later()
        left, self._open = self._open, {}
        for answered in left.values():
            answered(None, [])


def _nothing(_: Frame | None, fds: list[int]) -> None:
    fdpass.close_all(fds)


def errno_of(code: int) -> int:
    """An errno for the google.rpc code of an ERROR."""
    return _ERRNOS.get(code, errno.EPROTO)


_ERRNOS = {
    1: errno.ECANCELED,
    3: errno.EINVAL,
    4: errno.ETIMEDOUT,
    5: errno.ENOENT,
    6: errno.EEXIST,
    7: errno.EACCES,
    8: errno.EAGAIN,
    9: errno.ESTALE,
    10: errno.ECANCELED,
    12: errno.ENOSYS,
    14: errno.ECONNREFUSED,
    16: errno.EACCES,
}
