"""Services that die or meet a second one: what lives is adopted with its exit, what was attached ends."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from tests.harness.calls import FULL_SPEC, code, fresh_name, info
from tests.harness.pair import ROOT, SERVICES, Pair, Service
from tests.harness.waiting import Answer, until
from tightship.switchboard.pumps import unread
from tightship.v1 import containerizer_pb2 as cpb
from tightship.v1 import switchboard_pb2 as spb


@pytest.fixture(autouse=True)
def _ready(faulty: Pair) -> Iterator[None]:
    yield
    faulty.points.clear()
    faulty.await_ready()
    assert not faulty.calls.living(), "a test left containers"


def _on_signal(flag: Path, code: int) -> list[str]:
    """A command that exits with `code` when the file `flag` appears."""
    return ["/bin/sh", "-c", f"while [ ! -e {flag} ]; do sleep 0.02; done; echo seen; exit {code}"]


# Services that speak the protocol version before this one.
_OLDER_SPAWNER = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "services")!r})
from tightship.spawner import orders
orders.VERSION = 1
runpy.run_path({str(ROOT / "services/tightship/spawner/__main__.py")!r}, run_name="__main__")
"""
_OLDER_SWITCHBOARD = """
# as with -m tightship.switchboard
import runpy
from tightship.kernel import fdframes
from tightship.switchboard import session
fdframes.VERSION = 1
put = session.Session._put
def older(self, response):
    if response.HasField("welcome"):
        response.welcome.ClearField("session")
    put(self, response)
session.Session._put = older
runpy.run_module("tightship.switchboard", run_name="__main__")
"""


@pytest.mark.parametrize("older", ["spawner", "switchboard", "both"])
def test_an_older_peer_is_served(older: str, tmp_path: Path) -> None:
    pair = Pair()
    if older != "switchboard":
        pair.commands["spawner"][3:4] = ["-c", _OLDER_SPAWNER]
    if older != "spawner":
        pair.commands["switchboard"][1:3] = ["-c", _OLDER_SWITCHBOARD]
    with pair:
        calls = pair.calls
        before = pair.census()
        assert calls.run(["/bin/sh", "-c", "echo hi; exit 3"], spec=FULL_SPEC).code == 3
        kept = calls.detach(_on_signal(tmp_path / "go", 7), fresh_name(), FULL_SPEC)
        pair.kill("containerizer")
        pair.await_ready()
        (tmp_path / "go").touch()
        assert calls.wait(kept.id).exit_code == 7
        assert calls.output(kept.lease_id)[1] == b"seen\n"
        attached = calls.launch(["/bin/sleep", "600"], spec=FULL_SPEC)
        attached.started()
        attached.cancel()
        pair.settle(before)
        if older != "switchboard":
            for spec in ("security { user: 'nobody' }", "filesystem { fd_limit: 9 }"):
                error = calls.launch(["/bin/true"], spec=spec).error()
                assert code(error) is grpc.StatusCode.UNIMPLEMENTED, "it would run without"
                assert info(error).metadata["field"] == spec.split()[0]
            pair.settle(before)


@pytest.mark.parametrize("spec", ["", FULL_SPEC], ids=["plain", "namespaces"])
def test_nsjail_69_containers_outlive_the_containerizer(faulty: Pair, tmp_path: Path, spec: str) -> None:
    calls = faulty.calls
    before = faulty.census()
    early = calls.detach(_on_signal(tmp_path / "early", 7), fresh_name(), spec, labels={"k": "v"})
    late = calls.detach(_on_signal(tmp_path / "late", 8), fresh_name(), spec)
    killed = calls.detach(["/bin/sleep", "600"], fresh_name(), spec)
    calls.create(created := fresh_name(), "memory { limit: 67108864 }")
    faulty.kill("containerizer")
    (tmp_path / "early").touch()
    faulty.await_ready()

    assert calls.wait(early.id).exit_code == 7
    assert calls.wait(early.id).labels == {"k": "v"}
    living = calls.living()
    assert living[late.name].state == cpb.Container.RUNNING
    assert living[late.name].pid == late.pid
    assert living[created].state == cpb.Container.CREATED
    assert living[created].spec.memory.limit == 67108864
    (tmp_path / "late").touch()
    assert calls.wait(late.id).exit_code == 8
    assert calls.output(late.lease_id)[1] == b"seen\n", "its streams were never touched"
    calls.containerizer.Kill(cpb.KillRequest(name=killed.name))
    record = calls.wait(killed.id)
    assert (record.reason, record.signal) == (cpb.Record.SIGNALLED, signal.SIGKILL)
    calls.destroy(created)
    faulty.settle(before)


