"""The containerizer's end of spawner.sock: orders out, replies and events in.

One non-blocking SEQPACKET connection on the event loop. There is no reconnecting: when it ends, the spawner has ended
or has a newer client, and this process has no business any more; `ended` says so.
"""

from __future__ import annotations

import asyncio
import collections
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tightship.common.packets import Packet, receive_packet, send_packet
from tightship.kernel import fdpass, process

VERSION = 4
LOWEST = 1

# From this version on LAUNCH may be prepared alone, and make its lease; and orders need not be answered.
_PREPARES = 2
# From this one on LAUNCH may isolate; one before would start the command without.
_ISOLATES = 3
# And from this one on enter the namespaces of another.
_ENTERS = 4

_OUTBOX_MAX = 4096
_CONNECT_TIMEOUT_S = 10.0


class OrderFailed(Exception):
    """The spawner answered `ok: false`."""

    def __init__(self, stage: str, errno: int, message: str) -> None:
        super().__init__(message)
        self.stage = stage
        self.errno = errno
        self.message = message


class VersionRefused(Exception):
    """No protocol version in common."""


class SpawnerLink:
    """The connection. `on_event` gets every event packet; `ended` is set when the connection is over."""

    def __init__(self, path: Path, on_event: Callable[[Packet], None]) -> None:
        self._path = path
        self._on_event = on_event
        self._sock: socket.socket | None = None
        self._replies: dict[int, asyncio.Future[Packet]] = {}
        self._next = 1
        self._outbox: collections.deque[Packet] = collections.deque()
        self.ended = asyncio.Event()
        self.identity = ""
        """Of the spawner's process, its pid namespace last; another one after its restart."""
        self.prepares = False
        """It makes leases itself, prepares launches before their cgroups are there, and takes orders with id 0."""
        self.isolates = False
        """It confines what it is told to."""
        self.enters = False
        """It has launches enter the namespaces of others."""

    async def connect(self) -> Packet:
        """Connects and says HELLO; its answer. Raises OSError, VersionRefused, or TimeoutError."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                while True:
                    try:
                        sock.connect(os.fspath(self._path))  # a Unix socket connects at once or not at all
                        break
                    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                        await asyncio.sleep(0.02)
                if fdpass.peer(sock).uid != os.geteuid():
                    raise PermissionError("the spawner has another uid than we")
                self._sock = sock
                loop.add_reader(sock.fileno(), self._readable)
                try:
                    hello = await self.order("HELLO", version=VERSION, lowest=LOWEST)
                except OrderFailed as error:
                    raise VersionRefused(error.message) from error
                version = int(hello["version"])
                self.prepares = version >= _PREPARES
                self.isolates = version >= _ISOLATES
                self.enters = version >= _ENTERS
                stat = process.stat(int(hello["pid"]))
                start = stat.start if stat is not None else 0
                self.identity = f"{hello['pid']}:{start}:{process.pid_namespace()}"
                return hello
        except BaseException:
            if self._sock is None:
                sock.close()
            self.close()
            raise

    def order(self, op: str, **fields: Any) -> asyncio.Future[Packet]:
        """Sends an order at once; the future has its reply, or OrderFailed, or ConnectionError.

        A future nobody waits for may be dropped.
        """
        future: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        number = self._next
        self._next += 1
        if self._sock is None:
            _fail(future, ConnectionError("the spawner's connection has ended"))
            return future
        self._replies[number] = future
        self._send({"id": number, "op": op, **fields})
        return future

    def tell(self, op: str, **fields: Any) -> None:
        """Sends an order whose answer nobody waits for."""
        if not self.prepares:
            self.order(op, **fields)
        elif self._sock is not None:
            self._send({"id": 0, "op": op, **fields})

    def close(self) -> None:
        """Ends the connection; every order that waits fails."""
        if self._sock is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock.fileno())
            loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._sock = None
        for future in self._replies.values():
            _fail(future, ConnectionError("the spawner's connection has ended"))
        self._replies.clear()
        self.ended.set()

    def _send(self, packet: Packet) -> None:
        assert self._sock is not None
        if self._outbox:
            self._queue(packet)
            return
        try:
            send_packet(self._sock, packet)
        except BlockingIOError:
            self._queue(packet)
            asyncio.get_running_loop().add_writer(self._sock.fileno(), self._writable)
        except OSError:
            self.close()

    def _queue(self, packet: Packet) -> None:
        if len(self._outbox) >= _OUTBOX_MAX:
            self.close()  # a spawner that reads nothing is no spawner
        else:
            self._outbox.append(packet)

    def _writable(self) -> None:
        assert self._sock is not None
        try:
            while self._outbox:
                send_packet(self._sock, self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        asyncio.get_running_loop().remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        for _ in range(64):  # then let the loop look at others
            if self._sock is None:
                return
            try:
                packet = receive_packet(self._sock)
            except BlockingIOError:
                return
            except (OSError, fdpass.FramingError):
                packet = None
            if packet is None:
                self.close()
                return
            self._dispatch(packet)

    def _dispatch(self, packet: Packet) -> None:
        number = packet.get("id")
        if number == 0:
            self._on_event(packet)
            return
        future = self._replies.pop(number, None) if isinstance(number, int) else None
        if future is None or future.done():
            return
        if packet.get("ok"):
            future.set_result(packet)
            return
        stage, errno, message = packet.get("stage"), packet.get("errno"), packet.get("message")
        _fail(future, OrderFailed(str(stage or ""), int(errno or 0), str(message or "")))


def _fail(future: asyncio.Future[Packet], error: Exception) -> None:
    """The exception counts as seen: whoever waited may have gone."""
    if not future.done():
        future.set_exception(error)
        future.exception()
