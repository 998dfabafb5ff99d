"""A process of another user, which does what lines of JSON on its standard input say, and answers each with a line.

It is started as root and becomes the user after its imports, which the user need not be able to read.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import grpc

from tests.harness.calls import Calls, code, info
from tests.harness.pair import CHANNEL_OPTIONS
from tightship.v1 import containerizer_pb2 as cpb
from tightship.v1 import switchboard_pb2 as spb

NOBODY = 65534


class Stranger:
    """Its end in the test."""

    def __init__(self, uid: int = NOBODY) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(uid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.communicate(timeout=30)

    def ask(self, what: str, *values: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, *values]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def connect(self, path: Path) -> str:
        """ "ok", or the exception's name; for SEQPACKET "closed" where the connection was ended at once."""
        told: str = self.ask("connect", str(path))
        return told


def _connect(path: str) -> str:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with closing(socket.socket(socket.AF_UNIX, kind)) as sock:
            sock.settimeout(10)
            try:
                sock.connect(path)
            except OSError as error:
                if isinstance(error, PermissionError | FileNotFoundError):
                    return type(error).__name__
                continue  # EPROTOTYPE: the other kind
            if kind == socket.SOCK_SEQPACKET:
                return "closed" if sock.recv(1) == b"" else "ok"
            return "ok"
    return "neither"


def _call(run_dir: str, what: str, *values: Any) -> Any:
    channels = [
        grpc.insecure_channel(f"unix:{run_dir}/{service}.sock", options=CHANNEL_OPTIONS)
        for service in ("containerizer", "switchboard")
    ]
    calls = Calls(*channels)
    try:
        match what:
            case "run":
                request_id = values[2] if len(values) > 2 else ""
                result = calls.run(values[0], values[1], request_id=request_id)
                started = result.started
                return {"stdout": result.stdout.decode(), "name": started.name, "node": started.node}
            case "unary":
                _unary(calls, values[0], values[1])
                return "ok"
            case "watches":
                return _watches(channels[0], values[0])
            case "create":
                return {"name": calls.create(values[0]).container.name}
            case "list":
                listed = calls.containerizer.List(cpb.ListRequest(recursive=True, records=True), timeout=10)
                return sorted({one.name for one in listed.containers})
    except grpc.RpcError as error:
        try:
            reason = info(error).reason
        except AssertionError:
            reason = ""
        return {"code": code(error).name, "reason": reason}
    finally:
        for channel in channels:
            channel.close()


def _unary(calls: Calls, method: str, fields: dict[str, Any]) -> None:
    """Any method with one request, by the names of its fields."""
    if hasattr(calls.containerizer, method):
        getattr(calls.containerizer, method)(getattr(cpb, f"{method}Request")(**fields), timeout=10)
        return
    answer = getattr(calls.switchboard, method)(getattr(spb, f"{method}Request")(**fields), timeout=10)
    if method == "AttachOutput":
        list(answer)


def _watches(channel: grpc.Channel, count: int) -> dict[str, int]:
    """Opens as many health watches at the same time; how each went."""
    method: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
    calls = [method(b"", timeout=10) for _ in range(count)]
    found: Counter[str] = Counter()
    for call in calls:
        try:
            next(call)
            found["open"] += 1
        except grpc.RpcError as error:
            found[code(error).name] += 1
    for call in calls:
        call.cancel()
    return found


def _read(path: str) -> str:
    try:
        os.listdir(path) if os.path.isdir(path) else os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        return type(error).__name__
    return "ok"


def main() -> None:
    uid = int(sys.argv[1])
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    for line in sys.stdin:
        what, *values = json.loads(line)
        match what:
            case "connect":
                answer: Any = _connect(*values)
            case "read":
                answer = _read(*values)
            case _:
                answer = _call(values[0], what, *values[1:])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
