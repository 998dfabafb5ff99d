"""The spawner as a real process, driven over spawner.sock, with pipes from a small peer on fd.sock."""

from __future__ import annotations

import base64
import errno
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import spawnerkit
from tests.kernel.spawnerkit import Client, Rig, children, fds, wait_until
from tightship.common.packets import Packet, send_packet
from tightship.kernel import process
from tightship.kernel.fdframes import ExitKind, Stream, Type
from tightship.spawner import orders

ALL = ["pid", "mount", "ipc", "uts"]
_TREES = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
V2 = next((path for path in _TREES if (path / "cgroup.controllers").exists()), None)
V1 = [path for path in map(Path, ("/sys/fs/cgroup/pids", "/sys/fs/cgroup/freezer")) if (path / "tasks").exists()]


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    with spawnerkit.rig() as made:
        yield made


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    """The rig that tests share: each leaves it without a descriptor or process more than before."""
    before = shared.kinds()
    yield shared
    wait_until(lambda: shared.children() == [], "the end of every process")
    wait_until(lambda: shared.kinds() == before, "the close of every descriptor")
    assert shared.client.call("AUDIT")["findings"] == []
    assert not shared.client.events


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Rig]:
    """A rig with failpoints in `rig.failpoints`."""
    with spawnerkit.rig(tmp_path) as made:
        yield made


def arm(rig: Rig, point: str, what: str) -> None:
    assert rig.failpoints is not None
    (rig.failpoints / point).write_text(what)


def release(rig: Rig, point: str) -> None:
    assert rig.failpoints is not None
    (rig.failpoints / point).unlink()


def hit(rig: Rig, point: str) -> None:
    assert rig.failpoints is not None
    wait_until((rig.failpoints / f"{point}.hit").exists, f"{point}.hit")


def refused(reply: Packet, stage: str, code: int) -> None:
    assert (reply["ok"], reply.get("stage"), reply.get("errno")) == (False, stage, code), reply


def gone(rig: Rig, launch: str, others: int = 0) -> None:
    """Nothing of the launch is left: no process, no copy of its streams, and the spawner no longer knows it."""
    wait_until(lambda: len(rig.children()) == others, "the end of its process")
    wait_until(lambda: rig.peer.hung_up(rig.token(launch)), "the end of its streams")
    refused(rig.client.call("OPEN", launch=launch), "order", errno.ESRCH)


# What runs, and how it ends


def test_a_command_runs_and_its_exit_is_told_to_both(rig: Rig) -> None:
    launch, ready = rig.ready("/bin/sh", "-c", "echo out; echo err >&2; exit 3")
    times = ready["times"]
    assert times["claim"] <= times["clone"] <= times["bind"] <= times["ready"]
    stat = process.stat(ready["pid"])
    assert stat is not None
    assert ready["start"] == stat.start
    assert not rig.peer.output_ready(rig.token(launch)), "it ran before its gate was opened"
    opened = rig.client.call("OPEN", launch=launch)
    assert opened["times"]["open"] <= opened["times"]["exec"]
    event = rig.client.event("exited", launch)
    assert event["status"] == {"kind": "exited", "value": 3}
    assert event["rusage"]["cpu_us"] >= 0
    assert event["time"] >= opened["times"]["exec"]
    assert rig.peer.output(rig.token(launch)) == b"out\n"
    assert rig.peer.output(rig.token(launch), Stream.STDERR) == b"err\n"
    wait_until(lambda: rig.token(launch) in rig.peer.exits, "EXIT")
    assert rig.peer.exits[rig.token(launch)] == (ExitKind.EXITED, 3)
    rig.client.await_closed(launch)
    assert rig.client.call("ACK", launch=launch)["ok"]


def test_a_signal_is_told_as_one(rig: Rig) -> None:
    assert rig.ran("/bin/sh", "-c", "kill -9 $$")[0] == {"kind": "signalled", "value": 9}
    launch = rig.opened("sleep", "60")
    assert rig.client.call("SIGNAL", launch=launch, signal=int(signal.SIGTERM))["ok"]
    assert rig.client.event("exited", launch)["status"] == {"kind": "signalled", "value": 15}
    refused(rig.client.call("SIGNAL", launch=launch, signal=15), "signal", errno.ESRCH)
    rig.client.call("ACK", launch=launch)


def test_mesos_10007_a_stop_is_no_exit(rig: Rig) -> None:
    launch = rig.opened("sleep", "60")
    for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
        assert rig.client.call("SIGNAL", launch=launch, signal=int(number))["ok"]
    assert rig.client.call("AUDIT")["ok"]
    assert rig.client.events == []
    assert rig.client.call("KILL", launch=launch)["ok"]
    assert rig.client.event("exited", launch)["status"] == {"kind": "signalled", "value": 9}
    rig.client.call("ACK", launch=launch)


def test_standard_input_reaches_the_command_and_its_end_too(rig: Rig) -> None:
    launch = rig.opened("cat", stdin=True)
    near = rig.peer.near[rig.token(launch)].pop(Stream.STDIN)
    os.write(near, b"hello")
    os.close(near)
    assert rig.client.event("exited", launch)["status"] == {"kind": "exited", "value": 0}
    assert rig.peer.output(rig.token(launch)) == b"hello"
    rig.client.call("ACK", launch=launch)


def test_without_standard_input_it_is_dev_null(rig: Rig) -> None:
    assert rig.ran("cat")[0] == {"kind": "exited", "value": 0}


@pytest.mark.parametrize("namespaces", [[], ALL, [*ALL, "net"]])
def test_runc_cve_2024_21626_no_descriptor_but_the_streams_is_inside(rig: Rig, namespaces: list[str]) -> None:
    others = [rig.opened("sleep", "60") for _ in range(3)]
    script = "for i in $(seq 0 200); do [ -e /proc/$$/fd/$i ] && echo $i; done; readlink /proc/$$/fd/0"
    _, output = rig.ran("/bin/sh", "-c", script, namespaces=namespaces)
    assert output.split() == [b"0", b"1", b"2", b"/dev/null"]
    for launch in others:
        rig.client.call("KILL", launch=launch)
        rig.client.event("exited", launch)
        rig.client.call("ACK", launch=launch)


