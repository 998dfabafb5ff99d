"""The command line on real services: a pair of `up -d`, and the embedded pair of `run`."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import census

TIGHTSHIP = [sys.executable, "-c", "from tightship.cli.main import main; main()"]


@dataclass
class Cli:
    """The command with a run directory and a temporary directory of its own."""

    root: Path

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    @property
    def env(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "TIGHTSHIP_"))}
        return {**inherited, "TIGHTSHIP_RUN_DIR": str(self.run_dir), "TMPDIR": str(self.root)}

    def __call__(self, *args: str, stdin: bytes | int = subprocess.DEVNULL) -> subprocess.CompletedProcess[bytes]:
        given: dict[str, Any] = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
        return subprocess.run([*TIGHTSHIP, *args], env=self.env, capture_output=True, timeout=60, check=False, **given)

    def ok(self, *args: str, stdin: bytes | int = subprocess.DEVNULL) -> str:
        ended = self(*args, stdin=stdin)
        assert ended.returncode == 0, ended.stderr.decode()
        return ended.stdout.decode()

    def json(self, *args: str) -> Any:
        return json.loads(self.ok("--json", *args))

    def start(self, *args: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen([*TIGHTSHIP, *args], env=self.env, **options)

    def processes(self) -> list[int]:
        """Services of ours: processes whose command names our directory."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if str(self.root).encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return found

    def service(self, words: str) -> int:
        """The pid of the service whose command line has the words."""
        return next(pid for pid in self.processes() if words in census.command(pid))


@pytest.fixture(scope="module")
def _need_cgroups() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


@contextlib.contextmanager
def directory() -> Iterator[Cli]:
    cli = Cli(Path(tempfile.mkdtemp(prefix="tc", dir="/tmp")))
    try:
        yield cli
        until(lambda: not cli.processes())
    finally:
        for pid in cli.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(cli.root)


@pytest.fixture(scope="module")
def up(_need_cgroups: None) -> Iterator[Cli]:
    """A pair that `up -d` started."""
    with directory() as cli:
        cli.ok("up", "-d")
        try:
            yield cli
        finally:
            instance = (cli.run_dir / "instance").read_text().strip()
            for each in cli.json("list").get("containers", []):
                cli("destroy", "-f", each["name"])
            cli.ok("down")
            assert census.cgroup_bases(instance) == []


@pytest.fixture
def alone(_need_cgroups: None) -> Iterator[Cli]:
    """No service at all."""
    with directory() as cli:
        yield cli
        assert [path.name for path in cli.root.iterdir() if path.name != f"tightship-{os.geteuid()}"] == []
        assert list(embedded(cli)) == []


def embedded(cli: Cli) -> Iterator[Path]:
    """Run directories of embedded pairs."""
    base = cli.root / f"tightship-{os.geteuid()}"
    if base.is_dir():
        yield from (path for path in base.iterdir() if not path.name.startswith("."))


def until(met: Callable[[], object], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < end, "not met in time"
        time.sleep(0.02)


def await_line(stream: Any, words: bytes, timeout_s: float = 30.0) -> bytes:
    """Reads the pipe until the words have come."""
    read = b""
    end = time.monotonic() + timeout_s
    while words not in read:
        ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{words!r} did not come: {read!r}"
        piece = os.read(stream.fileno(), 65536)
        assert piece, f"ended with {read!r}"
        read += piece
    return read


# run


def test_run_gives_output_and_status(up: Cli) -> None:
    ended = up("run", "--", "sh", "-c", "printf out; printf err >&2; exit 7")
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, b"out", b"err")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["sh", "-c", "kill -KILL $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["no-such-command"], 127),
        (["/etc/passwd"], 126),
        (["/"], 126),
        (["sh", "-c", "exit 255"], 255),
    ],
)
def test_statuses_of_run(up: Cli, command: list[str], status: int) -> None:
    assert up("run", "--", *command).returncode == status


