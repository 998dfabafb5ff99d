"""Failpoints: what an armed file does to the process that reaches it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.harness.points import Failpoints
from tightship.common import failpoints


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failpoints:
    monkeypatch.setattr(failpoints, "DIRECTORY", str(tmp_path / "fp"))
    return Failpoints(tmp_path / "fp")


def test_off_without_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "DIRECTORY", None)
    assert failpoints.reach("a.point") is None


def test_a_point_that_is_not_armed_leaves_no_mark(points: Failpoints) -> None:
    assert failpoints.reach("a.point") is None
    assert points.hits() == set()


@pytest.mark.parametrize(("action", "number"), [("errno EIO", errno.EIO), ("errno 28", errno.ENOSPC)])
def test_errno(points: Failpoints, action: str, number: int) -> None:
    points.arm("a.point", action)
    with pytest.raises(OSError, match=r"failpoint a\.point") as caught:
        failpoints.reach("a.point")
    assert caught.value.errno == number
    assert points.hit_by("a.point") == [os.getpid()]


def test_hit_marks_and_goes_on(points: Failpoints) -> None:
    points.arm("a.point", "hit")
    assert failpoints.reach("a.point") is None
    assert failpoints.reach("a.point") is None
    assert points.hit_by("a.point") == [os.getpid()] * 2


def test_all_marks_every_point(points: Failpoints) -> None:
    points.arm("_all", "hit")
    failpoints.reach("one")
    failpoints.reach("two")
    assert points.hits() == {"one", "two"}


def test_all_does_not_hide_an_armed_point(points: Failpoints) -> None:
    points.arm("_all", "hit")
    points.arm("one", "errno EIO")
    with pytest.raises(OSError, match="failpoint one"):
        failpoints.reach("one")


def test_a_wait_ends_when_the_file_is_removed(points: Failpoints) -> None:
    points.arm("a.point", "wait")
    thread = threading.Thread(target=failpoints.block, args=("a.point",), daemon=True)
    thread.start()
    points.await_hit("a.point")
    thread.join(0.05)
    assert thread.is_alive()
    points.disarm("a.point")
    thread.join(5)
    assert not thread.is_alive()


def test_a_wait_ends_with_what_it_delays(points: Failpoints) -> None:
    points.arm("a.point", "wait")
    over = threading.Event()
    thread = threading.Thread(target=failpoints.block, args=("a.point", over.is_set), daemon=True)
    thread.start()
    points.await_hit("a.point")
    over.set()
    thread.join(5)
    assert not thread.is_alive()


async def test_hold_leaves_the_loop_free(points: Failpoints) -> None:
    points.arm("a.point", "wait")
    held = asyncio.create_task(failpoints.hold("a.point"))
    until = time.monotonic() + 5
    while not points.was_hit("a.point") and time.monotonic() < until:
        await asyncio.sleep(0.001)
    assert not held.done()
    points.disarm("a.point")
    await asyncio.wait_for(held, 5)


def test_kill(points: Failpoints) -> None:
    points.arm("a.point", "kill")
    pid = os.fork()
    if pid == 0:
        failpoints.reach("a.point")
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert points.hit_by("a.point") == [pid]


def test_names_are_unique_and_say_their_process() -> None:
    for process, names in (
        ("spawner", failpoints.SPAWNER),
        ("child", failpoints.CHILD),
        ("switchboard", failpoints.SWITCHBOARD),
    ):
        assert len(set(names)) == len(names)
        assert all(name.startswith(f"{process}.") for name in names)
    assert set(failpoints.SPAWNER + failpoints.CHILD + failpoints.SWITCHBOARD) >= failpoints.CANNOT_FAIL
