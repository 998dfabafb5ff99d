"""Calls on living containers, against the kernel's own files: pause, signals to all, update, statistics, processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2, text_format
from grpc import StatusCode

from tests.harness.calls import Calls, code, fresh_name, info
from tests.harness.pair import Pair
from tests.harness.waiting import until
from tightship.v1 import containerizer_pb2 as cpb

LASTING = ["/bin/sleep", "600"]
BUSY = ["/bin/sh", "-c", "while :; do :; done"]
SPEC = "cpu { limit: 500 max_limit: 500 } memory { limit: 67108864 } tasks { limit: 20 }"
REPLACE, DIFF = cpb.UpdateRequest.REPLACE, cpb.UpdateRequest.DIFF


@pytest.fixture
def name(pair: Pair) -> Iterator[str]:
    made = fresh_name("living")
    yield made
    if made in pair.calls.living():
        pair.calls.destroy(made)


def update(calls: Calls, name: str, spec: str, mode: cpb.UpdateRequest.Mode.ValueType = DIFF) -> cpb.UpdateResponse:
    request = cpb.UpdateRequest(name=name, spec=cpb.SpecInput(text=spec), mode=mode)
    return calls.containerizer.Update(request, timeout=20)


def in_force(calls: Calls, name: str) -> dict[str, str]:
    """Limits by the base name of their file, read by the tests themselves."""
    files = [each.file for each in calls.get(name).in_force]
    return {os.path.basename(file): Path(file).read_text().strip() for file in files}


def pause(calls: Calls, name: str, **fields: duration_pb2.Duration) -> None:
    calls.containerizer.Pause(cpb.PauseRequest(name=name, **fields), timeout=20)


def resume(calls: Calls, name: str) -> None:
    calls.containerizer.Resume(cpb.ResumeRequest(name=name), timeout=20)


def ticks(pid: int) -> int:
    """CPU time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def error_of(calls: Calls, method: str, **fields: object) -> tuple[StatusCode, str]:
    request = getattr(cpb, f"{method}Request")(**fields)
    with pytest.raises(grpc.RpcError) as caught:
        getattr(calls.containerizer, method)(request, timeout=20)
    return code(caught.value), info(caught.value).reason


# Pause


def test_what_is_paused_stands_still_and_goes_on(pair: Pair, name: str) -> None:
    calls = pair.calls
    started = calls.detach(BUSY, name)
    pause(calls, name)
    assert calls.get(name).state == cpb.Container.PAUSED
    before = ticks(started.pid)
    time.sleep(0.3)
    assert ticks(started.pid) == before
    pause(calls, name)  # again

    error = calls.launch(["/bin/true"], f"{name}/x").error()
    assert (code(error), info(error).reason) == (StatusCode.FAILED_PRECONDITION, "PARENT_PAUSED")
    resume(calls, name)
    assert calls.get(name).state == cpb.Container.RUNNING
    until(lambda: ticks(started.pid) > before, "it goes on")
    resume(calls, name)  # again


def test_a_paused_tree_with_paused_children_is_destroyed(pair: Pair, name: str) -> None:
    calls = pair.calls
    with pair.unchanged():
        calls.detach(LASTING, name)
        for below in ("a", "a/b", "c"):
            calls.detach(BUSY, f"{name}/{below}")
        for each in (f"{name}/a/b", f"{name}/c", name):
            pause(calls, each)
        assert error_of(calls, "Resume", name=f"{name}/c") == (StatusCode.FAILED_PRECONDITION, "PARENT_PAUSED")
        resume(calls, name)
        assert calls.get(f"{name}/c").state == cpb.Container.PAUSED
        pause(calls, name)
        begun = time.monotonic()
        assert calls.destroy(name).outcome == cpb.Cleanup.CLEAN
        assert time.monotonic() - begun < 8


def test_a_pause_outlives_the_containerizer(own_pair: Pair) -> None:
    calls, name = own_pair.calls, fresh_name()
    started = calls.detach(BUSY, name)
    pause(calls, name)
    own_pair.kill("containerizer")
    own_pair.await_ready()
    assert calls.get(name).state == cpb.Container.PAUSED
    before = ticks(started.pid)
    resume(calls, name)
    until(lambda: ticks(started.pid) > before, "it goes on")
    calls.destroy(name)


@pytest.mark.parametrize("point", ["containerizer.pause.freeze.before", "containerizer.pause.freeze.after"])
@pytest.mark.parametrize("fault", ["cancel", "errno"])
def test_a_pause_that_ends_half_way_leaves_it_running(faulty: Pair, point: str, fault: str) -> None:
    calls, name = faulty.calls, fresh_name()
    started = calls.detach(BUSY, name)
    faulty.points.clear()
    with faulty.points.armed(point, "wait" if fault == "cancel" else "errno EIO"):
        call = calls.containerizer.Pause.future(cpb.PauseRequest(name=name), timeout=20)
        faulty.points.await_hit(point)
        if fault == "cancel":
            call.cancel()
        else:
            assert isinstance(call.exception(20), grpc.RpcError)
        # Still armed: else it would go on, and be paused before the cancel has come.
        until(lambda: calls.get(name).state == cpb.Container.RUNNING, "it runs")
    before = ticks(started.pid)
    until(lambda: ticks(started.pid) > before, "it goes on")
    calls.destroy(name)


