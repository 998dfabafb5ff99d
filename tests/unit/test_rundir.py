"""The run directory: limits of its paths, its instance id, its locks, and sockets that appear by rename."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tightship.common import rundir
from tightship.common.rundir import RunDir, RunDirError


@pytest.fixture
def base() -> Iterator[Path]:
    """Short: a Unix socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as path:
        yield Path(path)


def test_it_is_made_for_owner_and_group_alone(base: Path) -> None:
    run = RunDir.open(base / "new")
    assert stat.S_IMODE(run.path.stat().st_mode) & 0o007 == 0


def test_a_path_over_the_limit_is_refused_with_the_limit(base: Path) -> None:
    with pytest.raises(RunDirError, match="107") as caught:
        RunDir.open(base / ("x" * 100))
    assert "--run-dir" in str(caught.value)
    assert not (base / ("x" * 100)).exists()


def test_the_longest_legal_path_serves_every_socket(base: Path) -> None:
    room = rundir.SOCKET_PATH_MAX - len(os.fsencode(base)) - len("//containerizer.sock.new")
    run = RunDir.open(base / ("x" * room))
    for path in (run.containerizer_sock, run.switchboard_sock, run.fd_sock, run.spawner_sock):
        rundir.seqpacket_listener(path).close()
    with pytest.raises(RunDirError):
        RunDir.open(base / ("x" * (room + 1)))


def test_a_directory_that_cannot_be_made(base: Path) -> None:
    (base / "file").write_text("")
    with pytest.raises(RunDirError, match="--run-dir"):
        RunDir.open(base / "file" / "below")


def test_the_instance_is_made_once(base: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(RunDir.open(base).instance())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(found[0]) == 8
    assert sorted(path.name for path in base.iterdir()) == ["instance"]


def test_a_spoilt_instance_is_refused(base: Path) -> None:
    (base / "instance").write_text("../../etc\n")
    with pytest.raises(RunDirError, match="8 hex digits"):
        RunDir.open(base).instance()


def test_a_second_service_is_refused_and_the_holder_named(base: Path) -> None:
    run = RunDir.open(base)
    lock = run.lock("switchboard")
    with pytest.raises(RunDirError, match=f"pid {os.getpid()}"):
        run.lock("switchboard")
    other = run.lock("containerizer")
    os.close(other)
    os.close(lock)
    os.close(run.lock("switchboard"))


def test_a_lock_is_not_inherited(base: Path) -> None:
    lock = RunDir.open(base).lock("switchboard")
    try:
        assert not os.get_inheritable(lock)
    finally:
        os.close(lock)


def test_mesos_7742_a_socket_appears_only_when_it_accepts(base: Path) -> None:
    path = base / "some.sock"
    with rundir.publishing(path, 0o600) as hidden:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.fsencode(hidden))
        assert not path.exists()
        listener.listen(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(os.fsencode(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not hidden.exists()
    listener.close()


def test_a_new_listener_replaces_the_path_of_a_dead_one(base: Path) -> None:
    path = base / "fd.sock"
    rundir.seqpacket_listener(path).close()
    with rundir.seqpacket_listener(path) as listener:
        assert not listener.getblocking()
        assert not listener.get_inheritable()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(os.fsencode(path))


def test_its_mode_is_its_own_whatever_the_umask(base: Path) -> None:
    kept = base / "kept"
    kept.mkdir(0o700)
    before = os.umask(0o077)
    try:
        run = RunDir.open(kept / "above" / "new")
        RunDir.open(kept)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (run.path, run.path.parent, kept)]
    assert modes == [0o750, 0o755, 0o700]  # what was there stays as it was
