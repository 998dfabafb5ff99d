"""The command line as people use it: `top` on a terminal and elsewhere, `doctor`, names that are completed, progress,
specs in JSON, and the next step after a failure."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.harness.calls import fresh_name
from tests.harness.pair import Pair
from tests.harness.waiting import until

TIGHTSHIP = [sys.executable, "-c", "from tightship.cli.main import main; main()"]

# What a terminal is told beside text.
_CONTROL = re.compile(rb"\x1b\[[?0-9;]*[a-zA-Z]")


class Terminal:
    """A command on a terminal of its own, `width` columns wide."""

    def __init__(self, pair: Pair, *args: str, width: int = 100, height: int = 30, **environment: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.read = b""
        env = pair.environment | {"TIGHTSHIP_RUN_DIR": str(pair.run_dir), "TERM": "xterm"} | environment
        self.process = subprocess.Popen([*TIGHTSHIP, *args], stdin=theirs, stdout=theirs, stderr=theirs, env=env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.theirs)
        os.close(self.ours)

    def look(self) -> bytes:
        """All that was written until now."""
        while select.select([self.ours], [], [], 0)[0]:
            self.read += os.read(self.ours, 65536)
        return self.read

    def await_text(self, words: str, timeout_s: float = 20.0) -> None:
        until(lambda: words.encode() in _CONTROL.sub(b"", self.look()), f"{words!r} is shown", timeout_s)

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def end(self, timeout_s: float = 20.0) -> int:
        until(lambda: (self.look(), self.process.poll())[1] is not None, "the command ends", timeout_s)
        self.look()
        return self.process.returncode


def screens(read: bytes) -> list[list[str]]:
    """The frames of `top`: lines without colours."""
    return [_CONTROL.sub(b"", frame).decode().split("\r\n") for frame in read.split(b"\x1b[H")[1:]]


@pytest.fixture
def running(pair: Pair) -> Iterator[str]:
    """A container that uses CPU."""
    pair.calls.detach(["/bin/sh", "-c", "while :; do :; done"], name := fresh_name(), "memory { limit: 67108864 }")
    yield name
    with contextlib.suppress(Exception):
        pair.calls.destroy(name)


def test_top_shows_a_launch_and_its_end(pair: Pair) -> None:
    with Terminal(pair, "top", "-d", "100ms") as top:
        top.await_text("no containers")
        pair.calls.detach(["/bin/sh", "-c", "while :; do :; done"], name := fresh_name(), "memory { limit: 67108864 }")
        top.await_text(name)
        until(lambda: float(_row(top, name)[2]) > 0, "it is seen to use CPU")
        row = _row(top, name)
        assert row[1] == "RUNNING"
        assert "64.0 MiB" in " ".join(row)
        assert b"\x1b[32mRUNNING" in top.look()
        pair.calls.destroy(name)
        until(lambda: name not in "".join(screens(top.look())[-1]), "it is gone")
        top.press(b"q")
        assert top.end() == 0
        assert top.read.startswith(b"\x1b[?1049h") and top.read.endswith(b"\x1b[?1049l")
        assert termios.tcgetattr(top.theirs) == top.before


def _row(top: Terminal, name: str) -> list[str]:
    for line in screens(top.look())[-1]:
        if line.startswith(name):
            return line.split()
    return ["", "", "0"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_top_leaves_the_terminal_as_it_was(pair: Pair, number: signal.Signals, status: int) -> None:
    with Terminal(pair, "top") as top:
        top.await_text("tightship on")
        top.process.send_signal(number)
        assert top.end() == status
        assert top.read.endswith(b"\x1b[?1049l")
        assert termios.tcgetattr(top.theirs) == top.before


def test_top_fits_the_terminal(pair: Pair, running: str) -> None:
    with Terminal(pair, "top", "-d", "100ms", "-n", "2", width=60, height=8, NO_COLOR="1") as top:
        assert top.end() == 0
    for frame in screens(top.read):
        assert len(frame) <= 8
        assert all(len(line) <= 60 for line in frame)
    assert any(running[:6] in line for line in screens(top.read)[-1])
    assert b"\x1b[32m" not in top.read


def test_top_says_what_it_can_not_show(pair: Pair) -> None:
    names = [fresh_name() for _ in range(6)]
    for name in names:
        pair.calls.create(name)
    with Terminal(pair, "top", "-n", "1", height=6) as top:
        assert top.end() == 0
    for name in names:
        pair.calls.destroy(name)
    (frame,) = screens(top.read)
    assert len(frame) == 6
    assert frame[-1] == "... and 4 more"


def test_top_elsewhere_is_one_plain_table(pair: Pair, running: str) -> None:
    ended = pair.command("top", "-d", "300ms")
    assert (ended.returncode, ended.stderr) == (0, "")
    header, *rows = ended.stdout.splitlines()
    assert header.split()[:3] == ["NAME", "STATE", "CPU%"]
    (row,) = [row.split() for row in rows if row.startswith(running)]
    assert float(row[2]) > 0
    assert "\x1b" not in ended.stdout
    told = json.loads(pair.command("--json", "top", "-d", "300ms", running).stdout)
    (container,) = told["containers"]
    assert container["name"] == running
    assert container["cpu_percent"] > 0
    assert container["usage"]["memory_limit"] == "67108864"
    lines = pair.command("top", "--json", "-n", "2", "-d", "100ms").stdout.splitlines()
    assert len([json.loads(line) for line in lines]) == 2


def test_top_of_nothing(pair: Pair) -> None:
    with Terminal(pair, "top", "/no-such") as top:
        assert top.end() == 5
    assert b"NOT_FOUND" in top.read
    assert b"\x1b[?1049h" not in top.read


def test_top_waits_for_a_service_that_is_started_anew(own_pair: Pair) -> None:
    with Terminal(own_pair, "top", "-d", "100ms") as top:
        top.await_text("tightship on")
        own_pair.kill("containerizer")
        own_pair.await_ready()
        own_pair.calls.create(name := fresh_name())
        top.await_text(name)
        own_pair.calls.destroy(name)
        top.press(b"q")
        assert top.end() == 0


def test_names_are_completed(pair: Pair, running: str) -> None:
    for typed, expected in ((running[:-1], running), (running[1:-1], running[1:])):
        asked = {"_TIGHTSHIP_COMPLETE": "bash_complete", "COMP_WORDS": f"tightship kill {typed}", "COMP_CWORD": "2"}
        env = pair.environment | {"TIGHTSHIP_RUN_DIR": str(pair.run_dir)} | asked
        ended = subprocess.run(TIGHTSHIP, capture_output=True, text=True, timeout=60, check=True, env=env)
        assert ended.stdout.splitlines() == [f"plain,{expected}"]
        assert ended.stderr == ""


def test_tables_fit_a_terminal_and_have_its_colours(pair: Pair, running: str) -> None:
    with Terminal(pair, "list", width=50) as listed:
        assert listed.end() == 0
    lines = _CONTROL.sub(b"", listed.read).decode().split("\r\n")
    assert all(len(line) <= 50 for line in lines)
    assert b"\x1b[32mRUNNING\x1b[0m" in listed.read
    with Terminal(pair, "list", NO_COLOR="1") as listed:
        assert listed.end() == 0
    assert b"\x1b" not in listed.read
    assert "\x1b" not in pair.command("list").stdout


def test_progress_is_shown_on_a_terminal_alone(pair: Pair, running: str) -> None:
    with Terminal(pair, "wait", running) as waiting:
        waiting.await_text(f"waiting for {running}")
        pair.calls.destroy(running)
        assert waiting.end() == 0
    assert b"\r\x1b[K" in waiting.read
    quiet = pair.command("wait", running)
    assert (quiet.returncode, quiet.stderr) == (0, "")


def test_the_version_in_json(pair: Pair) -> None:
    plain = pair.command("--version").stdout.split()
    assert plain[0] == "tightship"
    for words in (["--json", "--version"], ["--version", "--json"]):
        assert json.loads(pair.command(*words).stdout) == {"version": plain[1]}


def test_a_spec_in_json(pair: Pair) -> None:
    name = fresh_name()
    made = pair.command("--json", "create", name, '{"memory": {"limit": 67108864}, "tasks": {"limit": 5}}')
    assert made.returncode == 0, made.stderr
    told = json.loads(pair.command("--json", "spec", name).stdout)["spec"]
    assert told == {"memory": {"limit": "67108864"}, "tasks": {"limit": "5"}}
    again = pair.command("--json", "create", f"{name}/again", json.dumps(told))  # as it was read back
    assert again.returncode == 0, again.stderr
    pair.calls.destroy(name)
    ran = pair.command("run", "--json", "--spec", '{"tasks": {"limit": 7}}', "--", "true")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("words", "status", "metadata"),
    [
        (["--json", "create", "/x", '{"cpu": {"limit": "x"}}'], 3, {"line": "1", "column": "10", "field": "cpu.limit"}),
        (["--json", "create", "/x", '{\n"memory": {"max_limit": 1}}'], 12, {"line": "2", "column": "12"}),
        (["run", "--json", "--spec", '{"memory": {"max_limit": 1}}', "--", "true"], 125, {"line": "1", "column": "13"}),
    ],
)
def test_what_is_wrong_in_json_has_its_place(
    pair: Pair, words: list[str], status: int, metadata: dict[str, str]
) -> None:
    ended = pair.command(*words)
    assert ended.returncode == status
    told: dict[str, Any] = json.loads(ended.stderr)
    assert metadata.items() <= told["metadata"].items()


def test_failures_tell_the_next_step(pair: Pair, running: str) -> None:
    for words, status, step in (
        (("create", running, ""), 6, f"tightship destroy -f {running}"),
        (("destroy", running), 9, f"tightship destroy -f {running}"),
        (("destroy", "/no-such"), 5, "tightship list -ra"),
        (("create", "/no-such/x", ""), 5, "tightship create /no-such ''"),
        (("create", "/x", "{}"), 3, "--json"),
        (("create", "/x", "cpu { nonsense: 1 }"), 3, "tightship help specs"),
        (("create", "/_x", ""), 3, "tightship help names"),
    ):
        ended = pair.command(*words)
        assert ended.returncode == status, ended.stderr
        assert step in ended.stderr
        assert "Traceback" not in ended.stderr


def doctor(pair: Pair, *args: str) -> tuple[int, dict[str, dict[str, str]]]:
    ended = pair.command("--json", "doctor", *args)
    told = json.loads(ended.stdout)
    assert told["ok"] == (ended.returncode == 0)
    return ended.returncode, {each["what"]: each for each in told["findings"]}


def test_doctor_tells_what_is_there(pair: Pair) -> None:
    status, found = doctor(pair)
    assert status == 0
    assert found["kernel"]["found"] == os.uname().release
    assert found["containerizer"]["state"] == found["switchboard"]["state"] == "ok"
    version = pair.command("--version").stdout.split()[1]
    for service in ("containerizer", "switchboard"):
        assert found[service]["found"] == f"serves, version {version}"
    assert str(pair.run_dir) in found["path"]["found"]
    assert found["containerizer.sock"]["state"] == "ok"
    effective = int(re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)  # type: ignore[index]
    assert (found["CAP_SYS_RESOURCE"]["state"] == "ok") == bool(effective >> 24 & 1)
    for controller in ("cpu", "cpuset", "memory", "pids"):
        told = found[f"controller {controller}"]
        assert told["state"] == "ok"
        version, _, path = told["found"].partition(", ")
        assert Path(path, pair.instance).is_dir()
        assert (version == "v2") == Path(path, "cgroup.controllers").exists()
    assert all(each["step"] for each in found.values() if each["state"] in ("warn", "missing"))
    text = pair.command("doctor")
    assert text.returncode == 0
    assert "nothing is missing" in text.stdout
    assert "\x1b" not in text.stdout


def test_doctor_asks_services_that_are_elsewhere(pair: Pair, tmp_path: Path) -> None:
    at = {f"TIGHTSHIP_{name.upper()}": f"{pair.run_dir}/{name}.sock" for name in ("containerizer", "switchboard")}
    env = pair.environment | at | {"TIGHTSHIP_RUN_DIR": str(tmp_path)}
    asked = subprocess.run(
        [*TIGHTSHIP, "doctor", "--json"], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    found = {each["what"]: each for each in json.loads(asked.stdout)["findings"]}
    assert found["switchboard"]["state"] == "ok"
    assert found["switchboard"]["found"].endswith(f"at {pair.run_dir}/switchboard.sock")
    assert "switchboard.sock" not in found


def test_doctor_warns_of_a_door_that_is_open_to_the_host(pair: Pair, tmp_path: Path) -> None:
    clients = tmp_path / "clients.toml"
    clients.write_text('[[client]]\nname = "loopback"\nprefixes = ["/l"]\n')
    opened = {"TIGHTSHIP_INSECURE_LOOPBACK": "1"}
    for more, state in (({}, None), (opened, "warn"), (opened | {"TIGHTSHIP_CLIENTS": str(clients)}, "ok")):
        asked = subprocess.run(
            [*TIGHTSHIP, "doctor", "--json"], env=pair.environment | more, capture_output=True, timeout=60, check=True
        )
        found = {each["what"]: each["state"] for each in json.loads(asked.stdout)["findings"]}
        assert found.get("insecure loopback") == state


def test_doctor_leaves_nothing(pair: Pair) -> None:
    """Its cgroups, under a name that is known here, are there while it looks and gone afterwards."""
    name = os.urandom(4).hex()
    code = (
        "import secrets\n"
        f"secrets.token_hex = lambda _: {name!r}\n"
        "from tightship.containerizer import doctor, machine\n"
        "look = machine.look\n"
        "def looked(name):\n"
        "    found = look(name)\n"
        "    print(*[each.base for each in found.trees])\n"
        "    return found\n"
        "machine.look = looked\n"
        "list(doctor.findings())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    bases = ended.stdout.split()
    assert bases
    assert all(base.endswith(name) for base in bases)
    assert not any(os.path.exists(base) for base in bases)


def test_doctor_finds_a_service_that_is_away(own_pair: Pair) -> None:
    own_pair.kill("switchboard", again=False)
    status, found = doctor(own_pair)
    assert status == 1
    assert found["switchboard"]["state"] == "missing"
    assert found["switchboard"]["step"]
    assert found["switchboard.sock"]["state"] == "warn"
    assert "nobody accepts" in found["switchboard.sock"]["found"]
    own_pair.restart("switchboard")
    own_pair.await_ready()


def test_doctor_finds_a_run_directory_that_anybody_writes(pair: Pair, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    status, found = doctor(pair, "--run-dir", str(tmp_path))
    assert (status, found["path"]["state"]) == (1, "missing")
    assert found["path"]["step"] == f"chmod o-w {tmp_path}"
    status, found = doctor(pair, "--run-dir", str(tmp_path / "absent"))
    assert (status, found["path"]["state"], found["pair"]["state"]) == (0, "note", "note")
    status, found = doctor(pair, "--run-dir", "/tmp/" + "x" * 200)
    assert (status, found["path"]["state"]) == (1, "missing")


def test_doctor_sees_what_a_user_lacks(pair: Pair, tmp_path: Path) -> None:
    """The machine's part, as a user who may do nothing."""
    code = (
        "import sys, json\n"
        "from dataclasses import asdict\n"
        "from tightship.containerizer import doctor\n"
        "import os, resource\n"
        "b'x'.decode('unicode_escape')  # that user may not be able to read this Python\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(json.dumps([asdict(each) for each in doctor.findings()]))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    found = {each["what"]: each for each in json.loads(ended.stdout)}
    assert found["user"]["state"] == "warn"
    assert found["cgroups of ours"]["state"] == "missing"
    assert found["CAP_KILL"]["state"] == "warn"
    assert found["namespaces of virtual_host"]["state"] == "warn"
    assert found["open files"]["state"] == "missing"
    assert found["clone3 with a pidfd"]["state"] == "ok"
