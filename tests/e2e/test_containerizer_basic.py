"""The containerizer's rules about names, trees, records, joining and recovery, on real parts."""

from __future__ import annotations

import datetime
import os
import signal
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2

from tests.harness import census
from tests.harness.calls import FULL_SPEC, code, fresh_name, info
from tests.harness.pair import Pair
from tests.harness.waiting import until
from tightship.v1 import containerizer_pb2 as cpb

StatusCode = grpc.StatusCode
LASTING = ["/bin/sleep", "600"]


def error_of(call: object) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()  # type: ignore[operator]
    return caught.value


def directories(pair: Pair, name: str) -> list[Path]:
    bases = [Path(mount) / "tightship" / pair.instance for mount in census.cgroup_mounts()]
    return [Path(f"{base}{name}") for base in bases if base.exists()]


def test_destroy_without_force_destroys_nothing_that_is_used(pair: Pair) -> None:
    calls = pair.calls
    with pair.unchanged():
        calls.create(top := fresh_name())
        calls.create(f"{top}/below")
        for name in (top, calls.detach(LASTING, fresh_name()).name):
            error = error_of(lambda name=name: calls.destroy(name, force=False))
            assert code(error) == StatusCode.FAILED_PRECONDITION
            assert calls.living()[name].state in (cpb.Container.CREATED, cpb.Container.RUNNING)
            assert calls.destroy(name).outcome == cpb.Cleanup.CLEAN
        assert not {top, f"{top}/below"} & calls.living().keys()
        calls.create(empty := fresh_name())
        calls.destroy(empty, force=False)


def test_a_tree_as_deep_as_names_may_be(pair: Pair) -> None:
    calls = pair.calls
    with pair.unchanged():
        top = fresh_name()
        calls.create(deep := top + "/d" * 63, parents=True)
        assert {top, deep} <= calls.living().keys()
        error = error_of(lambda: calls.create(f"{deep}/d"))
        assert (code(error), info(error).metadata["field"]) == (StatusCode.INVALID_ARGUMENT, "name")
        within = calls.launch(["/bin/true"], deep, within_existing=True).error()
        assert (code(within), info(within).metadata["field"]) == (StatusCode.INVALID_ARGUMENT, "name")
        assert calls.destroy(top).outcome == cpb.Cleanup.CLEAN


