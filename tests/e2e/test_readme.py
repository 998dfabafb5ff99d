"""Every command and every line of Python that the README shows, and the stories of docs/operations.md, run as they
stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pair import ROOT, Pair


def _blocks(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


_BLOCKS = _blocks("README.md")
_SHELL = [text for language, text in _BLOCKS if language == "sh" and "tightship" in text]
_PYTHON = [(text, "3\n") for language, text in _BLOCKS if language == "python"]
_PYTHON += [(text, "EXEC_FAILED exec ENOENT\n") for language, text in _blocks("docs/api.md") if language == "python"]
_STORIES = re.findall(
    r"^```sh\n(.*?)^```\n\n```tree\n(.*?)^```$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as directory:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield {**os.environ, "PATH": path, "TIGHTSHIP_RUN_DIR": f"{directory}/run"}
        subprocess.run(["tightship", "down"], env={**os.environ, "PATH": path, "TIGHTSHIP_RUN_DIR": f"{directory}/run"},
                       check=False, capture_output=True)  # fmt: skip


@pytest.mark.parametrize("commands", _SHELL, ids=lambda text: text.splitlines()[0][:40])
def test_commands(environment: dict[str, str], commands: str) -> None:
    done = subprocess.run(
        ["sh", "-eux", "-c", commands], env=environment, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("commands", "tree"), _STORIES, ids=range(len(_STORIES)))
def test_a_story_has_the_spans_that_it_shows(environment: dict[str, str], commands: str, tree: str) -> None:
    done = subprocess.run(
        ["sh", "-eu", "-c", commands], env=environment, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert _spans(tree)
    assert _spans(done.stdout) == _spans(tree)


def _spans(drawn: str) -> set[str]:
    """Names, but for the directories that another machine has others of, and what a cleanup came to."""
    lines = [
        re.match(r"[ │├└─]*(\S.*?)  +\+[\d.]+ m?s .*?(?:; (clean|pending):.*)?$", each) for each in drawn.splitlines()
    ]
    spans = {" ".join(filter(None, each.groups())) for each in lines if each}
    return {each for each in spans if "mkdir." not in each}


@pytest.mark.parametrize(("program", "last_words"), _PYTHON)
def test_python(pair: Pair, program: str, last_words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**pair.environment, "TIGHTSHIP_RUN_DIR": str(pair.run_dir)},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(last_words)


def test_the_two_commands_of_the_top() -> None:
    first = _BLOCKS[0][1].splitlines()
    assert [line.split("#")[0].strip() for line in first] == ["make run", "make test"]