@pytest.mark.timeout(180)
def test_fifty_containers_outlive_the_containerizer_with_their_exits(faulty: Pair, tmp_path: Path) -> None:
    calls = faulty.calls
    before = faulty.census()
    early, late = tmp_path / "early", tmp_path / "late"
    launched = {}
    for fifo, codes in ((early, range(10, 35)), (late, range(40, 65))):
        os.mkfifo(fifo)
        for number in codes:
            script = f"read -r line < {fifo} && exit {number}"
            launched[number] = calls.detach(["/bin/sh", "-c", script], fresh_name("fifty"))
    pid = faulty.pid("containerizer")
    faulty.kill("containerizer")
    _let_go(early, 25)  # some of them while nobody looks
    faulty.await_ready()
    assert faulty.pid("containerizer") != pid
    living = calls.living()
    assert {living[launched[number].name].pid for number in range(40, 65)} == {
        launched[number].pid for number in range(40, 65)
    }
    _let_go(late, 25)
    for number, started in launched.items():
        record = calls.wait(started.id)
        assert (record.reason, record.exit_code) == (cpb.Record.EXITED, number)
    faulty.settle(before)


def _let_go(fifo: Path, readers: int) -> None:
    fd = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.write(fd, b"\n" * readers)  # a byte each: they can not mix
        until(lambda: unread(fd) == 0, "all have read their line")
    finally:
        os.close(fd)


def test_an_attached_launch_ends_with_the_containerizer_it_was_attached_to(faulty: Pair) -> None:
    before = faulty.census()
    launching = faulty.calls.launch(["/bin/sleep", "600"], name := fresh_name())
    started = launching.started()
    faulty.kill("containerizer")
    assert code(launching.error()) == grpc.StatusCode.UNAVAILABLE
    faulty.await_ready()
    faulty.settle(before)
    record = faulty.calls.wait(started.id)
    assert record.reason == cpb.Record.CANCELLED
    assert faulty.calls.run(["/bin/true"], name).code == 0


def test_a_launch_with_a_request_id_is_joined_after_a_restart(faulty: Pair, tmp_path: Path) -> None:
    before = faulty.census()
    name, command = fresh_name(), _on_signal(tmp_path / "flag", 9)
    first = faulty.calls.launch(command, name, request_id="again")
    started = first.started()
    faulty.kill("containerizer")
    first.error()
    until(lambda: _answers(faulty), "the containerizer is back")
    second = faulty.calls.launch(command, name, request_id="again", timeout=60)
    again = second.started()
    assert again.joined
    assert (again.id, again.pid, again.lease_id) == (started.id, started.pid, started.lease_id)
    (tmp_path / "flag").touch()
    assert second.exited().exit_code == 9
    second.gone()
    faulty.settle(before)


def test_mesos_6214_a_request_id_of_another_request_is_refused(faulty: Pair) -> None:
    started = faulty.calls.detach(["/bin/sleep", "600"], fresh_name(), request_id="one")
    error = faulty.calls.launch(["/bin/sleep", "601"], started.name, request_id="one", detach=True).error()
    assert code(error) == grpc.StatusCode.ALREADY_EXISTS
    joined = faulty.calls.detach(["/bin/sleep", "600"], started.name, request_id="one")
    assert (joined.id, joined.joined) == (started.id, True)
    faulty.calls.destroy(started.name)


def test_moby_21933_containers_outlive_the_spawner(faulty: Pair, tmp_path: Path) -> None:
    calls = faulty.calls
    before = faulty.census()
    late = calls.detach(_on_signal(tmp_path / "late", 8), fresh_name())
    ended = calls.detach(["/bin/sleep", "600"], fresh_name(), FULL_SPEC)
    faulty.kill("spawner")
    faulty.await_ready()
    assert calls.living()[late.name].pid == late.pid
    assert calls.destroy(ended.name).outcome == cpb.Cleanup.CLEAN
    (tmp_path / "late").touch()
    record = calls.wait(late.id)
    if record.HasField("exit_code"):
        assert record.exit_code == 8
    else:
        assert record.reason == cpb.Record.UNKNOWN, "Linux before 6.15 tells nobody but the parent"
    assert calls.output(late.lease_id)[1] == b"seen\n"
    faulty.settle(before)


def test_containers_outlive_the_switchboard_without_their_streams(faulty: Pair, tmp_path: Path) -> None:
    calls = faulty.calls
    before = faulty.census()
    quiet = calls.detach(_on_signal(tmp_path / "never", 0), fresh_name())
    flagged = calls.detach(["/bin/sh", "-c", f"echo early; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 6"],
                           fresh_name())  # fmt: skip
    until(lambda: b"early\n" in calls.attach(flagged.lease_id, follow=False)[0][1], "its output is there")
    faulty.kill("switchboard")
    faulty.await_ready()
    assert {quiet.name, flagged.name} <= calls.living().keys()
    (tmp_path / "go").touch()
    assert calls.wait(flagged.id).exit_code == 6
    lease = calls.lease(flagged.lease_id)
    assert lease.state == spb.Lease.CLOSED
    assert calls.attach(flagged.lease_id)[0][1] == b"early\n", "what was written before is kept"
    assert calls.destroy(quiet.name).outcome == cpb.Cleanup.CLEAN
    faulty.settle(before)


