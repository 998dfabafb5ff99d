"""The rig as docker-compose.yml has it: who runs as what, the end-to-end tests against it, and its traces."""

from __future__ import annotations

import re
import secrets
import shlex

import pytest

from tests.compose.rig import Rig
from tests.harness.calls import FULL_SPEC
from tests.harness.pair import ROOT
from tests.harness.waiting import until

pytestmark = pytest.mark.timeout(900)


def test_nothing_is_privileged_and_the_switchboard_is_nobody(plain: Rig) -> None:
    for service in ("switchboard", "containerizer"):
        assert plain.inspect(service)["HostConfig"]["Privileged"] is False
    status = plain.command("cat", "/proc/1/status", service="switchboard")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["950"] * 4
    assert {int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {0}
    assert fields["NoNewPrivs"] == "1"
    status = plain.command("cat", "/proc/1/cmdline")
    assert "spawner/__main__.py" in status, "the spawner is the first process"


def test_a_limited_launch(plain: Rig) -> None:
    result = plain.calls.run(["/bin/sh", "-c", "cat; hostname"], spec=FULL_SPEC, input=b"hello\n")
    assert (result.code, result.stdout) == (0, b"hello\ninside\n"), result


def test_the_end_to_end_tests_in_the_test_profile(plain: Rig) -> None:
    printed = plain.compose("--profile", "test", "run", "--rm", "-T", "tests", timeout=800)
    print(printed)
    summary = re.search(r"(\d+) passed", printed.splitlines()[-1])
    assert summary is not None, printed
    assert int(summary[1]) >= 80
    assert "failed" not in printed.splitlines()[-1]
    plain.settle()


def test_a_launch_is_one_trace_over_both_services(plain: Rig) -> None:
    trace = secrets.token_hex(16)
    plain.calls.run(["/bin/true"], metadata=(("traceparent", f"00-{trace}-{secrets.token_hex(8)}-01"),))
    services = {"tightship-containerizer", "tightship-switchboard"}
    until(lambda: {span["service"] for span in plain.spans(trace)} >= services, "both services' spans have come", 30)


def test_a_stranger_to_the_pair_finds_no_way_in(plain: Rig) -> None:
    mode = plain.run_dir.stat()
    assert (mode.st_mode & 0o7777, mode.st_uid) == (0o750, 950)


def test_the_commands_of_the_readme(plain: Rig) -> None:
    text = (ROOT / "README.md").read_text()
    (commands,) = re.findall(r"^```bash\n(docker-compose up -d.*?)^```$", text, re.MULTILINE | re.DOTALL)
    verbatim = [line.split("#")[0].strip() for line in commands.splitlines()]
    assert (verbatim[0], verbatim[-1]) == ("docker-compose up -d", "docker-compose down -v")
    for line in verbatim[1:-1]:
        words = shlex.split(line)
        assert words.pop(0) == "docker-compose"
        if "tests" not in words:  # that one is the test above
            assert plain.compose(*words).splitlines()[-1] == "hello"
