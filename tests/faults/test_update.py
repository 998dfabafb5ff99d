"""An update that ends half-way, at each of its writes and by each fault: all limits are as before, or as asked."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.harness.calls import fresh_name, info
from tests.harness.pair import Pair
from tests.harness.waiting import until
from tightship.v1 import containerizer_pb2 as cpb

BEFORE = "cpu { limit: 500 max_limit: 500 } memory { limit: 67108864 } tasks { limit: 20 }"
AFTER = "cpu { limit: 700 max_limit: 900 } memory { limit: 33554432 reservation: 1048576 } tasks { limit: 9 }"
WRITES = (
    "cpu.shares",
    "cpu.cfs_quota_us",
    "memory.limit_in_bytes",
    "memory.soft_limit_in_bytes",
    "pids.max",
)
POINTS = [f"containerizer.update.write.{file}.{side}" for file in WRITES for side in ("before", "after")]


def held(pair: Pair, name: str) -> dict[str, str]:
    """What the kernel has, by file."""
    found: dict[str, str] = {}
    for mount in ("cpu", "memory", "pids"):
        directory = Path("/sys/fs/cgroup", mount, "tightship", pair.instance, name.lstrip("/"))
        found |= {file: (directory / file).read_text() for file in WRITES if (directory / file).exists()}
    return found


def _request(name: str) -> cpb.UpdateRequest:
    return cpb.UpdateRequest(name=name, spec=cpb.SpecInput(text=AFTER), mode=cpb.UpdateRequest.REPLACE)


@pytest.fixture
def name(faulty: Pair) -> str:
    if not Path("/sys/fs/cgroup/memory/tightship").is_dir():
        pytest.skip("needs the memory controller of cgroup v1 at /sys/fs/cgroup/memory")
    faulty.points.clear()
    made = fresh_name("update")
    faulty.calls.create(made, BEFORE)
    return made


def test_the_writes_of_an_update_are_these(faulty: Pair, name: str) -> None:
    faulty.points.arm("_all", "hit")
    faulty.calls.containerizer.Update(_request(name), timeout=20)
    assert {hit for hit in faulty.points.hits() if "update" in hit} == set(POINTS)
    faulty.points.clear()
    faulty.calls.destroy(name)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("fault", ["errno", "kill containerizer", "cancel"])
def test_all_or_nothing(faulty: Pair, name: str, point: str, fault: str) -> None:
    calls = faulty.calls
    before = held(faulty, name)
    spec = calls.get(name).spec
    with faulty.points.armed(point, "errno EIO" if fault == "errno" else "wait"):
        call = calls.containerizer.Update.future(_request(name), timeout=20)
        faulty.points.await_hit(point)
        match fault:
            case "errno":
                error = call.exception(20)
                assert isinstance(error, grpc.RpcError)
                assert info(error).metadata["errno"] == "EIO"
                file = point.split(".write.")[1].rpartition(".")[0]
                assert info(error).metadata["file"].endswith("/" + file)
            case "cancel":
                call.cancel()
            case _:
                faulty.kill("containerizer")
    if fault == "cancel":
        # Whoever asked has gone, and it goes on: a step that has begun is not left half-way.
        until(lambda: calls.get(name).spec != spec, "it is done")
        assert all(held(faulty, name)[file] != before[file] for file in WRITES)
    else:
        faulty.await_ready()
        assert held(faulty, name) == before
        assert calls.get(name).spec == spec
    calls.containerizer.Update(_request(name), timeout=20)
    assert all(held(faulty, name)[file] != before[file] for file in WRITES)
    calls.destroy(name)


def test_a_container_that_ends_meanwhile_goes(faulty: Pair, name: str) -> None:
    calls = faulty.calls
    point = POINTS[4]
    with faulty.points.armed(point, "wait"):
        call = calls.containerizer.Update.future(_request(name), timeout=20)
        faulty.points.await_hit(point)
        assert calls.destroy(name).outcome == cpb.Cleanup.CLEAN
    error = call.exception(20)
    assert isinstance(error, grpc.RpcError)
    assert info(error).reason == "CLOSING"