def test_a_child_at_its_gate_holds_its_own_and_nothing_of_a_sibling(rig: Rig) -> None:
    first, one = rig.ready("true", stdin=True)
    second, two = rig.ready("true")
    mine = fds(one["pid"])
    theirs = fds(two["pid"])
    assert len(mine) == len(theirs) == 5  # streams, gate, status
    assert theirs.pop(0) == "/dev/null"
    assert all(target.startswith("pipe:") for target in (*mine.values(), *theirs.values()))
    assert not set(mine.values()) & set(theirs.values())
    for pid, targets in ((one["pid"], mine), (two["pid"], theirs)):
        # Of neither the gate nor the status pipe it has both ends.
        assert len(set(targets.values())) == len(targets)
        for fd in targets:
            assert os.stat(f"/proc/{pid}/fd/{fd}").st_mode
    # The spawner has the other end of gate and status, and no stream.
    streams = [os.readlink(f"/proc/self/fd/{fd}") for fd in rig.peer.near[rig.token(first)].values()]
    assert not set(streams) & set(rig.descriptors())
    assert sum(target in rig.descriptors() for target in mine.values()) == 2
    for launch in (first, second):
        assert rig.client.call("ABORT", launch=launch, timeout_ms=5000)["ok"]


def test_an_opened_launch_costs_the_spawner_one_descriptor(rig: Rig) -> None:
    before = len(rig.descriptors())
    launches = [rig.opened("sleep", "60") for _ in range(10)]
    wait_until(lambda: len(rig.descriptors()) == before + 10, "10 descriptors")
    for launch in launches:
        rig.client.call("KILL", launch=launch)
    for launch in launches:
        rig.client.event("exited", launch)
        rig.client.call("ACK", launch=launch)


def test_the_mounts_of_a_short_command_are_held_until_its_exit_is_acknowledged(rig: Rig) -> None:
    before = rig.kinds()
    launch = rig.opened("true", namespaces=ALL)
    rig.client.event("exited", launch)
    rig.client.await_closed(launch)
    assert rig.kinds() == sorted([*before, "mnt"])
    rig.client.call("ACK", launch=launch)
    assert rig.kinds() == before
    launch = rig.opened("sleep", "60", namespaces=ALL)
    wait_until(lambda: rig.kinds() == sorted([*before, "anon_inode"]), "only its pidfd is left")
    rig.client.call("KILL", launch=launch)
    rig.client.event("exited", launch)
    rig.client.call("ACK", launch=launch)


def test_the_end_of_a_command_is_the_end_of_its_streams_though_a_sibling_waits_at_its_gate(rig: Rig) -> None:
    waiting, _ = rig.ready("true")
    assert rig.ran("echo", "x")[1] == b"x\n"
    assert rig.client.call("ABORT", launch=waiting, timeout_ms=5000)["ok"]


def test_the_process_is_as_was_asked(rig: Rig) -> None:
    script = "umask; pwd; cat /proc/self/oom_score_adj; ps -o sid= -p $$ | tr -d ' '; echo $$; cat /proc/self/limits"
    _, output = rig.ran("/bin/sh", "-c", script, umask=0o27, cwd="/usr", oom_score_adj=500, env=["PATH=/usr/bin:/bin"])
    umask, cwd, adjustment, session, pid, *limits = output.decode().splitlines()
    assert (umask, cwd, adjustment) == ("0027", "/usr", "500")
    assert session == pid
    files = next(line.split() for line in limits if line.startswith("Max open files"))
    assert (int(files[3]), int(files[4])) == resource.getrlimit(resource.RLIMIT_NOFILE)


def test_the_environment_is_what_was_asked_and_nothing_else(rig: Rig) -> None:
    assert rig.ran("env")[1] == b""
    assert rig.ran("env", env=["B=2", "A=1"])[1] == b"B=2\nA=1\n"


