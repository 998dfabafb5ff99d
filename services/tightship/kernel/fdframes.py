"""The frames of fd.sock, both ways, as docs/fd-socket.md documents them byte by byte. Pure: no I/O.

Plain classes, here and in whatever else the spawner loads: `dataclasses` and `typing` cost each fork 3 MB of pages.
"""

from __future__ import annotations

import enum
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAGIC = b"TSFD"
FORMAT = 1
# What HELLO agrees on. From 2 on there is TAKE, and EXIT is answered when the lease is closed.
VERSION = 2
TAKES = ANSWERS_CLOSED = 2
LOWEST_VERSION = 1
HEADER = struct.Struct("<4sBBBBII")
PAYLOAD_MAX = 16_384
FRAME_MAX = HEADER.size + PAYLOAD_MAX
TOKEN_SIZE = 32
TRACEPARENT_SIZE = 55
EPOCH_SIZE = 16
FDS_MAX = 3

_HELLO = struct.Struct("<BBH")
_EXIT = struct.Struct("<32sB3xi")
_HELLO_OK = struct.Struct("<B3x16s")
_FDS = struct.Struct("<IB")
_ERROR = struct.Struct("<H")


class Type(enum.IntEnum):
    HELLO = 1
    CLAIM = 2
    BIND = 3
    EXIT = 4
    LETGO = 5
    TAKE = 6
    OK = 128
    FDS = 129
    ERROR = 130


class ExitKind(enum.IntEnum):
    EXITED = 1
    SIGNALLED = 2
    UNKNOWN = 3


class Stream(enum.IntEnum):
    """Numbers of the streams in FDS; the same as in switchboard.proto."""

    STDIN = 1
    STDOUT = 2
    STDERR = 3


class BadFrame(Exception):
    """Not a frame of this protocol: the connection must be closed."""


class Frame:
    """A frame whose header holds; `fds` is how many descriptors it says it carries."""

    __slots__ = ("fds", "payload", "request", "type")

    def __init__(self, kind: Type, request: int, payload: bytes = b"", fds: int = 0) -> None:
        self.type = kind
        self.request = request
        self.payload = payload
        self.fds = fds

    def encode(self) -> bytes:
        return HEADER.pack(MAGIC, FORMAT, self.type, self.fds, 0, self.request, len(self.payload)) + self.payload


def decode(packet: bytes, fds: int) -> Frame:
    """The frame in `packet`, which came with `fds` descriptors. Raises BadFrame, saying what is wrong."""
    if len(packet) < HEADER.size:
        raise BadFrame(f"{len(packet)} bytes are no header")
    magic, form, kind, count, zero, request, length = HEADER.unpack_from(packet)
    if magic != MAGIC or zero != 0:
        raise BadFrame("wrong magic")
    if form != FORMAT:
        raise BadFrame(f"format {form}")
    if length > PAYLOAD_MAX or length != len(packet) - HEADER.size:
        raise BadFrame(f"length {length} in a packet of {len(packet)}")
    if count != fds or count > FDS_MAX:
        raise BadFrame(f"{fds} descriptors where the header says {count}")
    if request == 0:
        raise BadFrame("request 0")
    try:
        return Frame(Type(kind), request, packet[HEADER.size :], count)
    except ValueError:
        raise BadFrame(f"type {kind}") from None


def hello(request: int) -> Frame:
    return Frame(Type.HELLO, request, _HELLO.pack(LOWEST_VERSION, VERSION, 0))


def read_hello(payload: bytes) -> tuple[int, int]:
    """Lowest and highest version that the client speaks."""
    lowest, highest, zero = _unpack(_HELLO, payload)
    if zero or lowest > highest:
        raise BadFrame("bad HELLO")
    return lowest, highest


def hello_ok(request: int, version: int, epoch: str) -> Frame:
    return Frame(Type.OK, request, _HELLO_OK.pack(version, epoch.encode()))


def read_hello_ok(payload: bytes) -> tuple[int, str]:
    version, epoch = _unpack(_HELLO_OK, payload)
    return version, epoch.decode()