def test_a_created_container_with_a_process_in_it_is_used(pair: Pair) -> None:
    calls = pair.calls
    calls.create(name := fresh_name())
    tracker = next(path for path in directories(pair, name) if (path / "cgroup.events").exists())
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    (tracker / "cgroup.procs").write_text(str(pid))
    error = error_of(lambda: calls.destroy(name, force=False))
    assert code(error) == StatusCode.FAILED_PRECONDITION
    cleanup = calls.destroy(name)
    assert (cleanup.outcome, cleanup.processes_killed) == (cpb.Cleanup.CLEAN, 1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_the_end_of_a_container_takes_what_is_below(pair: Pair) -> None:
    calls = pair.calls
    with pair.unchanged():
        above = calls.launch(["/bin/sh", "-c", "sleep 0.5"], top := fresh_name())
        above.started()
        below = calls.detach(LASTING, f"{top}/below")
        assert above.exited().exit_code == 0
        assert above.gone().outcome == cpb.Cleanup.CLEAN
        record = calls.wait(below.id)
        assert (record.reason, record.cancel_reason) == (cpb.Record.CANCELLED, "parent")


def test_mesos_bb6527029_nothing_begins_below_what_closes(own_pair: Pair) -> None:
    calls = own_pair.calls
    calls.create(top := fresh_name())
    with own_pair.points.armed("containerizer.undo.mkdir.unified.before", "wait"):
        destroying = calls.containerizer.Destroy.future(cpb.DestroyRequest(name=top))
        own_pair.points.await_hit("containerizer.undo.mkdir.unified.before")
        for call in (
            lambda: calls.create(f"{top}/below"),
            lambda: calls.launch(["/bin/true"], f"{top}/below").started(),
        ):
            assert code(error_of(call)) == StatusCode.FAILED_PRECONDITION
        assert calls.living()[top].state == cpb.Container.CLOSING
    assert destroying.result().cleanup.outcome == cpb.Cleanup.CLEAN


def test_mesos_7926_many_destroy_one_container(own_pair: Pair) -> None:
    calls = own_pair.calls
    started = calls.detach(LASTING, fresh_name())
    own_pair.points.arm("containerizer.undo.lease.before", "hit")
    request = cpb.DestroyRequest(name=started.name, force=True)
    destroying = [calls.containerizer.Destroy.future(request) for _ in range(8)]
    destroying[0].cancel()
    for each in destroying[1:]:
        try:
            assert each.result().cleanup.outcome == cpb.Cleanup.CLEAN
        except grpc.RpcError as error:
            assert code(error) == StatusCode.NOT_FOUND, "it came when all was over"
    assert calls.wait(started.id).reason == cpb.Record.CANCELLED
    assert len(own_pair.points.hit_by("containerizer.undo.lease.before")) == 1


def test_a_spent_budget_is_told_with_what_is_left(own_pair: Pair) -> None:
    calls = own_pair.calls
    calls.create(name := fresh_name())
    with own_pair.points.armed("containerizer.undo.mkdir.memory.before", "errno EBUSY"):
        error = error_of(lambda: calls.destroy(name))
        assert code(error) == StatusCode.DEADLINE_EXCEEDED
        assert "mkdir.memory" in (error.details() or "")
        found = calls.living()[name]
        assert found.state == cpb.Container.CLEANUP_PENDING
        assert "mkdir.memory" in found.pending_reason
    until(lambda: name not in calls.living(), "the reconciler finishes it")


def test_children_limit_counts_all_levels(pair: Pair) -> None:
    calls = pair.calls
    calls.create(top := fresh_name(), "children_limit: 2")
    calls.create(f"{top}/a")
    calls.create(f"{top}/a/b")
    error = error_of(lambda: calls.create(f"{top}/a/b/c"))
    assert code(error) == StatusCode.RESOURCE_EXHAUSTED
    assert info(error).metadata["name"] == top
    calls.destroy(top)


def test_a_run_within_what_exists_leaves_it(pair: Pair) -> None:
    calls = pair.calls
    calls.create(name := fresh_name(), "memory { limit: 134217728 }")
    result = calls.run(["/bin/cat", "/proc/self/cgroup"], name, within_existing=True)
    assert result.started.name.startswith(f"{name}/")
    assert f"{name}/run-" in result.stdout.decode()
    assert calls.living()[name].state == cpb.Container.CREATED
    calls.destroy(name, force=False)
    assert calls.run(["/bin/true"], name, within_existing=True).started.name == name


def test_an_owner_gets_the_directories(pair: Pair) -> None:
    pair.calls.create(name := fresh_name(), "owner: 12345 owner_group: 54321")
    found = [path for path in directories(pair, name) if path.exists()]
    assert found
    for path in found:
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321), path
    pair.calls.destroy(name)


def test_mesos_6287_a_record_stays_until_it_is_removed(pair: Pair) -> None:
    calls = pair.calls
    result = calls.run(["/bin/sh", "-c", "exit 3"], name := fresh_name(), labels={"a": "b"})
    for record in (calls.wait(name), calls.wait(result.started.id), calls.get(name).record):
        assert (record.exit_code, record.reason, dict(record.labels)) == (3, cpb.Record.EXITED, {"a": "b"})
    assert calls.get(name).state == cpb.Container.ENDED
    listed = calls.containerizer.List(cpb.ListRequest(name=name, records=True)).containers
    assert [one.record.exit_code for one in listed] == [3]
    assert calls.containerizer.Remove(cpb.RemoveRequest(name=name)).records == 1
    assert code(error_of(lambda: calls.get(name))) == StatusCode.NOT_FOUND


def test_a_failed_launch_leaves_a_record(pair: Pair) -> None:
    name = fresh_name()
    error = error_of(lambda: pair.calls.run(["/nonexistent"], name))
    assert (code(error), info(error).reason, info(error).metadata["errno"]) == (
        StatusCode.NOT_FOUND, "EXEC_FAILED", "ENOENT",
    )  # fmt: skip
    record = pair.calls.wait(name)
    assert (record.reason, record.error_stage, record.error_errno) == (cpb.Record.FAILED, "exec", 2)


def test_a_repeated_request_gets_the_record_of_what_ran(pair: Pair) -> None:
    calls = pair.calls
    first = calls.run(["/bin/sh", "-c", "exit 5"], name := fresh_name(), request_id=f"once{name[1:]}")
    again = calls.run(["/bin/sh", "-c", "exit 5"], name, request_id=f"once{name[1:]}", output=False)
    assert again.started.joined
    assert (again.started.id, again.code) == (first.started.id, 5)
    other = error_of(lambda: calls.run(["/bin/true"], name, request_id=f"once{name[1:]}"))
    assert info(other).metadata["field"] == "request_id"