def test_sigpipe_and_all_signals_are_at_their_defaults(rig: Rig) -> None:
    _, output = rig.ran("cat", "/proc/self/status")
    status = dict(line.split(":\t", 1) for line in output.decode().splitlines())
    assert [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")] == ["0" * 16] * 3


def test_namespaces_have_their_own_proc_hostname_and_loopback(rig: Rig) -> None:
    script = "hostname; echo $$; cd /proc; echo [0-9]*; cat /sys/class/net/lo/flags /proc/net/route | wc -l; ip addr"
    before = Path("/proc/self/mounts").read_text()
    _, output = rig.ran("/bin/sh", "-c", script, namespaces=[*ALL, "net"], hostname="inside")
    hostname, pid, processes, *_ = output.decode().splitlines()
    assert (hostname, pid, processes) == ("inside", "1", "1")
    assert Path("/proc/self/mounts").read_text() == before
    assert socket.gethostname() != "inside"


@pytest.fixture
def cgroups() -> Iterator[list[Path]]:
    if V2 is None or not V1:
        pytest.skip("needs cgroup v1 controllers and a v2 tree")
    made = [tree / f"ts-spawner-{os.getpid()}" for tree in (V2, *V1)]
    for path in made:
        path.mkdir()
    yield made
    for path in made:
        wait_until(lambda path=path: not (path / "cgroup.procs").read_text(), "the end of what is inside")
        path.rmdir()


def test_the_child_is_in_its_cgroups_before_it_is_ready(rig: Rig, cgroups: list[Path]) -> None:
    v2, *v1 = cgroups
    launch, ready = rig.ready("true", cgroup_v2=str(v2), tasks_files=[str(path / "tasks") for path in v1])
    for path in cgroups:
        assert int((path / "cgroup.procs").read_text()) == ready["pid"]
    assert rig.client.call("ABORT", launch=launch, timeout_ms=5000)["ok"]


# What fails


@pytest.mark.parametrize(
    ("argv", "code"),
    [(("nowhere",), errno.ENOENT), (("/etc/passwd",), errno.EACCES), (("true", "x" * 200_000), errno.E2BIG)],
)
def test_conmon_05eff51_a_failed_exec_is_its_own_error(rig: Rig, argv: tuple[str, ...], code: int) -> None:
    launch, _ = rig.ready(*argv)
    refused(rig.client.call("OPEN", launch=launch), "exec", code)
    assert rig.peer.output(rig.token(launch)) == b""
    refused(rig.client.call("OPEN", launch=launch), "exec", code)
    entry = next(item for item in Client(rig.run).greeting["launches"] if item["launch"] == launch)
    rig.client = Client(rig.run)
    assert (entry["state"], entry["stage"], entry["errno"]) == ("failed", "exec", code)
    assert rig.client.call("ACK", launch=launch)["ok"]
    refused(rig.client.call("OPEN", launch=launch), "order", errno.ESRCH)


@pytest.mark.parametrize(
    ("fields", "stage", "code"),
    [
        ({"cwd": "/nowhere"}, "cwd", errno.ENOENT),
        ({"tasks_files": ["/sys/fs/cgroup/nowhere/tasks"]}, "cgroups", errno.ENOENT),
        ({"cgroup_v2": "/sys/fs/cgroup/nowhere"}, "clone", errno.ENOENT),
        ({"cgroup_v2": "/tmp"}, "clone", errno.EBADF),
        ({"epoch": "0" * 16}, "claim", errno.ESTALE),
        ({"stdin": True, "launch": "withoutstdin"}, "claim", errno.EPROTO),
    ],
)
def test_a_failure_tells_its_stage_and_leaves_nothing(rig: Rig, fields: Packet, stage: str, code: int) -> None:
    launch = fields.pop("launch", rig.name())
    order = rig.launch_fields(launch, "true", **fields)
    if stage == "claim":
        rig.peer.stdin.clear()
    refused(rig.client.call("LAUNCH", **order), stage, code)
    refused(rig.client.call("LAUNCH", **order), stage, code)
    if stage not in ("claim",):
        assert rig.peer.output(rig.token(launch)) == b""
    assert rig.client.call("ACK", launch=launch)["ok"]


def test_a_lowered_oom_score_without_the_right_to_is_told(rig: Rig) -> None:
    if process_may_lower_oom_score():
        pytest.skip("needs a machine where CAP_SYS_RESOURCE is missing")
    launch, number = rig.begin("true", oom_score_adj=-500)
    refused(rig.client.reply(number), "oom_score_adj", errno.EACCES)
    rig.client.call("ACK", launch=launch)


def process_may_lower_oom_score() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 24 & 1)
    return False


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"argv": []}, "argv"),
        ({"argv": ["a\0b"]}, "argv"),
        ({"argv": "true"}, "argv"),
        ({"env": [1]}, "env"),
        ({"token": "zz"}, "token"),
        ({"cwd": "tmp"}, "cwd"),
        ({"umask": -1}, "umask"),
        ({"umask": True}, "umask"),
        ({"namespaces": ["user"]}, "namespaces"),
        ({"hostname": "x"}, "hostname"),
        ({"oom_score_adj": 1001}, "oom_score_adj"),
        ({"stdin": 1}, "stdin"),
        ({"timeout_ms": "1"}, "timeout_ms"),
    ],
)
def test_an_order_that_does_not_hold_names_the_field_and_makes_nothing(rig: Rig, fields: Packet, field: str) -> None:
    reply = rig.client.call("LAUNCH", **{**rig.launch_fields("bad", "true"), **fields})
    refused(reply, "order", errno.EINVAL)
    assert reply["message"].startswith(field)
    assert (Type.CLAIM, rig.token("bad")) not in rig.peer.frames


def test_a_refused_claim_and_a_refused_bind_are_told_and_undone(rig: Rig) -> None:
    rig.peer.refuse = {Type.CLAIM: 5}
    launch, number = rig.begin("true")
    refused(rig.client.reply(number), "claim", errno.ENOENT)
    rig.client.call("ACK", launch=launch)
    rig.peer.refuse = {Type.BIND: 9}
    launch, number = rig.begin("true")
    refused(rig.client.reply(number), "bind", errno.ESTALE)
    assert rig.peer.output(rig.token(launch)) == b""
    rig.peer.wait_for(Type.EXIT, rig.token(launch))
    rig.client.call("ACK", launch=launch)
    rig.peer.refuse = {}


def test_a_death_at_the_gate_is_told_and_is_no_exit(rig: Rig) -> None:
    launch, ready = rig.ready("true")
    os.kill(ready["pid"], signal.SIGKILL)
    event = rig.client.event("died", launch)
    assert (event["stage"], event["errno"]) == ("gate", errno.ECHILD)
    refused(rig.client.call("OPEN", launch=launch), "gate", errno.ECHILD)
    rig.client.call("ACK", launch=launch)


def test_exec_truth_a_death_after_the_gate_and_before_exec_never_ran(faulty: Rig) -> None:
    arm(faulty, "child.gate", "wait")
    launch, ready = faulty.ready("true")
    number = faulty.client.order("OPEN", launch=launch)
    hit(faulty, "child.gate")
    os.kill(ready["pid"], signal.SIGKILL)
    refused(faulty.client.reply(number), "gate", errno.ECHILD)
    assert faulty.client.events == []


def test_a_gate_that_nobody_opens_is_shut_for_good(rig: Rig) -> None:
    launch, _ = rig.ready("true", gate_ms=50)
    event = rig.client.event("died", launch)
    assert (event["stage"], event["errno"]) == ("gate", errno.ETIMEDOUT)
    assert rig.peer.output(rig.token(launch)) == b""
    rig.client.call("ACK", launch=launch)


