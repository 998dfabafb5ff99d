"""Limits that are about devices, and those that v1 has no file for: run on both cgroup versions, as test_limits is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from tests.harness.calls import code, fresh_name, info
from tests.harness.census import cgroup_mounts
from tests.harness.pair import Pair

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make cgroups")

# Deny all, then what every command needs, and /dev/null.
NULL_ALONE = """device { restrictions_set {
  restrictions { permission: DENY type: DEVICE_ALL access: READ access: WRITE access: MKNOD }
  restrictions { permission: ALLOW type: DEVICE_CHAR access: READ access: WRITE major: 1 minor: 3 }
} }"""


@pytest.fixture
def name(pair: Pair) -> Iterator[str]:
    made = fresh_name("devices")
    yield made
    if made in pair.calls.living():
        pair.calls.destroy(made)


def has_v1(controller: str) -> bool:
    return any(f":{controller}:" in line for line in Path("/proc/self/cgroup").read_text().splitlines())


def disk() -> str:
    """A whole block device, as major:minor."""
    for each in sorted(Path("/sys/block").iterdir()):
        if not each.name.startswith(("loop", "ram", "zram")):
            return (each / "dev").read_text().strip()
    pytest.skip("there is no block device here")


def in_force(pair: Pair, name: str) -> dict[str, str]:
    return {os.path.basename(each.file): each.value for each in pair.calls.get(name).in_force}


def caps(device: str, read_bytes: int, writes: int) -> str:
    major, minor = device.split(":")
    one = f"limits {{ device {{ major: {major} minor: {minor} }} limit: %d }}"
    reads = f"max_limits {{ {one % read_bytes} op_type: READ limit_type: BYTES_PER_SECOND }}"
    return (
        f"blockio {{ max_device_limit_set {{ {reads}"
        f" max_limits {{ {one % writes} op_type: WRITE limit_type: IO_PER_SECOND }} }} }}"
    )


def test_caps_of_a_device_are_in_the_kernels_files(pair: Pair, name: str) -> None:
    device = disk()
    pair.calls.create(name, caps(device, 1 << 20, 100))
    found = in_force(pair, name)
    if has_v1("blkio"):
        assert found["blkio.throttle.read_bps_device"] == f"{device} {1 << 20}"
        assert found["blkio.throttle.write_iops_device"] == f"{device} 100"
    else:
        assert found["io.max"].split() == [device, "rbps=1048576", "wbps=max", "riops=max", "wiops=100"]


def test_shares_of_devices_are_written_or_refused_by_name(pair: Pair, name: str) -> None:
    try:
        pair.calls.create(name, "blockio { device_limit_set { default_limit: 50 } }")
    except grpc.RpcError as error:
        assert code(error) is StatusCode.UNIMPLEMENTED
        assert info(error).metadata["field"] == "blockio.device_limit_set"
        pytest.skip("this kernel has no shares of devices")
    found = in_force(pair, name)
    value = found.get("blkio.weight") or found.get("blkio.bfq.weight") or found["io.weight"]
    assert value.split()[-1] == ("5000" if "io.weight" in found else "500")


def test_a_device_that_is_not_there_is_an_error_with_file_value_and_errno(pair: Pair, name: str) -> None:
    with pair.unchanged():
        with pytest.raises(grpc.RpcError) as caught:
            pair.calls.create(name, f"memory {{ limit: 67108864 }} {caps('4000:7', 4096, 5)}")
        told = info(caught.value)
        assert (code(caught.value), told.reason) == (StatusCode.INVALID_ARGUMENT, "VALUE_REFUSED")
        assert (told.metadata["field"], told.metadata["errno"]) == ("blockio.max_device_limit_set", "ENODEV")
        assert told.metadata["value"].startswith("4000:7 ")
        assert told.metadata["file"].endswith(("/io.max", "/blkio.throttle.read_bps_device"))


def test_a_cap_holds_for_what_is_read(pair: Pair, name: str) -> None:
    """Its process is where the cap is: a launch of its own, and one below it, are counted there."""
    device = disk()
    result = pair.calls.run(["/bin/cat", "/proc/self/cgroup"], name, caps(device, 1 << 20, 100))
    controller = "blkio" if has_v1("blkio") else ""
    line = next(each for each in result.stdout.decode().splitlines() if each.split(":")[1] == controller)
    assert f"{pair.instance}{name}" in line


def test_devices_are_denied_and_allowed_in_order(pair: Pair, name: str) -> None:
    opened = ["/bin/sh", "-c", "echo x >/dev/null && echo null; head -c 1 /dev/zero >/dev/null && echo zero; exit 0"]
    if not has_v1("devices"):
        with pair.unchanged():
            with pytest.raises(grpc.RpcError) as caught:
                pair.calls.run(opened, name, NULL_ALONE)
            assert code(caught.value) is StatusCode.UNIMPLEMENTED
            assert info(caught.value).metadata["field"] == "device.restrictions_set"
        return
    result = pair.calls.run(opened, name, NULL_ALONE)
    assert result.stdout == b"null\n"
    assert b"Operation not permitted" in result.stderr
    # What is launched below is held to it, too.
    pair.calls.create(name, NULL_ALONE)
    below = pair.calls.run(opened, f"{name}/below")
    assert below.stdout == b"null\n"
    assert pair.calls.get(name).in_force


def test_a_limit_of_children_is_ours_and_the_kernels(pair: Pair, name: str) -> None:
    pair.calls.create(name, "children_limit: 2")
    for each in ("a", "b"):
        pair.calls.create(f"{name}/{each}")
    with pytest.raises(grpc.RpcError) as caught:
        pair.calls.create(f"{name}/c")
    assert (code(caught.value), info(caught.value).reason) == (StatusCode.RESOURCE_EXHAUSTED, "CHILDREN_LIMIT")
    for mount in cgroup_mounts():
        held = mount / "tightship" / pair.instance / name.lstrip("/") / "cgroup.max.descendants"
        if held.exists():
            leaves = (held.parent / "_main").exists()
            assert held.read_text().strip() == ("5" if leaves else "2")
    for each in ("a", "b"):
        pair.calls.destroy(f"{name}/{each}")


def test_eviction_priority_is_the_processs_score(pair: Pair, name: str) -> None:
    result = pair.calls.run(["/bin/cat", "/proc/self/oom_score_adj"], name, "memory { eviction_priority: 4000 }")
    assert result.stdout == b"200\n"


def test_perf_counters_are_counted_or_refused_by_name(pair: Pair, name: str) -> None:
    spec = "monitoring { enable_perf_counters: true }"
    try:
        pair.calls.create(name, spec)
    except grpc.RpcError as error:
        assert code(error) is StatusCode.UNIMPLEMENTED
        assert info(error).metadata["field"] == "monitoring.enable_perf_counters"
        return
    assert pair.calls.get(name).spec.monitoring.enable_perf_counters
