"""Each limit of a spec, in the kernel's own file: one table for both cgroup versions, run here and in a guest that has
v2 alone (`make vm`). A case whose file this kernel does not have is skipped, and says so.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.protobuf import text_format
from grpc import StatusCode

from tests.harness.calls import Calls, code, fresh_name, info
from tests.harness.census import cgroup_mounts
from tests.harness.pair import Pair
from tests.harness.waiting import until
from tightship.v1 import containerizer_pb2 as cpb

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make cgroups")

LASTING = ["/bin/sleep", "600"]
REPLACE, DIFF = cpb.UpdateRequest.REPLACE, cpb.UpdateRequest.DIFF
PAGE = os.sysconf("SC_PAGE_SIZE")
UNLIMITED = str((2**63 - 1) // PAGE * PAGE)


@dataclass(frozen=True)
class Case:
    """`v1` and `v2`: control files with what they hold; None: refused there, naming `field`."""

    spec: str
    field: str
    v1: dict[str, str] | None = None
    v2: dict[str, str] | None = None


CASES = [
    Case("cpu { limit: 1000 }", "cpu.limit", {"cpu.shares": "1024"}, {"cpu.weight": "100"}),
    Case("cpu { limit: 250 }", "cpu.limit", {"cpu.shares": "256"}, {"cpu.weight": "25"}),
    Case("cpu { limit: 0 }", "cpu.limit", {"cpu.shares": "2"}, {"cpu.weight": "1"}),
    Case("cpu { limit: 256000 }", "cpu.limit", {"cpu.shares": "262144"}, {"cpu.weight": "10000"}),
    Case(
        "cpu { max_limit: 1500 }",
        "cpu.max_limit",
        {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"},
        {"cpu.max": "150000 100000"},
    ),
    Case("cpu { max_limit: 10 }", "cpu.max_limit", {"cpu.cfs_quota_us": "1000"}, {"cpu.max": "1000 100000"}),
    Case("cpu { scheduling_latency: BEST_EFFORT }", "cpu.scheduling_latency", {"cpu.idle": "1"}, {"cpu.idle": "1"}),
    Case("cpu { mask { data: 1 } }", "cpu.mask", {"cpuset.cpus": "0"}, {"cpuset.cpus": "0"}),
    Case(
        "memory { limit: 67108864 }",
        "memory.limit",
        {"memory.limit_in_bytes": "67108864"},
        {"memory.max": "67108864"},
    ),
    Case("memory { limit: -1 }", "memory.limit", {"memory.limit_in_bytes": UNLIMITED}, {"memory.max": "max"}),
    Case(
        "memory { limit: 67108864 max_limit: 134217728 }",
        "memory.max_limit",
        None,
        {"memory.high": "67108864", "memory.max": "134217728"},
    ),
    Case(
        "memory { limit: 67108864 swap_limit: 134217728 }",
        "memory.swap_limit",
        {"memory.limit_in_bytes": "67108864", "memory.memsw.limit_in_bytes": "134217728"},
        {"memory.max": "67108864", "memory.swap.max": "67108864"},
    ),
    Case(
        "memory { limit: 67108864 swap_only: 4096 }",
        "memory.swap_only",
        {"memory.memsw.limit_in_bytes": "67112960"},
        {"memory.swap.max": "4096"},
    ),
    Case(
        "memory { reservation: 1048576 }",
        "memory.reservation",
        {"memory.soft_limit_in_bytes": "1048576"},
        {"memory.low": "1048576"},
    ),
    Case("tasks { limit: 20 }", "tasks.limit", {"pids.max": "20"}, {"pids.max": "20"}),
    Case("tasks { limit: -1 }", "tasks.limit", {"pids.max": "max"}, {"pids.max": "max"}),
]


@pytest.fixture
def name(pair: Pair) -> Iterator[str]:
    made = fresh_name("limits")
    yield made
    if made in pair.calls.living():
        pair.calls.destroy(made)


def version() -> int:
    """Of the cgroups that have the memory controller here."""
    return 2 if any("memory" in (mount / "cgroup.controllers").read_text().split() for mount in _v2()) else 1


def _v2() -> list[Path]:
    return [mount for mount in cgroup_mounts() if (mount / "cgroup.controllers").exists()]


def held(pair: Pair, name: str, file: str) -> str | None:
    """What the container's file holds, wherever it is; None where there is none."""
    for mount in cgroup_mounts():
        path = mount / "tightship" / pair.instance / name.lstrip("/") / file
        if path.exists():
            return path.read_text().strip()
    return None


def expected(case: Case) -> dict[str, str] | None:
    return case.v1 if version() == 1 else case.v2