# Abort


def test_abort_at_the_gate_leaves_nothing_and_refuses_a_late_launch(rig: Rig) -> None:
    launch, _ = rig.ready("true")
    assert rig.client.call("ABORT", launch=launch, timeout_ms=5000)["ok"]
    gone(rig, launch)
    refused(rig.client.call("LAUNCH", **rig.launch_fields(launch, "true")), "aborted", errno.ECANCELED)


def test_abort_of_the_unknown_is_ok_and_refuses_a_late_launch(rig: Rig) -> None:
    assert rig.client.call("ABORT", launch="never", timeout_ms=0)["ok"]
    refused(rig.client.call("LAUNCH", **rig.launch_fields("never", "true")), "aborted", errno.ECANCELED)


def test_abort_of_what_runs_is_busy_and_of_what_has_run_acknowledges(rig: Rig) -> None:
    launch = rig.opened("sleep", "60")
    refused(rig.client.call("ABORT", launch=launch, timeout_ms=0), "abort", errno.EBUSY)
    refused(rig.client.call("ACK", launch=launch), "ack", errno.EBUSY)
    rig.client.call("KILL", launch=launch)
    rig.client.event("exited", launch)
    assert rig.client.call("ABORT", launch=launch, timeout_ms=0)["ok"]
    refused(rig.client.call("OPEN", launch=launch), "order", errno.ESRCH)
    assert rig.client.call("KILL", launch=launch)["ok"]
    assert rig.client.call("ACK", launch=launch)["ok"]


def test_abort_does_not_wait_for_the_claims_answer_and_a_late_one_is_let_go(rig: Rig) -> None:
    rig.peer.mute = {Type.CLAIM}
    launch, number = rig.begin("true")
    rig.peer.wait_for(Type.CLAIM, rig.token(launch))
    assert rig.client.call("ABORT", launch=launch, timeout_ms=5000)["ok"]
    refused(rig.client.reply(number), "aborted", errno.ECANCELED)
    rig.peer.mute = set()
    rig.peer.answer_held()
    rig.peer.wait_for(Type.LETGO, rig.token(launch))
    wait_until(lambda: rig.peer.hung_up(rig.token(launch)), "the close of what came late")


def test_descriptors_that_come_after_their_time_are_closed_at_once_and_let_go(rig: Rig) -> None:
    rig.peer.bind_ms = 0
    launch, number = rig.begin("true")
    refused(rig.client.reply(number), "claim", errno.ETIMEDOUT)
    rig.peer.wait_for(Type.LETGO, rig.token(launch))
    assert rig.peer.hung_up(rig.token(launch))
    rig.client.call("ACK", launch=launch)
    rig.peer.bind_ms = 30_000


def test_abort_does_not_wait_for_the_binds_answer(rig: Rig) -> None:
    rig.peer.mute = {Type.BIND}
    launch, number = rig.begin("true")
    rig.peer.wait_for(Type.BIND, rig.token(launch))
    assert rig.client.call("ABORT", launch=launch, timeout_ms=5000)["ok"]
    refused(rig.client.reply(number), "aborted", errno.ECANCELED)
    gone(rig, launch)
    rig.peer.mute = set()
    rig.peer.answer_held()
    rig.peer.wait_for(Type.EXIT, rig.token(launch))


def test_a_timeout_is_told_with_the_stage_it_was_at(rig: Rig) -> None:
    for kind, stage in ((Type.CLAIM, "claim"), (Type.BIND, "bind")):
        rig.peer.mute = {kind}
        launch, number = rig.begin("true", timeout_ms=50)
        refused(rig.client.reply(number), stage, errno.ETIMEDOUT)
        rig.peer.mute = set()
        rig.peer.answer_held()
        rig.client.call("ACK", launch=launch)
        wait_until(lambda launch=launch: rig.peer.hung_up(rig.token(launch)), "the end of its streams")


POINTS = ["spawner.claim.before", "spawner.claim.after", "spawner.clone.before", "spawner.clone.after",
          "spawner.bind.before", "spawner.bind.after", "spawner.ready.after", "child.stdio", "child.cgroups",
          "child.namespaces", "child.process"]  # fmt: skip


@pytest.mark.parametrize("namespaces", [[], ALL])
def test_abort_at_every_point_before_ready_leaves_nothing(faulty: Rig, namespaces: list[str]) -> None:
    before = faulty.kinds()
    for point in POINTS:
        arm(faulty, point, "wait")
        launch, number = faulty.begin("true", namespaces=namespaces)
        hit(faulty, point)
        assert faulty.client.call("ABORT", launch=launch, timeout_ms=5000)["ok"], point
        refused(faulty.client.reply(number), "aborted", errno.ECANCELED)
        if point != "spawner.claim.before":
            gone(faulty, launch)
            end = Type.LETGO if point in ("spawner.claim.after", "spawner.clone.before", "spawner.clone.after",
                                          "spawner.bind.before") else Type.EXIT  # fmt: skip
            faulty.peer.wait_for(end, faulty.token(launch))
        release(faulty, point)
        (faulty.failpoints / f"{point}.hit").unlink()  # type: ignore[operator]
    assert faulty.kinds() == before
    assert faulty.client.call("AUDIT")["findings"] == []


@pytest.mark.parametrize("namespaces", [[], ALL])
def test_an_error_at_every_point_fails_the_launch_and_leaves_nothing(faulty: Rig, namespaces: list[str]) -> None:
    before = faulty.kinds()
    for point in [*POINTS, "child.ready", "spawner.open.before", "spawner.open.after"]:
        arm(faulty, point, "errno ENOSPC")
        launch, number = faulty.begin("sleep", "60", namespaces=namespaces)
        reply = faulty.client.reply(number)
        if reply["ok"]:
            reply = faulty.client.call("OPEN", launch=launch)
        stage = point.split(".")[1]
        refused(reply, stage, errno.ENOSPC)
        release(faulty, point)
        faulty.client.call("ACK", launch=launch)
        if point != "spawner.claim.before":
            gone(faulty, launch)
    assert faulty.kinds() == before


