"""One connection of spawner.sock: packets in, replies and events out, nothing of it ever blocking."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

from tightship.common.packets import Packet, receive_packet, send_packet
from tightship.kernel import fdpass
from tightship.spawner.loop import IN, OUT, Loop
from tightship.spawner.notices import notice

_UNREAD_MAX = 4096
_READ_AT_ONCE = 16


class Client:
    """`greeted` says that HELLO has come. `received` gets each packet.

    `ended` is called once, from the loop, when the peer or the protocol ends it.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        received: Callable[[Client, Packet], None],
        ended: Callable[[Client], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._received = received
        self._ended = ended
        self._unsent: deque[Packet] = deque()
        self.closed = False
        self.greeted = False
        loop.watch(sock.fileno(), self._ready)

    def descriptors(self) -> list[int]:
        return [] if self.closed else [self._sock.fileno()]

    def send(self, packet: Packet) -> None:
        """Nothing happens where the connection has ended."""
        if self.closed:
            return
        if not self._unsent:
            try:
                send_packet(self._sock, packet)
                return
            except BlockingIOError:
                self._loop.change(self._sock.fileno(), IN | OUT)
            except OSError as error:
                self._end_later(str(error))
                return
        if len(self._unsent) >= _UNREAD_MAX:
            self._end_later(f"it left {_UNREAD_MAX} packets unread")
            return
        self._unsent.append(packet)

    def close(self) -> None:
        """Whatever it sent and was not read is discarded. `ended` is not called."""
        if not self.closed:
            self.closed = True
            self._loop.forget(self._sock.fileno())
            self._sock.close()
            self._unsent.clear()

    def _ready(self, events: int) -> None:
        try:
            if events & OUT:
                self._flush()
            for _ in range(_READ_AT_ONCE):
                packet = receive_packet(self._sock)
                if packet is None:
                    self._end("")
                    return
                self._received(self, packet)
                if self.closed:
                    return
        except BlockingIOError:
            pass
        except (OSError, fdpass.FramingError) as error:
            self._end(str(error))

    def _flush(self) -> None:
        while self._unsent:
            send_packet(self._sock, self._unsent[0])
            self._unsent.popleft()
        self._loop.change(self._sock.fileno(), IN)

    def _end_later(self, reason: str) -> None:
        # The sender may be a routine that the end wants to throw into.
        self._loop.later(0, lambda: self._end(reason))

    def _end(self, reason: str) -> None:
        if not self.closed:
            if reason:
                notice(f"the client's connection is closed: {reason}")
            self.close()
            self._ended(self)