def claim(request: int, token: bytes, traceparent: str = "") -> Frame:
    trace = traceparent.encode() if len(traceparent) == TRACEPARENT_SIZE else bytes(TRACEPARENT_SIZE)
    return Frame(Type.CLAIM, request, token + trace)


def take(request: int, token: bytes, traceparent: str, acquire: bytes) -> Frame:
    """A CLAIM of a lease that is made by it. Raises ValueError where `acquire` is too long."""
    payload = claim(request, token, traceparent).payload + acquire
    if len(payload) > PAYLOAD_MAX:
        raise ValueError(f"an Acquire of {len(acquire)} bytes is too long")
    return Frame(Type.TAKE, request, payload)


def read_take(payload: bytes) -> tuple[bytes, str, bytes]:
    """Token, traceparent, and the AcquireRequest as it is."""
    size = TOKEN_SIZE + TRACEPARENT_SIZE
    return *read_claim(payload[:size]), payload[size:]


def read_claim(payload: bytes) -> tuple[bytes, str]:
    """Token and traceparent ("" where there is none)."""
    if len(payload) != TOKEN_SIZE + TRACEPARENT_SIZE:
        raise BadFrame(f"CLAIM of {len(payload)} bytes")
    trace = payload[TOKEN_SIZE:]
    try:
        return payload[:TOKEN_SIZE], "" if not any(trace) else trace.decode("ascii")
    except UnicodeDecodeError:
        raise BadFrame("traceparent is not ASCII") from None


def bind(request: int, token: bytes) -> Frame:
    """Goes with one descriptor: a pidfd."""
    return Frame(Type.BIND, request, token, 1)


def letgo(request: int, token: bytes) -> Frame:
    return Frame(Type.LETGO, request, token)


def read_token(payload: bytes) -> bytes:
    """The token of a BIND or LETGO."""
    if len(payload) != TOKEN_SIZE:
        raise BadFrame(f"token of {len(payload)} bytes")
    return payload


def exited(request: int, token: bytes, kind: ExitKind, value: int) -> Frame:
    return Frame(Type.EXIT, request, _EXIT.pack(token, kind, value))


def read_exit(payload: bytes) -> tuple[bytes, ExitKind, int]:
    """Token, kind, and exit code or signal."""
    token, kind, value = _unpack(_EXIT, payload)
    try:
        return token, ExitKind(kind), value
    except ValueError:
        raise BadFrame(f"exit kind {kind}") from None


def fds(request: int, bind_ms: int, streams: tuple[Stream, ...]) -> Frame:
    return Frame(Type.FDS, request, _FDS.pack(bind_ms, len(streams)) + bytes(streams), len(streams))


def read_fds(payload: bytes) -> tuple[int, tuple[Stream, ...]]:
    """Milliseconds until the lease must be bound, and the streams in the order of the descriptors."""
    if len(payload) < _FDS.size:
        raise BadFrame("short FDS")
    bind_ms, count = _FDS.unpack_from(payload)
    rest = payload[_FDS.size :]
    try:
        streams = tuple(Stream(number) for number in rest)
    except ValueError:
        raise BadFrame("unknown stream in FDS") from None
    if len(streams) != count or len(set(streams)) != count:
        raise BadFrame("bad FDS")
    return bind_ms, streams


def ok(request: int) -> Frame:
    return Frame(Type.OK, request)


def error(request: int, code: int, message: str) -> Frame:
    return Frame(Type.ERROR, request, _ERROR.pack(code) + message.encode()[: PAYLOAD_MAX - _ERROR.size])


def read_error(payload: bytes) -> tuple[int, str]:
    if len(payload) < _ERROR.size:
        raise BadFrame("short ERROR")
    return _ERROR.unpack_from(payload)[0], payload[_ERROR.size :].decode(errors="replace")


def _unpack(form: struct.Struct, payload: bytes) -> tuple[Any, ...]:
    if len(payload) != form.size:
        raise BadFrame(f"{len(payload)} bytes where {form.size} belong")
    return form.unpack(payload)
