"""clone3, namespaces, exec and signals for real, each in a process of one thread as the spawner is."""

from __future__ import annotations

import os
import shutil
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
        from tightship.kernel import calls, clone, execute, namespaces, process, signals

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

        def run_calls(fill, names=(), in_python=False):
            # Runs calls in a child: stage and errno of what failed, or its exit status.
            made = calls.Calls()
            fill(made)
            if in_python:
                made.point("point", "point")
            read, write = os.pipe()
            pid, pidfd = clone.start(made, names, None, write, lambda name: None)
            os.close(write)
            told = os.read(read, 64)
            os.close(read)
            status = os.waitid(os.P_PIDFD, pidfd, os.WEXITED).si_status
            os.close(pidfd)
            if not told:
                return status
            stage, code = calls.read_failure(told, made.stages)
            return stage, os.strerror(code)
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


NAMESPACES = """
        import socket
        before = socket.gethostname()
        inside = (
            "import os, socket;"
            "print(os.getpid(), socket.gethostname(), sorted(p for p in os.listdir('/proc') if p.isdigit()));"
            "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); socket.create_connection(s.getsockname(), 5)"
        )
        def fill(made):
            namespaces.make_mounts_private(made, "mounts")
            namespaces.mount_proc(made, "proc")
            made.add("hostname", "sethostname", b"inside", 6)
            made.add("close", "close_range", 3, clone.LAST_FD, 0)
            namespaces.bring_loopback_up(made, "loopback", 3)
            execute.Program([sys.executable, "-I", "-S", "-c", inside], []).execute(made, "exec")
        # The status pipe is closed with the rest: what fails is told by the exit status alone.
        print(run_calls(fill, tuple(clone.NAMESPACES), sys.argv[1] == "python"))
        print(socket.gethostname() == before, os.readlink("/proc/self") == str(os.getpid()))
    """


@pytest.mark.parametrize("how", ["native", "python"])
def test_namespaces_are_the_childs_own(how: str) -> None:
    assert run(NAMESPACES, how) == ["1 inside ['1']", "0", "True True"]


@pytest.mark.parametrize("how", ["native", "python"])
def test_the_call_that_fails_is_told_and_nothing_after_it_is_made(how: str, tmp_path: Path) -> None:
    lines = run(
        """
        def fill(made):
            made.add("first", "umask", 0o22)
            made.add("second", "chdir", b"/nowhere\\0")
            made.add("third", "openat", -100, os.fsencode(sys.argv[2]) + b"\\0", os.O_CREAT | os.O_WRONLY, 0o600)
        print(run_calls(fill, (), sys.argv[1] == "python"), os.path.exists(sys.argv[2]))
        def gate(made):
            made.add("gate", "read", os.open("/dev/null", os.O_RDONLY), b"x", 1, flags=calls.MUST_NOT_BE_ZERO)
            made.add("never", "chdir", b"/nowhere\\0")
        print(run_calls(gate, (), sys.argv[1] == "python"))
        """,
        how,
        os.fspath(tmp_path / "file"),
    )
    assert lines == ["('second', 'No such file or directory') False", "1"]


@pytest.mark.skipif(shutil.which("as") is None, reason="the assembler `as` is missing: apt-get install binutils")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the machine code is x86-64's")
def test_the_machine_code_is_what_its_source_says(tmp_path: Path) -> None:
    source = Path(__file__).with_name("native.S")
    subprocess.run(["as", "-o", tmp_path / "native.o", source], check=True)
    subprocess.run(
        ["objcopy", "-O", "binary", "-j", ".text", tmp_path / "native.o", tmp_path / "native.bin"], check=True
    )
    assert run("print(calls._NATIVE_X86_64.hex(), calls._native is not None)") == [
        f"{(tmp_path / 'native.bin').read_bytes().hex()} True"
    ]


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
    def fill(made):
        execute.Program(eval(sys.argv[1]), eval(sys.argv[2])).execute(made, "exec")
    end = run_calls(fill, (), sys.argv[3] == "python")
    print("Success" if end == 0 else end[1])
"""


def execute(argv: str, environment: str) -> list[str]:
    """Executes it both ways, which must end the same."""
    native = run(EXECUTE, argv, environment, "native")
    assert run(EXECUTE, argv, environment, "python") == native
    return native


def test_a_program_gets_its_arguments_and_its_environment_alone() -> None:
    assert execute("['/bin/sh', '-c', 'echo $0 $1 $A; env', 'x', 'y z']", "['A=b']")[0] == "x y z b"
    assert execute("['env']", "['A=\\u00e9', 'B=']") == ["A=é", "B=", "Success"]
    assert execute("['env']", "[]") == ["Success"]


def test_a_program_is_found_by_its_own_path(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "tool").write_text("#!/bin/sh\necho a\n")
    (tmp_path / "b" / "tool").write_text("#!/bin/sh\necho b\n")
    (tmp_path / "b" / "tool").chmod(0o755)
    both = f"PATH=/nowhere:{tmp_path}/a:/etc/passwd:{tmp_path}/b"
    # Found in a, and refused: the search goes on.
    assert execute("['tool']", repr([both])) == ["b", "Success"]
    assert execute("['tool']", repr([f"PATH={tmp_path}/a:/nowhere"])) == ["Permission denied"]
    assert execute("['tool']", "['PATH=/nowhere']") == ["No such file or directory"]
    assert execute("['']", "[]") == ["No such file or directory"]
    assert execute(repr([os.fspath(tmp_path / "a")]), "[]") == ["Permission denied"]
    (tmp_path / "b" / "tool").write_text("no program")
    assert execute("['tool']", repr([both])) == ["Exec format error"]


def test_a_program_may_have_very_many_arguments() -> None:
    assert execute("['/bin/sh', '-c', 'echo $#'] + ['x'] * 100_000", "[]") == ["99999", "Success"]
    assert execute("['true', 'x' * 200_000]", "[]") == ["Argument list too long"]