# Signals


def test_a_signal_to_all_reaches_all_and_those_below(pair: Pair, name: str) -> None:
    calls = pair.calls
    trap = ["/bin/sh", "-c", "trap 'exit 7' USR1; (trap 'exit 0' USR1; while :; do sleep 0.05; done) & wait; wait"]
    calls.detach(["/bin/sh", "-c", "trap '' USR1; while :; do sleep 0.05; done"], name)
    below = calls.detach(trap, f"{name}/below")
    time.sleep(0.2)  # for the traps
    request = cpb.KillAllRequest(name=name, signal="USR1")
    assert calls.containerizer.KillAll(request, timeout=20).processes >= 3
    assert calls.wait(below.id).exit_code == 7
    assert calls.get(name).state == cpb.Container.RUNNING
    assert calls.containerizer.KillAll(cpb.KillAllRequest(name=name), timeout=20).processes >= 1
    until(lambda: name not in calls.living(), "it is gone")
    assert error_of(calls, "KillAll", name=name) == (StatusCode.NOT_FOUND, "NOT_FOUND")
    assert error_of(calls, "KillAll", name=name, signal="NONE")[0] is StatusCode.INVALID_ARGUMENT


# Update


def test_what_is_asked_is_in_force_and_the_rest_stays(pair: Pair, name: str) -> None:
    calls = pair.calls
    calls.detach(LASTING, name, SPEC)
    answer = update(calls, name, "memory { limit: 134217728 } cpu { limit: 1500 }")
    assert {os.path.basename(each) for each in answer.written} == {"memory.limit_in_bytes", "cpu.shares"}
    assert in_force(calls, name) == {
        "cpu.shares": "1536", "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000",
        "memory.limit_in_bytes": "134217728", "pids.max": "20",
    }  # fmt: skip
    files = {os.path.basename(each.file): each.file for each in calls.get(name).in_force}
    update(calls, name, "tasks { limit: 30 }", REPLACE)
    assert in_force(calls, name) == {"pids.max": "30"}
    assert Path(files["cpu.shares"]).read_text() == "1024\n"
    assert Path(files["cpu.cfs_quota_us"]).read_text() == "-1\n"
    assert int(Path(files["memory.limit_in_bytes"]).read_text()) > 1 << 60
    assert text_format.MessageToString(calls.get(name).spec, as_one_line=True) == "tasks { limit: 30 }"


def test_the_spec_as_it_was_read_back_changes_nothing(pair: Pair, name: str) -> None:
    limits = "cpu { limit: 700 mask { data: 1 } } memory { limit: 67108864 reservation: 1048576 }"
    pair.calls.create(name, limits + " lifecycle { stop_signal: 'INT' }")
    before = in_force(pair.calls, name)
    printed = pair.command("spec", name)
    ended = pair.command("--json", "update", "replace", name, "-c", "-", input=printed.stdout)
    assert ended.returncode == 0, ended.stderr
    assert '"written"' not in ended.stdout
    assert in_force(pair.calls, name) == before
    assert pair.command("spec", name).stdout == printed.stdout


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("memory { limit: 67108864 swap_limit: 67108864 }", "memory { limit: 134217728 swap_limit: 134217728 }"),
        ("cpu { limit: 2000 }", "cpu { scheduling_latency: BEST_EFFORT }"),
        ("cpu { mask { data: 1 } max_limit: 200 }", "memory { reservation: 4096 }"),
    ],
)
def test_there_and_back_again(pair: Pair, name: str, first: str, second: str) -> None:
    try:
        pair.calls.create(name, first)
    except grpc.RpcError as error:
        if info(error).reason == "FIELD_NOT_SUPPORTED":
            pytest.skip(f"this kernel has no {info(error).metadata['field']}")
        raise
    was = in_force(pair.calls, name)
    for _ in range(2):
        update(pair.calls, name, second, REPLACE)
        assert text_format.MessageToString(pair.calls.get(name).spec, as_one_line=True).strip()
        update(pair.calls, name, first, REPLACE)
        assert in_force(pair.calls, name) == was


@pytest.mark.parametrize(
    ("spec", "expected", "field"),
    [
        ("owner: 1", StatusCode.UNIMPLEMENTED, "owner"),
        ("virtual_host { }", StatusCode.UNIMPLEMENTED, "virtual_host"),
        ("security { }", StatusCode.UNIMPLEMENTED, "security"),
        ("filesystem { fd_limit: 5 }", StatusCode.UNIMPLEMENTED, "filesystem"),
        ("memory { eviction_priority: 6000 }", StatusCode.UNIMPLEMENTED, "memory.eviction_priority"),
        ("cpu { limit: 300000 }", StatusCode.INVALID_ARGUMENT, "cpu.limit"),
        (
            "memory { limit: 8192 swap_limit: 4096 }",
            StatusCode.INVALID_ARGUMENT,
            "memory.swap_limit",
        ),
    ],
)
def test_what_can_not_be_had_is_named_and_nothing_changes(
    pair: Pair, name: str, spec: str, expected: StatusCode, field: str
) -> None:
    pair.calls.create(name, SPEC)
    before = in_force(pair.calls, name), pair.calls.get(name).spec
    with pytest.raises(grpc.RpcError) as caught:
        update(pair.calls, name, spec)
    if field == "memory.swap_limit" and code(caught.value) is StatusCode.UNIMPLEMENTED:
        pytest.skip("this kernel has no memory.memsw.limit_in_bytes")
    assert (code(caught.value), info(caught.value).metadata["field"]) == (expected, field)
    assert (in_force(pair.calls, name), pair.calls.get(name).spec) == before


