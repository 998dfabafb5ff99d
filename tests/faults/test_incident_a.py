"""Incident A: a cleanup that waits for itself (MESOS-9502), replayed at every place where it could begin.

A launch is held with its lease made and not claimed, claimed and not bound, bound and its gate not open. Its client
goes away, and in some cases the switchboard gets SIGTERM: the cleanup may not wait for a peer that waits for it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.harness import census
from tests.harness.calls import FULL_SPEC, fresh_name
from tests.harness.pair import Pair
from tests.harness.waiting import Answer, await_end, until
from tightship.common import failpoints
from tightship.v1 import containerizer_pb2 as cpb
from tightship.v1 import switchboard_pb2 as spb

BUDGET_S = 10.0

# Point to the state of the lease while the launch is held there.
HELD = {
    "switchboard.acquire.after": spb.Lease.OFFERED,
    "switchboard.claim.before": spb.Lease.OFFERED,
    "switchboard.claim.after": spb.Lease.CLAIMED,
    "spawner.claim.after": spb.Lease.CLAIMED,
    "spawner.clone.after": spb.Lease.CLAIMED,
    "spawner.ready.after": spb.Lease.BOUND,
    "containerizer.launch.spawn.after": spb.Lease.CLAIMED,
    "containerizer.launch.commit.after": spb.Lease.CLAIMED,
    "spawner.open.before": spb.Lease.BOUND,
    "child.gate": spb.Lease.BOUND,
}


@pytest.fixture(autouse=True)
def _disarmed(faulty: Pair) -> Iterator[None]:
    yield
    faulty.points.clear()
    faulty.await_ready()


@pytest.mark.parametrize("sigterm", [None, "before", "after"], ids=["alone", "sigterm first", "sigterm then"])
@pytest.mark.parametrize("point", HELD)
def test_mesos_9502_a_cancelled_launch_ends_with_everything_closed(
    faulty: Pair, point: str, sigterm: str | None
) -> None:
    calls = faulty.calls
    parent, child = fresh_name("parent"), "/check"
    before = faulty.census()
    calls.create(parent)
    faulty.points.arm(point, "wait")
    launching = calls.launch(["/bin/sh", "-c", "echo never; sleep 600"], parent + child, FULL_SPEC)
    faulty.points.await_hit(point)
    # Held in the containerizer, the spawner is on its way still.
    until(lambda: [one.state for one in calls.leases().values()] == [HELD[point]], f"the lease is {HELD[point]}")
    (lease,) = calls.leases().values()
    waiting = Answer(lambda: calls.wait(parent + child, timeout=3 * BUDGET_S))

    begun = time.monotonic()
    old = faulty.pid("switchboard")
    pidfd = os.pidfd_open(old)
    try:
        if sigterm == "before":
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        launching.cancel()
        if sigterm == "after":
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        # The point stays armed: what is held must end by itself.
        cleanup = calls.destroy(parent, timeout=2 * BUDGET_S)
        took = time.monotonic() - begun
        assert cleanup.outcome == cpb.Cleanup.CLEAN, cleanup
        assert took < BUDGET_S
        if sigterm:
            await_end(pidfd, 8)
    finally:
        os.close(pidfd)
    assert waiting.arrived(BUDGET_S), "Wait does not return"
    faulty.points.disarm(point)
    if sigterm:
        faulty.await_service("switchboard")
        faulty.await_ready()
    faulty.settle(before)
    assert calls.lease(lease.lease_id).state == spb.Lease.CLOSED
    assert calls.leases() == {}
    assert calls.run(["/bin/true"], parent).code == 0, "the name is free"


def test_mesos_9151_a_child_at_its_gate_does_not_delay_anothers_end_of_file(faulty: Pair) -> None:
    calls, points = faulty.calls, faulty.points
    before = faulty.census()
    # Both children are made while the spawner holds the pipes of both.
    points.arm("spawner.claim.after", "wait")
    points.arm("child.gate", "wait")
    held, free = calls.launch(["/bin/true"], fresh_name("held")), calls.launch(["/bin/echo", "hi"], fresh_name("free"))
    until(lambda: len(points.hit_by("spawner.claim.after")) == 2, "both are claimed")
    points.disarm("spawner.claim.after")
    until(lambda: len(points.hit_by("child.gate")) == 2, "both are at their gates")
    stopped = next(pid for pid in points.hit_by("child.gate") if "/held" in _cgroup(pid))
    pidfd = os.pidfd_open(stopped)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        pipes = dict(calls.switchboard.AuditStreams(spb.AuditStreamsRequest(), timeout=10).pipes)
        leases = {pipes[link] for link in _links(stopped) if link in pipes}
        assert len(leases) == 1, f"a child at its gate holds pipes of {leases}"
        points.disarm("child.gate")
        started = free.started()
        assert calls.output(started.lease_id)[1] == b"hi\n"
        free.exited()
        free.gone()
        lease = calls.lease(started.lease_id)
        assert all(one.ended for one in lease.streams), "ended by end-of-file"
        assert lease.end_reason == "exit"
        assert stopped in _pids_of(faulty), "the other one is still at its gate"
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        os.close(pidfd)
    held.started()
    held.exited()
    held.gone()
    faulty.settle(before)


@pytest.mark.parametrize("point", failpoints.CHILD)
def test_mesos_8577_a_child_that_never_gets_to_its_gate_ends_with_the_launch(faulty: Pair, point: str) -> None:
    before = faulty.census()
    faulty.points.arm(point, "wait")
    launching = faulty.calls.launch(["/bin/true"], name := fresh_name(), FULL_SPEC)
    faulty.points.await_hit(point)
    (pid,) = census.descendants(faulty.pid("spawner")) - {faulty.pid("containerizer")}
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        launching.cancel()
        await_end(pidfd, BUDGET_S)
    finally:
        os.close(pidfd)
    faulty.settle(before)
    faulty.points.disarm(point)
    assert faulty.calls.run(["/bin/true"], name).code == 0


def _cgroup(pid: int) -> str:
    with open(f"/proc/{pid}/cgroup") as file:
        return file.read()


def _links(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]


def _pids_of(pair: Pair) -> set[int]:
    return {pid for pid, _ in pair.census().processes}
