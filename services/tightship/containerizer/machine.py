"""What this machine has, found by looking once at start: hierarchies, the tracker, the control files there are.

`Machine` is plain data for the planner. `look` finds it, and makes our two base levels in every hierarchy that we use.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass

from tightship.common.rundir import RunDirError
from tightship.kernel import cgroup, process

# In the order in which a launch makes them; the tracker comes first, so that undo removes it last.
CONTROLLERS = ("cpu", "cpuset", "memory", "pids")

_ROOT = "tightship"

# include/uapi/linux/capability.h
_CAP_SYS_RESOURCE = 24


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One cgroup tree that we use. `base` is `<mount>/tightship/<instance>`; `name` is used in steps' names."""

    name: str
    version: int
    base: str
    controllers: frozenset[str]
    files: frozenset[str]
    """Control files in a container's directory there."""

    def path(self, name: str) -> str:
        """The directory of the container `name`."""
        return self.base + name


@dataclass(frozen=True, slots=True)
class Machine:
    instance: str
    boot: str
    hierarchies: tuple[Hierarchy, ...]
    """The tracker first: the tree that tells and kills a container's processes."""
    oom_floor: int = -1000
    """Lowest oom_score_adj a container's processes can get: without CAP_SYS_RESOURCE, ours."""

    cpus: int = 0
    """The CPUs present, a bit each; 0 where that is not known."""

    @property
    def tracker(self) -> Hierarchy:
        return self.hierarchies[0]

    def limits(self, controller: str) -> Hierarchy | None:
        """The v1 hierarchy whose directories have the controller's files."""
        for each in self.hierarchies:
            if each.version == 1 and controller in each.controllers:
                return each
        return None


def look(instance: str) -> Machine:
    """Finds the hierarchies and makes the base levels. Raises RunDirError that says what is missing."""
    chosen: dict[str, tuple[cgroup.Mount, str]] = {}
    mounts = sorted(cgroup.mounts(), key=lambda mount: (not mount.writable, len(mount.path)))
    v2 = next((mount for mount in mounts if mount.version == 2), None)
    wanted = list(CONTROLLERS)
    if v2 is not None:
        chosen["unified"] = (v2, "unified")
    else:
        wanted = ["freezer", *wanted, "cpuacct"]
    for controller in wanted:
        mount = next((each for each in mounts if each.version == 1 and controller in each.controllers), None)
        if mount is not None and all(mount is not other for other, _ in chosen.values()):
            chosen[controller] = (mount, controller)
    if not chosen or (v2 is None and "freezer" not in chosen):
        raise RunDirError("no cgroup tree to track processes in: mount cgroup2 or the v1 freezer")
    hierarchies: list[Hierarchy] = []
    try:
        for mount, name in chosen.values():
            hierarchies.append(_base(mount, name, instance))
    except RunDirError:
        _remove(hierarchies)
        raise
    return Machine(instance, process.boot_id(), (*hierarchies,), _oom_floor(), _cpus())


def leave(machine: Machine) -> None:
    """Removes the base levels that are empty; others stay."""
    _remove(machine.hierarchies)


def _remove(hierarchies: Iterable[Hierarchy]) -> None:
    for each in hierarchies:
        for path in (each.base, os.path.dirname(each.base)):
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _oom_floor() -> int:
    """proc_pid_oom_score_adj(5): lowering it needs CAP_SYS_RESOURCE."""
    if process.capabilities() >> _CAP_SYS_RESOURCE & 1:
        return -1000
    with open("/proc/self/oom_score_adj") as file:
        return int(file.read())


def _cpus() -> int:
    """Documentation/admin-guide/cputopology.rst: a list like "0-2,5"."""
    bits = 0
    with contextlib.suppress(OSError, ValueError):
        for part in cgroup.read("/sys/devices/system/cpu/present").split(","):
            first, _, last = part.partition("-")
            for cpu in range(int(first), int(last or first) + 1):
                bits |= 1 << cpu
    return bits


def _base(mount: cgroup.Mount, name: str, instance: str) -> Hierarchy:
    root = os.path.join(mount.path, _ROOT)
    base = os.path.join(root, instance)
    try:
        for _ in range(100):
            with contextlib.suppress(FileExistsError):
                cgroup.make(root, "- - /")
            _inherit(root)
            try:
                with contextlib.suppress(FileExistsError):
                    cgroup.make(base, f"{instance} - /")
                break
            except FileNotFoundError:
                continue  # another pair has just removed `tightship` at its end
        files = frozenset(entry.name for entry in os.scandir(base) if not entry.is_dir(follow_symlinks=False))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise RunDirError(
                f"can't make cgroups in {mount.path}: {error.strerror}; run as root, or with a writable cgroup tree"
            ) from error
        raise RunDirError(f"can't make cgroups in {mount.path}: {error}") from error
    return Hierarchy(name, mount.version, base, mount.controllers, files)


def _inherit(root: str) -> None:
    """Makes a v1 cpuset usable and its children like it; a fresh one has no CPU and no memory node: cpusets.rst."""
    switch = os.path.join(root, "cgroup.clone_children")
    if not os.path.exists(os.path.join(root, "cpuset.cpus")) or not os.path.exists(switch):
        return
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile by another pair; the caller comes again
        for name in ("cpuset.cpus", "cpuset.mems"):
            if not cgroup.read(os.path.join(root, name)):
                cgroup.write(os.path.join(root, name), cgroup.read(os.path.join(os.path.dirname(root), name)))
        cgroup.write(switch, "1")
