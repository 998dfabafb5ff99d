"""Descriptors over Unix sockets: SCM_RIGHTS and SO_PEERCRED, with every received descriptor close-on-exec.

`socket.recv_fds` is not used: it drops its flags and returns inheritable descriptors. Sources: unix(7), recvmsg(2).
"""

from __future__ import annotations

import array
import os
import socket
import struct

# unix(7): SCM_MAX_FD is 253; ours need few, and room for more shows a surplus instead of truncating it.
_ROOM_FDS = 16
_FD_SIZE = array.array("i").itemsize


class FramingError(Exception):
    """The peer sent something that breaks the framing; the connection must be closed. Its descriptors are closed."""


class Peer:
    """SO_PEERCRED: pid is 0 for a peer of a foreign pid namespace."""

    __slots__ = ("gid", "pid", "uid")

    def __init__(self, pid: int, uid: int, gid: int) -> None:
        self.pid = pid
        self.uid = uid
        self.gid = gid


def peer(sock: socket.socket) -> Peer:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", raw))


def send(sock: socket.socket, data: bytes, fds: tuple[int, ...] = ()) -> None:
    """Sends one packet. Raises BlockingIOError when a non-blocking peer does not read, OSError otherwise."""
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], control, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receives one packet of at most `size` bytes with its descriptors; `(b"", [])` at the end of the connection.

    Raises FramingError for truncated data or control data, having closed what came.
    """
    data, control, flags, _ = sock.recvmsg(size, socket.CMSG_SPACE(_ROOM_FDS * _FD_SIZE), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % _FD_SIZE])
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        close_all(fds)
        raise FramingError("a packet was truncated")
    return data, list(fds)


def close_all(fds: list[int] | array.array[int] | tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