def make(pair: Pair, name: str, spec: str, case: Case) -> bool:
    """False where the kernel, or this version, lacks what it takes, and says so by the field."""
    try:
        pair.calls.create(name, spec)
    except grpc.RpcError as error:
        assert (code(error), info(error).metadata["field"]) == (StatusCode.UNIMPLEMENTED, case.field)
        return False
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spec)
def test_a_limit_is_in_the_kernels_file(pair: Pair, name: str, case: Case) -> None:
    wanted = expected(case)
    made = make(pair, name, case.spec, case)
    if wanted is None:
        assert not made, "it should be refused here"
        return
    if not made:
        pytest.skip(f"this kernel does not have {' '.join(wanted)}")
    assert {file: held(pair, name, file) for file in wanted} == wanted
    container = pair.calls.get(name)
    told = {os.path.basename(each.file): each.value for each in container.in_force}
    assert {file: told.get(file) for file in wanted} == wanted
    given = text_format.Parse(case.spec, type(container.spec)())
    assert container.spec == given
    # Of a process below it, too.
    result = pair.calls.run(["/bin/cat", "/proc/self/cgroup"], f"{name}/below", case.spec)
    assert f"{name}/below" in result.stdout.decode()


@pytest.mark.parametrize("case", [case for case in CASES if "-1" not in case.spec], ids=lambda case: case.spec)
def test_a_limit_comes_and_goes_by_update(pair: Pair, name: str, case: Case) -> None:
    wanted = expected(case)
    if wanted is None:
        pytest.skip(f"needs cgroup v2, which has {case.field}: the guest runs it")
    pair.calls.create(name)
    before = {file: held(pair, name, file) for file in wanted}
    for _ in range(2):
        request = cpb.UpdateRequest(name=name, spec=cpb.SpecInput(text=case.spec), mode=REPLACE)
        try:
            pair.calls.containerizer.Update(request, timeout=20)
        except grpc.RpcError as error:
            assert (code(error), info(error).metadata["field"]) == (StatusCode.UNIMPLEMENTED, case.field)
            pytest.skip(f"this kernel does not have {' '.join(wanted)}")
        assert {file: held(pair, name, file) for file in wanted} == wanted
        again = pair.calls.containerizer.Update(request, timeout=20)
        assert not again.written
        request.spec.text = ""
        pair.calls.containerizer.Update(request, timeout=20)
        if "cpuset.cpus" not in wanted or version() == 1:
            assert {file: held(pair, name, file) for file in wanted} == before


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ("memory { limit: 8192 swap_limit: 4096 }", "memory.swap_limit"),
        ("cpu { mask { data: 4611686018427387904 } }", "cpu.mask"),
        ("cpu { limit: 256001 }", "cpu.limit"),
        ("cpu { max_limit: 9 }", "cpu.max_limit"),
        ("tasks { limit: -2 }", "tasks.limit"),
        ("memory { reservation: -1 }", "memory.reservation"),
    ],
)
def test_a_value_that_can_not_be_is_named_and_nothing_is_left(pair: Pair, name: str, spec: str, field: str) -> None:
    with pair.unchanged():
        with pytest.raises(grpc.RpcError) as caught:
            pair.calls.create(name, spec)
        assert info(caught.value).metadata["field"] == field
        assert code(caught.value) in (StatusCode.INVALID_ARGUMENT, StatusCode.UNIMPLEMENTED)


def test_a_value_that_the_kernel_refuses_has_file_and_errno(pair: Pair, name: str) -> None:
    """PID_MAX_LIMIT is 4,194,304: pids.rst."""
    for spec in ("tasks { limit: 5000000 }", "memory { limit: 67108864 } cpu { limit: 700 } tasks { limit: 5000000 }"):
        with pair.unchanged():
            with pytest.raises(grpc.RpcError) as caught:
                pair.calls.create(name, spec)
            told = info(caught.value)
            assert (code(caught.value), told.reason) == (StatusCode.INVALID_ARGUMENT, "VALUE_REFUSED")
            assert (told.metadata["field"], told.metadata["errno"]) == ("tasks.limit", "EINVAL")
            assert told.metadata["value"] == "5000000"
            assert told.metadata["file"].endswith(f"{name}/pids.max")
    pair.calls.create(name, "cpu { limit: 300 }")
    with pytest.raises(grpc.RpcError) as caught:
        request = cpb.UpdateRequest(name=name, spec=cpb.SpecInput(text=spec), mode=DIFF)
        pair.calls.containerizer.Update(request, timeout=20)
    assert info(caught.value).metadata["field"] == "tasks.limit"
    assert text_format.MessageToString(pair.calls.get(name).spec, as_one_line=True) == "cpu { limit: 300 }"
    assert held(pair, name, "memory.max" if version() == 2 else "memory.limit_in_bytes") in ("max", UNLIMITED)


