"""The command line before any service: names, where options end, values, exit statuses, what is imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightship.cli import names, values
from tightship.cli.launching import split
from tightship.cli.run import run

NO_SERVICE = "/tmp/tightship-test-no-such-dir"


def tightship(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: PLW1510
        [sys.executable, "-c", "from tightship.cli.main import main; main()", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TIGHTSHIP_RUN_DIR": NO_SERVICE, **(env or {})},
    )


@pytest.mark.parametrize(
    ("typed", "absolute"),
    [
        ("test", "/top/test"),
        ("./test", "/top/test"),
        (".", "/top"),
        ("..", "/"),
        ("../test", "/test"),
        ("//t/t2//t3///", "/t/t2/t3"),
        ("/../../a", "/a"),
        ("a/../b", "/top/b"),
        ("", ""),
    ],
)
def test_names(typed: str, absolute: str) -> None:
    assert names.resolve(typed, "/top") == absolute


@given(st.text("ab./", min_size=1), st.sampled_from(["/", "/top", "/top/x"]))
def test_a_resolved_name_is_clean(typed: str, own: str) -> None:
    made = names.resolve(typed, own)
    assert made.startswith("/")
    assert made == "/" or all(part not in ("", ".", "..") for part in made[1:].split("/"))
    assert names.resolve(made, own) == made


def test_ids_are_left_alone() -> None:
    assert names.resolve_or_id("0123456789abcdef", "/") == "0123456789abcdef"
    assert names.resolve_or_id("./0123456789abcdef", "/") == "/0123456789abcdef"
    assert names.resolve_or_id("abc", "/") == "/abc"


def test_own_container() -> None:
    cgroups = "5:memory:/tightship/0a0b0c0d/top/x\n0::/user.slice\n"
    assert names.within(cgroups, "0a0b0c0d") == "/top/x"
    assert names.within(cgroups, "ffffffff") == "/"
    assert names.within(cgroups, "") == "/"
    assert names.within("0::/tightship/0a0b0c0d\n", "0a0b0c0d") == "/"
    assert names.within("0::/a/tightship/0a0b0c0d/b\n", "0a0b0c0d") == "/b"


@pytest.mark.parametrize(
    ("args", "name", "command", "options"),
    [
        (["--", "true"], None, ["true"], {}),
        (["/a", "true", "-n", "--spec", "x"], "/a", ["true", "-n", "--spec", "x"], {"detach": False}),
        (["/a", "--", "-x"], "/a", ["-x"], {}),
        (["/a", "--", "--", "x"], "/a", ["--", "x"], {}),
        (["-n", "/a", "b"], "/a", ["b"], {"detach": True}),
        (["--spec", "--", "/a", "b"], "/a", ["b"], {"spec_text": "--"}),
        (["--spec=x", "--", "b"], None, ["b"], {"spec_text": "x"}),
        (["-nc", "file", "/a", "b"], "/a", ["b"], {"detach": True, "config": "file"}),
        (["-cfile", "a", "b"], "a", ["b"], {"config": "file"}),
        (["--env", "A=b", "--env", "C=d", "--", "x"], None, ["x"], {"env": ("A=b", "C=d")}),
        (["--timeout", "1.5s", "--max-lifetime", "500ms", "--", "x"], None, ["x"], {"timeout": 1.5}),
        (["-", "x"], "-", ["x"], {}),
    ],
)
def test_where_options_of_run_end(
    args: list[str], name: str | None, command: list[str], options: dict[str, object]
) -> None:
    params = run.make_context("run", args).params
    assert (params["name"], params["command"]) == (name, command)
    for key, value in options.items():
        assert params[key] == value


@given(st.lists(st.text("ab-="), min_size=1))
def test_the_command_is_never_changed(command: list[str]) -> None:
    assert split(["--", *command]) == (None, command)
    assert split(["name", "--", *command]) == ("name", command)


@pytest.mark.parametrize(("text", "seconds"), [("2", 2), ("1.5s", 1.5), ("500ms", 0.5), ("10m", 600), ("1h", 3600)])
def test_durations(text: str, seconds: float) -> None:
    assert values.Seconds().convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "x", "-1", "1d", "1 s", "nan"])
def test_no_durations(text: str) -> None:
    with pytest.raises(click.UsageError):
        values.Seconds().convert(text, None, None)


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["list"], 14, "tightship --run-dir /tmp/tightship-test-no-such-dir up -d"),
        (["destroy", "/a"], 14, "up -d"),
        (["down"], 14, "nothing is up"),
        (["kill"], 3, "NAME"),
        (["create", "/a"], 3, "spec"),
        (["create", "/a", "-c", "/no/such/file"], 5, "/no/such/file"),
        (["cleanup"], 3, "--all"),
        (["nonsense"], 3, "nonsense"),
        (["wait", "--timeout", "x", "/a"], 3, "500ms"),
        (["list", "pids"], 14, "up -d"),
        (["kill", "-s", "", "/a"], 3, "empty"),
        (["cleanup", "--all", "/a"], 3, "not both"),
        (["wait", "--timeout", "\u0663", "/a"], 3, "500ms"),
        (["list", "--run-dir", "/dev/null"], 9, "/dev/null"),
        (["down", "--run-dir", "/dev/null"], 9, "/dev/null"),
        (["run", "--run-dir", "/dev/null", "--", "true"], 125, "/dev/null"),
        (["run", "-i", "-c", "-", "--", "true"], 125, "standard input"),
        (["run"], 125, "command is missing"),
        (["run", "true"], 125, "tightship run -- true"),
        (["run", "--nonsense", "--", "true"], 125, "--nonsense"),
        (["run", "--env", "1=2=3", "--env", "=x", "--", "true"], 125, "K=V"),
        (["run", "-c", "/no/such/file", "--", "true"], 125, "5 NOT_FOUND"),
        (["run", "-n", "--", "true"], 125, "9 FAILED_PRECONDITION"),
        (["run", "", "true"], 125, "3 INVALID_ARGUMENT"),
        (["run", "--", "printf", "\udcff"], 125, "not UTF-8"),
        (["create", "/\udcff", ""], 3, "not UTF-8"),
        (["wait", "--timeout", "99999999999999999h", "/a"], 3, "ten years"),
    ],
)
def test_statuses_without_a_service(args: list[str], status: int, says: str) -> None:
    ended = tightship(*args)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("args", "status"), [(["list"], 14), (["list", "--nonsense"], 3), (["run", "true"], 125)])
def test_failures_as_json_are_one_object(args: list[str], status: int) -> None:
    ended = tightship("--json", *args)
    assert ended.returncode == status
    assert json.loads(ended.stderr).keys() == {"code", "status", "reason", "message", "metadata", "next"}


@pytest.mark.parametrize(
    ("redirections", "status"),
    [(">/dev/full", 8), (">&-", 0), ("<&- >&- 2>&-", 0), (">/dev/full 2>/dev/full", 8), ("2>/dev/full", 0)],
)
def test_standard_streams_that_are_closed_or_full(redirections: str, status: int) -> None:
    code = "from tightship.cli.main import main; main()"
    command = f'exec "$0" -c "$1" --help {redirections}'
    ended = subprocess.run(  # noqa: PLW1510
        ["sh", "-c", command, sys.executable, code], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == status
    assert len(ended.stderr.splitlines()) == (1 if redirections == ">/dev/full" else 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_importing_ends_it_quietly(number: signal.Signals) -> None:
    code = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'tightship.cli.containers': os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from tightship.cli.main import main; main()"
    )
    ended = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-c", code, "list"], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", "")


@pytest.mark.parametrize("command", ["", "up", "run", "create", "audit", "logs", "down"])
def test_help_is_light_and_has_an_example(command: str) -> None:
    code = (
        "import sys\n"
        "from tightship.cli.main import main\n"
        "try: main()\n"
        "finally: print(sorted({'grpc', 'google', 'opentelemetry', 'tenacity'} & set(sys.modules)))"
    )
    words = [command, "--help"] if command else ["--help"]
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.endswith("[]\n")
    assert "tightship " + (command or "run") in ended.stdout.split("Options:")[0].split("\n", 1)[1]


def test_a_user_without_cgroups_is_told_so_first() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    code = (  # imports first: another user may not be able to read this Python
        "import difflib, os, tightship.cli.commands, tightship.cli.run, tightship.cli.service, tightship.cli.embedded\n"
        "from tightship.cli.main import main\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"os.environ['TIGHTSHIP_RUN_DIR'] = {NO_SERVICE!r}\n"
        "main()"
    )
    for command, status in ((["up"], 7), (["up", "-d"], 7), (["run", "--", "true"], 125)):
        ended = subprocess.run(  # noqa: PLW1510
            [sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == status, ended.stderr
        assert len(ended.stderr.splitlines()) == 1
        assert "user 65534 may not make cgroups" in ended.stderr
        assert "root" in ended.stderr
    assert not os.path.exists(NO_SERVICE)
