"""Incident B: a failed create that nobody can undo (lmctfy, issue 37), with real refusals of the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.harness import census
from tests.harness.calls import code, fresh_name, info
from tests.harness.pair import Pair
from tests.harness.waiting import Answer
from tightship.v1 import containerizer_pb2 as cpb

# Memory and swap together below memory: EINVAL on the second file, with the directory made.
REFUSED = "cpu { limit: 1000 } memory { limit: 67108864 swap_limit: 33554432 }"
CORRECT = "cpu { limit: 1000 } memory { limit: 67108864 }"


@pytest.fixture(autouse=True)
def _disarmed(faulty: Pair) -> Iterator[None]:
    if not Path("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes").exists():
        pytest.skip("needs the v1 memory controller with swap accounting")
    yield
    faulty.points.clear()
    faulty.await_ready()


def _gone_and_free(pair: Pair, name: str) -> None:
    """Destroy says NOT_FOUND, and the corrected create succeeds at once."""
    with pytest.raises(grpc.RpcError) as caught:
        pair.calls.destroy(name)
    assert code(caught.value) == grpc.StatusCode.NOT_FOUND
    pair.calls.create(name, CORRECT)
    in_force = {one.field: one.value for one in pair.calls.get(name).in_force}
    assert in_force["memory.limit"] == "67108864"
    assert in_force["cpu.limit"] == "1024"
    assert pair.calls.destroy(name).outcome == cpb.Cleanup.CLEAN


def _base(hierarchy: str, pair: Pair) -> Path:
    return next(base for base in census.cgroup_bases(pair.instance) if f"/{hierarchy}/" in str(base))


def test_lmctfy_37_a_refusal_in_the_middle_of_a_controller(faulty: Pair) -> None:
    name = fresh_name()
    before = faulty.census()
    with pytest.raises(grpc.RpcError) as caught:
        faulty.calls.create(name, REFUSED)
    faulty.settle(before, 0)
    assert code(caught.value) == grpc.StatusCode.INVALID_ARGUMENT
    metadata = info(caught.value).metadata
    assert metadata["file"].endswith(f"{name}/memory.memsw.limit_in_bytes")
    assert (metadata["value"], metadata["errno"]) == ("33554432", "EINVAL")
    _gone_and_free(faulty, name)
    faulty.settle(before)


def test_lmctfy_37_the_same_of_a_launch(faulty: Pair) -> None:
    name = fresh_name()
    before = faulty.census()
    error = faulty.calls.launch(["/bin/true"], name, REFUSED).error()
    assert info(error).metadata["file"].endswith("memory.memsw.limit_in_bytes")
    faulty.settle(before)
    _gone_and_free(faulty, name)
    faulty.settle(before)


def test_lmctfy_37_parents_made_for_a_refused_create_go_with_it(faulty: Pair) -> None:
    before = faulty.census()
    top = fresh_name()
    with pytest.raises(grpc.RpcError):
        faulty.calls.create(f"{top}/a/b", REFUSED, parents=True)
    faulty.settle(before)
    made = faulty.calls.create(f"{top}/a/b", CORRECT, parents=True)
    assert list(made.parents_made) == [top, f"{top}/a"]
    faulty.calls.destroy(top)
    faulty.settle(before)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("operation", ["create", "launch"])
def test_lmctfy_37_a_crash_between_directory_and_file(faulty: Pair, operation: str, moment: str) -> None:
    name = fresh_name()
    before = faulty.census()
    point = f"containerizer.{operation}.write.memory.limit_in_bytes.{moment}"
    faulty.points.arm(point, "kill")
    if operation == "create":
        answer = Answer[object](lambda: faulty.calls.create(name, CORRECT))
    else:
        answer = Answer[object](lambda: faulty.calls.run(["/bin/true"], name, CORRECT))
    assert code(answer.error()) == grpc.StatusCode.UNAVAILABLE
    faulty.points.disarm(point)
    faulty.await_ready()
    faulty.settle(before)
    _gone_and_free(faulty, name)


@pytest.mark.parametrize("hierarchy", ["unified", "cpu", "memory", "pids"])
def test_lmctfy_37_a_directory_of_someone_else_is_refused_and_left(faulty: Pair, hierarchy: str) -> None:
    name = fresh_name()
    foreign = Path(f"{_base(hierarchy, faulty)}{name}")
    foreign.mkdir()
    (foreign / "theirs").mkdir()
    before = faulty.census()
    try:
        with pytest.raises(grpc.RpcError) as caught:
            faulty.calls.create(name, CORRECT)
        assert code(caught.value) == grpc.StatusCode.ALREADY_EXISTS
        assert str(foreign) in (caught.value.details() or "")
        error = faulty.calls.launch(["/bin/true"], name, CORRECT).error()
        assert code(error) == grpc.StatusCode.ALREADY_EXISTS
        with pytest.raises(grpc.RpcError) as caught:
            faulty.calls.destroy(name)
        assert code(caught.value) == grpc.StatusCode.NOT_FOUND
        faulty.settle(before)
        assert (foreign / "theirs").is_dir()
    finally:
        (foreign / "theirs").rmdir()
        foreign.rmdir()
    _gone_and_free(faulty, name)


def test_a_directory_that_appears_between_plan_and_mkdir_is_left(faulty: Pair) -> None:
    name = fresh_name()
    before = faulty.census()
    faulty.points.arm("containerizer.create.mkdir.memory.before", "wait")
    answer = Answer(lambda: faulty.calls.create(name, CORRECT))
    faulty.points.await_hit("containerizer.create.mkdir.memory.before")
    foreign = Path(f"{_base('memory', faulty)}{name}")
    foreign.mkdir()
    faulty.points.disarm("containerizer.create.mkdir.memory.before")
    try:
        assert code(answer.error()) == grpc.StatusCode.ALREADY_EXISTS
        assert foreign.is_dir()
    finally:
        foreign.rmdir()
    faulty.settle(before)


def test_lmctfy_37_cleanup_removes_our_residue_and_says_what(faulty: Pair) -> None:
    """Directories with our mark whose container nobody knows: what a lost journal would leave."""
    name = fresh_name()
    before = faulty.census()
    planted = [Path(f"{base}{name}") for base in census.cgroup_bases(faulty.instance)]
    for path in planted:
        path.mkdir()
        path.chmod(0o1755)
        os.setxattr(path, "trusted.tightship", f"{faulty.instance} 0123abcd {name}".encode())
        (path / "below").mkdir()
    cleanup = faulty.calls.containerizer.Cleanup(cpb.CleanupRequest(name=name), timeout=30).cleanup
    faulty.settle(before)
    assert cleanup.outcome == cpb.Cleanup.CLEAN
    for path in planted:
        assert any(str(path) in line for line in cleanup.removed), cleanup
    _gone_and_free(faulty, name)


def test_cleanup_of_a_name_whose_undo_failed(faulty: Pair) -> None:
    name = fresh_name()
    before = faulty.census()
    point = "containerizer.undo.mkdir.memory.before"
    faulty.points.arm(point, "errno EIO")
    with pytest.raises(grpc.RpcError):
        faulty.calls.create(name, REFUSED)
    assert faulty.calls.get(name).state == cpb.Container.CLEANUP_PENDING, "what list shows, destroy and cleanup can end"
    with pytest.raises(grpc.RpcError) as caught:
        faulty.calls.create(name, CORRECT)
    assert code(caught.value) in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.UNAVAILABLE)
    faulty.points.disarm(point)
    cleanup = faulty.calls.containerizer.Cleanup(cpb.CleanupRequest(name=name), timeout=30).cleanup
    assert cleanup.outcome == cpb.Cleanup.CLEAN
    faulty.settle(before)
    _gone_and_free(faulty, name)


def test_podman_3906_a_failed_undo_outlives_a_restart(faulty: Pair) -> None:
    name = fresh_name()
    before = faulty.census()
    point = "containerizer.undo.mkdir.memory.before"
    faulty.points.arm(point, "errno EIO")
    with pytest.raises(grpc.RpcError):
        faulty.calls.create(name, REFUSED)
    faulty.kill("containerizer")
    faulty.points.disarm(point)
    faulty.await_ready()
    faulty.settle(before)
    _gone_and_free(faulty, name)
