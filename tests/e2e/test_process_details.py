"""What a contained process finds around itself: descriptors, signals, environment, directory, limits, record."""

from __future__ import annotations

import datetime
import os
import resource
import signal
import time

import grpc
import pytest

from tests.harness.calls import FULL_SPEC, fresh_name, info
from tests.harness.pair import Pair
from tightship.v1 import containerizer_pb2 as cpb

# Most tests look at /proc/self from a shell without a fork: `read` is a builtin.
_STATUS = 'while read -r line; do echo "$line"; done < /proc/self/status'


def _status(text: bytes) -> dict[str, str]:
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.decode().splitlines())}


@pytest.mark.parametrize("spec", ["", FULL_SPEC], ids=["plain", "namespaces"])
@pytest.mark.parametrize("stdin", [None, b""], ids=["null", "pipe"])
def test_cve_2024_21626_descriptors_are_0_1_2(pair: Pair, spec: str, stdin: bytes | None) -> None:
    # The shell's own expansion opens the directory: that one is the descriptor that is gone at the echo.
    script = 'for fd in /proc/self/fd/*; do [ -e "$fd" ] && echo "${fd##*/}"; done'
    result = pair.calls.run(["/bin/sh", "-c", script], spec=spec, input=stdin)
    assert result.stdout.split() == [b"0", b"1", b"2"], result


def test_descriptors_of_containers_started_beside_each_other(pair: Pair) -> None:
    running = [pair.calls.detach(["/bin/sleep", "600"], fresh_name("fd")) for _ in range(8)]
    try:
        seen: set[str] = set()
        for started in running:
            links = {fd: os.readlink(f"/proc/{started.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{started.pid}/fd")}
            assert sorted(links) == ["0", "1", "2"], links
            assert links["0"] == "/dev/null"
            pipes = {links["1"], links["2"]}
            assert len(pipes) == 2
            assert not pipes & seen
            seen |= pipes
    finally:
        for started in running:
            pair.calls.destroy(started.name)


def test_signals_are_at_their_defaults(pair: Pair) -> None:
    found = _status(pair.calls.run(["/bin/sh", "-c", _STATUS]).stdout)
    # Even 32 and 33, glibc's own, which its posix_spawn, by which the keeper starts the services, leaves ignored.
    assert int(found["SigIgn"], 16) == 0
    assert int(found["SigBlk"], 16) == 0
    assert int(found["SigPnd"], 16) == 0


def test_sigpipe_kills_by_default(pair: Pair) -> None:
    result = pair.calls.run(["/bin/sh", "-c", "/usr/bin/yes | /usr/bin/head -n 1; sleep 0.1; echo done"])
    assert result.stdout == b"y\ndone\n"
    assert result.stderr == b""


def test_environment_is_what_was_asked_for(pair: Pair) -> None:
    given = ["A=1", "EMPTY=", "SPACE=a b", "EQUALS=a=b"]
    assert sorted(pair.calls.run(["/usr/bin/env"], env=given).stdout.decode().splitlines()) == sorted(given)
    assert pair.calls.run(["/usr/bin/env"]).stdout == b"", "nothing of the service's"


def test_command_is_looked_up_in_the_given_path(pair: Pair) -> None:
    assert pair.calls.run(["true"]).code == 0
    assert pair.calls.run(["true"], env=["PATH=/usr/bin:/bin"]).code == 0
    with pytest.raises(grpc.RpcError):
        pair.calls.run(["true"], env=["PATH=/nonexistent"])


def test_directory_and_umask(pair: Pair) -> None:
    assert pair.calls.run(["/bin/sh", "-c", "pwd; umask"]).stdout == b"/\n0022\n"
    assert pair.calls.run(["/bin/sh", "-c", "pwd; umask"], cwd="/tmp", umask=0o077).stdout == b"/tmp\n0077\n"


def test_a_session_of_its_own(pair: Pair) -> None:
    started = pair.calls.detach(["/bin/sleep", "600"], fresh_name())
    try:
        assert os.getsid(started.pid) == started.pid
        assert os.getpgid(started.pid) == started.pid
    finally:
        pair.calls.destroy(started.name)


def test_resource_limits_are_those_the_service_found(pair: Pair) -> None:
    started = pair.calls.detach(["/bin/sleep", "600"], fresh_name())
    try:
        # The keeper starts the services with this process' limits.
        for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE, resource.RLIMIT_STACK):
            assert resource.prlimit(started.pid, kind) == resource.getrlimit(kind)
    finally:
        pair.calls.destroy(started.name)


def test_virtual_host(pair: Pair) -> None:
    script = "echo $$; while read -r a; do echo $a; done < /proc/sys/kernel/hostname; ls /proc | grep -c '^[0-9]'"
    result = pair.calls.run(["/bin/sh", "-c", script], spec=FULL_SPEC, env=["PATH=/usr/bin:/bin"])
    pid, hostname, processes = result.stdout.split()
    assert (pid, hostname) == (b"1", b"inside")
    assert int(processes) <= 3
    spaces = {}
    started = pair.calls.detach(["/bin/sleep", "600"], fresh_name(), FULL_SPEC)
    try:
        for space in ("pid", "mnt", "ipc", "uts", "net", "user"):
            spaces[space] = os.readlink(f"/proc/{started.pid}/ns/{space}") != os.readlink(f"/proc/self/ns/{space}")
    finally:
        pair.calls.destroy(started.name)
    assert spaces == {"pid": True, "mnt": True, "ipc": True, "uts": True, "net": False, "user": False}


