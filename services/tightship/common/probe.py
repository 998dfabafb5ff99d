"""`python -m tightship.common.probe SERVICE`: exits with 0 where the service of the run directory says SERVING.

Container engines and systemd start this every few seconds, and importing grpc takes 200 ms of CPU. So one unary call of
grpc.health.v1 is written out as HTTP/2 frames (RFC 9113), its header fields as plain literals (RFC 7541, 6.2.2), and of
the answer the message alone is read. Standard library only.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

from tightship.common.rundir import DEFAULT

TIMEOUT_S = 2.0
SERVICES = ("containerizer", "switchboard")

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FIELDS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/grpc.health.v1.Health/Check"),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)
# A message of gRPC: not compressed, its length, HealthCheckRequest without a name.
_EMPTY_MESSAGE = b"\0" + struct.pack(">I", 0)
# HealthCheckResponse { status: SERVING }
_SERVING = b"\0" + struct.pack(">I", 2) + b"\x08\x01"


class ProbeError(Exception):
    """It does not serve; the message says what came instead."""


def probe(path: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Raises ProbeError where the server on the Unix socket does not say SERVING; `timeout_s` is for each wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(os.fspath(path))
            sock.sendall(_request())
            message = _answer(sock)
        except OSError as error:
            raise ProbeError(f"{path}: {error.strerror or error}") from error
    if message != _SERVING:
        raise ProbeError(f"{path}: not serving")


def _request() -> bytes:
    fields = b"".join(b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in _FIELDS)
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, fields)
        + _frame(_DATA, _END_STREAM, 1, _EMPTY_MESSAGE)
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _answer(sock: socket.socket) -> bytes:
    """The message of the answer; empty where the call failed. Raises OSError."""
    message = b""
    while len(message) < len(_SERVING):
        head = _exactly(sock, 9)
        size = int.from_bytes(head[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        payload = _exactly(sock, size)
        if kind == _GOAWAY:
            break
        if stream == 1 and kind == _DATA:
            message += payload
        if stream == 1 and (kind == _RST_STREAM or flags & _END_STREAM):
            break
    return message


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the connection ended")
        data += part
    return data


def main(words: list[str]) -> int:
    if len(words) != 1 or words[0] not in SERVICES:
        print(f"usage: python -m tightship.common.probe {{{'|'.join(SERVICES)}}}", file=sys.stderr)
        return 2
    directory = Path(os.environ.get("TIGHTSHIP_RUN_DIR") or DEFAULT)
    try:
        probe(directory / f"{words[0]}.sock")
    except ProbeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
