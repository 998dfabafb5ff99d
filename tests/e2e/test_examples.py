"""The programs in examples/, each in its language, against one pair: they run through, and nothing is left of them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.harness.pair import ROOT, Pair

EXAMPLES = ROOT / "examples"
NODE = EXAMPLES / "node"


def _run(pair: Pair, *command: str) -> str:
    with pair.unchanged():
        done = subprocess.run(
            [*command, str(pair.run_dir)], env=pair.environment, capture_output=True, text=True, timeout=90, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


def test_blocking(pair: Pair) -> None:
    said = _run(pair, sys.executable, str(EXAMPLES / "blocking.py")).splitlines()
    assert said[0] == "exit status 3, output: hello from Python"
    assert said[1].endswith("says: working")
    assert said[2].endswith("CANCELLED (client_cancelled)")
    assert said[3] == "audit: 0 left"
    assert said[4].startswith("INVALID_ARGUMENT BAD_SPEC")


def test_asyncio_many(pair: Pair) -> None:
    said = _run(pair, sys.executable, str(EXAMPLES / "asyncio_many.py")).splitlines()
    assert said == ["4 cancelled, 5 not passed, 11 passed", "0 living, audit: 0 left"]


def test_node(pair: Pair) -> None:
    if shutil.which("node") is None:
        pytest.skip("node is missing: apt-get install nodejs npm")
    if not (NODE / "node_modules").is_dir():
        pytest.skip(f"the modules of the Node example are missing: npm ci --prefix {NODE}")
    said = _run(pair, "node", str(NODE / "launch.js")).splitlines()
    assert said[0].startswith("cleanup: CLEAN, ")
    assert said[1] == "exit status 3, output: hello from Node"
    assert said[2].endswith("says: working")
    assert said[3].endswith("CANCELLED (client_cancelled)")
    assert said[4] == "audit: 0 left"
    assert said[5].startswith("INVALID_ARGUMENT BAD_SPEC")
    assert said[5].endswith("(field memory.limit)")
