"""The supervisor with services that are shell commands: restarts, configuration errors, orphans, the end, the log."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tightship.kernel.process import stat
from tightship.supervisor import __main__ as supervisor

PROGRAM = """
import sys
from pathlib import Path
from tightship.common.rundir import RunDir
from tightship.kernel import process
from tightship.supervisor import __main__ as supervisor
from tightship.supervisor.services import Service
services = zip(("spawner", "switchboard"), sys.argv[2:])
supervisor.pair = lambda run: tuple(Service(name, ["/bin/sh", "-c", command]) for name, command in services)
supervisor._SPAWNER_STOP_S = supervisor._SWITCHBOARD_STOP_S = 1.0
process.set_child_subreaper()
sys.exit(supervisor.Supervisor(RunDir.open(sys.argv[1]), None, None, None).serve())
"""


def start(directory: Path, spawner: str, switchboard: str = "exec sleep 100") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(directory), spawner, switchboard], stderr=subprocess.PIPE
    )


def until(directory: Path, name: str, count: int = 1) -> list[str]:
    """The words in the file, when there are as many."""
    end = time.monotonic() + 20
    while True:
        words = (directory / name).read_text().split() if (directory / name).exists() else []
        if len(words) >= count:
            return words
        assert time.monotonic() < end, f"{name}: {words}"
        time.sleep(0.02)


def end(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=20)
    return process.returncode, told.decode()


def test_what_dies_is_started_again_with_backoff(tmp_path: Path) -> None:
    process = start(tmp_path, f"date +%s.%N >> {tmp_path}/starts; exit 3")
    starts = [float(word) for word in until(tmp_path, "starts", 4)]
    status, told = end(process)
    assert status == 0
    assert "the spawner exited with status 3; starting it again" in told
    gaps = [later - before for before, later in itertools.pairwise(starts)]
    assert all(gap >= least for gap, least in zip(gaps, (0.1, 0.2, 0.4), strict=False))


def test_a_configuration_error_ends_all(tmp_path: Path) -> None:
    process = start(
        tmp_path, "exit 78", f"trap 'echo ended > {tmp_path}/ended; exit' TERM; while :; do sleep 0.02; done"
    )
    _, told = process.communicate(timeout=20)
    assert process.returncode == 78
    assert "can't run as it is configured" in told.decode()


def test_the_spawner_ends_before_the_switchboard(tmp_path: Path) -> None:
    def service(name: str) -> str:
        trap = f"trap 'sleep 0.2; echo {name} >> {tmp_path}/ends; exit' TERM"
        return f"{trap}; echo x >> {tmp_path}/up; while :; do sleep 0.02; done"

    process = start(tmp_path, service("spawner"), service("switchboard"))
    until(tmp_path, "up", 2)
    assert end(process)[0] == 0
    assert until(tmp_path, "ends", 2) == ["spawner", "switchboard"]


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.02; done")
    pid = int(until(tmp_path, "pid")[0])
    status, told = end(process)
    assert status == 0
    assert "the spawner did not end within" in told
    assert not Path(f"/proc/{pid}").exists()


def test_orphans_are_reaped_and_services_die_with_it(tmp_path: Path) -> None:
    process = start(
        tmp_path, f"(sh -c 'echo $$ > {tmp_path}/orphan; exit' &); echo $$ > {tmp_path}/pid; exec sleep 100"
    )
    service, orphan = (int(until(tmp_path, name)[0]) for name in ("pid", "orphan"))
    gone(orphan)
    process.kill()
    process.communicate()
    gone(service, zombie=True)  # whoever reaps it now


def gone(pid: int, *, zombie: bool = False) -> None:
    """Until there is no such process, or only its zombie."""
    end = time.monotonic() + 20
    while (found := stat(pid)) is not None and not (zombie and found.state == "Z"):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_log_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LOG_MAX", 100)
    log = tmp_path / "service.log"
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(fd, b"a" * 99)
        supervisor._cut(log)
        assert log.stat().st_size == 99
        os.write(fd, b"b" * 99)
        supervisor._cut(log)
        os.write(fd, b"c")  # a service goes on with the same description
    finally:
        os.close(fd)
    assert log.read_bytes() == b"c"
    assert (tmp_path / "service.log.1").read_bytes() == b"a" + b"b" * 99
