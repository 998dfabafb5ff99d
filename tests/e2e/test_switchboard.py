"""The switchboard as a process of its own: real gRPC, a real client of fd.sock, real children."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.harness.points import Failpoints
from tightship.common import failpoints as points
from tightship.kernel import fdframes, fdpass
from tightship.kernel.fdframes import ExitKind, Frame, Stream, Type
from tightship.v1 import switchboard_pb2 as pb
from tightship.v1 import switchboard_pb2_grpc

GATE = 'read -ru "$1"; eval "exec $1<&-"; shift; exec "$@"'


# The switchboard


class Board:
    """A switchboard of a test's own."""

    def __init__(self, *options: str, failpoints: bool = False) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
        self.options = options
        self.points = Failpoints(self.run_dir / "fp")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "TIGHTSHIP_"))}
        if failpoints:
            self.environment["TIGHTSHIP_FAILPOINTS"] = str(self.points.directory)
        self.process: subprocess.Popen[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._clients: list[Client] = []
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        for client in self._clients:
            client.close()
        if self._channel is not None:
            self._channel.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        subprocess.run(["rm", "-rf", str(self.run_dir)], check=True)

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tightship.switchboard", "--run-dir", str(self.run_dir), *self.options],
            env=self.environment,
            stderr=self.stderr,
        )
        until((self.run_dir / "switchboard.sock").exists)
        if self._channel is not None:
            self._channel.close()
        self._channel = grpc.insecure_channel(
            f"unix:{self.run_dir}/switchboard.sock", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        grpc.channel_ready_future(self._channel).result(20)  # a killed one leaves its socket
        self.stub = switchboard_pb2_grpc.SwitchboardServiceStub(self._channel)

    def end(self, number: int = signal.SIGTERM) -> float:
        """Signals it; seconds until it was gone."""
        assert self.process is not None
        begun = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(20)
        return time.monotonic() - begun

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    # Calls

    def client(self) -> Client:
        client = Client(self.run_dir / "fd.sock")
        self._clients.append(client)
        return client

    def acquire(self, lease_id: str, **fields: Any) -> pb.AcquireResponse:
        fields.setdefault("owner", "test")
        return self.stub.Acquire(pb.AcquireRequest(lease_id=lease_id, **fields), timeout=30)

    def lease(self, lease_id: str) -> pb.Lease:
        return self.stub.GetLease(pb.GetLeaseRequest(lease_id=lease_id), timeout=30).lease

    def await_state(self, lease_id: str, state: pb.Lease.State.ValueType, timeout_s: float = 20.0) -> pb.Lease:
        until(lambda: self.lease(lease_id).state == state, timeout_s)
        return self.lease(lease_id)

    def attach(self, lease_id: str, **fields: Any) -> Read:
        fields.setdefault("follow", True)
        read = Read()
        for event in self.stub.AttachOutput(pb.AttachOutputRequest(lease_id=lease_id, **fields), timeout=60):
            read.take(event)
        return read

    # What it holds

    def descriptors(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{self.pid}/fd/{fd}")
                if target.startswith("pipe:"):
                    found["pipe"] += 1
                elif "pidfd" in target:
                    found["pidfd"] += 1
                elif target.endswith(("/stdout", "/stderr")):
                    found["segment"] += 1
        return found

    @contextlib.contextmanager
    def nothing_left(self) -> Iterator[None]:
        before = self.descriptors()
        yield
        until(lambda: self.descriptors() == before)

    def rss(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.005)


@dataclass
class Read:
    """What a reader got; checks that offsets have neither hole nor overlap."""

    data: dict[int, bytearray] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)
    gaps: list[pb.AttachOutputResponse.Gap] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    end: pb.AttachOutputResponse.AttachEnd | None = None

    def take(self, event: pb.AttachOutputResponse) -> None:
        assert self.end is None
        match event.WhichOneof("event"):
            case "data":
                self._follows(event.data.stream, event.data.offset)
                assert 0 < len(event.data.data) <= 256 << 10
                self.data.setdefault(event.data.stream, bytearray()).extend(event.data.data)
                self.at[event.data.stream] = event.data.offset + len(event.data.data)
            case "gap":
                self._follows(event.gap.stream, event.gap.offset)
                self.gaps.append(event.gap)
                self.at[event.gap.stream] = event.gap.offset + event.gap.size
            case "ended":
                assert event.ended.stream not in self.ended
                self.ended[event.ended.stream] = event.ended.size
            case "end":
                self.end = event.end

    def _follows(self, stream: int, offset: int) -> None:
        assert stream not in self.ended
        assert self.at.setdefault(stream, offset) == offset

    @property
    def out(self) -> bytes:
        return bytes(self.data.get(pb.STREAM_STDOUT, b""))

    @property
    def err(self) -> bytes:
        return bytes(self.data.get(pb.STREAM_STDERR, b""))


# A claimer


class Client:
    """A client of fd.sock, as a spawner is one."""

    def __init__(self, path: Path, greet: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        self.sock.connect(str(path))
        self.number = 0
        if greet:
            answer, _ = self.call(fdframes.hello(self.next()))
            assert answer.type is Type.OK
            self.version, self.epoch = fdframes.read_hello_ok(answer.payload)

    def close(self) -> None:
        self.sock.close()

    def next(self) -> int:
        self.number += 1
        return self.number

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        fdpass.send(self.sock, data, fds)

    def receive(self) -> tuple[Frame, list[int]]:
        data, fds = fdpass.receive(self.sock, fdframes.FRAME_MAX)
        if not data:
            raise EOFError
        return fdframes.decode(data, len(fds)), fds

    def call(self, frame: Frame, fds: tuple[int, ...] = ()) -> tuple[Frame, list[int]]:
        self.send(frame.encode(), fds)
        answer, got = self.receive()
        assert answer.request == frame.request
        return answer, got

    def claim(self, token: bytes) -> dict[Stream, int]:
        answer, fds = self.call(fdframes.claim(self.next(), token))
        if answer.type is not Type.FDS:
            raise Refused(*fdframes.read_error(answer.payload))
        _, streams = fdframes.read_fds(answer.payload)
        return dict(zip(streams, fds, strict=True))

    def take(self, token: bytes, owner: Session, lease_id: str, **fields: Any) -> dict[Stream, int]:
        """Has the lease made, and claims it."""
        acquire = pb.AcquireRequest(
            lease_id=lease_id, owner="owner", session=owner.welcome.session, labels={"name": "/a"}, **fields
        )
        answer, fds = self.call(fdframes.take(self.next(), token, "", acquire.SerializeToString()))
        if answer.type is not Type.FDS:
            raise Refused(*fdframes.read_error(answer.payload))
        return dict(zip(fdframes.read_fds(answer.payload)[1], fds, strict=True))

    def bind(self, token: bytes, pidfd: int) -> None:
        self._ok(fdframes.bind(self.next(), token), (pidfd,))

    def exited(self, token: bytes, code: int) -> None:
        kind, value = (ExitKind.SIGNALLED, -code) if code < 0 else (ExitKind.EXITED, code)
        self._ok(fdframes.exited(self.next(), token, kind, value))

    def let_go(self, token: bytes) -> None:
        self._ok(fdframes.letgo(self.next(), token))

    def _ok(self, frame: Frame, fds: tuple[int, ...] = ()) -> None:
        answer, _ = self.call(frame, fds)
        if answer.type is not Type.OK:
            raise Refused(*fdframes.read_error(answer.payload))

    def start(self, token: bytes, command: list[str]) -> Child:
        """Claims, starts the command at a gate, closes, binds, opens the gate."""
        ends = self.claim(token)
        gate, opener = os.pipe2(os.O_CLOEXEC)
        process = subprocess.Popen(
            ["bash", "-c", GATE, "gate", str(gate), *command],
            stdin=ends.get(Stream.STDIN, subprocess.DEVNULL),
            stdout=ends[Stream.STDOUT],
            stderr=ends[Stream.STDERR],
            pass_fds=(gate,),
            start_new_session=True,
        )
        os.close(gate)
        fdpass.close_all(list(ends.values()))
        pidfd = os.pidfd_open(process.pid)
        try:
            self.bind(token, pidfd)
            os.write(opener, b"\n")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            os.close(pidfd)
            os.close(opener)
        return Child(self, token, process)


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message


@dataclass
class Child:
    client: Client
    token: bytes
    process: subprocess.Popen[bytes]

    def finish(self) -> int:
        """Waits, and reports the exit."""
        code = self.process.wait(60)
        self.client.exited(self.token, code)
        return code

    def kill(self) -> int:
        self.kill_only()
        return self.finish()

    def kill_only(self) -> None:
        """With all it started; nobody is told."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)


@pytest.fixture(scope="module")
def shared() -> Iterator[Board]:
    with Board() as board:
        yield board


@pytest.fixture
def board(shared: Board) -> Iterator[Board]:
    """Shared by tests that leave nothing living."""
    with shared.nothing_left():
        yield shared


def run(board: Board, client: Client, lease_id: str, command: list[str], **fields: Any) -> Child:
    return client.start(board.acquire(lease_id, **fields).token, command)


def seconds(value: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(value * 1e9))
    return duration


def reason(error: grpc.RpcError) -> str:
    return str(info(error).reason)


def info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    found = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(found) for detail in status.details)
    return found


# Output


def test_a_short_output_is_exact_whenever_it_is_read(board: Board) -> None:
    client = board.client()
    for number in range(100):
        child = run(board, client, f"abc-{number}", ["printf", "abc"])
        early = number % 2 == 0
        reader = (
            board.stub.AttachOutput(pb.AttachOutputRequest(lease_id=f"abc-{number}", follow=True)) if early else None
        )
        assert child.finish() == 0
        read = Read()
        for event in reader or board.stub.AttachOutput(pb.AttachOutputRequest(lease_id=f"abc-{number}", follow=True)):
            read.take(event)
        assert read.out == b"abc"
        assert read.err == b""
        assert read.ended == {pb.STREAM_STDOUT: 3, pb.STREAM_STDERR: 0}
        assert read.end is not None
        assert (read.end.exit.code, read.end.state, read.end.end_reason) == (0, pb.Lease.CLOSED, "exit")


def test_64_mib_come_back_identical(board: Board) -> None:
    script = "import os,random; r=random.Random(7)\nfor _ in range(1024): os.write(1, r.randbytes(65536))"
    child = run(board, board.client(), "big", [sys.executable, "-c", script])
    read = board_reader(board, "big")
    assert child.finish() == 0
    got = read()
    source = random.Random(7)
    expected = hashlib.sha256()
    for _ in range(1024):
        expected.update(source.randbytes(65536))
    assert len(got.out) == 64 << 20
    assert hashlib.sha256(got.out).digest() == expected.digest()
    board.stub.Forget(pb.ForgetRequest(lease_id="big"))
    assert not (board.run_dir / "logs" / "big").exists()


def board_reader(board: Board, lease_id: str, **fields: Any) -> Callable[[], Read]:
    """Reads in a thread; the result when called."""
    results: queue.Queue[Read | BaseException] = queue.Queue()

    def work() -> None:
        try:
            results.put(board.attach(lease_id, **fields))
        except BaseException as error:
            results.put(error)

    threading.Thread(target=work, daemon=True).start()

    def result() -> Read:
        got = results.get(timeout=60)
        if isinstance(got, BaseException):
            raise got
        return got

    return result


def test_both_streams_are_kept_apart_and_interleaved(board: Board) -> None:
    child = run(board, board.client(), "two", ["sh", "-c", "printf out; printf err >&2; exit 3"])
    assert child.finish() == 3
    read = board.attach("two")
    assert (read.out, read.err) == (b"out", b"err")
    assert read.end is not None
    assert read.end.exit.code == 3
    only = board.attach("two", streams=[pb.STREAM_STDERR])
    assert (only.out, only.err) == (b"", b"err")


def test_past_the_cap_there_is_a_gap_of_exact_size_and_memory_stays(board: Board) -> None:
    cap = 8 << 20
    child = run(board, board.client(), "yes", ["yes"], log_cap=cap)
    until(lambda: board.lease("yes").streams[0].size > cap)
    before = board.rss()
    time.sleep(1.5)
    assert board.rss() - before < 4 << 20
    assert child.kill() == -9
    lease = board.await_state("yes", pb.Lease.CLOSED)
    assert lease.exit.signal == 9
    size, lost = lease.streams[0].size, lease.streams[0].lost
    assert size - lost == cap
    read = board.attach("yes", stdout_offset=cap - 10)
    assert read.out == (b"y\n" * 5)
    assert [(gap.offset, gap.size, gap.reason) for gap in read.gaps] == [(cap, size - cap, "log cap")]
    assert read.ended[pb.STREAM_STDOUT] == size
    assert (board.run_dir / "logs" / "yes" / "stdout").stat().st_size == cap


def test_a_grandchild_that_keeps_the_output_open_does_not_keep_the_lease(board: Board) -> None:
    """containerd#2823: the exit is the main process' exit; what follows is bounded."""
    client = board.client()
    child = run(board, client, "hi", ["sh", "-c", "sleep 600 & echo $!"])
    assert child.finish() == 0
    exited = time.monotonic()
    read = board.attach("hi")
    assert time.monotonic() - exited < 10
    assert read.end is not None
    assert read.end.exit.code == 0
    os.kill(int(read.out), signal.SIGKILL)


def test_an_offset_reads_on_from_there_and_one_beyond_the_end_is_refused(board: Board) -> None:
    run(board, board.client(), "ten", ["printf", "0123456789"]).finish()
    board.await_state("ten", pb.Lease.CLOSED)
    assert board.attach("ten", stdout_offset=4).out == b"456789"
    assert board.attach("ten", stdout_offset=10).out == b""
    for name, offset in (("stdout_offset", 11), ("stdout_offset", -1), ("stderr_offset", 1)):
        with pytest.raises(grpc.RpcError) as refused:
            board.attach("ten", **{name: offset})
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert info(refused.value).metadata["field"] == name
    with pytest.raises(grpc.RpcError) as refused:
        board.attach("ten", streams=[pb.STREAM_STDIN])
    assert info(refused.value).metadata["field"] == "streams"
    with pytest.raises(grpc.RpcError) as refused:
        board.attach("nobody")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_not_followed_ends_at_what_there_is_now(board: Board) -> None:
    child = run(board, board.client(), "now", ["sh", "-c", "printf abc; sleep 600"])
    until(lambda: board.lease("now").streams[0].size == 3)
    read = board.attach("now", follow=False)
    assert read.out == b"abc"
    assert read.ended == {}
    assert read.end is not None
    assert read.end.state == pb.Lease.BOUND
    assert not read.end.HasField("exit")
    child.kill()


def test_abandoned_readers_leave_nothing(board: Board) -> None:
    child = run(board, board.client(), "left", ["sh", "-c", "yes | head -c 2000000; sleep 600"])
    until(lambda: board.lease("left").streams[0].size == 2_000_000)
    held = board.descriptors()
    for number in range(60):
        call = board.stub.AttachOutput(pb.AttachOutputRequest(lease_id="left", follow=True))
        if number % 2:
            next(call)
        call.cancel()
    until(lambda: board.descriptors() == held)
    child.kill()
    assert len(board.attach("left").out) == 2_000_000


def test_a_reader_that_does_not_read_slows_nobody(board: Board) -> None:
    child = run(board, board.client(), "slow", ["sh", "-c", "head -c 30000000 /dev/zero"])
    stuck = board.stub.AttachOutput(pb.AttachOutputRequest(lease_id="slow", follow=True))
    assert child.finish() == 0
    assert len(board.attach("slow").out) == 30_000_000
    read = Read()
    for event in stuck:
        read.take(event)
    assert len(read.out) == 30_000_000


# Ends of a lease


def test_a_normal_end_is_quick_and_the_holders_are_named_until_then(board: Board) -> None:
    client = board.client()
    token = board.acquire("holders", stdin=True).token
    assert list(board.lease("holders").holders) == ["near", "far"]
    assert board.lease("holders").HasField("time_left")
    ends = client.claim(token)
    assert list(board.lease("holders").holders) == ["near", "claimer"]
    child = subprocess.Popen(["cat"], stdin=ends[Stream.STDIN], stdout=ends[Stream.STDOUT], stderr=ends[Stream.STDERR])
    fdpass.close_all(list(ends.values()))
    pidfd = os.pidfd_open(child.pid)
    client.bind(token, pidfd)
    os.close(pidfd)
    lease = board.lease("holders")
    assert (lease.state, list(lease.holders)) == (pb.Lease.BOUND, ["near", "process"])
    assert not lease.HasField("time_left")
    child.kill()
    client.exited(token, child.wait())
    lease = board.await_state("holders", pb.Lease.CLOSED)
    assert (list(lease.holders), lease.exit.signal) == ([], 9)


@pytest.mark.parametrize("state", ["offered", "claimed", "bound"])
@pytest.mark.parametrize("end", ["release", "revoke"])
def test_the_owner_ends_a_lease_in_any_state(board: Board, state: str, end: str) -> None:
    """MESOS-9502: claimed by nobody, or not bound, or running: nothing waits without a bound."""
    lease_id = f"{end}-{state}"
    client = board.client()
    token = board.acquire(lease_id, stdin=True).token
    ends: dict[Stream, int] = {}
    child = None
    if state == "claimed":
        ends = client.claim(token)
    elif state == "bound":
        child = client.start(token, ["sleep", "600"])
    if end == "release":
        board.stub.Release(pb.ReleaseRequest(lease_id=lease_id, cancel_reason="client_cancelled"))
        # A claimer that still has the far ends is waited for 1 s, and not longer.
        lease = board.await_state(lease_id, pb.Lease.CLOSED, 6.0)
        assert lease.end_reason == "released"
    else:
        lease = board.stub.Revoke(pb.RevokeRequest(lease_id=lease_id)).lease
        assert (lease.state, lease.end_reason) == (pb.Lease.CLOSED, "revoked")
    with pytest.raises(Refused):
        client.claim(token)
    with pytest.raises(grpc.RpcError) as refused:
        board.acquire(lease_id)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    fdpass.close_all(list(ends.values()))
    if child is not None:
        child.kill()


def test_an_unclaimed_and_an_unbound_lease_expire(board: Board) -> None:
    client = board.client()
    board.acquire("unclaimed", claim_ttl=seconds(0.2))
    token = board.acquire("unbound", bind_ttl=seconds(0.2)).token
    ends = client.claim(token)
    assert board.await_state("unclaimed", pb.Lease.CLOSED).end_reason == "expired"
    assert board.await_state("unbound", pb.Lease.CLOSED).end_reason == "expired"
    pidfd = os.pidfd_open(os.getpid())
    with pytest.raises(Refused):
        client.bind(token, pidfd)
    os.close(pidfd)
    fdpass.close_all(list(ends.values()))


def test_a_claimer_that_lets_go_or_closes_or_leaves_ends_its_claims(board: Board) -> None:
    client = board.client()
    tokens = {name: board.acquire(f"by-{name}", stdin=True).token for name in ("letgo", "closing", "leaving")}
    fdpass.close_all(list(client.claim(tokens["letgo"]).values()))
    client.let_go(tokens["letgo"])
    fdpass.close_all(list(client.claim(tokens["closing"]).values()))
    assert board.await_state("by-closing", pb.Lease.CLOSED).end_reason == "let go"
    assert board.await_state("by-letgo", pb.Lease.CLOSED).end_reason == "let go"
    kept = client.claim(tokens["leaving"])
    client.close()
    assert board.await_state("by-leaving", pb.Lease.CLOSED).end_reason == "claimer gone"
    fdpass.close_all(list(kept.values()))


def test_an_exit_nobody_reports_is_asked_of_the_kernel(board: Board) -> None:
    child = run(board, board.client(), "silent", ["sh", "-c", "exit 5"])
    child.process.wait()
    lease = board.await_state("silent", pb.Lease.CLOSED)
    assert lease.end_reason == "exit"
    assert not lease.exit.HasField("signal")
    # Known since Linux 6.15, else unknown; never 0 by default.
    assert not lease.exit.HasField("code") or lease.exit.code == 5
    child.client.exited(child.token, 5)


def test_an_exit_is_taken_from_any_connection_and_repeated_ones_are_harmless(board: Board) -> None:
    child = run(board, board.client(), "anew", ["true"])
    child.client.close()
    other = board.client()
    assert board.lease("anew").state == pb.Lease.BOUND
    for _ in range(3):
        other.exited(child.token, child.process.wait())
    assert board.await_state("anew", pb.Lease.CLOSED).exit.code == 0
    other.exited(bytes(32), 0)


def test_renew_moves_the_deadline_and_is_bounded(board: Board) -> None:
    board.acquire("renewed", claim_ttl=seconds(0.3))
    board.stub.Renew(pb.RenewRequest(lease_id="renewed", ttl=seconds(50)))
    time.sleep(0.6)
    lease = board.lease("renewed")
    assert lease.state == pb.Lease.OFFERED
    assert lease.time_left.seconds > 30
    for ttl in (61.0, 0.0):
        with pytest.raises(grpc.RpcError) as refused:
            board.stub.Renew(pb.RenewRequest(lease_id="renewed", ttl=seconds(ttl)))
        assert info(refused.value).metadata["field"] == "ttl"
    board.stub.Release(pb.ReleaseRequest(lease_id="renewed"))


def test_ending_an_unknown_id_refuses_its_late_acquire(board: Board) -> None:
    assert not board.stub.Release(pb.ReleaseRequest(lease_id="late")).HasField("lease")
    with pytest.raises(grpc.RpcError) as refused:
        board.acquire("late")
    assert reason(refused.value) == "LEASE_ENDED"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lease_id": ""}, "lease_id"),
        ({"lease_id": "../up"}, "lease_id"),
        ({"lease_id": "x" * 65}, "lease_id"),
        ({"owner": ""}, "owner"),
        ({"owner": "o" * 200}, "owner"),
        ({"claim_ttl": seconds(61)}, "claim_ttl"),
        ({"bind_ttl": seconds(-1)}, "bind_ttl"),
        ({"log_cap": -1}, "log_cap"),
        ({"labels": {str(n): "" for n in range(65)}}, "labels"),
        ({"token": b"short"}, "token"),
    ],
)
def test_a_bad_acquire_names_the_field(board: Board, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        board.stub.Acquire(pb.AcquireRequest(**({"lease_id": "bad", "owner": "test"} | fields)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info(refused.value).metadata["field"] == named


def test_a_repeated_acquire_is_the_same_lease(board: Board) -> None:
    first = board.acquire("same", labels={"name": "/a"})
    again = board.acquire("same", labels={"name": "/a"})
    assert first.token == again.token
    with pytest.raises(grpc.RpcError) as refused:
        board.acquire("same", owner="another")
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    with pytest.raises(grpc.RpcError) as refused:
        board.acquire("same", labels={"name": "/a"}, token=os.urandom(32))
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    with pytest.raises(grpc.RpcError) as refused:
        board.acquire("other", token=first.token)
    assert info(refused.value).metadata["field"] == "token"
    board.stub.Release(pb.ReleaseRequest(lease_id="same"))


# fd.sock


def test_a_take_makes_a_lease_of_its_owners_session_and_claims_it(board: Board) -> None:
    owner = Session(board)
    with contextlib.closing(board.client()) as client:
        assert client.version == fdframes.VERSION
        token = os.urandom(fdframes.TOKEN_SIZE)
        ends = client.take(token, owner, "taken-1", stdin=True)
        assert set(ends) == {Stream.STDIN, Stream.STDOUT, Stream.STDERR}
        lease = board.lease("taken-1")
        assert (lease.state, lease.owner) == (pb.Lease.CLAIMED, "owner")
        assert lease.labels == {"name": "/a"}
        fdpass.close_all(list(ends.values()))
        with pytest.raises(Refused):
            client.take(token, owner, "taken-1", stdin=True)
        # The end of the owner is the end of what it has not bound.
        client.take(os.urandom(fdframes.TOKEN_SIZE), owner, "taken-2")
        owner.end()
        board.await_state("taken-1", pb.Lease.CLOSED)
        assert board.await_state("taken-2", pb.Lease.CLOSED).end_reason == "owner gone"


def test_a_take_for_a_session_that_is_over_or_an_id_that_was_ended_makes_nothing(board: Board) -> None:
    owner = Session(board)
    with contextlib.closing(board.client()) as client:
        board.stub.Release(pb.ReleaseRequest(lease_id="over-1"))
        with pytest.raises(Refused) as refused:
            client.take(os.urandom(fdframes.TOKEN_SIZE), owner, "over-1")
        assert refused.value.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        owner.end()
        until(lambda: owner.error is not None or not owner.thread.is_alive())
        with pytest.raises(Refused) as refused:
            client.take(os.urandom(fdframes.TOKEN_SIZE), owner, "over-2")
        assert refused.value.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        with pytest.raises(grpc.RpcError) as unknown:
            board.lease("over-2")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_of_100_takes_of_one_lease_one_wins(board: Board) -> None:
    owner = Session(board)
    token = os.urandom(fdframes.TOKEN_SIZE)
    clients = [board.client() for _ in range(10)]
    won: list[dict[Stream, int]] = []

    def take(client: Client) -> None:
        for _ in range(10):
            with contextlib.suppress(Refused):
                won.append(client.take(token, owner, "contested"))

    threads = [threading.Thread(target=take, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    fdpass.close_all(list(won[0].values()))
    for client in clients:
        client.close()
    board.await_state("contested", pb.Lease.CLOSED)
    owner.end()


def test_of_100_takers_of_one_token_one_wins(board: Board) -> None:
    token = board.acquire("taken").token
    clients = [board.client() for _ in range(20)]
    won: list[dict[Stream, int]] = []
    refused: list[Refused] = []

    def take(client: Client) -> None:
        for _ in range(5):
            try:
                won.append(client.claim(token))
            except Refused as error:
                refused.append(error)

    threads = [threading.Thread(target=take, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 99)
    fdpass.close_all(list(won[0].values()))
    board.await_state("taken", pb.Lease.CLOSED)
    for client in clients:
        client.close()


def header(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "magic": b"TSFD",
        "format": 1,
        "type": 2,
        "fds": 0,
        "zero": 0,
        "request": 9,
        "length": 87,
    } | changes
    length = fields["length"]
    return fdframes.HEADER.pack(*fields.values()) + bytes(min(length, 1 << 17))


BAD = {
    "a short packet": (b"TSFD", 0),
    "a wrong magic": (header(magic=b"TSFE"), 0),
    "a wrong format": (header(format=2), 0),
    "an unknown type": (header(type=9), 0),
    "an answer as a request": (header(type=128, length=0), 0),
    "request 0": (header(request=0), 0),
    "a wrong length": (header()[:-1], 0),
    "a payload of the wrong size": (header(length=5), 0),
    "too long": (header(length=fdframes.PAYLOAD_MAX + 1), 0),
    "a TAKE of no Acquire": (header(type=6, length=96)[:-9] + b"\xff" * 9, 0),
    "much too long, truncated": (header(length=100_000), 0),
    "a second HELLO": (fdframes.hello(9).encode(), 0),
    "a surplus descriptor": (header(), 1),
    "an announced surplus descriptor": (header(fds=1), 1),
    "a missing descriptor": (fdframes.bind(9, bytes(32)).encode(), 0),
    "two pidfds": (header(type=3, fds=2, length=32), 2),
    "truncated control data": (header(), 30),
    "a bad exit kind": (fdframes.exited(9, bytes(32), 9, 0).encode(), 0),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", BAD)
def test_what_breaks_a_rule_ends_the_connection_and_closes_what_came(board: Board, what: str) -> None:
    packet, count = BAD[what]
    client = board.client()
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(count)]
    client.send(packet, tuple(reader for reader, _ in pipes))
    for reader, _ in pipes:
        os.close(reader)
    with pytest.raises((EOFError, ConnectionError)):
        client.receive()
    for _, writer in pipes:
        # Nobody has the other end any more.
        until(lambda writer=writer: _broken(writer))  # type: ignore[misc]
        os.close(writer)


def _broken(writer: int) -> bool:
    try:
        os.write(writer, b"x")
    except BrokenPipeError:
        return True
    return False


def test_the_first_frame_must_be_hello_and_come_within_a_second(board: Board) -> None:
    path = board.run_dir / "fd.sock"
    for first in (fdframes.claim(1, bytes(32)).encode(), fdframes.HEADER.pack(b"TSFD", 1, 1, 0, 0, 1, 0)):
        eager = Client(path, greet=False)
        eager.send(first)
        with pytest.raises((EOFError, ConnectionError)):
            eager.receive()
        eager.close()
    silent = Client(path, greet=False)
    with pytest.raises((EOFError, ConnectionError)):
        silent.receive()
    silent.close()
    future = Client(path, greet=False)
    future.send(Frame(Type.HELLO, 1, bytes([9, 12, 0, 0])).encode())
    assert future.receive()[0].type is Type.ERROR
    future.close()


def test_connections_are_bounded(board: Board) -> None:
    path = board.run_dir / "fd.sock"
    strangers = [Client(path, greet=False) for _ in range(20)]
    refused = 0
    for stranger in strangers:
        stranger.sock.settimeout(0.3)
        try:
            stranger.receive()
        except (EOFError, ConnectionError):
            refused += 1
        except TimeoutError:
            break
        finally:
            stranger.close()
    for stranger in strangers:
        stranger.close()
    # 16 may wait for their HELLO; of those that came first nobody is refused at once.
    known: list[Client] = []
    with pytest.raises((EOFError, ConnectionError, OSError)):
        for _ in range(80):
            known.append(Client(path))
    assert len(known) <= 64
    for client in known:
        client.close()
    until(lambda: _greets(path))


def _greets(path: Path) -> bool:
    try:
        Client(path).close()
    except (EOFError, ConnectionError):
        return False
    return True


def test_what_is_no_pidfd_is_refused_and_closed(board: Board) -> None:
    client = board.client()
    token = board.acquire("no-pidfd").token
    ends = client.claim(token)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with pytest.raises(Refused) as refused:
        client.bind(token, reader)
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    os.close(reader)
    until(lambda: _broken(writer))
    os.close(writer)
    fdpass.close_all(list(ends.values()))
    board.await_state("no-pidfd", pb.Lease.CLOSED)


def test_a_short_lease_ends_in_time_under_a_flood(board: Board) -> None:
    """s6-fdholderd: a deadline holds under steady traffic."""
    stop = threading.Event()
    path = board.run_dir / "fd.sock"

    def flood(frame: Callable[[int], bytes]) -> None:
        client = Client(path)
        client.sock.settimeout(0.5)
        number = 1
        while not stop.is_set():
            number = number % 1_000_000 + 1
            try:
                client.send(frame(number))
                client.sock.recv(2048, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except (OSError, EOFError):
                client.close()
                with contextlib.suppress(OSError, EOFError):
                    client = Client(path)
        client.close()

    def valid(number: int) -> bytes:
        return fdframes.claim(number, bytes(32)).encode()

    def junk(number: int) -> bytes:
        return b"junk" * 10

    threads = [threading.Thread(target=flood, args=(kind,)) for kind in (valid, valid, valid, junk)]
    for thread in threads:
        thread.start()
    try:
        board.acquire("flooded", claim_ttl=seconds(1))
        offered = time.monotonic()
        while board.lease("flooded").state != pb.Lease.CLOSED:
            time.sleep(0.05)
        assert time.monotonic() - offered < 3.0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_peer_that_does_not_read_its_answers_is_let_go(board: Board) -> None:
    client = board.client()
    client.sock.settimeout(5)
    with pytest.raises(OSError):
        for number in range(1, 200_000):
            client.send(fdframes.claim(number, bytes(32)).encode())


# Standard input


def inputs(lease_id: str, *messages: pb.AttachInputRequest) -> Iterator[pb.AttachInputRequest]:
    yield pb.AttachInputRequest(lease_id=lease_id)
    yield from messages


def test_a_mebibyte_through_cat_comes_back_whole(board: Board) -> None:
    data = os.urandom(1 << 20)
    child = run(board, board.client(), "cat", ["sh", "-c", "cat; sleep 0.1; echo tail"], stdin=True)
    read = board_reader(board, "cat")
    pieces = [pb.AttachInputRequest(data=data[at : at + 100_000]) for at in range(0, len(data), 100_000)]
    answer = board.stub.AttachInput(inputs("cat", *pieces, pb.AttachInputRequest(eof=True)), timeout=30)
    assert (answer.written, answer.reader_gone) == (len(data), False)
    assert child.finish() == 0
    assert read().out == data + b"tail\n"


def test_input_that_ends_without_eof_is_aborted_and_can_go_on(board: Board) -> None:
    child = run(board, board.client(), "resumed", ["cat"], stdin=True)
    with pytest.raises(grpc.RpcError) as aborted:
        board.stub.AttachInput(inputs("resumed", pb.AttachInputRequest(data=b"one ")), timeout=30)
    assert aborted.value.code() is grpc.StatusCode.ABORTED
    board.stub.AttachInput(inputs("resumed", pb.AttachInputRequest(data=b"two", eof=True)), timeout=30)
    with pytest.raises(grpc.RpcError) as closed:
        board.stub.AttachInput(inputs("resumed"), timeout=30)
    assert reason(closed.value) == "INPUT_CLOSED"
    assert child.finish() == 0
    assert board.attach("resumed").out == b"one two"


class Held:
    """An AttachInput that a test keeps open."""

    def __init__(self, board: Board, lease_id: str) -> None:
        self.messages: queue.Queue[pb.AttachInputRequest | None] = queue.Queue()
        self.messages.put(pb.AttachInputRequest(lease_id=lease_id))
        self.call = board.stub.AttachInput.future(iter(self.messages.get, None), timeout=60)

    def put(self, **fields: Any) -> None:
        self.messages.put(pb.AttachInputRequest(**fields))

    def close(self) -> None:
        self.messages.put(None)


def test_a_second_writer_is_refused_and_a_cancelled_one_leaves_the_pipe_open(board: Board) -> None:
    child = run(board, board.client(), "writers", ["cat"], stdin=True)
    held = Held(board, "writers")
    held.put(data=b"first ")
    until(lambda: board.lease("writers").streams[0].size == 6)
    with pytest.raises(grpc.RpcError) as refused:
        board.stub.AttachInput(inputs("writers"), timeout=30)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason(refused.value) == "INPUT_TAKEN"
    held.call.cancel()
    held.close()

    def second() -> bool:
        try:
            board.stub.AttachInput(inputs("writers", pb.AttachInputRequest(data=b"second", eof=True)), timeout=30)
        except grpc.RpcError as error:
            assert reason(error) == "INPUT_TAKEN"
            return False
        return True

    until(second)
    assert child.finish() == 0
    assert board.attach("writers").out == b"first second"


def test_a_writer_learns_that_the_reader_is_gone(board: Board) -> None:
    child = run(board, board.client(), "closed-stdin", ["sh", "-c", "exec 0<&-; echo shut; sleep 600"], stdin=True)
    until(lambda: board.lease("closed-stdin").streams[0].size > 0)
    answer = board.stub.AttachInput(inputs("closed-stdin", pb.AttachInputRequest(data=b"x")), timeout=30)
    assert (answer.written, answer.reader_gone) == (0, True)
    child.kill()


@pytest.mark.parametrize("blocked", [True, False])
def test_a_writer_ends_with_the_process(board: Board, blocked: bool) -> None:
    """MESOS-9131: an open input stream does not outlive its container."""
    lease_id = f"input-{'blocked' if blocked else 'idle'}"
    child = run(board, board.client(), lease_id, ["sleep", "600"], stdin=True)
    held = Held(board, lease_id)
    if blocked:
        held.put(data=bytes(300_000))
        time.sleep(0.2)
    child.kill()
    answer = held.call.result(timeout=20)
    assert answer.reader_gone
    assert answer.written <= 65536 * 2
    board.await_state(lease_id, pb.Lease.CLOSED)
    held.close()


def test_input_waits_for_a_lease_to_be_bound_and_is_refused_where_there_is_none(board: Board) -> None:
    token = board.acquire("before", stdin=True).token
    held = Held(board, "before")
    held.put(data=b"early", eof=True)
    time.sleep(0.1)
    child = board.client().start(token, ["cat"])
    assert held.call.result(timeout=20).written == 5
    held.close()
    child.finish()
    assert board.attach("before").out == b"early"
    run(board, board.client(), "without", ["true"]).finish()
    board.await_state("without", pb.Lease.CLOSED)
    for lease_id, code in (("without", grpc.StatusCode.FAILED_PRECONDITION), ("unknown", grpc.StatusCode.NOT_FOUND)):
        with pytest.raises(grpc.RpcError) as refused:
            board.stub.AttachInput(inputs(lease_id), timeout=30)
        assert refused.value.code() is code


# Sessions


class Session:
    """A Session stream, with its answers by request and its events."""

    def __init__(self, board: Board, owner: str = "owner") -> None:
        self.requests: queue.Queue[pb.SessionRequest | None] = queue.Queue()
        self.answers: dict[int, pb.SessionResponse] = {}
        self.closed: list[pb.Lease] = []
        self.error: grpc.RpcError | None = None
        self.number = 0
        self.call = board.stub.Session(iter(self.requests.get, None))
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        self.welcome = self.ask(hello=pb.SessionHello(owner=owner)).welcome

    def _read(self) -> None:
        try:
            for response in self.call:
                if response.request:
                    self.answers[response.request] = response
                else:
                    self.closed.append(response.closed)
        except grpc.RpcError as error:
            self.error = error

    def send(self, **message: Any) -> int:
        self.number += 1
        self.requests.put(pb.SessionRequest(request=self.number, **message))
        return self.number

    def ask(self, **message: Any) -> pb.SessionResponse:
        return self.answer(self.send(**message))

    def answer(self, number: int) -> pb.SessionResponse:
        until(lambda: number in self.answers or self.error is not None)
        return self.answers[number]

    def acquire(self, lease_id: str, **fields: Any) -> pb.AcquireResponse:
        response = self.ask(acquire=pb.AcquireRequest(lease_id=lease_id, **fields))
        assert response.WhichOneof("message") == "acquire", response
        return response.acquire

    def end(self) -> None:
        self.requests.put(None)
        self.thread.join(20)
        assert not self.thread.is_alive()

    def cancel(self) -> None:
        self.call.cancel()
        self.end()


@pytest.mark.parametrize("end", ["close", "bye", "cancel"])
def test_the_end_of_a_session_ends_what_is_not_bound(board: Board, end: str) -> None:
    client = board.client()
    session = Session(board)
    assert session.welcome.epoch == client.epoch
    session.acquire(f"{end}-offered")
    ends = client.claim(session.acquire(f"{end}-claimed").token)
    child = client.start(session.acquire(f"{end}-bound").token, ["sleep", "600"])
    board.acquire(f"{end}-unary", owner="owner")
    match end:
        case "close":
            session.end()
        case "bye":
            session.send(bye=pb.SessionBye())
            session.thread.join(20)
            session.end()
        case _:
            session.cancel()
    for name in ("offered", "claimed"):
        assert board.await_state(f"{end}-{name}", pb.Lease.CLOSED).end_reason == "owner gone"
    assert board.lease(f"{end}-bound").state == pb.Lease.BOUND
    assert board.lease(f"{end}-unary").state == pb.Lease.OFFERED
    again = Session(board)
    assert {lease.lease_id for lease in again.welcome.leases} == {f"{end}-bound", f"{end}-unary"}
    child.kill()
    until(lambda: [lease.lease_id for lease in again.closed] == [f"{end}-bound"])
    assert again.closed[0].exit.signal == 9
    again.ask(release=pb.ReleaseRequest(lease_id=f"{end}-unary"))
    until(lambda: len(again.closed) == 2)
    again.end()
    fdpass.close_all(list(ends.values()))


def test_a_new_session_of_the_same_owner_ends_the_old_one(board: Board) -> None:
    old = Session(board)
    old.acquire("of-the-old")
    new = Session(board)
    until(lambda: old.error is not None)
    assert old.error is not None
    assert old.error.code() is grpc.StatusCode.ABORTED
    assert board.await_state("of-the-old", pb.Lease.CLOSED).end_reason == "owner gone"
    new.acquire("of-the-new")
    old.end()
    assert board.lease("of-the-new").state == pb.Lease.OFFERED
    new.end()


def test_a_session_answers_everything_and_errors_as_messages(board: Board) -> None:
    session = Session(board)
    session.acquire("all")
    assert session.ask(get=pb.GetLeaseRequest(lease_id="all")).get.lease.state == pb.Lease.OFFERED
    assert session.ask(renew=pb.RenewRequest(lease_id="all", ttl=seconds(5))).renew.lease.lease_id == "all"
    assert [lease.lease_id for lease in session.ask(list=pb.ListLeasesRequest()).list.leases] == ["all"]
    assert session.ask(forget=pb.ForgetRequest(lease_id="all")).error.reason == "LEASE_STATE"
    assert session.ask(revoke=pb.RevokeRequest(lease_id="all")).revoke.lease.state == pb.Lease.CLOSED
    until(lambda: len(session.closed) == 1)
    assert session.ask(forget=pb.ForgetRequest(lease_id="all")).forget.forgotten
    assert not session.ask(forget=pb.ForgetRequest(lease_id="all")).forget.forgotten
    assert session.ask(get=pb.GetLeaseRequest(lease_id="all")).error.code == grpc.StatusCode.NOT_FOUND.value[0]
    bad = session.ask(acquire=pb.AcquireRequest(lease_id="X")).error
    assert (bad.code, bad.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], "lease_id")
    assert session.ask(acquire=pb.AcquireRequest(lease_id="all")).error.reason == "LEASE_ENDED"
    assert session.ask().error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    session.end()


# Its own end


def test_sigterm_copies_what_is_in_the_pipes_and_tells_readers_to_resume() -> None:
    with Board() as board:
        client = board.client()
        child = run(board, client, "running", ["sh", "-c", "trap '' PIPE; printf before; sleep 600"])
        board.acquire("offered")
        ends = client.claim(board.acquire("claimed").token)
        os.write(ends[Stream.STDOUT], b"in the pipe")
        call = board.stub.AttachOutput(pb.AttachOutputRequest(lease_id="running", follow=True))
        read = Read()
        read.take(next(call))
        assert read.out == b"before"
        assert board.end() < 5.0
        assert board.process is not None
        assert board.process.returncode == 0
        with pytest.raises(grpc.RpcError) as resumed:
            for event in call:
                read.take(event)
        assert resumed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason(resumed.value) == "RESUME"
        with pytest.raises(BrokenPipeError):
            os.write(ends[Stream.STDOUT], b"more")
        fdpass.close_all(list(ends.values()))
        assert not (board.run_dir / "switchboard.sock").exists()
        assert not (board.run_dir / "fd.sock").exists()
        board.start()
        assert board.attach("claimed").out == b"in the pipe"
        rest = board.attach("running", stdout_offset=6)
        assert rest.out == b""
        assert rest.end is not None
        assert (rest.end.end_reason, rest.end.state) == ("shutdown", pb.Lease.CLOSED)
        assert board.lease("offered").end_reason == "shutdown"
        child.kill_only()


def test_sigterm_is_bounded_with_a_writer_that_never_stops_and_a_reader_that_never_reads() -> None:
    with Board() as board:
        child = run(board, board.client(), "yes", ["yes"], stdin=True, log_cap=1 << 20)
        call = board.stub.AttachOutput(pb.AttachOutputRequest(lease_id="yes", follow=True))
        held = Held(board, "yes")
        held.put(data=bytes(300_000))
        session = Session(board)
        until(lambda: board.lease("yes").streams[0].size > 1 << 20)
        assert board.end() < 5.0
        assert child.process.wait(20) == -signal.SIGPIPE
        call.cancel()
        held.close()
        session.end()


def test_killed_it_leaves_what_it_wrote_and_the_next_one_says_so() -> None:
    with Board() as board:
        child = run(board, board.client(), "orphan", ["sh", "-c", "printf written; sleep 600"])
        until(lambda: board.lease("orphan").streams[0].size == 7)
        board.end(signal.SIGKILL)
        child.kill_only()
        board.start()
        read = board.attach("orphan")
        assert read.out == b"written"
        assert read.end is not None
        assert read.end.end_reason == "switchboard died"
        assert not read.end.exit.HasField("code")
        assert not read.end.exit.HasField("signal")
        with pytest.raises(grpc.RpcError) as refused:
            board.acquire("orphan")
        assert reason(refused.value) == "LEASE_ENDED"
        board.client().exited(child.token, -9)


def test_a_second_one_on_the_same_directory_is_refused(board: Board) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "tightship.switchboard", "--run-dir", str(board.run_dir)],
        check=False, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert second.returncode != 0
    assert f"pid {board.pid}" in second.stderr
    board.acquire("still-there")
    board.stub.Release(pb.ReleaseRequest(lease_id="still-there"))


# Retention, limits, audit


def test_logs_go_by_number_and_the_id_is_still_remembered() -> None:
    with Board("--retention-number", "2") as board:
        client = board.client()
        for number in range(5):
            run(board, client, f"n-{number}", ["printf", "x"]).finish()
            board.await_state(f"n-{number}", pb.Lease.CLOSED)
        until(lambda: len(board.stub.ListLeases(pb.ListLeasesRequest(closed=True)).leases) == 2)
        until(lambda: sorted(p.name for p in (board.run_dir / "logs").iterdir() if p.is_dir()) == ["n-3", "n-4"])
        with pytest.raises(grpc.RpcError) as refused:
            board.acquire("n-0")
        assert reason(refused.value) == "LEASE_ENDED"


def test_the_limit_of_leases_is_refused_and_takes_no_descriptor() -> None:
    with Board("--leases-max", "3") as board:
        for number in range(3):
            board.acquire(f"l-{number}")
        held = board.descriptors()
        with pytest.raises(grpc.RpcError) as refused:
            board.acquire("l-3")
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert board.descriptors() == held
        board.stub.Revoke(pb.RevokeRequest(lease_id="l-0"))
        board.acquire("l-3")


def test_the_audit_finds_a_planted_segment_and_explains_what_lives(board: Board) -> None:
    child = run(board, board.client(), "lives", ["sh", "-c", "echo x; sleep 600"], stdin=True)
    until(lambda: board.lease("lives").streams[0].size == 2)
    planted = board.run_dir / "logs" / "planted"
    planted.mkdir()
    (planted / "stdout").write_text("x")
    audit = board.stub.AuditStreams(pb.AuditStreamsRequest())
    assert [(one.kind, one.what) for one in audit.findings] == [("segment", str(planted))]
    assert set(audit.pipes.values()) == {"lives"}
    assert len(audit.pipes) == 3
    assert audit.examined["pidfd"] == 1
    fixed = board.stub.AuditStreams(pb.AuditStreamsRequest(fix=True))
    assert fixed.findings[0].fixed
    assert not planted.exists()
    assert not board.stub.AuditStreams(pb.AuditStreamsRequest()).findings
    child.kill()


def test_memory_and_descriptors_stay_over_many_leases(board: Board) -> None:
    client = board.client()
    session = Session(board, "soak")

    def launches(name: str, count: int) -> None:
        for number in range(count):
            lease_id = f"{name}-{number}"
            ends = client.claim(session.acquire(lease_id, stdin=True).token)
            os.write(ends[Stream.STDOUT], b"hello")
            pidfd = os.pidfd_open(os.getpid())
            token = session.answers[session.number].acquire.token
            client.bind(token, pidfd)
            os.close(pidfd)
            fdpass.close_all(list(ends.values()))
            client.exited(token, 0)
        until(lambda: len(session.closed) >= count)
        session.closed.clear()
        session.answers.clear()

    launches("warm", 400)
    before = board.rss()
    launches("soak", 500)
    assert board.rss() - before < 500 * 655 + (256 << 10)
    session.end()


# Traces


def test_the_lease_is_a_span_of_the_trace_that_acquired_it_and_none_is_lost_at_the_end() -> None:
    with Board() as board:
        board.end()
        spans = board.run_dir / "spans"
        board.environment["OTEL_TRACES_EXPORTER"] = "console"
        with spans.open("wb") as board.stderr:
            board.start()
        trace = "5" * 32
        parent = f"00-{trace}-{'7' * 16}-01"
        token = board.acquire("traced", traceparent=parent).token
        board.stub.Release(pb.ReleaseRequest(lease_id="unrelated"), metadata=(("traceparent", parent),))
        ends = board.client().claim(token)
        board.stub.Release(pb.ReleaseRequest(lease_id="traced", cancel_reason="client_cancelled"))
        board.await_state("traced", pb.Lease.CLOSED)
        fdpass.close_all(list(ends.values()))
        assert board.end() < 5.0
        text = spans.read_text()
        assert text.count(f'"trace_id": "0x{trace}"') >= 2
        assert '"name": "lease"' in text
        assert '"tightship.cancel.reason": "client_cancelled"' in text
        assert '"name": "tightship.v1.SwitchboardService/Release"' in text
        assert token.hex() not in text


# Failpoints


@pytest.fixture(scope="module")
def armed() -> Iterator[Board]:
    with Board(failpoints=True) as board:
        yield board


@pytest.fixture
def faulty(armed: Board) -> Iterator[Board]:
    with armed.nothing_left():
        yield armed
        armed.points.clear()


def test_a_plain_launch_reaches_every_point_once(faulty: Board) -> None:
    faulty.points.arm("_all", "hit")
    run(faulty, faulty.client(), "plain", ["true"]).finish()
    faulty.await_state("plain", pb.Lease.CLOSED)
    until(lambda: len(faulty.points.hits()) >= len(points.SWITCHBOARD))
    assert faulty.points.hits() == set(points.SWITCHBOARD)
    assert all(faulty.points.hit_by(name) == [faulty.pid] for name in points.SWITCHBOARD)


@pytest.mark.parametrize("name", [name for name in points.SWITCHBOARD if name not in points.CANNOT_FAIL])
def test_an_errno_fails_the_request_with_it_and_leaves_nothing(faulty: Board, name: str) -> None:
    lease_id = name.removeprefix("switchboard.").replace(".", "-")
    faulty.points.arm(name, "errno EIO")
    client = faulty.client()
    child = None
    try:
        token = faulty.acquire(lease_id).token
        ends = client.claim(token)
        process = subprocess.Popen(
            ["sleep", "600"], stdout=ends[Stream.STDOUT], stderr=ends[Stream.STDERR], start_new_session=True
        )
        fdpass.close_all(list(ends.values()))
        child = Child(client, token, process)
        pidfd = os.pidfd_open(process.pid)
        try:
            client.bind(token, pidfd)
        finally:
            os.close(pidfd)
        child.kill()
        pytest.fail("nothing failed")
    except grpc.RpcError as error:
        assert "acquire" in name
        assert info(error).metadata["errno"] == "EIO"
    except Refused as error:
        assert "acquire" not in name
        assert "EIO" in error.message
    assert faulty.points.was_hit(name)
    faulty.points.clear()
    faulty.stub.Release(pb.ReleaseRequest(lease_id=lease_id))
    if child is not None:
        child.kill_only()
        client.exited(child.token, -9)
    if name != "switchboard.acquire.before":
        faulty.await_state(lease_id, pb.Lease.CLOSED)


@pytest.mark.parametrize("name", points.SWITCHBOARD)
def test_a_wait_holds_one_lease_and_no_other_and_ends_with_it(faulty: Board, name: str) -> None:
    lease_id = "w-" + name.removeprefix("switchboard.").replace(".", "-")
    faulty.points.arm(name, "wait")
    done = threading.Event()

    def launch() -> None:
        client = faulty.client()
        with contextlib.suppress(grpc.RpcError, Refused, OSError, EOFError):
            child = run(faulty, client, lease_id, ["true"])
            child.finish()
        done.set()

    thread = threading.Thread(target=launch)
    thread.start()
    faulty.points.await_hit(name)
    # Others are not held up: the point is disarmed for them by its hit file alone, so they are asked what passes none.
    begun = time.monotonic()
    assert faulty.stub.ListLeases(pb.ListLeasesRequest()).leases is not None
    assert time.monotonic() - begun < 2.0
    faulty.stub.Release(pb.ReleaseRequest(lease_id=lease_id))
    thread.join(15)
    assert done.is_set()
    if name != "switchboard.acquire.before":
        faulty.await_state(lease_id, pb.Lease.CLOSED)


def test_a_wait_in_a_session_does_not_hold_up_its_other_requests(faulty: Board) -> None:
    session = Session(faulty)
    faulty.points.arm("switchboard.acquire.before", "wait")
    held = session.send(acquire=pb.AcquireRequest(lease_id="held"))
    faulty.points.await_hit("switchboard.acquire.before")
    assert session.ask(list=pb.ListLeasesRequest()).list is not None
    assert held not in session.answers
    faulty.points.disarm("switchboard.acquire.before")
    assert session.answer(held).acquire.lease.state == pb.Lease.OFFERED
    faulty.points.arm("switchboard.acquire.before", "wait")
    session.send(acquire=pb.AcquireRequest(lease_id="never"))
    time.sleep(0.1)
    session.cancel()
    faulty.points.clear()
    faulty.await_state("held", pb.Lease.CLOSED)
    time.sleep(0.1)
    assert [one.lease_id for one in faulty.stub.ListLeases(pb.ListLeasesRequest()).leases] == []


@pytest.mark.parametrize("name", points.SWITCHBOARD)
def test_sigterm_ends_every_wait(name: str) -> None:
    with Board(failpoints=True) as board:
        board.points.arm(name, "wait")

        def launch() -> None:
            with contextlib.suppress(grpc.RpcError, Refused, OSError, EOFError):
                run(board, board.client(), "stopped", ["true"]).finish()

        thread = threading.Thread(target=launch)
        thread.start()
        board.points.await_hit(name)
        assert board.end() < 5.0
        thread.join(15)
        assert not thread.is_alive()