def test_a_child_killed_at_every_point_fails_the_launch_and_leaves_nothing(faulty: Rig) -> None:
    before = faulty.kinds()
    for namespaces in ([], ALL):
        for point in ("child.stdio", "child.cgroups", "child.namespaces", "child.process", "child.ready", "child.gate"):
            arm(faulty, point, "kill")
            launch, number = faulty.begin("sleep", "60", namespaces=namespaces)
            reply = faulty.client.reply(number)
            if reply["ok"]:
                reply = faulty.client.call("OPEN", launch=launch)
            refused(reply, "gate", errno.ECHILD)
            release(faulty, point)
            faulty.client.call("ACK", launch=launch)
            gone(faulty, launch)
    assert faulty.kinds() == before


def test_a_plain_launch_reaches_every_point_that_is_listed(faulty: Rig) -> None:
    from tightship.common import failpoints

    arm(faulty, "_all", "hit")
    faulty.ran("true", namespaces=ALL)
    assert faulty.failpoints is not None
    marks = {path.name.removesuffix(".hit") for path in faulty.failpoints.glob("*.hit")}
    assert marks == {*failpoints.SPAWNER, *failpoints.CHILD}


def test_kill_ends_a_wait_before_and_after_exec_and_at_the_reap(faulty: Rig) -> None:
    for point, stage in (("spawner.open.before", "gate"), ("child.gate", "gate"), ("spawner.open.after", "")):
        arm(faulty, point, "wait")
        launch, _ = faulty.ready("sleep", "60")
        number = faulty.client.order("OPEN", launch=launch)
        hit(faulty, point)
        assert faulty.client.call("KILL", launch=launch)["ok"]
        reply = faulty.client.reply(number)
        if stage:
            refused(reply, stage, errno.ECHILD)
        else:
            assert reply["ok"]
            assert faulty.client.event("exited", launch)["status"] == {"kind": "signalled", "value": 9}
        release(faulty, point)
        assert faulty.client.call("ACK", launch=launch)["ok"]
    arm(faulty, "spawner.reap.after", "wait")
    launch = faulty.opened("true")
    hit(faulty, "spawner.reap.after")
    assert faulty.client.call("AUDIT")["ok"]
    assert faulty.client.events == []
    assert faulty.client.call("KILL", launch=launch)["ok"]
    assert faulty.client.event("exited", launch)["status"] == {"kind": "exited", "value": 0}


# Idempotence, identity, many


def test_a_repeated_launch_and_open_give_the_present_answer(rig: Rig) -> None:
    order = rig.launch_fields("again", "sleep", "60")
    first, second = rig.client.order("LAUNCH", **order), rig.client.order("LAUNCH", **order)
    one, two = rig.client.reply(first), rig.client.reply(second)
    assert one.pop("id") != two.pop("id")
    assert one == two
    first, second = rig.client.order("OPEN", launch="again"), rig.client.order("OPEN", launch="again")
    one, two = rig.client.reply(first), rig.client.reply(second)
    assert one["ok"]
    assert one["times"] == two["times"]
    assert rig.client.call("LAUNCH", **order)["ok"]
    rig.client.call("KILL", launch="again")
    rig.client.event("exited", "again")
    assert rig.client.call("OPEN", launch="again")["times"] == one["times"]
    rig.client.call("ACK", launch="again")


def test_containerd_9719_start_before_exit_each_once_with_many_in_flight(rig: Rig) -> None:
    launches = [rig.name() for _ in range(200)]
    numbers = {rig.client.order("LAUNCH", **rig.launch_fields(launch, "true")): launch for launch in launches[:16]}
    rest = iter(launches[16:])
    seen: list[str] = []
    while len(seen) < len(launches):
        number = next(iter(numbers))
        launch = numbers.pop(number)
        assert rig.client.reply(number)["ok"]
        opened = rig.client.order("OPEN", launch=launch)
        assert rig.client.reply(opened)["ok"]
        assert launch not in seen
        assert rig.client.event("exited", launch)["status"] == {"kind": "exited", "value": 0}
        seen.append(launch)
        rig.client.call("ACK", launch=launch)
        more = next(rest, None)
        if more is not None:
            numbers[rig.client.order("LAUNCH", **rig.launch_fields(more, "true"))] = more


