"""Names of the containerizer's failpoints, from the same plans that the code runs. Pure."""

from __future__ import annotations

from typing import Literal

from tightship.common import failpoints
from tightship.containerizer import plan
from tightship.containerizer.machine import Machine
from tightship.v1 import spec_pb2

Operation = Literal["launch", "exec", "create", "destroy", "update", "pause"]
OPERATIONS: tuple[Operation, ...] = ("launch", "exec", "create", "destroy", "update", "pause")

# What the end of a running container reaches in the other processes.
_END = ("spawner.reap.after", *(name for name in failpoints.SWITCHBOARD if name.split(".")[1] in ("exit", "close")))


def listed(machine: Machine, spec: spec_pb2.ContainerSpec, operation: Operation) -> list[str]:
    """Points reached in all processes by a launch and its end, by the same in a container with its own namespaces, by
    a create, by a destroy of what runs, by an update that takes all limits away, or by a pause."""
    launch = plan.for_launch(machine, spec, "/x", "", "x")
    create = plan.for_create(machine, spec, "/x", "")
    if operation == "destroy":
        return [*_undo(launch), *_END]
    if operation == "create":
        return _apply("create", create)
    if operation == "update":
        return _apply("update", (*plan.limits(machine, spec, "/x"),))
    if operation == "pause":
        return [f"containerizer.pause.freeze.{side}" for side in ("before", "after")]
    # Where a child has entered, the failpoints' directory may be out of sight.
    child = failpoints.CHILD if operation == "launch" else failpoints.CHILD_BEFORE_NAMESPACES
    others = (*failpoints.SWITCHBOARD, *failpoints.SPAWNER, *child)
    return [*_apply("launch", launch), *others, *_undo(launch)]


def _apply(what: str, steps: tuple[plan.Step, ...]) -> list[str]:
    return [f"containerizer.{what}.{step.name}.{side}" for step in steps for side in ("before", "after")]


def _undo(steps: tuple[plan.Step, ...]) -> list[str]:
    return [f"containerizer.undo.{name}.{side}" for name in plan.undo_names(steps) for side in ("before", "after")]
