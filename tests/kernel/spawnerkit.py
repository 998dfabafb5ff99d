"""A real spawner process for tests, its client, and a small peer for fd.sock that hands out real pipes."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightship.common.packets import Packet, receive_packet, send_packet
from tightship.common.rundir import RunDir, seqpacket_listener
from tightship.kernel import fdframes, fdpass, process
from tightship.kernel.fdframes import ExitKind, Stream, Type
from tightship.spawner import orders

MAIN = Path(__file__).resolve().parents[2] / "services" / "tightship" / "spawner" / "__main__.py"
EPOCH = "00112233aabbccdd"
PATIENCE_S = 15.0


class Peer:
    """The other end of fd.sock: one thread, one connection at a time, every CLAIM answered with fresh pipes.

    `mute` holds frame types that are read and not answered (until `answer_held`); `refuse` answers them with ERROR.
    """

    def __init__(self, run: RunDir, epoch: str = EPOCH) -> None:
        self.epoch = epoch
        self.mute: set[Type] = set()
        self.refuse: dict[Type, int] = {}
        self.version = fdframes.VERSION
        self.taken: list[bytes] = []
        self.bind_ms = 30_000
        self.frames: list[tuple[Type, bytes]] = []
        self.exits: dict[bytes, tuple[ExitKind, int]] = {}
        self.bound: dict[bytes, int] = {}
        self.near: dict[bytes, dict[Stream, int]] = {}
        self.stdin: set[bytes] = set()
        self.held: list[tuple[Type, int, bytes]] = []
        self.connections = 0
        self._sock: socket.socket | None = None
        self._listener = seqpacket_listener(run.fd_sock)
        self._stop_read, self._stop_write = os.pipe()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._stop_write)
        self._thread.join(PATIENCE_S)
        self._listener.close()
        self.drop()
        os.close(self._stop_read)
        for fd in [*self.bound.values(), *(fd for pipes in self.near.values() for fd in pipes.values())]:
            os.close(fd)

    def drop(self) -> None:
        """Ends the connection."""
        if self._sock is not None:
            self._sock.shutdown(socket.SHUT_RDWR)

    def wait_for(self, kind: Type, token: bytes) -> None:
        wait_until(lambda: (kind, token) in self.frames, f"{kind.name} at the switchboard")

    def answer_held(self) -> None:
        """Answers what was held, as if late."""
        with self._lock:
            held, self.held = self.held, []
            for kind, request, payload in held:
                self._answer(kind, request, payload)

    def output(self, token: bytes, stream: Stream = Stream.STDOUT) -> bytes:
        """All bytes to end-of-file."""
        fd = self.near[token][stream]
        data = b""
        deadline = time.monotonic() + PATIENCE_S
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            assert poll.poll(max(0, deadline - time.monotonic()) * 1000), f"no end-of-file; so far {data!r}"
            more = os.read(fd, 65536)
            if not more:
                return data
            data += more

    def output_ready(self, token: bytes) -> bool:
        return bool(select.select([self.near[token][Stream.STDOUT]], [], [], 0)[0])

    def hung_up(self, token: bytes) -> bool:
        """Whether no far end of its standard output is open anywhere."""
        poll = select.poll()
        poll.register(self.near[token][Stream.STDOUT], 0)
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener.fileno(), self._stop_read], [], [])
            if self._stop_read in ready:
                return
            with contextlib.suppress(BlockingIOError):
                self._sock, _ = self._listener.accept()
                self._sock.setblocking(True)
                self.connections += 1
                with contextlib.suppress(OSError):
                    self._converse(self._sock)
                self._sock.close()
                self._sock = None

    def _converse(self, sock: socket.socket) -> None:
        while True:
            ready, _, _ = select.select([sock.fileno(), self._stop_read], [], [])
            if self._stop_read in ready:
                return
            data, fds = fdpass.receive(sock, fdframes.FRAME_MAX)
            if not data:
                return
            frame = fdframes.decode(data, len(fds))
            with self._lock:
                if fds:
                    self.bound[frame.payload] = fds[0]
                self.frames.append((frame.type, frame.payload[: fdframes.TOKEN_SIZE]))
                if frame.type in self.mute:
                    self.held.append((frame.type, frame.request, frame.payload))
                elif frame.type in self.refuse:
                    fdpass.send(sock, fdframes.error(frame.request, self.refuse[frame.type], "refused").encode())
                else:
                    self._answer(frame.type, frame.request, frame.payload)

    def _answer(self, kind: Type, request: int, payload: bytes) -> None:
        assert self._sock is not None
        match kind:
            case Type.HELLO:
                fdpass.send(self._sock, fdframes.hello_ok(request, self.version, self.epoch).encode())
            case Type.CLAIM | Type.TAKE:
                if kind is Type.TAKE:
                    self.taken.append(fdframes.read_take(payload)[2])
                self._hand_out(request, payload[: fdframes.TOKEN_SIZE])
            case Type.EXIT:
                token, how, value = fdframes.read_exit(payload)
                self.exits[token] = (how, value)
                fdpass.send(self._sock, fdframes.ok(request).encode())
            case _:
                fdpass.send(self._sock, fdframes.ok(request).encode())

    def _hand_out(self, request: int, token: bytes) -> None:
        assert self._sock is not None
        streams = (
            (Stream.STDIN, Stream.STDOUT, Stream.STDERR) if token in self.stdin else (Stream.STDOUT, Stream.STDERR)
        )
        near = {}
        far = []
        for stream in streams:
            read, write = os.pipe()
            near[stream], other = (write, read) if stream is Stream.STDIN else (read, write)
            far.append(other)
        self.near[token] = near
        fdpass.send(self._sock, fdframes.fds(request, self.bind_ms, streams).encode(), tuple(far))
        fdpass.close_all(far)


class Client:
    """The containerizer's end of spawner.sock, blocking. Events and replies that nobody asked for yet are kept."""

    def __init__(self, run: RunDir, hello: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE_S)
        wait_until(run.spawner_sock.exists, "spawner.sock")
        self.sock.connect(os.fspath(run.spawner_sock))
        self._id = 0
        self._replies: dict[int, Packet] = {}
        self.events: list[Packet] = []
        self.closed: list[str] = []
        """Launches whose lease was told as closed."""
        if hello:
            self.greeting = self.call("HELLO", version=orders.VERSION, lowest=1)
            assert self.greeting["ok"], self.greeting

    def close(self) -> None:
        self.sock.close()

    def order(self, op: str, **fields: Any) -> int:
        self._id += 1
        send_packet(self.sock, {"id": self._id, "op": op, **fields})
        return self._id

    def tell(self, op: str, **fields: Any) -> None:
        send_packet(self.sock, {"id": 0, "op": op, **fields})

    def reply(self, number: int) -> Packet:
        while number not in self._replies:
            self._receive()
        return self._replies.pop(number)

    def call(self, op: str, **fields: Any) -> Packet:
        return self.reply(self.order(op, **fields))

    def answered(self, number: int) -> bool:
        """Without waiting."""
        self.sock.setblocking(False)
        try:
            while True:
                self._receive()
        except BlockingIOError:
            pass
        finally:
            self.sock.settimeout(PATIENCE_S)
        return number in self._replies

    def event(self, name: str, launch: str) -> Packet:
        while True:
            for event in self.events:
                if event["event"] == name and event["launch"] == launch:
                    self.events.remove(event)
                    return event
            self._receive()

    def await_closed(self, launch: str) -> None:
        while launch not in self.closed:
            self._receive()

    def _receive(self) -> None:
        packet = receive_packet(self.sock)
        assert packet is not None, "the spawner closed the connection"
        if packet["id"] == 0 and packet["event"] == "closed":
            self.closed.append(packet["launch"])
        elif packet["id"] == 0:
            self.events.append(packet)
        else:
            self._replies[packet["id"]] = packet


