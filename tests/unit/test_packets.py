"""Packets of spawner.sock over real sockets: inline, in a sealed memfd, and what is refused without a leak."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator

import pytest

from tightship.common import packets
from tightship.kernel import fdpass

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = set(os.listdir("/proc/self/fd"))
    yield ours, theirs
    assert set(os.listdir("/proc/self/fd")) == before
    ours.close()
    theirs.close()


def memfd(data: bytes, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("size", [0, 100, packets.INLINE_MAX - 8, packets.INLINE_MAX, 3_000_000])
def test_an_object_of_any_size_arrives_whole(pair: tuple[socket.socket, socket.socket], size: int) -> None:
    ours, theirs = pair
    packets.send_packet(ours, {"k": "x" * size})
    assert packets.receive_packet(theirs) == {"k": "x" * size}


def test_the_end_is_told(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.shutdown(socket.SHUT_WR)
    assert packets.receive_packet(theirs) is None


def test_a_full_socket_raises_and_keeps_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        for _ in range(100_000):
            packets.send_packet(ours, {"k": "x" * 1000})
    with pytest.raises(BlockingIOError):
        packets.send_packet(ours, {"k": "x" * 100_000})


@pytest.mark.parametrize("data", [b"{", b"[]", b"1", b"\xff", b'{"a":' * 10_000, b"x" * (packets.INLINE_MAX + 2)])
def test_what_is_no_object_is_refused(pair: tuple[socket.socket, socket.socket], data: bytes) -> None:
    ours, theirs = pair
    ours.send(data)
    with pytest.raises(fdpass.FramingError):
        packets.receive_packet(theirs)


@pytest.mark.parametrize(
    ("data", "seals", "length"),
    [
        (b'{"a":1}', 0, 7),
        (b'{"a":1}', SEALS & ~fcntl.F_SEAL_WRITE, 7),
        (b'{"a":1}', SEALS, 6),
        (b'{"a":1}', SEALS, 8),
        (b"[1,2,3]", SEALS, 7),
    ],
)
def test_a_memfd_that_could_change_or_lie_is_refused(
    pair: tuple[socket.socket, socket.socket], data: bytes, seals: int, length: int
) -> None:
    ours, theirs = pair
    fd = memfd(data, seals)
    fdpass.send(ours, b'{"memfd":%d}' % length, (fd,))
    os.close(fd)
    with pytest.raises(fdpass.FramingError):
        packets.receive_packet(theirs)


def test_missing_and_surplus_descriptors_are_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    for data, count in ((b'{"memfd":7}', 0), (b'{"memfd":7}', 2), (b'{"a":1}', 1), (b'{"a":1}', 20)):
        fd = memfd(b'{"a":1}')
        fdpass.send(ours, data, (fd,) * count)
        os.close(fd)
        with pytest.raises(fdpass.FramingError):
            packets.receive_packet(theirs)


def test_a_pipe_is_no_memfd(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    read, write = os.pipe()
    fdpass.send(ours, b'{"memfd":7}', (read,))
    os.close(read)
    os.close(write)
    with pytest.raises(fdpass.FramingError):
        packets.receive_packet(theirs)


def test_received_descriptors_are_close_on_exec(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    fd = memfd(b"x")
    fdpass.send(ours, b"x", (fd, fd, fd))
    os.close(fd)
    data, fds = fdpass.receive(theirs, 16)
    assert data == b"x"
    assert [os.get_inheritable(fd) for fd in fds] == [False] * 3
    fdpass.close_all(fds)