def test_modes_and_states_of_an_update(pair: Pair, name: str) -> None:
    pair.calls.create(name)
    assert error_of(pair.calls, "Update", name=name)[0] is StatusCode.INVALID_ARGUMENT
    assert error_of(pair.calls, "Update", name="/absent", mode=DIFF) == (StatusCode.NOT_FOUND, "NOT_FOUND")
    update(pair.calls, name, "children_limit: 1")
    pair.calls.create(f"{name}/one")
    with pytest.raises(grpc.RpcError) as caught:
        pair.calls.create(f"{name}/two")
    assert info(caught.value).reason == "CHILDREN_LIMIT"


# Looks


def test_statistics_are_the_kernels(pair: Pair, name: str) -> None:
    calls = pair.calls
    calls.detach(BUSY, name, SPEC.replace("max_limit: 500", "max_limit: 20"))
    until(lambda: stats(calls, name).cpu.throttled_periods > 0, "it is throttled")
    found = stats(calls, name)
    assert found.memory.limit == 67108864
    assert 0 < found.memory.usage <= found.memory.peak <= 67108864
    assert (found.tasks.current, found.tasks.limit) == (1, 20)
    assert found.cpu.usage.ToNanoseconds() > 0
    calls.create(f"{name}/x")
    assert stats(calls, f"{name}/x").tasks.limit == -1
    assert error_of(calls, "Stats", name="/absent")[0] is StatusCode.NOT_FOUND


def stats(calls: Calls, name: str) -> cpb.StatsResponse:
    return calls.containerizer.Stats(cpb.StatsRequest(name=name), timeout=20)


def test_processes_are_listed_and_found(pair: Pair, name: str) -> None:
    calls = pair.calls
    script = "import threading, time; [threading.Thread(target=time.sleep, args=(600,)).start() for _ in range(3)]"
    main = calls.detach(["/usr/bin/python3", "-I", "-c", script], name)
    below = calls.detach(LASTING, f"{name}/below")

    def listed(**fields: bool) -> list[int]:
        return [*calls.containerizer.ListProcesses(cpb.ListProcessesRequest(name=name, **fields), timeout=20).ids]

    assert listed() == [main.pid]
    assert listed(recursive=True) == sorted([main.pid, below.pid])
    until(lambda: len(listed(threads=True)) == 4, "all threads are there")
    assert set(listed(threads=True)) == {int(each) for each in os.listdir(f"/proc/{main.pid}/task")}
    for pid, where in ((main.pid, name), (below.pid, f"{name}/below")):
        found = calls.containerizer.Detect(cpb.DetectRequest(pid=pid), timeout=20)
        assert (found.name, found.id) == (where, calls.get(where).id)
    assert error_of(calls, "Detect", pid=os.getpid()) == (StatusCode.NOT_FOUND, "NOT_FOUND")
    assert error_of(calls, "Detect", pid=1 << 22) == (StatusCode.NOT_FOUND, "NO_PROCESS")
    assert error_of(calls, "Detect")[0] is StatusCode.INVALID_ARGUMENT


def test_a_fork_bomb_is_contained_and_destroyed(pair: Pair, name: str) -> None:
    with pair.unchanged():
        calls = pair.calls
        bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
        calls.detach(["/usr/bin/python3", "-I", "-c", bomb], name, "tasks { limit: 50 }")
        until(lambda: stats(calls, name).tasks.current >= 40, "it has grown")
        assert stats(calls, name).tasks.current <= 50
        assert calls.destroy(name).outcome == cpb.Cleanup.CLEAN


def test_the_commands(pair: Pair, name: str) -> None:
    main = pair.calls.detach(BUSY, name, SPEC)
    for words, printed in (
        (["pause", name], ""),
        (["resume", name], ""),
        (["list", "pids", name], f"{main.pid}\n"),
        (["list", "tids", "-r", name], f"{main.pid}\n"),
        (["detect", str(main.pid)], f"{name}\n"),
        (["update", "diff", name, "tasks { limit: 7 }"], ""),
    ):
        ended = pair.command(*words)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, printed, ""), words
    assert "tasks.limit" in pair.command("stats", name).stdout
    assert pair.command("resume", "/absent").returncode == 5
    assert pair.command("killall", name).returncode == 0
    until(lambda: name not in pair.calls.living(), "it is gone")