def test_a_repeated_request_starts_anew_what_never_ran(own_pair: Pair) -> None:
    calls = own_pair.calls
    name = fresh_name()
    with own_pair.points.armed("containerizer.launch.spawn.before", "errno EIO"):
        assert code(error_of(lambda: calls.run(["/bin/true"], name, request_id="r"))) == StatusCode.INTERNAL
    assert calls.run(["/bin/true"], name, request_id="r").code == 0


def test_a_launch_is_cancelled_when_its_last_caller_goes(pair: Pair) -> None:
    calls = pair.calls
    name = fresh_name()
    first = calls.launch(LASTING, name, request_id=name[1:])
    started = first.started()
    second = calls.launch(LASTING, name, request_id=name[1:])
    assert second.started().id == started.id
    first.cancel()
    first.error()
    assert calls.get(name).state == cpb.Container.RUNNING
    second.cancel()
    record = calls.wait(started.id)
    assert (record.reason, record.cancel_reason) == (cpb.Record.CANCELLED, "client_cancelled")


def test_what_ignores_the_stop_signal_is_killed_after_its_grace(pair: Pair) -> None:
    spec = "lifecycle { grace { nanos: 300000000 } }"
    started = pair.calls.detach(["/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"], fresh_name(), spec)
    until(lambda: b"sh" in Path(f"/proc/{started.pid}/comm").read_bytes(), "the shell runs")
    cleanup = pair.calls.destroy(started.name)
    assert cleanup.outcome == cpb.Cleanup.CLEAN
    assert pair.calls.wait(started.id).signal in (signal.SIGKILL, signal.SIGTERM)


def test_the_stop_signal_is_the_one_of_the_spec(pair: Pair) -> None:
    script = "trap 'exit 7' USR1; echo ready; while :; do sleep 0.02; done"
    started = pair.calls.detach(["/bin/sh", "-c", script], fresh_name(), "lifecycle { stop_signal: 'USR1' }")
    until(lambda: pair.calls.attach(started.lease_id, follow=False)[0][1] == b"ready\n", "the trap is set")
    pair.calls.destroy(started.name)
    assert pair.calls.wait(started.id).exit_code == 7


def test_moby_50040_a_launch_killed_before_it_opened_never_ran(own_pair: Pair) -> None:
    calls = own_pair.calls
    name = fresh_name()
    with own_pair.points.armed("containerizer.launch.commit.after", "kill"):
        calls.launch(["/bin/touch", f"/tmp/{name[1:]}"], name, detach=True).error()
    own_pair.await_ready()
    record = calls.wait(name)
    assert (record.reason, record.cancel_reason) == (cpb.Record.FAILED, "recovered")
    assert not Path(f"/tmp/{name[1:]}").exists()


def test_an_unreadable_journal_is_rebuilt(own_pair: Pair) -> None:
    calls = own_pair.calls
    running = calls.detach(LASTING, fresh_name(), FULL_SPEC, labels={"a": "b"})
    calls.create(created := fresh_name(), "tasks { limit: 7 }")
    journal = next(own_pair.run_dir.glob("journal-*.db"))
    for path in own_pair.run_dir.glob("journal-*.db*"):
        path.write_bytes(b"no journal at all " * 1000)
    own_pair.kill("containerizer")
    own_pair.await_ready()
    assert journal.with_name(journal.name + ".unreadable").exists()
    living = calls.living()
    assert living[running.name].state == cpb.Container.RUNNING
    assert (living[running.name].pid, dict(living[running.name].labels)) == (running.pid, {"a": "b"})
    assert living[created].state == cpb.Container.CREATED
    for name in (running.name, created):
        assert calls.destroy(name).outcome == cpb.Cleanup.CLEAN
    assert not any(path.exists() for name in (running.name, created) for path in directories(own_pair, name))


def test_a_callers_deadline_is_the_runs_limit(pair: Pair) -> None:
    name = fresh_name()
    error = error_of(lambda: pair.calls.run(LASTING, name, output=False, timeout=1))
    assert code(error) == StatusCode.DEADLINE_EXCEEDED
    record = pair.calls.wait(name)
    assert (record.reason, record.cancel_reason) == (cpb.Record.TIMEOUT, "deadline_exceeded")