def test_a_hog_of_memory_is_ended_and_told_so(pair: Pair, name: str) -> None:
    hog = ["/usr/bin/python3", "-I", "-c", "x = bytearray(256 << 20)"]
    result = pair.calls.run(hog, name, "memory { limit: 33554432 }", env=["PATH=/usr/bin"])
    assert (result.record.reason, result.record.signal) == (cpb.Record.OOM, signal.SIGKILL)
    assert result.record.oom_kills == 1
    other = ["/bin/sh", "-c", "/usr/bin/python3 -I -c 'x = bytearray(256 << 20)'; echo went on; exit 5"]
    result = pair.calls.run(other, name, "memory { limit: 33554432 }")
    assert (result.record.reason, result.code) == (cpb.Record.EXITED, 5)
    assert result.record.oom_kills == 1
    assert result.stdout == b"went on\n"


def test_a_fork_bomb_stays_within_and_goes(pair: Pair, name: str) -> None:
    with pair.unchanged(timeout_s=30):
        bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
        pair.calls.detach(["/usr/bin/python3", "-I", "-c", bomb], name, "tasks { limit: 40 }")
        until(lambda: _tasks(pair.calls, name) >= 35, "it has grown", 30)
        assert _tasks(pair.calls, name) <= 40
        assert pair.calls.destroy(name).outcome == cpb.Cleanup.CLEAN


def _tasks(calls: Calls, name: str) -> int:
    return calls.containerizer.Stats(cpb.StatsRequest(name=name), timeout=20).tasks.current


def test_figures_and_records(pair: Pair, name: str) -> None:
    calls = pair.calls
    busy = (
        "x = bytearray(20 << 20)\nimport time\nend = time.time() + 0.3\nwhile time.time() < end: pass\ntime.sleep(600)"
    )
    main = calls.detach(["/usr/bin/python3", "-I", "-c", busy], name, "memory { limit: 67108864 } tasks { limit: 9 }")
    until(lambda: _stats(calls, name).memory.usage > 20 << 20, "it has its memory", 30)
    found = _stats(calls, name)
    assert found.memory.limit == 67108864
    assert (found.tasks.current, found.tasks.limit) == (1, 9)
    assert found.cpu.usage.ToNanoseconds() > 0
    assert [*calls.containerizer.ListProcesses(cpb.ListProcessesRequest(name=name), timeout=20).ids] == [main.pid]
    assert calls.containerizer.Detect(cpb.DetectRequest(pid=main.pid), timeout=20).name == name
    calls.containerizer.Kill(cpb.KillRequest(name=name), timeout=20)
    record = calls.wait(main.id)
    assert record.cpu_time.ToNanoseconds() > 0
    if record.HasField("peak_memory"):
        assert record.peak_memory > 20 << 20


def _stats(calls: Calls, name: str) -> cpb.StatsResponse:
    return calls.containerizer.Stats(cpb.StatsRequest(name=name), timeout=20)


def test_nested_ones_pause_and_go(pair: Pair, name: str) -> None:
    calls = pair.calls
    with pair.unchanged(timeout_s=30):
        calls.create(name, "memory { limit: 134217728 }")
        calls.detach(LASTING, f"{name}/a", "memory { limit: 67108864 } cpu { mask { data: 1 } }")
        calls.detach(LASTING, f"{name}/a/b", "tasks { limit: 5 } virtual_host { }")
        assert calls.run(["/bin/echo", "inside"], f"{name}/a/b", exec=True).stdout == b"inside\n"
        calls.containerizer.Pause(cpb.PauseRequest(name=f"{name}/a"), timeout=20)
        assert calls.get(f"{name}/a").state == cpb.Container.PAUSED
        assert calls.destroy(name).outcome == cpb.Cleanup.CLEAN


def test_the_services_killed_leave_nothing_that_is_not_adopted(own_pair: Pair) -> None:
    calls, name = own_pair.calls, fresh_name()
    before = own_pair.census()
    started = calls.detach(LASTING, name, "memory { limit: 67108864 } tasks { limit: 9 }")
    for service in ("containerizer", "spawner"):
        own_pair.kill(service)
        own_pair.await_ready()
        assert calls.get(name).pid == started.pid
        assert calls.get(name).state == cpb.Container.RUNNING
    assert not calls.containerizer.Audit(cpb.AuditRequest(), timeout=30).findings
    calls.destroy(name)
    own_pair.settle(before)
