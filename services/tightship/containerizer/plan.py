"""The plan of a container: every side effect as a step, in order, before anything is touched. Pure.

A plan is computed from the spec, the machine's facts and ids chosen beforehand, goes into the journal whole, and is all
that undo needs. The names of its steps are the names in failpoints, spans and errors.
"""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

from tightship.common.errors import invalid
from tightship.containerizer.machine import Machine
from tightship.containerizer.spec import cpu_bits, cpu_list, unimplemented
from tightship.v1 import spec_pb2

Kind = Literal["mkdir", "chown", "write", "lease", "spawn", "commit", "open"]

# The default of cpu.cfs_period_us, which a quota is a share of: sched-bwc.rst.
_PERIOD_US = 100_000
_SHARES_MIN = 2

# Kinds whose apply and undo touch the cgroup file system alone.
CGROUP_KINDS = frozenset({"mkdir", "chown", "write"})
# Kinds that leave something behind; the others go with it.
UNDONE_KINDS = frozenset({"mkdir", "lease", "spawn"})


class Step(NamedTuple):
    """One side effect. `target` is a path, or the id of a lease or launch; `field` the spec field it honours."""

    kind: Kind
    name: str
    target: str = ""
    value: str = ""
    field: str = ""


def to_json(plan: tuple[Step, ...]) -> str:
    return json.dumps(plan, separators=(",", ":"))


def from_json(text: str) -> tuple[Step, ...]:
    return tuple(Step(*each) for each in json.loads(text))


def for_create(machine: Machine, spec: spec_pb2.ContainerSpec, name: str, mark: str) -> tuple[Step, ...]:
    """Steps of a container without a process. Raises UNIMPLEMENTED or INVALID_ARGUMENT naming what
    this machine can't honour."""
    return (*_directories(machine, name, mark), *_owner(machine, spec, name), *limits(machine, spec, name), _COMMIT)


def for_launch(machine: Machine, spec: spec_pb2.ContainerSpec, name: str, mark: str, identity: str) -> tuple[Step, ...]:
    """Steps of a launch; `identity` names the lease and the launch too. Raises like `for_create`."""
    return (
        *_directories(machine, name, mark),
        *_owner(machine, spec, name),
        *limits(machine, spec, name),
        Step("lease", "lease", identity),
        Step("spawn", "spawn", identity),
        _COMMIT,
        Step("open", "open", identity),
    )


def for_cleanup(machine: Machine, name: str, identities: list[str]) -> tuple[Step, ...]:
    """A plan only to be undone: all that a container of this name, with one of these ids, can have left."""
    remote = [Step(kind, kind, each) for each in identities for kind in _REMOTE]
    return (*_directories(machine, name, ""), *remote)


def undo_names(plan: tuple[Step, ...]) -> list[str]:
    """Names of the steps that the walk undoes, in its order."""
    return [step.name for step in reversed(plan) if step.kind in UNDONE_KINDS]


_REMOTE: tuple[Kind, ...] = ("lease", "spawn")
_COMMIT = Step("commit", "commit")


def _directories(machine: Machine, name: str, mark: str) -> list[Step]:
    return [Step("mkdir", f"mkdir.{each.name}", each.path(name), mark) for each in machine.hierarchies]


def _owner(machine: Machine, spec: spec_pb2.ContainerSpec, name: str) -> list[Step]:
    if not spec.HasField("owner") and not spec.HasField("owner_group"):
        return []
    field = "owner" if spec.HasField("owner") else "owner_group"
    uid = spec.owner if spec.HasField("owner") else -1
    gid = spec.owner_group if spec.HasField("owner_group") else -1
    return [Step("chown", f"chown.{each.name}", each.path(name), f"{uid}:{gid}", field) for each in machine.hierarchies]


def limits(machine: Machine, spec: spec_pb2.ContainerSpec, name: str) -> list[Step]:
    steps: list[Step] = []

    def limit(controller: str, field: str, file: str, value: int | str) -> None:
        hierarchy = machine.limits(controller)
        unlimited = value in (-1, "max")
        if hierarchy is None or file not in hierarchy.files:
            if unlimited:
                return  # not limited is what a kernel without the file does
            raise unimplemented(field, f"needs the kernel's {file}, which this machine does not have")
        steps.append(Step("write", f"write.{file}", f"{hierarchy.path(name)}/{file}", str(value), field))

    cpu = spec.cpu
    if cpu.HasField("limit"):
        limit("cpu", "cpu.limit", "cpu.shares", max(_SHARES_MIN, cpu.limit * 1024 // 1000))
    if cpu.HasField("max_limit"):
        limit("cpu", "cpu.max_limit", "cpu.cfs_period_us", _PERIOD_US)
        limit("cpu", "cpu.max_limit", "cpu.cfs_quota_us", cpu.max_limit * _PERIOD_US // 1000)
    if cpu.scheduling_latency == spec_pb2.BEST_EFFORT:
        limit("cpu", "cpu.scheduling_latency", "cpu.idle", 1)
    if cpu.HasField("mask"):
        bits = cpu_bits(list(cpu.mask.data))
        if machine.cpus and (absent := bits & ~machine.cpus):
            there = cpu_list(machine.cpus)
            raise invalid(
                "cpu.mask",
                f"there is no CPU {cpu_list(absent)[:80]}; this machine has {there}",
                "OUT_OF_RANGE",
                value=cpu_list(bits)[:200],
            )
        limit("cpuset", "cpu.mask", "cpuset.cpus", cpu_list(bits))
    memory = spec.memory
    if memory.HasField("limit"):
        limit("memory", "memory.limit", "memory.limit_in_bytes", memory.limit)
    if memory.HasField("swap_limit"):
        limit("memory", "memory.swap_limit", "memory.memsw.limit_in_bytes", memory.swap_limit)
    if memory.HasField("swap_only"):
        limit("memory", "memory.swap_only", "memory.memsw.limit_in_bytes", memory.limit + memory.swap_only)
    if memory.HasField("reservation"):
        limit("memory", "memory.reservation", "memory.soft_limit_in_bytes", memory.reservation)
    if spec.tasks.HasField("limit"):
        limit("pids", "tasks.limit", "pids.max", "max" if spec.tasks.limit < 0 else spec.tasks.limit)
    return steps