def test_cleanup_all_takes_residue_and_nothing_alive(pair: Pair) -> None:
    calls = pair.calls
    calls.create(name := fresh_name())
    residue = directories(pair, fresh_name("residue"))[0]
    residue.mkdir(0o755)
    os.setxattr(residue, "trusted.tightship", f"{pair.instance} 0123456789abcdef {residue.name}".encode())
    cleanup = calls.containerizer.Cleanup(cpb.CleanupRequest(all=True), timeout=30).cleanup
    assert any(str(residue) in line for line in cleanup.removed)
    assert not residue.exists()
    assert calls.living()[name].state == cpb.Container.CREATED
    calls.destroy(name)


def test_a_budget_must_be_more_than_nothing(pair: Pair) -> None:
    pair.calls.create(name := fresh_name())
    for budget in (datetime.timedelta(seconds=-1), datetime.timedelta()):
        error = error_of(lambda b=budget: pair.calls.containerizer.Destroy(cpb.DestroyRequest(name=name, budget=b)))
        assert code(error) == StatusCode.INVALID_ARGUMENT
        assert info(error).metadata["field"] == "budget"
    pair.calls.destroy(name)


def test_counters_are_kept_when_the_exit_is_told_after_the_directories_went(own_pair: Pair) -> None:
    calls = own_pair.calls
    script = "x=$(head -c 20000000 /dev/zero | tr '\\0' a); echo ready; sleep 600"
    started = calls.detach(["/bin/sh", "-c", script], fresh_name(), "memory { limit: 134217728 }")
    until(lambda: calls.attach(started.lease_id, follow=False)[0][1] == b"ready\n", "the memory is used")
    os.kill(spawner := own_pair.pid("spawner"), signal.SIGSTOP)
    try:
        request = cpb.DestroyRequest(name=started.name, force=True, budget=duration_pb2.Duration(seconds=1))
        assert code(error_of(lambda: calls.containerizer.Destroy(request))) == StatusCode.DEADLINE_EXCEEDED
        assert not any(path.exists() for path in directories(own_pair, started.name))
    finally:
        os.kill(spawner, signal.SIGCONT)
    record = calls.wait(started.id)
    assert record.peak_memory > 20_000_000
    assert record.cpu_time.ToMicroseconds() > 0


def test_a_process_killed_twice_counts_once(pair: Pair) -> None:
    script = "trap '' TERM; for i in $(seq 30); do sleep 600 & done; echo ready; wait; sleep 600"
    started = pair.calls.detach(["/bin/sh", "-c", script], fresh_name(), "lifecycle { grace { nanos: 1000000 } }")
    until(lambda: pair.calls.attach(started.lease_id, follow=False)[0][1] == b"ready\n", "all run")
    assert 31 <= pair.calls.destroy(started.name).processes_killed <= 32


def test_a_create_repeated_while_it_is_destroyed_starts_anew(own_pair: Pair) -> None:
    calls = own_pair.calls
    request = cpb.CreateRequest(name=fresh_name(), request_id="again")
    first = calls.containerizer.Create(request).container
    assert calls.containerizer.Create(request).container.id == first.id
    with own_pair.points.armed("containerizer.undo.mkdir.unified.before", "wait"):
        destroying = calls.containerizer.Destroy.future(cpb.DestroyRequest(name=request.name))
        own_pair.points.await_hit("containerizer.undo.mkdir.unified.before")
        creating = calls.containerizer.Create.future(request)
        with pytest.raises(grpc.FutureTimeoutError):
            creating.result(timeout=0.2)
    assert destroying.result().cleanup.outcome == cpb.Cleanup.CLEAN
    again = creating.result().container
    assert (again.id != first.id, again.state) == (True, cpb.Container.CREATED)
    assert calls.living()[request.name].id == again.id


@pytest.mark.parametrize("same", [False, True], ids=["siblings", "one request"])
def test_creates_below_a_parent_that_is_being_made_wait_for_it(own_pair: Pair, *, same: bool) -> None:
    calls = own_pair.calls
    top = fresh_name()
    requests = [
        cpb.CreateRequest(name=f"{top}/m/{0 if same else n}", parents=True, request_id="one" if same else "")
        for n in range(6)
    ]
    point = "containerizer.create.mkdir.unified.before"
    with own_pair.points.armed(point, "wait"):
        creating = [calls.containerizer.Create.future(each) for each in requests]
        own_pair.points.await_hit(point)
        until(lambda: calls.living()[top].state == cpb.Container.LAUNCHING, "the parent is being made")
    made = [each.result() for each in creating]
    assert len({each.container.id for each in made}) == (1 if same else 6)
    assert sorted(name for each in made for name in each.parents_made) == [top, f"{top}/m"]
    assert calls.destroy(top).outcome == cpb.Cleanup.CLEAN


