"""What a launch gets from the containers above it: the namespaces of the nearest one that runs, and confinement.

A container's namespaces are its main process's. What is launched below enters them and has none of its own, and below a
confined container its confinement holds. A launch below containers that have nothing of the kind enters nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tightship.common.errors import Code, ServiceError, invalid
from tightship.common.rights import Rights
from tightship.containerizer import isolation, names
from tightship.containerizer.journal import Kind
from tightship.containerizer.spec import unimplemented
from tightship.v1 import spec_pb2

if TYPE_CHECKING:
    from tightship.containerizer.operations import Operation, Parts


class Entered:
    """`launch` is whose namespaces are entered, empty for ours; `confining` the container whose confinement holds."""

    __slots__ = ("_exec", "_top", "confining", "launch")

    def __init__(self, parts: Parts, name: str, caller: Rights, *, exec_in: str = "") -> None:
        """For a launch of that name, or with `exec_in` in that container. Raises ServiceError."""
        self._exec = bool(exec_in)
        if exec_in:
            _check_runs(parts.registry.named(exec_in), exec_in)
        above = [each for each in map(parts.registry.named, names.lineage(name)) if each is not None]
        launched = [each for each in above if each.row.kind is Kind.LAUNCH]
        self.confining = next((each for each in launched if isolation.is_confined(each.spec)), None)
        self._top = next((each for each in launched if _has_namespaces(each)), None)
        self.launch = ""
        if self._top is not None:
            nearest = launched[0]
            self.launch = nearest.row.id
            if not parts.spawner.enters:
                raise unimplemented("name", f"below {self._top.row.name} needs a newer spawner than the one that runs")
            if not caller.whole and nearest.row.client != caller.client:
                # Its user's rights would be the caller's.
                raise caller.made_by_another(nearest.row.name, "may run nothing in it")

    def check(self, given: spec_pb2.ContainerSpec) -> None:
        """Raises ServiceError naming the field that can't be had there."""
        if self._exec and given.HasField("virtual_host"):
            raise invalid("virtual_host", "is not for an exec, which enters the namespaces of its container")
        if self._top is None:
            return
        for field, there in (
            ("virtual_host", given.HasField("virtual_host")),
            ("security", given.HasField("security")),
            ("filesystem.rootfs", given.filesystem.HasField("rootfs")),
            ("filesystem.mounts", given.filesystem.HasField("mounts")),
        ):
            if there:
                raise unimplemented(field, f"can't be had below {self._top.row.name}, whose namespaces hold there")

    def isolation(self, given: spec_pb2.ContainerSpec) -> dict[str, Any] | None:
        """For the order of a launch with this spec. Raises ServiceError naming the field."""
        asked = isolation.order(given)
        if self.confining is None:
            return asked
        theirs = spec_pb2.ContainerSpec()
        theirs.CopyFrom(self.confining.spec)
        theirs.filesystem.ClearField("mounts")  # which are there
        order = {**(isolation.order(theirs) or {}), **(asked or {}), "confined": True, "entered": True}
        order.pop("rootfs", None)
        return order


def _has_namespaces(operation: Operation) -> bool:
    spec = operation.spec
    return spec.HasField("virtual_host") or isolation.is_confined(spec)


def _check_runs(operation: Operation | None, name: str) -> None:
    if operation is None or operation.row.kind is not Kind.LAUNCH or operation.record is not None:
        raise ServiceError(Code.FAILED_PRECONDITION, "NO_PROCESS", f"no main process runs in {name}", None, name=name)