def test_run_failures_of_ours_are_125_with_the_code(up: Cli) -> None:
    for args, says in (
        (["--spec", "cpu { limi: 1 }", "--", "true"], "3 INVALID_ARGUMENT"),
        (["/_bad", "true"], "3 INVALID_ARGUMENT"),
        (["/no/parent", "true"], "5 NOT_FOUND"),
        (["--cwd", "relative", "--", "true"], "3 INVALID_ARGUMENT"),
    ):
        ended = up("run", *args)
        assert ended.returncode == 125
        assert says in ended.stderr.decode()


def test_output_is_byte_exact(up: Cli) -> None:
    ended = up("run", "--", "head", "-c", "8388608", "/dev/zero")
    assert ended.returncode == 0
    assert ended.stdout == bytes(8 << 20)
    assert up("run", "--", "printf", "abc").stdout == b"abc"


def test_output_into_a_file(up: Cli, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        process = up.start("run", "--", "seq", "1", "200000", stdout=out)
        assert process.wait(60) == 0
    assert (tmp_path / "out").read_text() == "".join(f"{n}\n" for n in range(1, 200001))


def test_standard_input_from_a_pipe_and_a_file(up: Cli, tmp_path: Path) -> None:
    content = os.urandom(1 << 20)
    assert up("run", "--", "cat", stdin=content).stdout == content
    (tmp_path / "in").write_bytes(content)
    with (tmp_path / "in").open("rb") as file:
        assert up("run", "--", "cat", stdin=file.fileno()).stdout == content
    assert up("run", "--", "cat").stdout == b""  # /dev/null


def test_input_that_never_ends_does_not_hold_the_end(up: Cli) -> None:
    read, write = os.pipe()
    try:
        assert up("run", "--", "true", stdin=read).returncode == 0
    finally:
        os.close(read)
        os.close(write)


def test_environment_and_directory_are_what_was_asked(up: Cli) -> None:
    out = up.ok("run", "--env", "A=b", "--env", "EMPTY=", "--cwd", "/usr", "--", "sh", "-c", "/usr/bin/env; pwd")
    assert {"A=b", "EMPTY="} <= set(out.splitlines())
    assert not any(line.startswith(("HOME=", "TMPDIR=", "TIGHTSHIP_")) for line in out.splitlines())
    assert out.splitlines()[-1] == "/usr"


def test_timeout_is_told(up: Cli) -> None:
    ended = up("run", "--timeout", "200ms", "--", "sleep", "60")
    assert ended.returncode == 143
    assert "timeout" in ended.stderr.decode()


def test_run_in_a_container_that_exists_leaves_it(up: Cli) -> None:
    up.ok("create", "/there", "tasks { limit: 50 }")
    out = up.ok("run", "/there", "cat", "/proc/self/cgroup")
    assert re.search(r"/there/[^/\n]+$", out, re.M)
    assert up("spec", "/there").returncode == 0
    up.ok("destroy", "/there")


def test_relative_names_are_the_callers_containers(up: Cli) -> None:
    up.ok("create", "/top", "")
    own = [sys.executable, "-c", TIGHTSHIP[2], "--run-dir", str(up.run_dir)]
    env = [word for key, value in up.env.items() if key == "PATH" for word in ("--env", f"{key}={value}")]
    out = up.ok("run", *env, "/top", "--", *own, "create", "x", "")
    assert out == ""
    names = [each["name"] for each in up.json("list", "-r")["containers"]]
    # The caller was in a container of its own below /top, which went with what it made.
    assert names == ["/top"]
    up.ok("run", *env, "/top", "--", *own, "create", "../../y", "")
    assert {"/top", "/y"} == {each["name"] for each in up.json("list", "-r")["containers"]}
    for name in ("/y", "/top"):
        up.ok("destroy", name)


def test_verbose_tells_limits_record_and_cleanup(up: Cli) -> None:
    told = up("run", "-v", "--spec", "memory { limit: 67108864 }", "--", "true").stderr.decode()
    assert "in force: memory.limit 67108864" in told
    assert "exited 0" in told
    assert "peak memory" in told
    assert "cleanup clean" in told


def test_json_of_run_goes_beside_the_output(up: Cli) -> None:
    ended = up("run", "--json", "--", "echo", "x")
    assert ended.stdout == b"x\n"
    told = json.loads(ended.stderr)
    assert (told["record"]["exit_code"], told["cleanup"]["outcome"]) == (0, "CLEAN")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_cleans_up_and_reports(up: Cli, number: signal.Signals) -> None:
    process = up.start(
        "run", "/job", "--", "sh", "-c", "trap 'echo last; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    )
    await_line(process.stdout, b"ready\n")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert b"last" in out
    assert f"cancelled by {number.name}".encode() in err
    assert up("kill", "/job").returncode in (5, 9)
    assert not up.json("list").get("containers")


def test_a_second_signal_leaves_at_once_and_leaves_nothing(up: Cli) -> None:
    process = up.start("run", "/stubborn", "--", "sh", "-c", "trap '' TERM; echo ready; sleep 600 & wait; sleep 600")
    await_line(process.stdout, b"ready\n")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    process.communicate()
    until(lambda: not any(each["name"] == "/stubborn" for each in up.json("list").get("containers", [])))


def test_a_killed_client_leaves_nothing(up: Cli) -> None:
    process = up.start("run", "/orphan", "--", "sh", "-c", "echo ready; sleep 600")
    await_line(process.stdout, b"ready\n")
    process.kill()
    process.communicate()
    until(lambda: not up.json("list").get("containers"))


def test_a_broken_pipe_ends_the_command(up: Cli) -> None:
    process = up.start("run", "/yes", "--", "yes")
    assert process.stdout is not None and process.stderr is not None
    os.read(process.stdout.fileno(), 100)
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    assert not any(each["name"] == "/yes" for each in up.json("list").get("containers", []))


def test_a_reader_that_stops_does_not_hold_a_signal(up: Cli) -> None:
    process = up.start("run", "/stuck", "--", "yes")
    time.sleep(0.7)  # the pipe is full, nobody reads
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert process.returncode == 130
    process.communicate()


def test_programs_that_cannot_be_executed_are_named(up: Cli) -> None:
    assert b"no-such-program: not found" in up("run", "--", "no-such-program").stderr
    assert b"options after NAME are the command's" in up("run", "/x", "-v", "--", "true").stderr


def test_a_full_standard_output(up: Cli) -> None:
    for args in (["run", "--", "echo", "x"], ["run", "-n", "/full", "--", "sleep", "600"]):
        with open("/dev/full", "wb") as full:
            process = up.start(*args, stdout=full)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 125
        assert len(err.splitlines()) == 1
        assert b"No space left" in err
    assert not up.json("list").get("containers")


def test_a_spec_from_standard_input(up: Cli) -> None:
    ended = up("run", "-v", "-c", "-", "--", "cat", stdin=b"memory { limit: 67108864 }")
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert b"memory.limit 67108864" in ended.stderr
    up.ok("create", "/in", "-c", "-", stdin=b"tasks { limit: 7 }")
    assert "7" in up.ok("spec", "/in")
    up.ok("destroy", "/in")


def test_output_as_json(up: Cli) -> None:
    up.ok("run", "-n", "/json", "--", "sh", "-c", "printf 'a\\377'; exit 3")
    for args in (["attach", "/json"], ["logs", "/json"]):
        *pieces, last = map(json.loads, up.ok("--json", *args).splitlines())
        data = b"".join(base64.b64decode(each["data"]) if "data" in each else each["text"].encode() for each in pieces)
        assert data == b"a\xff"
        assert last["record"]["exit_code"] == 3
    assert "code" in json.loads(up("--json", "kill", "/json").stderr)


# Containers


def test_the_incidents_command_works_as_written(up: Cli) -> None:
    up.ok("create", "-p", "/test/one", "cpu { limit: 1000 } memory { limit: -1 }")
    assert up("create", "/test/one", "").returncode == 6
    assert up.ok("spec", "/test/one").split() == ["cpu", "{", "limit:", "1000", "}", "memory", "{", "limit:", "-1", "}"]
    assert "1024" in up.ok("spec", "--in-force", "/test/one")
    assert up("destroy", "/test").returncode == 9
    up.ok("destroy", "-f", "/test")
    assert up("destroy", "/test").returncode == 5


def test_spec_errors_tell_where(up: Cli, tmp_path: Path) -> None:
    (tmp_path / "spec").write_text("cpu {\n  limit: 1000\n  nonsense: 3\n}\n")
    ended = up("create", "/bad", "-c", str(tmp_path / "spec"))
    assert ended.returncode == 3
    told = ended.stderr.decode()
    assert "nonsense" in told
    assert "line 3, column 3" in told
    ended = up("create", "/bad", "memory { limit: 67108864 swap_limit: 33554432 }")
    assert "errno EINVAL" in ended.stderr.decode()
    assert "field memory.swap_limit" in ended.stderr.decode()


def test_a_detached_container(up: Cli) -> None:
    name = up.ok(
        "run",
        "-n",
        "--label",
        "a=b",
        "/web",
        "--",
        "sh",
        "-c",
        "echo out; echo err >&2; sleep 600",
    )
    assert name == "/web\n"
    until(lambda: up.ok("logs", "/web") and up.ok("logs", "--stderr", "/web") == "err\n")
    assert up.ok("logs", "--stdout", "/web") == "out\n"
    listed = up.json("list")["containers"][0]
    assert (listed["name"], listed["state"], listed["labels"]) == ("/web", "RUNNING", {"a": "b"})
    table = up.ok("list").splitlines()
    assert table[0].startswith("NAME")
    assert table[1].startswith("/web")
    assert "BOUND" in up.ok("leases")
    following = up.start("logs", "-f", "/web")
    await_line(following.stdout, b"out\n")
    up.ok("kill", "web", "-s", "TERM")
    following.communicate(timeout=60)
    assert following.returncode == 0
    assert "signalled 15" in up.ok("wait", listed["id"])
    assert up("wait", "--timeout", "1", "/nothing").returncode == 5
    assert "/web" in up.ok("list", "-a")
    assert up.ok("logs", "/web").splitlines()[0] in ("out", "err")
    up.ok("rm", "/web")
    assert up("logs", "/web").returncode == 5


def test_attach_passes_input_and_follows(up: Cli) -> None:
    # Only an attached launch has a pipe for input; a second client reads along.
    process = up.start("run", "/cat", "--", "cat", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"one\n")
    process.stdin.flush()
    await_line(process.stdout, b"one\n")
    following = up.start("attach", "/cat")
    await_line(following.stdout, b"one\n")
    process.stdin.close()
    assert process.wait(60) == 0
    following.communicate(timeout=60)
    assert following.returncode == 0
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def test_attach_passes_input_to_a_detached_container(up: Cli) -> None:
    up.ok("run", "-n", "-i", "/in", "--", "sh", "-c", "cat; echo tail")
    assert up.ok("attach", "/in", stdin=b"hello\n") == "hello\ntail\n"
    assert "exited 0" in up.ok("wait", "/in")


@pytest.mark.parametrize("victim", ["tightship.containerizer", "spawner/__main__.py", "tightship.switchboard"])
def test_a_run_goes_on_when_a_service_dies(up: Cli, victim: str) -> None:
    process = up.start("run", "--", "sh", "-c", "trap '' PIPE; echo ready; sleep 2; echo late; exit 5")
    begun = await_line(process.stdout, b"ready\n")
    os.kill(up.service(victim), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 5, err.decode()
    if victim == "tightship.switchboard":  # it held the other ends of the pipes
        assert b"incomplete" in err
    else:
        assert begun + out == b"ready\nlate\n"
    until(lambda: up("run", "--", "true").returncode == 0)
    assert not up.json("list").get("containers")


def test_cleanup_and_audit(up: Cli) -> None:
    assert up("audit").returncode == 0
    planted = next(base for base in census.cgroup_bases((up.run_dir / "instance").read_text().strip())) / "planted"
    planted.mkdir()
    found = up("audit")
    assert found.returncode == 1
    assert str(planted) in found.stdout.decode()
    planted.rmdir()
    assert up("audit", "--fix").returncode == 0
    assert "nothing to remove" in up.ok("cleanup", "/nothing")
    assert up("cleanup").returncode == 3


def test_a_broken_pipe_of_a_table_is_quiet(up: Cli) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        process = up.start("list", stdout=write)
        _, err = process.communicate(timeout=60)
    finally:
        os.close(write)
    assert (process.returncode, err) == (141, b"")


# up and down


def test_a_second_up_is_refused(up: Cli) -> None:
    for args in (["up"], ["up", "-d"]):
        ended = up(*args)
        assert ended.returncode == 9
        assert b"already up" in ended.stderr


@pytest.mark.parametrize("victim", ["spawner/__main__.py", "tightship.containerizer", "tightship.switchboard"])
def test_what_dies_is_started_again(up: Cli, victim: str) -> None:
    before = up.service(victim)
    os.kill(before, signal.SIGKILL)
    until(lambda: any(victim in census.command(pid) and pid != before for pid in up.processes()))
    until(lambda: up("run", "--", "true").returncode == 0)
    assert up("audit").returncode == 0


def test_up_in_the_foreground_ends_with_ctrl_c(alone: Cli) -> None:
    process = alone.start("up", "--run-dir", str(alone.root / "fore"))
    try:
        await_line(process.stderr, b"up: run directory")
        assert alone("--run-dir", str(alone.root / "fore"), "run", "--", "true").returncode == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert alone("--run-dir", str(alone.root / "fore"), "list").returncode == 14
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(alone.root / "fore")


def test_up_that_fails_shows_the_logs_tail(alone: Cli) -> None:
    run_dir = alone.root / "bad"
    run_dir.mkdir()
    (run_dir / "instance").write_text("nonsense\n")
    ended = alone("--run-dir", str(run_dir), "up", "-d")
    shutil.rmtree(run_dir)
    assert ended.returncode == 14
    assert "does not hold an instance id" in ended.stderr.decode()
    too_long = alone("--run-dir", "/tmp/" + "x" * 100, "up", "-d")
    assert too_long.returncode == 14
    assert "107" in too_long.stderr.decode()


def test_up_refuses_a_directory_that_everybody_may_write(alone: Cli) -> None:
    run_dir = alone.root / "open"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    ended = alone("--run-dir", str(run_dir), "up", "-d")
    run_dir.rmdir()
    assert ended.returncode == 9
    assert b"chmod o-w" in ended.stderr


# The embedded pair


def test_embedded_run_needs_and_leaves_nothing(alone: Cli) -> None:
    ended = alone("run", "-v", "--spec", "memory { limit: 67108864 }", "--", "sh", "-c", "echo hi; exit 3")
    assert (ended.returncode, ended.stdout) == (3, b"hi\n")
    told = ended.stderr.decode()
    assert "in force: memory.limit 67108864" in told
    assert "audit: 0 left" in told
    assert alone.processes() == []
    assert list(embedded(alone)) == []


def test_embedded_run_is_cancelled_by_a_signal(alone: Cli) -> None:
    process = alone.start("run", "--", "sh", "-c", "echo ready; sleep 600")
    await_line(process.stdout, b"ready\n")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert b"cancelled by SIGTERM" in err
    assert alone.processes() == []


def test_embedded_pair_ends_with_a_killed_client(alone: Cli) -> None:
    process = alone.start("run", "--", "sh", "-c", "echo ready; sleep 600")
    await_line(process.stdout, b"ready\n")
    instance = (next(embedded(alone)) / "instance").read_text().strip()
    process.kill()
    process.communicate()
    until(lambda: not alone.processes() and not list(embedded(alone)))
    assert census.cgroup_bases(instance) == []


def test_what_a_dead_embedded_pair_left_is_swept_at_the_next_start(alone: Cli) -> None:
    process = alone.start("run", "--", "sh", "-c", "echo ready; sleep 600")
    await_line(process.stdout, b"ready\n")
    dead = next(embedded(alone))
    instance = (dead / "instance").read_text().strip()
    words = ("supervisor/__main__.py", "spawner/__main__.py", "tightship.containerizer", "tightship.switchboard")
    services = [alone.service(each) for each in words]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none may clean up after another
        for pid in services:
            os.kill(pid, number)
    process.kill()
    process.communicate()
    until(lambda: not alone.processes())
    assert dead.is_dir()
    assert census.cgroup_bases(instance)
    assert alone("run", "--", "true").returncode == 0
    assert not dead.exists()
    assert census.cgroup_bases(instance) == []


def test_what_died_before_it_had_an_instance_is_swept_some_at_each_start(alone: Cli) -> None:
    base = alone.root / f"tightship-{os.geteuid()}"
    base.mkdir(mode=0o700)
    for number in range(6):
        (base / f"dead{number}").mkdir()
        for name in ("lock.supervisor", "service.log"):
            (base / f"dead{number}" / name).touch()
        (base / f"dead{number}" / "logs").mkdir()
        (base / f"dead{number}" / "logs" / "leases.db").touch()
    assert alone("run", "--", "true").returncode == 0
    assert len(list(embedded(alone))) == 2
    assert alone("run", "--", "true").returncode == 0
    assert list(embedded(alone)) == []


def test_a_sweep_leaves_other_directories_alone(alone: Cli, tmp_path: Path) -> None:
    sweep = [sys.executable, "-m", "tightship.containerizer", "sweep", str(tmp_path)]
    (tmp_path / "file").touch()
    subprocess.run(sweep, check=True, timeout=60)
    (tmp_path / "lock.supervisor").touch()
    subprocess.run(sweep, check=True, timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_leaves_nothing(alone: Cli, number: signal.Signals) -> None:
    for after_s in (0.2, 0.3, 0.4, 0.6):
        process = alone.start("run", "--", "sleep", "600")
        time.sleep(after_s)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (128 + number, b"")
        assert b"Traceback" not in err
        until(lambda: not alone.processes())
        assert list(embedded(alone)) == []


def test_embedded_runs_side_by_side(alone: Cli) -> None:
    running = [alone.start("run", "--", "sh", "-c", f"sleep 0.3; echo {n}") for n in range(3)]
    assert [process.communicate(timeout=60)[0] for process in running] == [b"0\n", b"1\n", b"2\n"]


def test_detach_is_refused_there(alone: Cli) -> None:
    ended = alone("run", "-n", "--", "true")
    assert ended.returncode == 125
    assert b"up -d" in ended.stderr


def test_a_start_that_failed_tells_of_itself_alone() -> None:
    run_dir = Path(tempfile.mkdtemp(prefix="ts", dir="/tmp"))

    def up(**more: str) -> str:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TIGHTSHIP_")}
        done = subprocess.run(
            [Path(sys.executable).with_name("tightship"), "--run-dir", str(run_dir), "up", "-d"],
            env=environment | more, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 14
        return done.stderr

    try:
        assert "/no/clients" in up(TIGHTSHIP_CLIENTS="/no/clients")
        second = up(TIGHTSHIP_CLIENTS="/no/others")
        assert "/no/others" in second
        assert "/no/clients" not in second
    finally:
        shutil.rmtree(run_dir)


def test_a_service_elsewhere_is_looked_for_there() -> None:
    nobody = "127.0.0.1:9"
    done = subprocess.run(
        [Path(sys.executable).with_name("tightship"), "list"],
        env={"PATH": os.environ["PATH"], "TIGHTSHIP_CONTAINERIZER": nobody, "TIGHTSHIP_SWITCHBOARD": nobody},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 14
    assert nobody in done.stderr
    assert "TIGHTSHIP_TLS_CA" in done.stderr
    assert "up -d" not in done.stderr