def test_a_caller_that_makes_parents_may_go_and_the_same_request_goes_on(own_pair: Pair) -> None:
    calls = own_pair.calls
    top = fresh_name()
    request = cpb.CreateRequest(name=f"{top}/below", parents=True, request_id="one")
    point = "containerizer.create.mkdir.unified.before"
    with own_pair.points.armed(point, "wait"):
        first = calls.containerizer.Create.future(request)
        own_pair.points.await_hit(point)
        second = calls.containerizer.Create.future(request)
        with pytest.raises(grpc.FutureTimeoutError):
            second.result(timeout=0.2)
        first.cancel()
    assert second.result().container.state == cpb.Container.CREATED
    assert calls.destroy(top).outcome == cpb.Cleanup.CLEAN


def test_a_list_comes_in_pages_that_any_client_takes(own_pair: Pair) -> None:
    calls = own_pair.calls
    labels = {f"k{n}": "x" * 1000 for n in range(64)}
    top = fresh_name()
    before = {each.id for each in calls.containerizer.List(cpb.ListRequest(records=True)).containers}
    ended = [calls.run(["/bin/true"], f"/r{n}", labels=labels, output=False).started.id for n in range(32)]
    living = [calls.create(name).container.id for name in (top, f"{top}/a", f"{top}/a/b", f"{top}/a-b", f"{top}/c")]
    for size in (0, 1, 3):
        found: list[str] = []
        request = cpb.ListRequest(recursive=True, records=True, page_size=size)
        pages = 0
        while True:
            answer = calls.containerizer.List(request)
            assert answer.ByteSize() <= 3 << 20
            assert not size or len(answer.containers) <= size
            pages += 1
            found += [each.id for each in answer.containers]
            request.page_token = answer.next_page_token
            if not request.page_token:
                break
        assert pages > 1
        assert [each for each in found if each not in before] == living + ended
    for field in ({"page_size": -1}, {"page_token": "nonsense"}, {"page_token": "ended 1 " + "9" * 30}):
        error = error_of(lambda field=field: calls.containerizer.List(cpb.ListRequest(records=True, **field)))
        assert (code(error), info(error).metadata["field"]) == (StatusCode.INVALID_ARGUMENT, next(iter(field)))
    shown = own_pair.command("list", "-ra", "/")
    assert (shown.returncode, sum(identity in shown.stdout for identity in living + ended)) == (0, 37), shown.stderr
    calls.destroy(top)


def test_what_is_no_message_is_the_callers_error(own_pair: Pair) -> None:
    for data in (b"\x0a\x03\xff\xfe\xfd", b"\x0a\x50abc"):
        for method in ("unary_unary", "unary_stream"):
            name = "Get" if method == "unary_unary" else "Launch"
            call = getattr(own_pair.channel("containerizer"), method)(f"/tightship.v1.ContainerizerService/{name}")
            error = error_of(lambda call=call, data=data: list(call(data, timeout=10)))
            assert code(error) == StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in own_pair.log_tail(100_000)


def test_list_tells_what_the_living_use(pair: Pair) -> None:
    name = fresh_name()
    busy = "x=$(head -c 3000000 /dev/zero | tr '\\0' x); sleep 600 & while :; do :; done"
    pair.calls.detach(["/bin/sh", "-c", busy], name, "memory { limit: 67108864 }")
    try:

        def used() -> cpb.Usage:
            listed = pair.calls.containerizer.List(cpb.ListRequest(name=name, usage=True), timeout=10).containers
            return listed[0].usage

        until(lambda: used().cpu_time.ToMilliseconds() > 100 and used().tasks == 2, "it has used some CPU")
        assert used().memory > 3_000_000
        assert used().memory_limit == 67108864
        without = pair.calls.containerizer.List(cpb.ListRequest(name=name), timeout=10).containers[0]
        assert not without.HasField("usage")
    finally:
        pair.calls.destroy(name)
    ended = pair.calls.containerizer.List(cpb.ListRequest(name=name, records=True, usage=True), timeout=10).containers
    assert not ended[0].HasField("usage")
