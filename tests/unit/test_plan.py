"""Plans: what each field writes, in which order, and what can't be honoured here."""

from __future__ import annotations

import dataclasses

import pytest

from tightship.common.errors import Code, ServiceError
from tightship.containerizer import failpoint_names, plan, spec
from tightship.containerizer.machine import Hierarchy, Machine
from tightship.v1 import containerizer_pb2 as pb

CONTROLLERS = {
    "cpu": {"cpu.shares", "cpu.cfs_period_us", "cpu.cfs_quota_us", "cpu.idle"},
    "cpuset": {"cpuset.cpus"},
    "memory": {"memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.soft_limit_in_bytes"},
    "pids": {"pids.max"},
}


def machine(without: frozenset[str] = frozenset()) -> Machine:
    v1 = [
        Hierarchy(name, 1, f"/cg/{name}/tightship/i", frozenset({name}), frozenset(files - without))
        for name, files in CONTROLLERS.items()
        if name not in without
    ]
    tracker = Hierarchy("unified", 2, "/cg/unified/tightship/i", frozenset(), frozenset({"cgroup.kill"}))
    return Machine("i", "boot", (tracker, *v1))


def writes(text: str, where: Machine | None = None) -> dict[str, str]:
    given = spec.parse(pb.SpecInput(text=text))
    steps = plan.for_create(where or machine(), given, "/a/b", "mark")
    return {step.target.rpartition("/")[2]: step.value for step in steps if step.kind == "write"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu { limit: 1000 }", {"cpu.shares": "1024"}),
        ("cpu { limit: 0 }", {"cpu.shares": "2"}),
        ("cpu { max_limit: 1500 }", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}),
        ("cpu { scheduling_latency: BEST_EFFORT }", {"cpu.idle": "1"}),
        ("cpu { scheduling_latency: NORMAL }", {}),
        ("cpu { mask { data: 3 } }", {"cpuset.cpus": "0-1"}),
        ("memory { limit: -1 }", {"memory.limit_in_bytes": "-1"}),
        ("memory { limit: 10 swap_only: 5 }", {"memory.limit_in_bytes": "10", "memory.memsw.limit_in_bytes": "15"}),
        ("memory { reservation: 7 }", {"memory.soft_limit_in_bytes": "7"}),
        ("tasks { limit: -1 }", {"pids.max": "max"}),
        ("", {}),
    ],
)
def test_what_a_field_writes(text: str, expected: dict[str, str]) -> None:
    assert writes(text) == expected


def test_lmctfy_the_limit_is_written_before_the_swap_limit() -> None:
    assert list(writes("memory { swap_limit: 20 limit: 10 }")) == [
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
    ]


def test_lmctfy_37_a_default_is_never_written_and_explicit_unlimited_needs_no_file() -> None:
    bare = machine(frozenset({"memory.memsw.limit_in_bytes"}))
    assert writes("memory { limit: -1 }", bare) == {"memory.limit_in_bytes": "-1"}
    assert writes("memory { swap_limit: -1 }", bare) == {}
    with pytest.raises(ServiceError) as caught:
        writes("memory { limit: 5 swap_limit: 10 }", bare)
    assert caught.value.code is Code.UNIMPLEMENTED
    assert caught.value.metadata["field"] == "memory.swap_limit"


def test_cpus_that_are_not_there_are_refused_and_those_that_are_told() -> None:
    two = dataclasses.replace(machine(), cpus=0b11)
    assert writes("cpu { mask { data: 3 } }", two) == {"cpuset.cpus": "0-1"}
    with pytest.raises(ServiceError) as caught:
        writes("cpu { mask { data: 1 data: 5 } }", two)
    assert caught.value.metadata["field"] == "cpu.mask"
    assert "no CPU 2,64; this machine has 0-1" in caught.value.message


def test_a_missing_controller_is_named_by_the_field() -> None:
    with pytest.raises(ServiceError) as caught:
        writes("tasks { limit: 5 }", machine(frozenset({"pids"})))
    assert caught.value.metadata["field"] == "tasks.limit"


def test_a_plan_survives_the_journal() -> None:
    given = spec.parse(pb.SpecInput(text="cpu { limit: 1 } owner: 5"))
    steps = plan.for_launch(machine(), given, "/a", "mark", "id")
    assert plan.from_json(plan.to_json(steps)) == steps


def test_the_tracker_is_made_first_and_removed_last() -> None:
    steps = plan.for_launch(machine(), spec.parse(pb.SpecInput()), "/a", "mark", "id")
    assert steps[0].name == "mkdir.unified"
    assert plan.undo_names(steps)[:2] == ["spawn", "lease"]
    assert plan.undo_names(steps)[-1] == "mkdir.unified"
    assert [step.name for step in steps[-4:]] == ["lease", "spawn", "commit", "open"]


def test_failpoints_are_those_of_the_plan() -> None:
    names = failpoint_names.listed(machine(), spec.parse(pb.SpecInput(text="tasks { limit: 1 }")), "create")
    assert "containerizer.create.write.pids.max.after" in names
    assert len(names) == len(set(names)) == 2 * (5 + 1 + 1)
