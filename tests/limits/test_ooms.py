"""Kills for want of memory are told of the container that they were in, on both cgroup versions."""

from __future__ import annotations

import os
import signal

import pytest

from tests.harness.calls import fresh_name
from tests.harness.pair import Pair
from tightship.v1 import containerizer_pb2 as cpb

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make cgroups")

HOG = ["/usr/bin/python3", "-I", "-c", "x = bytearray(256 << 20)"]


def test_a_kill_below_is_not_told_of_the_one_above(pair: Pair) -> None:
    calls, name = pair.calls, fresh_name("oom")
    main = calls.detach(["/bin/sleep", "600"], name)
    below = calls.run(HOG, f"{name}/below", "memory { limit: 33554432 }")
    assert below.record.reason == cpb.Record.OOM
    calls.containerizer.Kill(cpb.KillRequest(name=name), timeout=20)
    record = calls.wait(main.id)
    assert (record.reason, record.signal) == (cpb.Record.SIGNALLED, signal.SIGKILL)
    assert record.oom_kills == 0


def test_a_kill_by_the_limit_of_one_above_is_told_of_where_it_was(pair: Pair) -> None:
    calls, name = pair.calls, fresh_name("oom")
    calls.create(name, "memory { limit: 67108864 }")
    calls.create(f"{name}/a")
    result = calls.run(HOG, f"{name}/a/b")
    assert (result.record.reason, result.record.oom_kills) == (cpb.Record.OOM, 1)
    calls.destroy(name)


def test_a_kill_in_one_that_has_another_below_is_told_of_it(pair: Pair) -> None:
    """On v2 its processes are charged to its leaf from then on."""
    calls, name = pair.calls, fresh_name("oom")
    script = "until [ -e /tmp/ooms-$$ ] || [ $((n += 1)) -gt 600 ]; do sleep 0.1; done; exec " + " ".join(
        f"'{word}'" for word in HOG
    )
    main = calls.detach(["/bin/sh", "-c", script], name, "memory { limit: 33554432 }", env=["PATH=/usr/bin:/bin"])
    calls.create(f"{name}/below")
    flag = f"/tmp/ooms-{main.pid}"
    with open(flag, "w"):
        record = calls.wait(main.id)
    os.unlink(flag)
    assert (record.reason, record.oom_kills) == (cpb.Record.OOM, 1)
