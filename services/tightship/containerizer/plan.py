"""The plan of a container: every side effect as a step, in order, before anything is touched. Pure.

A plan is computed from the spec, the machine's facts and ids chosen beforehand, goes into the journal whole, and is all
that undo needs. The names of its steps are the names in failpoints, spans and errors.
"""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

from tightship.common.errors import Code, ServiceError
from tightship.containerizer import limits as limits_table
from tightship.containerizer.machine import COMMON_V2, LEAF, Hierarchy, Machine
from tightship.v1 import spec_pb2

Kind = Literal["enable", "mkdir", "leaf", "chown", "write", "lease", "spawn", "commit", "open"]

# Kinds whose apply and undo touch the cgroup file system alone.
CGROUP_KINDS = frozenset({"enable", "mkdir", "leaf", "chown", "write"})
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


def for_create(
    machine: Machine, spec: spec_pb2.ContainerSpec, name: str, mark: str, *, above: frozenset[str] = frozenset()
) -> tuple[Step, ...]:
    """Steps of a container without a process. `above` names the optional hierarchies that its parent is in.

    Raises UNIMPLEMENTED, INVALID_ARGUMENT or FAILED_PRECONDITION naming what can't be honoured here.
    """
    return (*_cgroups(machine, spec, name, mark, above), _COMMIT)


def for_launch(
    machine: Machine,
    spec: spec_pb2.ContainerSpec,
    name: str,
    mark: str,
    identity: str,
    *,
    above: frozenset[str] = frozenset(),
) -> tuple[Step, ...]:
    """Steps of a launch; `identity` names the lease and the launch too. Else like `for_create`."""
    return (
        *_cgroups(machine, spec, name, mark, above),
        Step("lease", "lease", identity),
        Step("spawn", "spawn", identity),
        _COMMIT,
        Step("open", "open", identity),
    )


def for_cleanup(machine: Machine, name: str, identities: list[str]) -> tuple[Step, ...]:
    """A plan only to be undone: all that a container of this name, with one of these ids, can have left."""
    remote = [Step(kind, kind, each) for each in identities for kind in _REMOTE]
    return (*(_mkdir(each, name, "") for each in machine.trees), *remote)


def optional_of(machine: Machine, plan: tuple[Step, ...]) -> tuple[Hierarchy, ...]:
    """The optional hierarchies in which a container with this plan has a directory."""
    if not machine.optional:
        return ()
    made = {step.name for step in plan if step.kind == "mkdir"}
    return tuple(each for each in machine.optional if f"mkdir.{each.name}" in made)


def undo_names(plan: tuple[Step, ...]) -> list[str]:
    """Names of the steps that the walk undoes, in its order."""
    return [step.name for step in reversed(plan) if step.kind in UNDONE_KINDS]


_REMOTE: tuple[Kind, ...] = ("lease", "spawn")
_COMMIT = Step("commit", "commit")


def _cgroups(machine: Machine, spec: spec_pb2.ContainerSpec, name: str, mark: str, above: frozenset[str]) -> list[Step]:
    writes = limits(machine, spec, name)
    wanted = limits_table.optional(machine, spec)
    nested = name.count("/") > 1
    if nested and (lacking := wanted - above):
        field = _OPTIONAL_FIELDS[min(lacking)]
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "PARENT_WITHOUT_FIELD",
            f"{field} needs a parent with it: give {name[: name.rindex('/')]} {field.partition('.')[0]}, be it empty",
            None,
            field=field,
        )
    # What a container is held to by one above it, it is held to itself.
    hierarchies = (*machine.hierarchies, *(each for each in machine.optional if each.name in wanted | above))
    steps = _enable(machine, name, writes)
    for each in hierarchies:
        steps.append(_mkdir(each, name, mark))
        if each.has_leaves:
            steps.append(Step("leaf", f"mkdir.{each.name}.{LEAF}", each.inside(name)))
    return [*steps, *_owner(hierarchies, spec, name), *writes]


_OPTIONAL_FIELDS = {
    "blkio": "blockio",
    "devices": "device",
    "perf_event": "monitoring.enable_perf_counters",
}


def _mkdir(hierarchy: Hierarchy, name: str, mark: str) -> Step:
    return Step("mkdir", f"mkdir.{hierarchy.name}", hierarchy.path(name), mark)


def _enable(machine: Machine, name: str, writes: list[Step]) -> list[Step]:
    """Lets a container's v2 directory have the files that are written: from our base down, what is not there yet."""
    steps = []
    for hierarchy in machine.hierarchies:
        if not hierarchy.has_leaves:
            continue
        files = {step.target.rpartition("/")[2] for step in writes if step.target.startswith(hierarchy.base)}
        asked = {each.partition(".")[0] for each in files} & hierarchy.controllers
        common = hierarchy.controllers.intersection(COMMON_V2)
        levels = name.split("/")[:-1]
        for depth in range(1, len(levels) + 1):
            path = hierarchy.base + "/".join(levels[:depth])
            wanted = asked - common if depth == 1 else asked | common
            if wanted:
                value = " ".join(f"+{each}" for each in sorted(wanted))
                field = next((step.field for step in writes if step.target.startswith(hierarchy.base)), "")
                steps.append(Step("enable", f"enable.{depth}", f"{path}/cgroup.subtree_control", value, field))
    return steps


def _owner(hierarchies: tuple[Hierarchy, ...], spec: spec_pb2.ContainerSpec, name: str) -> list[Step]:
    if not spec.HasField("owner") and not spec.HasField("owner_group"):
        return []
    field = "owner" if spec.HasField("owner") else "owner_group"
    uid = spec.owner if spec.HasField("owner") else -1
    gid = spec.owner_group if spec.HasField("owner_group") else -1
    value = f"{uid}:{gid}"
    steps = []
    for each in hierarchies:
        steps.append(Step("chown", f"chown.{each.name}", each.path(name), value, field))
        if each.has_leaves:
            steps.append(Step("chown", f"chown.{each.name}.{LEAF}", each.inside(name), value, field))
    return steps


def limits(machine: Machine, spec: spec_pb2.ContainerSpec, name: str) -> list[Step]:
    """The writes of a spec's limits into the container's directories, in order. Raises like `for_create`."""
    return [
        Step(
            "write",
            f"write.{each.file}" + (f".{each.key}" if each.key else ""),
            f"{each.hierarchy.path(name)}/{each.file}",
            each.value,
            each.field,
        )
        for each in limits_table.writes(machine, spec)
    ]