def test_own_network_has_loopback_up(pair: Pair) -> None:
    script = (
        "import socket; s=socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname());"
        "print(sorted(n for _, n in socket.if_nameindex() if n == 'lo'), len(socket.if_nameindex()))"
    )
    result = pair.calls.run(
        ["/usr/bin/env", "python3", "-c", script],
        spec="virtual_host { network { } }",
        env=["PATH=/usr/local/bin:/usr/bin:/bin"],
    )
    assert result.code == 0, result.stderr
    assert result.stdout.startswith(b"['lo']")


def test_record_of_an_exit(pair: Pair) -> None:
    result = pair.calls.run(
        ["/bin/sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; sleep 0.2; exit 7"], labels={"a": "b"}
    )
    record = result.record
    assert record.exit_code == 7
    assert not record.HasField("signal")
    assert record.reason == cpb.Record.EXITED
    assert record.labels == {"a": "b"}
    wall = record.wall_time.ToTimedelta().total_seconds()
    cpu = record.cpu_time.ToTimedelta().total_seconds()
    assert wall >= 0.2
    assert 0 < cpu < wall * os.cpu_count()  # type: ignore[operator]
    assert record.peak_memory > 0
    assert record.ended.ToNanoseconds() >= record.started.ToNanoseconds()
    assert pair.calls.wait(result.started.id) == record


def test_record_of_a_signal(pair: Pair) -> None:
    result = pair.calls.run(["/bin/sh", "-c", "kill -TERM $$"])
    assert (result.record.signal, result.record.reason) == (signal.SIGTERM, cpb.Record.SIGNALLED)
    assert not result.record.HasField("exit_code")


def test_containerd_12714_an_oom_kill_is_told(pair: Pair) -> None:
    program = "b=[]\nwhile True: b.append(bytearray(1<<20))"
    result = pair.calls.run(
        ["/usr/bin/env", "python3", "-c", program],
        spec="memory { limit: 33554432 }",
        env=["PATH=/usr/local/bin:/usr/bin:/bin"],
    )
    assert result.record.reason == cpb.Record.OOM
    assert result.record.oom_kills >= 1
    assert result.record.signal == signal.SIGKILL


def test_conmon_426_an_oom_kill_of_a_child_is_a_fact_apart(pair: Pair) -> None:
    program = "b=[]\nwhile True: b.append(bytearray(1<<20))"
    result = pair.calls.run(
        ["/bin/sh", "-c", f"python3 -c '{program}'; exit 5"],
        spec="memory { limit: 33554432 }",
        env=["PATH=/usr/local/bin:/usr/bin:/bin"],
    )
    assert (result.code, result.record.reason) == (5, cpb.Record.EXITED)
    assert result.record.oom_kills >= 1


def test_limits_are_in_force(pair: Pair) -> None:
    spec = "cpu { limit: 500 max_limit: 1500 } memory { limit: 67108864 } tasks { limit: 20 }"
    launching = pair.calls.launch(["/bin/cat"], spec=spec, stdin=True, report_in_force=True)
    started = launching.started()
    told = {one.field: one.value for one in started.in_force}
    assert told["memory.limit"] == "67108864"
    assert told["tasks.limit"] == "20"
    for one in started.in_force:
        with open(one.file) as file:
            assert file.read().strip() == one.value
    launching.cancel()
    launching.error()


def test_tasks_limit_holds(pair: Pair) -> None:
    result = pair.calls.run(["/bin/sh", "-c", "sleep 1 & sleep 1 & sleep 1 & wait"], spec="tasks { limit: 2 }")
    assert result.code != 0
    assert b"fork" in result.stderr


def test_timeout(pair: Pair) -> None:
    with pair.unchanged():
        begun = time.monotonic()
        result = pair.calls.run(["/bin/sleep", "600"], limit_s=0.5)
        assert 0.5 <= time.monotonic() - begun < 20
    assert result.record.reason == cpb.Record.TIMEOUT


def test_max_lifetime_ends_a_detached_container(pair: Pair) -> None:
    with pair.unchanged(timeout_s=20):
        started = pair.calls.detach(["/bin/sleep", "600"], fresh_name(), max_lifetime=datetime.timedelta(seconds=0.5))
        record = pair.calls.wait(started.id)
    assert record.reason in (cpb.Record.TIMEOUT, cpb.Record.CANCELLED)


@pytest.mark.parametrize(
    ("command", "errno"), [("/nonexistent", "ENOENT"), ("/etc/passwd", "EACCES"), ("/tmp", "EACCES")]
)
def test_conmon_05eff51_a_failed_exec_is_an_error_with_its_errno(pair: Pair, command: str, errno: str) -> None:
    name = fresh_name()
    with pair.unchanged():
        error = pair.calls.launch([command], name).error()
    assert info(error).metadata["errno"] == errno
    assert info(error).metadata["stage"] == "exec"
    assert pair.calls.run(["/bin/true"], name).code == 0, "the name is free"


def test_a_directory_that_is_not_there(pair: Pair) -> None:
    with pair.unchanged():
        error = pair.calls.launch(["/bin/true"], cwd="/nonexistent").error()
    assert info(error).metadata["errno"] == "ENOENT"


def test_containerd_1430_double_forks_leave_no_zombies(pair: Pair) -> None:
    with pair.unchanged():
        result = pair.calls.run(["/bin/sh", "-c", "for i in $(seq 100); do (true & ) ; done; echo ok"], timeout=60)
    assert result.stdout == b"ok\n"
