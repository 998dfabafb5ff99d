"""JSON objects over SEQPACKET: the frames of spawner.sock. Standard library only: the spawner imports this.

One object is one packet. One larger than 64 KiB travels in a sealed memfd: a packet over the socket's send buffer would
be EMSGSIZE. Sources: memfd_create(2), fcntl(2) on F_ADD_SEALS.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket

from tightship.kernel import fdpass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

INLINE_MAX = 64 << 10
# argv and environment may have 6 MiB together, and JSON escapes them.
OBJECT_MAX = 64 << 20

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

Packet: TypeAlias = "dict[str, Any]"


def send_packet(sock: socket.socket, packet: Packet) -> None:
    """Sends one object. Raises BlockingIOError on a full non-blocking socket, OSError when the peer is gone."""
    data = json.dumps(packet, separators=(",", ":")).encode()
    if len(data) <= INLINE_MAX:
        fdpass.send(sock, data)
        return
    fd = os.memfd_create("packet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        fdpass.send(sock, b'{"memfd":%d}' % len(data), (fd,))
    finally:
        os.close(fd)


def receive_packet(sock: socket.socket) -> Packet | None:
    """Receives one object; None at the end of the connection.

    Raises fdpass.FramingError for anything that is no object by these rules (its descriptors are closed), and
    BlockingIOError when a non-blocking socket has nothing.
    """
    data, fds = fdpass.receive(sock, INLINE_MAX + 1)
    try:
        if not data and not fds:
            return None
        packet = _object(data)
        if "memfd" not in packet:
            if fds:
                raise fdpass.FramingError("descriptors where none belong")
            return packet
        if len(fds) != 1:
            raise fdpass.FramingError(f"{len(fds)} descriptors where one memfd belongs")
        return _object(_sealed(fds[0], packet["memfd"]))
    finally:
        fdpass.close_all(fds)


def _sealed(fd: int, length: object) -> bytes:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise fdpass.FramingError("the descriptor is no memfd") from None
    if seals & _SEALS != _SEALS:
        raise fdpass.FramingError("the memfd is not sealed")
    if not isinstance(length, int) or length != os.fstat(fd).st_size or length > OBJECT_MAX:
        raise fdpass.FramingError("the memfd's length is wrong")
    parts = []
    at = 0
    while at < length:
        parts.append(os.pread(fd, length - at, at))
        at += len(parts[-1])
    return b"".join(parts)


def _object(data: bytes) -> Packet:
    try:
        packet = json.loads(data)
    except (ValueError, RecursionError):
        raise fdpass.FramingError("not JSON, or nested too deep") from None
    if not isinstance(packet, dict):
        raise fdpass.FramingError("not a JSON object")
    return packet
