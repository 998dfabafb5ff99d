"""Help, topics, and completion: every command says what it does, with an example and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import grpc
import pytest

from tightship.cli import commands, help

TIGHTSHIP = [sys.executable, "-c", "from tightship.cli.main import main; main()"]
NAMES = commands.cli.list_commands(click.Context(commands.cli))


def tightship(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TIGHTSHIP_RUN_DIR": "/tmp/tightship-test-no-such-dir"} | environment
    return subprocess.run([*TIGHTSHIP, *args], capture_output=True, text=True, timeout=60, check=False, env=env)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_example_exit_status_and_json(name: str) -> None:
    command = commands.cli.get_command(click.Context(commands.cli), name)
    assert command is not None
    told = command.get_help(click.Context(command, info_name=name))
    assert f"tightship {name}" in told.split("Example", 1)[1]
    assert "Exit status:" in told
    assert "--json" in told.split("Options:", 1)[1]
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.name
            timed = option.metavar == "TIME"
            assert not timed or "[" in option.help, f"{option.name} has no default"
    assert all(len(line) <= 100 for line in told.splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_help_names_a_command_as_its_own_help_does(name: str) -> None:
    assert tightship("help", name).stdout.replace("tightship help", "") == tightship(name, "--help").stdout.replace(
        "tightship help", ""
    )


@pytest.mark.parametrize("topic", help.TOPICS)
def test_topics(topic: str) -> None:
    ended = tightship("help", topic)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert topic in tightship("help").stdout
    assert json.loads(tightship("--json", "help", topic).stdout) == {"topic": topic, "text": ended.stdout.rstrip("\n")}


def test_exit_codes_are_those_of_grpc() -> None:
    codes = {each.value[0]: each.name for each in grpc.StatusCode}
    assert all(codes[number] == name for number, name, _ in help.CODES if name)


def test_no_such_topic() -> None:
    ended = tightship("help", "nonsense")
    assert ended.returncode == 5
    assert "next: " in ended.stderr


def complete(shell: str, words: str, position: int, last: str) -> list[str]:
    """What a shell's script is answered: bash tells the position, fish the word itself."""
    asked = {"_TIGHTSHIP_COMPLETE": f"{shell}_complete", "COMP_WORDS": words}
    asked["COMP_CWORD"] = last if shell == "fish" else str(position)
    ended = tightship(**asked)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.removesuffix("\n").split("\n")


def test_commands_are_completed_for_each_shell() -> None:
    assert complete("bash", "tightship dest", 1, "dest") == ["plain,destroy"]
    assert complete("zsh", "tightship de", 1, "de")[:3] == ["plain", "destroy", "End a container and all below it."]
    assert "destroy\tEnd a container and all below it." in complete("fish", "tightship de", 1, "de")[0]


@pytest.mark.parametrize(
    ("words", "position", "expected"),
    [
        ("tightship destroy --fo", 2, ["plain,--force"]),
        ("tightship kill -s US", 3, ["plain,USR1", "plain,USR2"]),
        ("tightship create -c x", 3, ["file,x"]),
        ("tightship run --time", 2, ["plain,--timeout"]),
        ("tightship run -- ca", 3, ["file,ca"]),
        ("tightship run /a --x", 3, ["file,--x"]),
        ("tightship top -s me", 3, ["plain,memory"]),
        ("tightship help exit", 2, ["plain,exit-codes"]),
        ("tightship completion f", 2, ["plain,fish"]),
        ("tightship destroy /a", 2, []),  # no service
        ("tightship --run-dir /dev/null destroy /a", 4, []),
    ],
)
def test_what_follows_a_command_is_completed(words: str, position: int, expected: list[str]) -> None:
    assert complete("bash", words, position, "") == (expected or [""])


def test_completing_commands_imports_none_of_them() -> None:
    code = (
        "import sys\n"
        "from tightship.cli.main import main\n"
        "try: main()\n"
        "finally: print(sorted(set(sys.modules) & {'asyncio', 'grpc', 'google', 'tightship.cli.containers'}))"
    )
    env = os.environ | {"_TIGHTSHIP_COMPLETE": "bash_complete", "COMP_WORDS": "tightship d", "COMP_CWORD": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=env
    )
    assert ended.stdout.splitlines() == ["plain,down", "plain,destroy", "plain,detect", "plain,doctor", "[]"]


def test_bash_completes_by_the_script() -> None:
    script = tightship("completion", "bash").stdout
    path = os.path.dirname(sys.executable)
    asked = (
        f"{script}\nPATH={path}:$PATH\n"
        "COMP_WORDS=(tightship compl); COMP_CWORD=1; _tightship_completion tightship\n"
        'echo "${COMPREPLY[@]}"; complete -p tightship'
    )
    ended = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines()[0] == "completion"
    assert "_tightship_completion tightship" in ended.stdout


@pytest.mark.parametrize(("shell", "words"), [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete --no")])
def test_scripts_of_all_shells(shell: str, words: str) -> None:
    ended = tightship("completion", shell, PATH="/nonexistent")
    assert ended.returncode == 0
    assert words in ended.stdout
    assert json.loads(tightship("--json", "completion", shell).stdout) == {
        "shell": shell, "script": ended.stdout.removesuffix("\n"),
    }  # fmt: skip
    assert tightship("completion", "tcsh").returncode == 3