def test_thousands_of_launches_grow_nothing(rig: Rig) -> None:
    def batch(count: int) -> int:
        for _ in range(count):
            rig.ran("true")
            for fd in [*rig.peer.bound.values(), *(fd for pipes in rig.peer.near.values() for fd in pipes.values())]:
                os.close(fd)
            rig.peer.bound.clear()
            rig.peer.near.clear()
        status = Path(f"/proc/{rig.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))

    first = batch(200)
    assert batch(200) - first <= 64


def test_a_large_order_travels_in_a_memfd_and_so_does_a_large_greeting(rig: Rig) -> None:
    big = ["x" * 1000] * 1000
    launch = rig.opened("sleep", "60", env=[f"V{i}={value}" for i, value in enumerate(big)], meta={"row": big})
    rig.client.close()
    rig.client = Client(rig.run)
    (entry,) = rig.client.greeting["launches"]
    assert entry["meta"] == {"row": big}
    rig.client.call("KILL", launch=launch)
    rig.client.event("exited", launch)
    rig.client.call("ACK", launch=launch)


def test_containerd_1430_orphans_are_reaped(rig: Rig) -> None:
    status, _ = rig.ran("/bin/sh", "-c", "for i in $(seq 300); do (true & true &) ; done")
    assert status == {"kind": "exited", "value": 0}


def test_audit_names_an_orphan_and_not_what_is_launched(rig: Rig) -> None:
    running = rig.opened("sleep", "60")
    rig.ran("/bin/sh", "-c", "sleep 61 >/dev/null 2>&1 &")
    audit = rig.client.call("AUDIT")
    (finding,) = audit["findings"]
    (orphan,) = (pid for pid in rig.children() if b"61" in Path(f"/proc/{pid}/cmdline").read_bytes())
    assert (finding["kind"], finding["what"], finding["ours"]) == ("process", f"pid {orphan} (sleep)", True)
    assert audit["examined"]["process"] == 2
    assert audit["examined"]["descriptor"] >= 6
    os.kill(orphan, signal.SIGKILL)
    rig.client.call("KILL", launch=running)
    rig.client.event("exited", running)
    rig.client.call("ACK", launch=running)


# Clients


def claimed(rig: Rig, launch: str) -> None:
    wait_until(lambda: rig.token(launch) in rig.peer.near, "its claim")


@pytest.mark.parametrize("acquire", [None, b"an Acquire"])
def test_a_prepared_launch_is_cloned_when_it_is_opened(rig: Rig, acquire: bytes | None) -> None:
    launch = f"prepared-{acquire is None}"
    more = {} if acquire is None else {"acquire": base64.b64encode(acquire).decode()}
    order = rig.launch_fields(launch, "echo", "x", prepare=True, **more)
    launching = rig.client.order("LAUNCH", **order)
    claimed(rig, launch)
    assert rig.peer.taken == ([] if acquire is None else [acquire])
    again = rig.client.order("LAUNCH", **order)
    assert not rig.client.answered(launching)
    assert rig.children() == []
    rig.client.tell("OPEN", launch=launch)
    opened = rig.client.reply(launching)
    assert opened["pid"]
    assert opened["start"]
    assert list(opened["times"].values()) == sorted(opened["times"].values())
    assert rig.client.reply(again)["times"] == opened["times"]
    rig.client.event("exited", launch)
    assert rig.peer.output(rig.token(launch)) == b"x\n"
    rig.client.call("ACK", launch=launch)
    rig.peer.taken.clear()


@pytest.mark.parametrize("end", ["abort", "time-out", "connection"])
def test_a_prepared_launch_that_nobody_opens_leaves_nothing(rig: Rig, end: str) -> None:
    launch = f"never-{end}"
    order = rig.launch_fields(launch, "echo", "x", prepare=True, timeout_ms=200 if end == "time-out" else 5000)
    launching = rig.client.order("LAUNCH", **order)
    claimed(rig, launch)
    if end == "abort":
        assert rig.client.call("ABORT", launch=launch, timeout_ms=5000)["ok"]
        refused(rig.client.reply(launching), "aborted", errno.ECANCELED)
    elif end == "time-out":
        refused(rig.client.reply(launching), "clone", errno.ETIMEDOUT)
        rig.client.call("ACK", launch=launch)
    else:
        rig.client.close()
        rig.client = Client(rig.run)
        assert rig.client.greeting["launches"] == []
    gone(rig, launch)


def test_an_order_without_a_number_is_not_answered(rig: Rig) -> None:
    rig.client.tell("NONSENSE")
    rig.client.tell("KILL", launch="unknown")
    assert rig.client.call("KILL", launch="unknown")["ok"]
    assert not rig.client.events


def test_open_may_come_before_ready(faulty: Rig) -> None:
    arm(faulty, "spawner.claim.before", "wait")
    order = faulty.launch_fields("early", "echo", "x")
    launching = faulty.client.order("LAUNCH", **order)
    opening = faulty.client.order("OPEN", launch="early")
    hit(faulty, "spawner.claim.before")
    release(faulty, "spawner.claim.before")
    assert faulty.client.reply(launching)["ok"]
    assert faulty.client.reply(opening)["times"]["exec"]
    faulty.client.event("exited", "early")
    faulty.client.call("ACK", launch="early")


@pytest.mark.parametrize("end", ["abort", "connection"])
def test_a_gate_ordered_open_stays_shut_when_the_launch_ends_before_it_is_ready(faulty: Rig, end: str) -> None:
    arm(faulty, "spawner.bind.before", "wait")
    order = faulty.launch_fields("early", "echo", "x")
    launching = faulty.client.order("LAUNCH", **order)
    opening = faulty.client.order("OPEN", launch="early")
    hit(faulty, "spawner.bind.before")
    if end == "abort":
        assert faulty.client.call("ABORT", launch="early", timeout_ms=5000)["ok"]
        refused(faulty.client.reply(launching), "aborted", errno.ECANCELED)
        refused(faulty.client.reply(opening), "aborted", errno.ECANCELED)
    else:
        faulty.client.close()
        faulty.client = Client(faulty.run)
        assert faulty.client.greeting["launches"] == []
    release(faulty, "spawner.bind.before")
    gone(faulty, "early")
    assert faulty.peer.output(faulty.token("early")) == b""


def test_a_new_client_ends_the_old_one_and_its_unopened_launches(rig: Rig) -> None:
    old = rig.client
    waiting, _ = rig.ready("true")
    running = rig.opened("sleep", "60")
    rig.client = Client(rig.run)
    (entry,) = rig.client.greeting["launches"]
    assert (entry["launch"], entry["state"], entry["meta"]) == (running, "opened", {"about": running})
    gone(rig, waiting, others=1)
    assert old.sock.recv(1) == b""
    refused(rig.client.call("LAUNCH", **rig.launch_fields(waiting, "true")), "aborted", errno.ECANCELED)
    rig.client.call("KILL", launch=running)
    rig.client.event("exited", running)
    rig.client.call("ACK", launch=running)


def test_the_end_of_a_client_shuts_its_gates_and_keeps_the_exits(rig: Rig) -> None:
    waiting, _ = rig.ready("true")
    running = rig.opened("/bin/sh", "-c", "sleep 0.2; exit 5")
    rig.client.close()
    wait_until(lambda: rig.children() == [], "the end of both")
    rig.client = Client(rig.run)
    (entry,) = rig.client.greeting["launches"]
    assert (entry["launch"], entry["state"], entry["status"]) == (running, "exited", {"kind": "exited", "value": 5})
    assert entry["time"] > 0
    gone(rig, waiting)
    rig.client.call("ACK", launch=running)


def test_a_client_that_ends_while_its_launch_waits_leaves_nothing(faulty: Rig) -> None:
    for point in ("spawner.clone.after", "child.process", "spawner.open.before"):
        arm(faulty, point, "wait")
        launch, number = faulty.begin("true")
        if point == "spawner.open.before":
            assert faulty.client.reply(number)["ok"]
            faulty.client.order("OPEN", launch=launch)
        hit(faulty, point)
        faulty.client.close()
        wait_until(lambda: faulty.children() == [], "the end of the child")
        faulty.client = Client(faulty.run)
        assert faulty.client.greeting["launches"] == []
        release(faulty, point)


def test_versions_are_agreed_or_refused(rig: Rig) -> None:
    rig.client.close()
    newer = orders.VERSION + 1
    for version, lowest in ((newer + 5, newer), (newer, newer)):
        client = Client(rig.run, hello=False)
        refused(client.call("HELLO", version=version, lowest=lowest), "hello", errno.EPROTONOSUPPORT)
        client.close()
    for ours, agreed in ((newer, orders.VERSION), (1, 1)):
        client = Client(rig.run, hello=False)
        greeting = client.call("HELLO", version=ours, lowest=1)
        assert (greeting["ok"], greeting["version"], greeting["pid"]) == (True, agreed, rig.process.pid)
        assert greeting["epoch"] == spawnerkit.EPOCH
        client.close()
    rig.client = Client(rig.run)


@pytest.mark.parametrize("packet", [{"id": 1, "op": "AUDIT"}, {"id": 0, "op": "HELLO"}, {"op": "HELLO"}])
def test_what_is_no_greeting_ends_the_connection(rig: Rig, packet: Packet) -> None:
    client = Client(rig.run, hello=False)
    send_packet(client.sock, packet)
    assert client.sock.recv(1) == b""
    client.close()
    refused(rig.client.call("NONSENSE"), "order", errno.ENOSYS)


def test_noise_ends_the_connection_that_made_it(rig: Rig) -> None:
    for data in (b"{", json.dumps({"memfd": 5}).encode(), b"x" * 65_000):
        rig.client.sock.send(data)
        assert rig.client.sock.recv(1) == b""
        rig.client = Client(rig.run)


def test_a_connection_without_greeting_ends_by_itself_and_many_are_refused(rig: Rig) -> None:
    silent = [Client(rig.run, hello=False) for _ in range(20)]
    assert all(client.sock.recv(1) == b"" for client in silent)
    for client in silent:
        client.close()


def test_a_client_that_reads_nothing_is_ended_and_nothing_is_lost(rig: Rig) -> None:
    running = rig.opened("sleep", "60")
    rig.client.sock.settimeout(1)
    with pytest.raises(OSError):
        for number in range(20_000):
            send_packet(rig.client.sock, {"id": number + 1000, "op": "KILL", "launch": "nobody"})
    rig.client.close()
    rig.client = Client(rig.run)
    assert [entry["launch"] for entry in rig.client.greeting["launches"]] == [running]
    rig.client.call("KILL", launch=running)
    rig.client.event("exited", running)
    rig.client.call("ACK", launch=running)


# The switchboard goes and comes


def test_exits_are_told_again_to_a_switchboard_that_did_not_answer(rig: Rig) -> None:
    rig.peer.mute = {Type.EXIT}
    launch = rig.opened("/bin/sh", "-c", "exit 4")
    rig.client.event("exited", launch)
    rig.client.call("ACK", launch=launch)
    rig.peer.wait_for(Type.EXIT, rig.token(launch))
    rig.peer.mute = set()
    rig.peer.held.clear()
    rig.peer.drop()
    wait_until(lambda: rig.token(launch) in rig.peer.exits, "EXIT on the next connection")
    assert rig.peer.exits[rig.token(launch)] == (ExitKind.EXITED, 4)


def test_the_end_of_the_claims_connection_fails_what_is_unopened(rig: Rig) -> None:
    launch, _ = rig.ready("true")
    running = rig.opened("sleep", "60")
    connections = rig.peer.connections
    rig.peer.drop()
    wait_until(lambda: rig.peer.connections > connections, "a new connection")
    refused(rig.client.call("OPEN", launch=launch), "bind", errno.ECONNRESET)
    rig.client.call("ACK", launch=launch)
    gone(rig, launch, others=1)
    rig.peer.mute = {Type.CLAIM}
    launch, number = rig.begin("true")
    rig.peer.wait_for(Type.CLAIM, rig.token(launch))
    rig.peer.drop()
    refused(rig.client.reply(number), "claim", errno.ECONNRESET)
    rig.client.call("ACK", launch=launch)
    rig.peer.mute = set()
    rig.peer.held.clear()
    rig.client.call("KILL", launch=running)
    assert rig.client.event("exited", running)["status"]["kind"] == "signalled"
    rig.client.call("ACK", launch=running)
    rig.ran("true")


def test_a_launch_waits_for_a_switchboard_that_is_coming_and_gives_up_on_one_that_is_not(rig: Rig) -> None:
    rig.peer.close()
    os.unlink(rig.run.fd_sock)
    launch, number = rig.begin("true")
    began = time.monotonic()
    refused(rig.client.reply(number), "claim", errno.ECONNREFUSED)
    assert time.monotonic() - began >= 1.5
    rig.client.call("ACK", launch=launch)
    launch, number = rig.begin("true")
    rig.peer = spawnerkit.Peer(rig.run)
    assert rig.client.reply(number)["ok"]
    rig.client.call("ABORT", launch=launch, timeout_ms=5000)


# Adoption


def test_what_an_earlier_spawner_left_is_adopted_by_its_identity(rig: Rig) -> None:
    process.set_child_subreaper()
    boot, pidns = process.boot_id(), process.pid_namespace()
    pid = os.fork()
    if pid == 0:
        try:
            os.execv("/bin/sleep", ["sleep", "60"])
        finally:
            os._exit(1)
    wait_until(lambda: (stat := process.stat(pid)) is not None and stat.execed, "exec")
    stat = process.stat(pid)
    assert stat is not None
    identity = {"launch": "old", "pid": pid, "start": stat.start, "boot": boot, "pidns": pidns, "meta": {"a": 1}}
    for wrong in ({"start": stat.start + 1}, {"boot": "other"}, {"pidns": 1}, {"pid": 4_000_000}):
        assert not rig.client.call("ADOPT", **{**identity, **wrong})["alive"]
    reply = rig.client.call("ADOPT", **identity)
    assert (reply["alive"], reply["execed"]) == (True, True)
    assert rig.client.call("ADOPT", **identity)["alive"]
    assert rig.client.call("OPEN", launch="old")["ok"]
    refused(rig.client.call("ABORT", launch="old", timeout_ms=0), "abort", errno.EBUSY)
    assert rig.client.call("SIGNAL", launch="old", signal=int(signal.SIGTERM))["ok"]
    os.waitpid(pid, 0)
    event = rig.client.event("exited", "old")
    # The kernel tells whoever has a pidfd since Linux 6.15.
    assert event["status"] in ({"kind": "signalled", "value": 15}, {"kind": "unknown", "value": 0})
    rig.client.close()
    rig.client = Client(rig.run)
    assert [(entry["launch"], entry["state"]) for entry in rig.client.greeting["launches"]] == [("old", "exited")]
    assert rig.client.call("ACK", launch="old")["ok"]


def test_what_never_reached_its_command_is_killed_instead_of_adopted(rig: Rig) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(spawnerkit.PATIENCE_S)
        os._exit(0)
    stat = process.stat(pid)
    assert stat is not None
    number = rig.client.order(
        "ADOPT",
        launch="old",
        pid=pid,
        start=stat.start,
        boot=process.boot_id(),
        pidns=process.pid_namespace(),
        meta=None,
    )
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    reply = rig.client.reply(number)
    assert (reply["ok"], reply["alive"], reply["execed"]) == (True, False, False)
    assert rig.client.call("ACK", launch="old")["ok"]


# The process itself


def test_a_second_spawner_on_the_directory_is_refused(rig: Rig) -> None:
    second = rig.start()
    assert second.wait(spawnerkit.PATIENCE_S) == 78
    assert rig.client.call("AUDIT")["ok"]


def test_its_socket_is_for_its_own_user_alone(rig: Rig) -> None:
    assert rig.run.spawner_sock.stat().st_mode & 0o777 == 0o600
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    rig.run.spawner_sock.chmod(0o666)
    rig.directory.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        try:
            os._exit(0 if Client(rig.run, hello=False).sock.recv(1) == b"" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    rig.run.spawner_sock.chmod(0o600)


def test_contained_processes_outlive_it_and_unopened_ones_do_not(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with spawnerkit.rig() as rig:
            process.set_child_subreaper()
            waiting, ready = rig.ready("true")
            running = rig.opened("sleep", "60")
            pids = rig.children()
            rig.process.send_signal(number)
            assert rig.process.wait(spawnerkit.PATIENCE_S) == (0 if number == signal.SIGTERM else -9)
            wait_until(lambda rig=rig, waiting=waiting: rig.peer.hung_up(rig.token(waiting)), "the shut gate's end")
            (survivor,) = [pid for pid in pids if pid != ready["pid"]]
            assert b"sleep" in Path(f"/proc/{survivor}/cmdline").read_bytes()
            assert not rig.peer.hung_up(rig.token(running))
            os.kill(survivor, signal.SIGKILL)
            assert rig.run.spawner_sock.exists() == (number == signal.SIGKILL)
            for pid in pids:
                try:
                    os.waitpid(pid, 0)
                except ChildProcessError:
                    pass


SERVICE = """
trap 'echo term >> "$0"; exit 0' TERM
echo $$ $PPID >> "$0"
for i in $(seq 3 200); do [ -e /proc/$$/fd/$i ] && echo "inherited $i" >> "$0"; done
[ "$(wc -l < "$0")" -lt 3 ] && exit 1
while :; do sleep 0.01; done
"""


def test_the_containerizer_is_started_again_and_ends_with_the_spawner(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with spawnerkit.rig(None, "--containerizer", "/bin/sh", "-c", SERVICE, "--", str(log)) as rig:
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 3, "the third start")
        assert {line.split()[1] for line in log.read_text().splitlines()} == {str(rig.process.pid)}
        assert rig.client.call("AUDIT")["findings"] == []
        rig.ran("true")
        rig.process.send_signal(signal.SIGTERM)
        assert rig.process.wait(spawnerkit.PATIENCE_S) == 0
        assert log.read_text().endswith("term\n")


def test_a_containerizer_that_can_not_work_ends_the_spawner(tmp_path: Path) -> None:
    with spawnerkit.rig(None, "--containerizer", "/bin/sh", "-c", "sleep 0.3; exit 78") as rig:
        assert rig.process.wait(spawnerkit.PATIENCE_S) == 78


def test_the_containerizer_dies_with_a_killed_spawner(tmp_path: Path) -> None:
    with spawnerkit.rig(None, "--containerizer", "sleep", "60") as rig:
        (pid,) = children(rig.process.pid)
        pidfd = os.pidfd_open(pid)
        rig.process.kill()
        rig.process.wait()
        wait_until(lambda: (stat := process.stat(pid)) is None or stat.state == "Z", "its end")
        os.close(pidfd)
