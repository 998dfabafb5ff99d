"""The rig by Compose v2: up by its health checks, used, stopped, killed, started again, and down."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.compose.engine import CACHE, docker
from tests.compose.rig import Rig, rig
from tests.harness.calls import fresh_name
from tightship.v1 import containerizer_pb2 as cpb

pytestmark = pytest.mark.timeout(900)


def _program() -> list[str]:
    """The plugin, or what prepare has built."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    built = CACHE / "compose-v2"
    if not os.access(built, os.X_OK):
        pytest.skip("needs Compose v2: its docker plugin, or Go 1.22 or newer, by which prepare builds it")
    return [str(built)]


@pytest.fixture(scope="module")
def second(_images: None) -> Iterator[Rig]:
    with rig("tightship-second", program=_program()) as one:
        yield one


def test_it_is_the_second_compose(second: Rig) -> None:
    assert "Docker Compose version" in second.compose("version")
    listed = [json.loads(line) for line in second.compose("ps", "--format", "json").splitlines()]
    assert {one["Service"]: one["Health"] for one in listed} == {
        "switchboard": "healthy", "containerizer": "healthy", "jaeger": "",
    }  # fmt: skip


def test_the_commands_of_the_readme(second: Rig) -> None:
    printed = second.command("tightship", "run", "--spec", "memory { limit: 67108864 }", "--", "echo", "hello")
    assert printed.splitlines()[-1] == "hello"


def test_some_end_to_end_tests_in_the_test_profile(second: Rig) -> None:
    words = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/e2e/test_streams.py")
    printed = second.compose("--profile", "test", "run", "--rm", "-T", "tests", *words, timeout=600)
    summary = re.search(r"(\d+) passed", printed.splitlines()[-1])
    assert summary is not None, printed
    assert int(summary[1]) >= 5
    assert "failed" not in printed.splitlines()[-1]
    second.settle()


@pytest.mark.parametrize("service", ["containerizer", "switchboard"])
@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_service_is_stopped_and_killed_with_contained_work(second: Rig, service: str, how: str) -> None:
    name = fresh_name("work")
    second.calls.detach(["/bin/sh", "-c", "sleep 600 & sleep 600"], name)
    if how == "kill":
        docker("kill", second.container(service))
        second.compose("start", service)
    else:
        second.compose("restart", service)
    second.connect()
    second.await_healthy(service)
    second.await_ready()
    if name in second.calls.living():
        assert service == "switchboard", "the containerizer's container has taken it along"
        second.calls.destroy(name)
    second.settle()
    assert second.calls.run(["/bin/true"], name).record.reason == cpb.Record.EXITED
    second.settle()


def test_the_faults_are_taken_too(second: Rig) -> None:
    faulty = Rig("tightship-second", "docker-compose.faults.yml", program=second.program)
    shown = json.loads(faulty.compose("config", "--format", "json"))
    for service in ("switchboard", "containerizer"):
        assert shown["services"][service]["environment"]["TIGHTSHIP_FAILPOINTS"]