class Rig:
    """A spawner without a containerizer, its client, and its switchboard."""

    def __init__(self, failpoints: Path | None = None, *arguments: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tsp", dir="/tmp"))
        self.run = RunDir.open(self.directory)
        self.failpoints = failpoints
        self.peer = Peer(self.run)
        self.arguments = arguments or ("--no-containerizer",)
        self.process = self.start()
        self.client = Client(self.run)
        self._count = 0

    def start(self) -> subprocess.Popen[bytes]:
        environment = {key: value for key, value in os.environ.items() if key != "TIGHTSHIP_FAILPOINTS"}
        if self.failpoints is not None:
            environment["TIGHTSHIP_FAILPOINTS"] = os.fspath(self.failpoints)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", os.fspath(MAIN), "--run-dir", os.fspath(self.directory), *self.arguments],
            env=environment,
        )

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            for child in self.children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE_S)
        self.peer.close()
        shutil.rmtree(self.directory)

    def token(self, launch: str) -> bytes:
        return launch.encode().rjust(fdframes.TOKEN_SIZE, b"-")

    def name(self) -> str:
        self._count += 1
        return f"l{self._count}"

    def launch_fields(self, launch: str, *argv: str, **fields: Any) -> dict[str, Any]:
        if fields.get("stdin"):
            self.peer.stdin.add(self.token(launch))
        return {
            "launch": launch,
            "lease": launch,
            "token": self.token(launch).hex(),
            "epoch": EPOCH,
            "stdin": False,
            "argv": list(argv),
            "env": [],
            "cwd": "/",
            "umask": 0o022,
            "cgroup_v2": None,
            "tasks_files": [],
            "namespaces": [],
            "hostname": "",
            "oom_score_adj": None,
            "meta": {"about": launch},
            "traceparent": "",
            "timeout_ms": 10_000,
            "gate_ms": 30_000,
            **fields,
        }

    def begin(self, *argv: str, **fields: Any) -> tuple[str, int]:
        """Orders LAUNCH: the launch and the order's number."""
        launch = str(fields.pop("launch", "") or self.name())
        return launch, self.client.order("LAUNCH", **self.launch_fields(launch, *argv, **fields))

    def ready(self, *argv: str, **fields: Any) -> tuple[str, Packet]:
        """A launch that waits at its gate, and READY's reply."""
        launch, number = self.begin(*argv, **fields)
        reply = self.client.reply(number)
        assert reply["ok"], reply
        return launch, reply

    def opened(self, *argv: str, **fields: Any) -> str:
        launch, _ = self.ready(*argv, **fields)
        reply = self.client.call("OPEN", launch=launch)
        assert reply["ok"], reply
        return launch

    def ran(self, *argv: str, **fields: Any) -> tuple[Packet, bytes]:
        """Runs to the end: the exit's status, and what it wrote."""
        launch = self.opened(*argv, **fields)
        status = self.client.event("exited", launch)["status"]
        output = self.peer.output(self.token(launch))
        assert self.client.call("ACK", launch=launch)["ok"]
        return status, output

    def children(self) -> list[int]:
        return children(self.process.pid)

    def descriptors(self) -> list[str]:
        return sorted(fds(self.process.pid).values())

    def kinds(self) -> list[str]:
        """Its descriptors by kind: a new connection for an old one makes no difference."""
        return sorted(target.partition(":[")[0] for target in self.descriptors())


def children(pid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = process.stat(int(name))
            if stat is not None and stat.parent == pid:
                found.append(int(name))
    return found


def fds(pid: int) -> dict[int, str]:
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.002)


@contextlib.contextmanager
def rig(failpoints: Path | None = None, *arguments: str) -> Iterator[Rig]:
    made = Rig(failpoints, *arguments)
    try:
        yield made
    finally:
        made.close()
