"""The cgroup file system, on real hierarchies of this machine: marks, killing, removing, and what is spared."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tightship.kernel import cgroup

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes cgroups")

MOUNTS = {mount.path.rpartition("/")[2]: mount for mount in cgroup.mounts() if mount.writable}
TREES = [name for name in ("unified", "freezer", "memory", "pids") if name in MOUNTS]


@pytest.fixture(params=TREES)
def base(request: pytest.FixtureRequest) -> Iterator[str]:
    """A directory of this test's own in one hierarchy."""
    path = os.path.join(MOUNTS[request.param].path, f"tightship-test-{secrets.token_hex(4)}")
    os.mkdir(path)
    yield path
    removal = cgroup.remove(path, time.monotonic() + 10)
    assert not removal.left


@contextlib.contextmanager
def process_in(path: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(
        command or ("sleep", "600"), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        cgroup.write(os.path.join(path, "cgroup.procs"), str(started.pid))
        yield started
    finally:
        started.kill()
        started.wait()


def test_mounts_have_the_controllers_of_this_machine() -> None:
    listed = Path("/proc/self/cgroup").read_text()
    for mount in cgroup.mounts():
        if mount.version == 1:
            for controller in mount.controllers:
                assert f":{controller}" in listed or f",{controller}" in listed


def test_a_mount_table_of_another_machine(tmp_path: object) -> None:
    table = (
        "30 23 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
        "31 23 0:27 / /sys/fs/cgroup/systemd ro - cgroup cgroup rw,xattr,name=systemd\n"
        "32 23 0:28 / /mnt/a\\040b rw - cgroup2 cgroup2 rw,nsdelegate\n"
        "33 23 0:29 / /proc rw - proc proc rw\n"
    )
    path = f"{tmp_path}/mountinfo"
    with open(path, "w") as file:
        file.write(table)
    found = cgroup.mounts(path)
    assert [(one.path, one.version, set(one.controllers), one.writable) for one in found] == [
        ("/sys/fs/cgroup/cpu,cpuacct", 1, {"cpu", "cpuacct"}, True),
        ("/sys/fs/cgroup/systemd", 1, set(), False),
        ("/mnt/a b", 2, set(), True),
    ]


def test_a_made_directory_is_marked(base: str) -> None:
    path = f"{base}/one"
    cgroup.make(path, "instance id /name")
    assert cgroup.mark_of(path) == "instance id /name"
    assert not cgroup.is_unfinished(path)
    with pytest.raises(FileExistsError):
        cgroup.make(path, "other")
    assert cgroup.mark_of(path) == "instance id /name"


def test_what_a_crash_before_the_mark_leaves_is_known(base: str) -> None:
    os.mkdir(f"{base}/cut", 0o1755)
    os.mkdir(f"{base}/foreign", 0o755)
    assert cgroup.is_unfinished(f"{base}/cut")
    assert not cgroup.is_unfinished(f"{base}/foreign")
    assert not cgroup.is_unfinished(f"{base}/none")
    os.mkdir(f"{base}/cut/child")
    assert not cgroup.is_unfinished(f"{base}/cut")


def test_a_mark_of_nothing_is_an_error(base: str) -> None:
    assert cgroup.mark_of(base) is None
    with pytest.raises(FileNotFoundError):
        cgroup.mark_of(f"{base}/none")


def test_reading_what_is_gone(base: str) -> None:
    assert cgroup.processes(f"{base}/none") == []
    assert cgroup.children(f"{base}/none") == []
    assert cgroup.keyed(f"{base}/none/cpu.stat", "usage_usec") is None
    assert cgroup.number(f"{base}/none/x") is None
    assert not cgroup.populated(f"{base}/none")


def test_lmctfy_37_the_kernel_refuses_a_value() -> None:
    if "memory" not in MOUNTS:
        pytest.skip("needs the v1 memory controller")
    path = os.path.join(MOUNTS["memory"].path, f"tightship-test-{secrets.token_hex(4)}")
    os.mkdir(path)
    try:
        cgroup.write(f"{path}/memory.limit_in_bytes", "67108864")
        assert cgroup.number(f"{path}/memory.limit_in_bytes") == 67108864
        with pytest.raises(OSError) as caught:
            cgroup.write(f"{path}/memory.memsw.limit_in_bytes", "33554432")
        assert caught.value.errno == errno.EINVAL
    finally:
        os.rmdir(path)


def test_kill_takes_everything_below(base: str) -> None:
    os.makedirs(f"{base}/a/b")
    with process_in(base) as one, process_in(f"{base}/a/b") as two:
        assert cgroup.populated(base)
        assert cgroup.kill(base) == {one.pid, two.pid}
        assert (one.wait(10), two.wait(10)) == (-signal.SIGKILL, -signal.SIGKILL)
    assert cgroup.kill(base) == set()


def test_kill_takes_what_ignores_signals_and_forks(base: str) -> None:
    os.mkdir(f"{base}/a")
    script = "trap '' TERM INT HUP; for i in 1 2 3 4 5; do (trap '' TERM; sleep 600) & done; wait"
    with process_in(f"{base}/a", "/bin/sh", "-c", script):
        removal = cgroup.remove(f"{base}/a", time.monotonic() + 10)
    assert not removal.left
    assert removal.removed == [f"{base}/a"]


def test_spared_trees_stay_and_live(base: str) -> None:
    os.makedirs(f"{base}/a/mine")
    os.makedirs(f"{base}/a/spared/deep")

    def spare(path: str) -> bool:
        return path.endswith("/spared")

    with process_in(f"{base}/a/spared/deep") as spared, process_in(f"{base}/a/mine") as mine:
        removal = cgroup.remove(f"{base}/a", time.monotonic() + 5, spare)
        assert mine.wait(10) == -signal.SIGKILL
        assert spared.poll() is None
        assert not os.path.exists(f"{base}/a/mine")
        assert os.path.exists(f"{base}/a/spared/deep")
        assert f"{base}/a/spared" in removal.left


def test_remove_is_idempotent_and_bounded(base: str) -> None:
    os.mkdir(f"{base}/a")
    assert cgroup.remove(f"{base}/a", time.monotonic()).removed == [f"{base}/a"]
    again = cgroup.remove(f"{base}/a", time.monotonic())
    assert (again.removed, again.left) == ([], {})


def test_a_process_of_another_does_not_go(base: str) -> None:
    os.mkdir(f"{base}/a")
    with process_in(base) as outside, process_in(f"{base}/a"):
        assert not cgroup.remove(f"{base}/a", time.monotonic() + 10).left
        assert outside.poll() is None


def test_a_deep_tree_goes(base: str) -> None:
    path = f"{base}/deep"
    depth = 0
    while len(path) < 3000:
        os.mkdir(path)
        path += "/x"
        depth += 1
    assert depth > 1000
    assert len(cgroup.remove(f"{base}/deep", time.monotonic() + 20).removed) == depth
