"""clone3, namespaces, exec and signals for real, each in a process of one thread as the spawner is."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICES = Path(__file__).resolve().parents[2] / "services"
_TREES = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
UNIFIED = next((path for path in _TREES if (path / "cgroup.controllers").exists()), None)


def run(code: str, *arguments: str) -> list[str]:
    """Runs `code` in a process of its own, in whose child `child()` runs; the lines of its output."""
    prelude = f"""
        import os, sys, signal
        sys.path.insert(0, {os.fspath(SERVICES)!r})
        from tightship.kernel import clone, execute, namespaces, process, signals

        def in_child(act, names=(), cgroup=None):
            pid, pidfd = clone.clone3(names, cgroup)
            if pid == 0:
                try:
                    act()
                    sys.stdout.flush()
                except OSError as error:
                    os._exit(error.errno)
                finally:
                    os._exit(0)
            assert not os.get_inheritable(pidfd)
            result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
            assert result.si_pid == pid
            os.close(pidfd)
            return result.si_status
    """
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", textwrap.dedent(prelude) + textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        timeout=30,
        check=True,
        text=True,
    )
    return done.stdout.splitlines()


def test_a_child_goes_on_from_the_clone_and_its_pidfd_tells_its_end() -> None:
    assert run("print(in_child(lambda: os._exit(7)))") == ["7"]


def test_many_children_in_turn_none_hangs() -> None:
    assert run("print(sum(in_child(lambda: os._exit(1)) for _ in range(300)))") == ["300"]


def test_namespaces_are_the_childs_own() -> None:
    lines = run("""
        import socket
        before = socket.gethostname()
        def act():
            namespaces.make_mounts_private()
            namespaces.mount_proc()
            socket.sethostname("inside")
            namespaces.bring_loopback_up()
            print(os.getpid(), socket.gethostname(), sorted(p for p in os.listdir("/proc") if p.isdigit()))
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                s.listen()
                socket.create_connection(s.getsockname(), 5).close()
        print(in_child(act, tuple(clone.NAMESPACES)))
        print(socket.gethostname() == before, os.readlink("/proc/self") == str(os.getpid()))
    """)
    assert lines == ["1 inside ['1']", "0", "True True"]


def test_loopback_is_down_until_brought_up() -> None:
    lines = run("""
        import socket
        def act():
            socket.create_connection(("127.0.0.1", 9), 5)
        print(os.strerror(in_child(act, ("net",))))
    """)
    assert lines == ["Network is unreachable"]


@pytest.fixture
def v2_cgroup() -> Iterator[Path]:
    if UNIFIED is None:
        pytest.skip("needs a cgroup v2 tree")
    path = UNIFIED / f"ts-clone-{os.getpid()}"
    path.mkdir()
    yield path
    path.rmdir()


def test_a_child_is_born_in_its_v2_cgroup(v2_cgroup: Path) -> None:
    lines = run(
        """
        fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
        def act():
            print([line for line in open("/proc/self/cgroup").read().split() if line.startswith("0::")])
        print(in_child(act, (), fd))
        """,
        os.fspath(v2_cgroup),
    )
    assert lines == [f"['0::/{v2_cgroup.name}']", "0"]


def test_a_refused_clone_raises_its_errno_and_leaves_no_descriptor() -> None:
    lines = run("""
        before = os.listdir("/proc/self/fd")
        try:
            clone.clone3((), os.dup(0))
        except OSError as error:
            print(error.strerror)
        os.close(max(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")))
        print(os.listdir("/proc/self/fd") == before)
    """)
    assert lines == ["Bad file descriptor", "True"]


def test_close_range_closes_what_it_says_and_no_more() -> None:
    lines = run("""
        for fd in (50, 60, 70):
            os.dup2(0, fd)
        clone.close_range(51, 60)
        print([fd for fd in (50, 60, 70) if os.path.exists(f"/proc/self/fd/{fd}")])
        clone.close_range(3, clone.LAST_FD)
        print(sorted(os.listdir("/proc/self/fd")))
    """)
    assert lines == ["[50, 70]", "['0', '1', '2', '3']"]


def test_all_signals_are_default_for_a_child_whatever_the_parent_was_given() -> None:
    lines = run("""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signals.block_all()
        def act():
            signals.unblock_all()
            lines = [line.split(":") for line in open("/proc/self/status") if line.startswith("Sig")]
            status = dict(lines)
            print([status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")])
        print(in_child(act))
    """)
    assert lines == [f"{['0' * 16] * 3}", "0"]


def test_signals_come_by_descriptor_and_a_broken_pipe_is_an_error() -> None:
    lines = run("""
        signals.block_all()
        fd = signals.open_signalfd(signal.SIGTERM, signal.SIGUSR1)
        print(signals.read_signalfd(fd), os.get_inheritable(fd))
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        print(sorted(signals.read_signalfd(fd)), signals.read_signalfd(fd))
        read, write = os.pipe()
        os.close(read)
        try:
            os.write(write, b"x")
        except BrokenPipeError:
            print("error")
    """)
    assert lines == ["[] False", "[10, 15] []", "error"]


EXECUTE = """
    def act():
        os._exit(execute.Program(eval(sys.argv[1]), eval(sys.argv[2])).execute())
    print(os.strerror(in_child(act)))
"""


def test_a_program_gets_its_arguments_and_its_environment_alone() -> None:
    assert run(EXECUTE, "['/bin/sh', '-c', 'echo $0 $1 $A; env', 'x', 'y z']", "['A=b']")[0] == "x y z b"
    assert run(EXECUTE, "['env']", "['A=\\u00e9', 'B=']") == ["A=é", "B=", "Success"]
    assert run(EXECUTE, "['env']", "[]") == ["Success"]


def test_a_program_is_found_by_its_own_path(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "tool").write_text("#!/bin/sh\necho a\n")
    (tmp_path / "b" / "tool").write_text("#!/bin/sh\necho b\n")
    (tmp_path / "b" / "tool").chmod(0o755)
    both = f"PATH=/nowhere:{tmp_path}/a:/etc/passwd:{tmp_path}/b"
    # Found in a, and refused: the search goes on.
    assert run(EXECUTE, "['tool']", repr([both])) == ["b", "Success"]
    assert run(EXECUTE, "['tool']", repr([f"PATH={tmp_path}/a:/nowhere"])) == ["Permission denied"]
    assert run(EXECUTE, "['tool']", "['PATH=/nowhere']") == ["No such file or directory"]
    assert run(EXECUTE, "['']", "[]") == ["No such file or directory"]
    assert run(EXECUTE, repr([os.fspath(tmp_path / "a")]), "[]") == ["Permission denied"]
    (tmp_path / "b" / "tool").write_text("no program")
    assert run(EXECUTE, "['tool']", repr([both])) == ["Exec format error"]


def test_a_program_may_have_very_many_arguments() -> None:
    assert run(EXECUTE, "['/bin/sh', '-c', 'echo $#'] + ['x'] * 100_000", "[]") == ["99999", "Success"]
    assert run(EXECUTE, "['true', 'x' * 200_000]", "[]") == ["Argument list too long"]
