"""The calls of a child as they are laid out: what a plain launch makes, what a confined one makes in which order,
and arguments that are more than numbers and strings.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.test_clone import run
from tightship.kernel import calls, capabilities, seccomp
from tightship.spawner import child, orders
from tightship.spawner.orders import LaunchOrder, OrderError

NAMES = {number: name for name, number in calls.NUMBERS.items()}
SPACES = ["pid", "mount", "ipc", "uts"]
PLAIN = ["dup3"] * 3 + ["close_range"] * 2 + ["setsid", "chdir", "umask", "rt_sigprocmask", "write", "read", "execve"]


def order(**fields: Any) -> LaunchOrder:
    packet = {"launch": "x", "lease": "x", "epoch": "x", "token": "00" * 32, "argv": ["/bin/true"]}
    return LaunchOrder(packet | fields)


def made(given: LaunchOrder) -> list[tuple[str, str]]:
    """Name and stage of each call."""
    laid = child.calls_of(given, (10, 11, 12), 3, 5, ())
    words = laid._words
    numbers = [words[index] for index in range(0, len(words), len(words) // len(laid.stages))]
    return [(NAMES[number], stage) for number, stage in zip(numbers, laid.stages, strict=True)]


def names(given: LaunchOrder) -> list[str]:
    return [name for name, _ in made(given)]


def test_a_plain_launch_makes_no_call_more() -> None:
    assert names(order()) == PLAIN
    assert sorted(set(names(order(namespaces=SPACES))) - set(PLAIN)) == ["mount"]


def test_a_limit_of_descriptors_is_one_call_more() -> None:
    found = names(order(isolation={"fd_limit": 9}))
    assert [name for name in found if name != "prlimit64"] == PLAIN
    assert found.count("prlimit64") == 1


@pytest.mark.parametrize("kept", [None, [10], []])
def test_privileges_are_given_up_after_what_needs_them(kept: list[int] | None) -> None:
    isolation = {"confined": True, "uid": 65534, "gid": 65534, "capabilities": kept, "rootfs": "/srv"}
    found = made(order(namespaces=SPACES, isolation=isolation))
    calls_made = [name for name, _ in found]
    sequence = ["pivot_root", "umount2", "setgroups", "setresgid", "setresuid", "getcwd", "capset"]
    places = [calls_made.index(name) for name in sequence]
    assert places == sorted(places)
    last_mount = max(index for index, name in enumerate(calls_made) if name in ("mount", "move_mount", "mount_setattr"))
    assert last_mount < calls_made.index("setgroups")
    tail = calls_made[places[-1] :]
    ambient = ["prctl"] * len(kept or [])
    filtered = ["seccomp"] if seccomp.available() else []
    assert tail == ["capset", *ambient, "prctl", *filtered, "write", "read", "execve"]
    dropped = [stage for name, stage in found[: places[2]] if name == "prctl"]
    assert set(dropped) == {"security.capabilities"}
    assert len(dropped) == int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1 - len(kept or [])


def test_without_no_new_privs_the_filter_comes_while_root_may_install_it() -> None:
    isolation = {"confined": True, "uid": 1, "gid": 1, "no_new_privs": False, "seccomp": [seccomp.ALLOW, []]}
    if not seccomp.available():
        pytest.skip("libseccomp.so.2 is missing: apt-get install libseccomp2")
    found = names(order(namespaces=SPACES, isolation=isolation))
    assert found.index("seccomp") < found.index("setgroups")


@pytest.mark.parametrize(
    "isolation",
    [
        [],
        {"confined": 1},
        {"confined": True},  # without namespaces
        {"uid": -1},
        {"groups": ["0"]},
        {"capabilities": [64]},
        {"mounts": [1]},
        {"mounts": [{"source": "relative", "target": "/"}]},
        {"mounts": [{"source": "tmpfs", "target": "/mnt", "tmpfs": 0}]},
        {"mounts": [{"source": "tmpfs", "target": "/mnt", "tmpfs": "4096"}]},
        {"rootfs": "relative"},
    ],
)
def test_a_bad_order_is_refused(isolation: object) -> None:
    with pytest.raises(OrderError):
        order(isolation=isolation)


@pytest.mark.parametrize("given", [[], "x", {}, [1, []], [seccomp.ALLOW, [1]], [seccomp.ALLOW, [[["kill"], -1, []]]]])
def test_a_bad_filter_is_refused(given: object) -> None:
    with pytest.raises(OrderError):
        order(namespaces=SPACES, isolation={"confined": True, "seccomp": given})


def test_an_order_of_before_is_taken() -> None:
    assert order().isolation is None
    assert orders.LOWEST_VERSION == 1


@pytest.mark.parametrize("how", ["native", "python"])
def test_what_one_call_writes_another_reads(how: str, tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    program = """
        def fill(made):
            room = bytearray(4096)
            made.add("enter", "chdir", os.fsencode(sys.argv[2]) + b"\\0")
            made.add("ask", "getcwd", room, len(room))
            made.add("leave", "chdir", b"/\\0")
            made.add("back", "chdir", room)
            made.add("inside", "chdir", b"inside\\0")
            made.add("end", "chdir", b"nowhere\\0")
        print(run_calls(fill, (), sys.argv[1] == "python"))
    """
    assert run(program, how, os.fspath(tmp_path)) == ["('end', 'No such file or directory')"]


@pytest.mark.parametrize("how", ["native", "python"])
def test_a_counted_argument_is_what_the_kernel_takes(how: str) -> None:
    program = """
        import struct
        def fill(made):
            # BPF: return ERRNO(EXDEV) for umask, ALLOW for all others.
            umask = calls.NUMBERS["umask"]
            code = ((0x20, 0, 0, 0), (0x15, 0, 1, umask), (0x06, 0, 0, 0x50012), (0x06, 0, 0, 0x7FFF0000))
            program = b"".join(struct.pack("=HBBI", *each) for each in code)
            made.add("privileges", "prctl", 38, 1, 0, 0, 0)
            made.add("filter", "seccomp", 1, 0, calls.Counted(len(code), program))
            made.add("session", "setsid")
            made.add("umask", "umask", 0)
        print(run_calls(fill, (), sys.argv[1] == "python"))
    """
    assert run(program, how) == ["('umask', 'Invalid cross-device link')"]


def test_numbers_of_capabilities() -> None:
    assert capabilities.NUMBERS["CAP_SYS_ADMIN"] == 21
    assert capabilities.NUMBERS["CAP_CHECKPOINT_RESTORE"] == 40
    assert sum(1 << number for number in capabilities.DEFAULT) == 0x404FB
