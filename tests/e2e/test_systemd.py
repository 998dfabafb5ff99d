"""The systemd units: systemd takes them without a word, and what they start is a pair whose containers outlive a stop.

No systemd runs here as the first process; a test starts what ExecStart says, and stops as KillMode=process does.
"""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pair import ROOT, Pair

UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
_PYTHON = "/opt/tightship/bin/python"


def _unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / f"deploy/systemd/tightship-{name}.service")
    return parser


def _command(name: str) -> list[str]:
    command = shlex.split(_unit(name)["Service"]["ExecStart"])
    assert command[0] == _PYTHON
    return [sys.executable, *command[1:]]


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace(_PYTHON, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / unit.name) for unit in UNITS)],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:/lib/systemd/system"},
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if "tightship" in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_a_stop_reaches_the_spawner_alone() -> None:
    service = _unit("containerizer")["Service"]
    assert (service["KillMode"], service["Delegate"]) == ("process", "yes")
    restricting = [key for key in service if key.startswith(("Protect", "Private", "Restrict", "SystemCall"))]
    assert restricting == [], "contained processes would inherit it"
    for name in ("containerizer", "switchboard"):
        assert _unit(name)["Service"]["RestartPreventExitStatus"] == "78"


@pytest.fixture
def started() -> Iterator[Pair]:
    """A pair whose services are started by what the units say."""
    pair = Pair()
    pair.commands = {"spawner": _command("containerizer"), "switchboard": _command("switchboard")}
    pair.environment["TIGHTSHIP_RUN_DIR"] = str(pair.run_dir)
    with pair:
        yield pair


def test_containers_outlive_a_stop_of_the_unit(started: Pair) -> None:
    running = started.calls.detach(["/bin/sleep", "600"], "/kept")
    started.stop("spawner")
    assert os.path.exists(f"/proc/{running.pid}")
    started.restart("spawner")
    started.await_service("containerizer")
    started.await_ready()
    assert started.calls.living()["/kept"].pid == running.pid
    started.calls.destroy("/kept")