@pytest.mark.timeout(180)
def test_nsjail_69_sigkill_of_everything_leaves_nothing(faulty: Pair) -> None:
    before = faulty.census()
    for _ in range(3):
        attached = [faulty.calls.launch(["/bin/sleep", "600"], spec=FULL_SPEC) for _ in range(3)]
        for launching in attached[:2]:
            launching.started()
        faulty.calls.create(created := fresh_name())
        pids = faulty.pids()
        for service in SERVICES:
            pidfd = os.pidfd_open(pids[service])
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        for launching in attached:
            launching.error()
        until(lambda: _answers(faulty), "the pair is back", 30)
        faulty.await_ready(30)
        faulty.calls.destroy(created)
        faulty.settle(before, 20)


@pytest.mark.parametrize("service", ["spawner", "switchboard"])
def test_a_second_service_on_the_directory_is_refused(faulty: Pair, service: Service) -> None:
    commands = {
        "spawner": ["-I", "-S", str(ROOT / "services/tightship/spawner/__main__.py")],
        "switchboard": ["-m", f"tightship.{service}"],
    }
    before = faulty.census()
    with faulty.unchanged():
        second = subprocess.run(
            [sys.executable, *commands[service], "--run-dir", str(faulty.run_dir)],
            check=False, capture_output=True, text=True, timeout=30, env=faulty.environment,
        )  # fmt: skip
    assert second.returncode != 0
    assert str(faulty.run_dir) in second.stderr
    assert str(faulty.pid(service)) in second.stderr, "it says who has it"
    assert faulty.calls.run(["/bin/echo", "hi"]).stdout == b"hi\n"
    faulty.settle(before)


@pytest.mark.parametrize("service", ["spawner", "switchboard"])
def test_an_orderly_stop_is_bounded(faulty: Pair, service: Service) -> None:
    calls = faulty.calls
    attached = calls.launch(["/bin/sleep", "600"], fresh_name())
    attached.started()
    detached = calls.detach(["/bin/sleep", "600"], fresh_name())
    following = Answer(lambda: calls.attach(detached.lease_id))
    took = faulty.stop(service)
    if service == "switchboard":
        assert took < 8, "5 s and what a busy machine adds"
        assert code(following.error()) == grpc.StatusCode.UNAVAILABLE
    faulty.restart(service)
    faulty.await_ready()
    assert detached.name in calls.living()
    if service == "spawner":
        record = attached.exited()
        assert (record.reason, record.cancel_reason) == (cpb.Record.CANCELLED, "shutdown")
        attached.gone()
    else:
        attached.cancel()
    calls.destroy(detached.name)
    following.arrived()
    until(lambda: not calls.living(), "the attached one is gone")


@pytest.mark.parametrize("how", ["deleted", "empty", "records"])
def test_a_lost_journal_is_rebuilt_from_directories_and_launches(faulty: Pair, tmp_path: Path, how: str) -> None:
    calls = faulty.calls
    before = faulty.census()
    calls.create(above := fresh_name())
    calls.create(inner := f"{above}/inner")
    running = calls.detach(_on_signal(tmp_path / "flag", 5), f"{inner}/run")
    limited = calls.detach(["/bin/sleep", "600"], f"{above}/limited", max_lifetime=timedelta(seconds=3))
    (journal,) = faulty.run_dir.glob("journal-*.db")
    spawner = os.pidfd_open(faulty.pid("spawner"))
    signal.pidfd_send_signal(spawner, signal.SIGSTOP)  # so that the next one waits
    containerizer = faulty.pid("containerizer")
    os.kill(containerizer, signal.SIGKILL)
    until(lambda: _state(containerizer) in "ZX", "the containerizer has ended")
    _damage(journal, how)
    signal.pidfd_send_signal(spawner, signal.SIGCONT)
    os.close(spawner)
    until(lambda: _answers(faulty), "the containerizer is back")
    faulty.await_ready()

    living = calls.living()
    assert {above, inner, running.name} <= living.keys()
    assert living[running.name].pid == running.pid
    assert calls.run(["/bin/true"], f"{above}/new").code == 0
    assert calls.wait(limited.id).cancel_reason == "max_lifetime"
    (tmp_path / "flag").touch()
    assert calls.wait(running.id).exit_code == 5
    calls.destroy(above)
    calls.create(above)
    calls.destroy(above)
    faulty.settle(before)


def _damage(journal: Path, how: str) -> None:
    if how == "records":
        db = sqlite3.connect(journal)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'records'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
        db.close()
        with journal.open("r+b") as file:
            file.seek((page - 1) * size)
            file.write(b"\xa5" * size)
        return
    for path in journal.parent.glob(f"{journal.name}*"):
        if how == "deleted":
            path.unlink()
        else:
            os.truncate(path, 0)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _answers(pair: Pair) -> bool:
    try:
        pair.calls.touch()
    except grpc.RpcError:
        return False
    return True
