"""The rig with docker-compose.faults.yml: Incident A on demand, and containers of services stopped, killed, restarted.

A container's end is the end of its pid namespace: all that is contained dies with the containerizer's, and what is left
on the host are cgroups, which the next start has to find by its journal.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterator

import grpc
import pytest

from tests.compose.engine import docker
from tests.compose.rig import Rig
from tests.harness import census
from tests.harness.calls import FULL_SPEC, code, fresh_name
from tests.harness.pair import ROOT
from tests.harness.waiting import Answer, await_end, until
from tightship.v1 import containerizer_pb2 as cpb
from tightship.v1 import switchboard_pb2 as spb

pytestmark = pytest.mark.timeout(300)

BUDGET_S = 10.0
# Seconds that a stop may take, as docker-compose.yml gives them.
GRACE_S = {"switchboard": 8, "containerizer": 25}
SERVICES = tuple(GRACE_S)


@pytest.fixture(autouse=True)
def _disarmed(faulty: Rig) -> Iterator[None]:
    yield
    faulty.points.clear()
    for service in SERVICES:
        docker("start", faulty.container(service))
    faulty.await_ready()
    faulty.settle()


@pytest.mark.parametrize("stopped", [False, True], ids=["alone", "switchboard stopped"])
@pytest.mark.parametrize("point", ["spawner.claim.before", "spawner.claim.after", "spawner.ready.after"])
def test_mesos_9502_incident_a_on_demand(faulty: Rig, point: str, stopped: bool) -> None:
    calls = faulty.calls
    calls.create(parent := fresh_name("parent"))
    faulty.command("sh", "-c", f"echo wait > $TIGHTSHIP_FAILPOINTS/{point}")
    launching = calls.launch(["/bin/sh", "-c", "echo never; sleep 600"], f"{parent}/check", FULL_SPEC)
    faulty.points.await_hit(point)
    begun = time.monotonic()
    stopping = Answer(lambda: _stop(faulty, "switchboard")) if stopped else None
    launching.cancel()
    # The point stays armed: what is held must end by itself.
    cleanup = calls.destroy(parent, timeout=2 * BUDGET_S)
    assert cleanup.outcome == cpb.Cleanup.CLEAN, cleanup
    assert time.monotonic() - begun < BUDGET_S
    if stopping is not None:
        stopping.result(60)
        docker("start", faulty.container("switchboard"))
    faulty.points.clear()
    faulty.await_ready()
    assert calls.run(["/bin/true"], parent).code == 0, "the name is free"


def test_mesos_9502_by_the_commands_of_the_faults_file(faulty: Rig) -> None:
    text = (ROOT / "docker-compose.faults.yml").read_text()
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   docker-compose ")]
    assert (lines[0], lines[-1]) == ("docker-compose up -d", "docker-compose down -v")
    arm, check, end, audit = (shlex.split(line)[1:] for line in lines[1:-1])
    faulty.compose(*arm)
    assert "gone away" in faulty.compose(*check)
    assert faulty.points.was_hit("spawner.claim.after")
    faulty.compose(*end)
    assert "0 found" in faulty.compose(*audit)
    assert faulty.calls.run(["/bin/true"], "/check").code == 0, "the name is free"


@pytest.mark.parametrize("how", ["stop", "restart", "kill", "crash"])
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_ends_with_contained_work_running(faulty: Rig, service: str, how: str) -> None:
    calls = faulty.calls
    calls.create(made := fresh_name("made"), "memory { limit: 67108864 }")
    attached = calls.launch(["/bin/sleep", "600"], fresh_name("attached"), FULL_SPEC)
    attached_name = attached.started().name
    writer = ["/bin/sh", "-c", "echo begun; while sleep 0.05; do echo more; done"]
    detached = [calls.detach(writer, fresh_name("detached"), spec) for spec in ("", FULL_SPEC)]
    below = calls.detach(["/bin/sleep", "600"], f"{made}/below")
    names = [made, attached_name, below.name, *(each.name for each in detached)]
    inside = census.members(census.cgroups(faulty.instance))
    assert len(inside) >= 4

    _end(faulty, service, how)
    faulty.await_healthy(service)
    faulty.await_ready()

    killed = how in ("kill", "crash")
    survivors = calls.living()
    if service == "containerizer":
        # At a stop all goes; after a kill only a create is still there, since its cgroups are.
        assert set(survivors) == ({made} if killed else set())
        assert not [pid for pid in inside if census.command(pid).startswith(("/bin/sleep", "/bin/sh"))]
        for one in (*detached, below):
            record = calls.wait(one.id)
            assert record.reason == (cpb.Record.UNKNOWN if killed else cpb.Record.CANCELLED), record
            assert calls.lease(one.lease_id).state == spb.Lease.CLOSED
        assert b"begun\n" in calls.attach(detached[0].lease_id)[0][1], "its output outlives it"
    else:
        assert {made, below.name} <= survivors.keys(), "containers outlive the switchboard"
    if service == "containerizer" and killed:
        assert code(attached.error()) == grpc.StatusCode.UNAVAILABLE
    elif service == "containerizer":
        assert attached.exited().cancel_reason == "shutdown"
        attached.gone()
    else:
        attached.cancel()
        until(lambda: attached_name not in calls.living(), "what was cancelled is gone")
    for name in sorted(calls.living(), reverse=True):
        calls.destroy(name)
    faulty.settle()
    calls.create(made)
    for name in names[1:]:
        assert calls.run(["/bin/true"], name, FULL_SPEC).code == 0, "the name is free"
    calls.destroy(made)
    faulty.settle()


@pytest.mark.parametrize(
    "point",
    [
        "containerizer.launch.mkdir.memory.after",
        "containerizer.launch.lease.after",
        "spawner.clone.after",
        "child.cgroups",
        "containerizer.launch.commit.after",
        "spawner.open.after",
        "containerizer.undo.mkdir.memory.before",
    ],
)
def test_a_crash_of_the_whole_container_in_the_middle_of_a_launch(faulty: Rig, point: str) -> None:
    calls = faulty.calls
    faulty.points.arm(point, "wait")
    launching = calls.launch(["/bin/true"], name := fresh_name("cut"), FULL_SPEC)
    faulty.points.await_hit(point)
    _crash(faulty, "containerizer")
    faulty.points.clear()
    assert code(launching.error()) == grpc.StatusCode.UNAVAILABLE
    faulty.await_ready()
    faulty.settle()
    assert calls.run(["/bin/true"], name, FULL_SPEC).code == 0, "the name is free"


def _crash(rig: Rig, service: str) -> None:
    """SIGKILL to the first process, as of the kernel's out-of-memory killer; returns when all of it is gone."""
    pidfd = os.pidfd_open(rig.inspect(service)["State"]["Pid"])
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        await_end(pidfd, 20)
    finally:
        os.close(pidfd)


def _end(rig: Rig, service: str, how: str) -> None:
    if how == "stop":
        _stop(rig, service)
        docker("start", rig.container(service))
    elif how == "kill":
        docker("kill", rig.container(service))
        docker("start", rig.container(service))
    elif how == "crash":
        _crash(rig, service)  # and the engine starts it again
    else:
        rig.compose("restart", service)


def _stop(rig: Rig, service: str) -> None:
    """Raises AssertionError where it did not end by itself within its grace period."""
    begun = time.monotonic()
    rig.compose("stop", service)
    took = time.monotonic() - begun
    state = rig.inspect(service)["State"]
    assert (state["Running"], state["OOMKilled"], state["ExitCode"]) == (False, False, 0), state
    assert took < GRACE_S[service] + 5, "and what docker-compose itself takes"
