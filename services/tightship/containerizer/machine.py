"""What this machine has, found by looking once at start: hierarchies, the tracker, the control files there are.

`Machine` is plain data for the planner. `look` finds it, and makes our two base levels in every hierarchy that we use.
Each controller is taken from where it is: a v1 hierarchy of its own, or the v2 tree.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tightship.common.rundir import RunDirError
from tightship.kernel import cgroup, process

# In the order in which a launch makes them; the tracker comes first, so that undo removes it last.
CONTROLLERS = ("cpu", "cpuset", "memory", "pids")

# Hierarchies of v1 in which a container has a directory only where its spec, or that of a container above, asks for it.
OPTIONAL = ("blkio", "devices", "perf_event")

# What every container uses on v2, for its record and figures; the others are enabled for the spec that asks for them.
COMMON_V2 = ("cpu", "memory", "pids")
_USED_V2 = (*COMMON_V2, "cpuset", "io")

LEAF = "_main"
"""On a v2 tree with controllers, where a container's processes live: cgroup-v2.rst, "No Internal Process Constraint".
No container has a name like this."""

_ROOT = "tightship"
SERVICES = "_tightship"
"""The leaf for the services themselves, where the v2 cgroup they were given held them."""

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

    @property
    def has_leaves(self) -> bool:
        """Whether processes live one level below a container's directory."""
        return self.version == 2 and bool(self.controllers)

    def inside(self, name: str) -> str:
        """The directory that has the processes of the container `name`."""
        return f"{self.base}{name}/{LEAF}" if self.has_leaves else self.base + name


@dataclass(frozen=True, slots=True)
class Machine:
    instance: str
    boot: str
    hierarchies: tuple[Hierarchy, ...]
    """Those of every container. The tracker first: the tree that tells and kills a container's processes."""
    optional: tuple[Hierarchy, ...] = ()
    """Those of v1 that only some containers have: OPTIONAL."""
    oom_floor: int = -1000
    """Lowest oom_score_adj a container's processes can get: without CAP_SYS_RESOURCE, ours."""

    cpus: int = 0
    """The CPUs present, a bit each; 0 where that is not known."""

    perf_on_v2: bool = False
    """Whether every cgroup of the v2 tree counts for perf_event."""

    @property
    def tracker(self) -> Hierarchy:
        return self.hierarchies[0]

    @property
    def trees(self) -> tuple[Hierarchy, ...]:
        """Every hierarchy in which something of ours may be."""
        return (*self.hierarchies, *self.optional)

    def limits(self, controller: str) -> Hierarchy | None:
        """The hierarchy whose directories have the controller's files, v1 or v2."""
        return next((each for each in self.trees if controller in each.controllers), None)


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
    optional = {
        controller: (mount, controller)
        for controller in OPTIONAL
        for mount in [next((each for each in mounts if each.version == 1 and controller in each.controllers), None)]
        if mount is not None and mount.writable and all(mount is not other for other, _ in chosen.values())
    }
    if not chosen or (v2 is None and "freezer" not in chosen):
        raise RunDirError("no cgroup tree to track processes in: mount cgroup2 or the v1 freezer")
    hierarchies: list[Hierarchy] = []
    try:
        for mount, name in (*chosen.values(), *optional.values()):
            hierarchies.append(_base(mount, name, instance))
    except RunDirError:
        _remove(hierarchies)
        raise
    common = len(chosen)
    return Machine(
        instance,
        process.boot_id(),
        (*hierarchies[:common],),
        (*hierarchies[common:],),
        _oom_floor(),
        _cpus(),
        v2 is not None and _perf_on_v2(),
    )


def leave(machine: Machine) -> None:
    """Removes the base levels that are empty; others stay."""
    _remove(machine.trees)


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


def _perf_on_v2() -> bool:
    """cgroups(7), /proc/cgroups: name, hierarchy (0 = v2, or none), number of cgroups, enabled."""
    with contextlib.suppress(OSError), open("/proc/cgroups") as file:
        return any(line.split()[:2] == ["perf_event", "0"] and line.split()[3] == "1" for line in file)
    return False


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
    above = mount.path if mount.version == 1 else _delegated(mount)
    root = os.path.join(above, _ROOT)
    base = os.path.join(root, instance)
    controllers = mount.controllers
    try:
        for _ in range(100):
            with contextlib.suppress(FileExistsError):
                cgroup.make(root, "- - /")
            _inherit(root)
            try:
                if mount.version == 2:
                    _offer(above, root)
                with contextlib.suppress(FileExistsError):
                    cgroup.make(base, f"{instance} - /")
                if mount.version == 2:
                    controllers = _controllers(base)
                    cgroup.enable(base, [each for each in COMMON_V2 if each in controllers])
                break
            except FileNotFoundError:
                continue  # another pair has just removed `tightship` at its end
        files = frozenset(entry.name for entry in os.scandir(base) if not entry.is_dir(follow_symlinks=False))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise RunDirError(
                f"can't make cgroups in {above}: {error.strerror}; run as root, or with a writable cgroup tree"
            ) from error
        raise RunDirError(f"can't make cgroups in {above}: {error}") from error
    return Hierarchy(name, mount.version, base, controllers, files)


def _controllers(path: str) -> frozenset[str]:
    """Of those that we use, the ones that the cgroup above lets this one have."""
    return frozenset(cgroup.read(os.path.join(path, "cgroup.controllers")).split()) & frozenset(_USED_V2)


def _offer(above: str, root: str) -> None:
    """Lets our base have what the v2 cgroup we were given has; what is refused stays out of `cgroup.controllers`.

    Raises FileNotFoundError where `root` went meanwhile.
    """
    # All but the root of the tree have a type, and may not hold processes beside children with controllers. They go
    # first: cpu and pids would be taken beside them, and make a threaded domain, where nothing else is.
    if os.path.exists(os.path.join(above, "cgroup.type")) and cgroup.processes(above):
        _move_aside(above)
        if cgroup.processes(above):
            return  # of somebody else: no controller is ours to give
    for controller in sorted(_controllers(above)):
        with contextlib.suppress(OSError):
            cgroup.enable(above, [controller])
    for controller in sorted(_controllers(root)):
        cgroup.enable(root, [controller])


def _delegated(mount: cgroup.Mount) -> str:
    """Where in the v2 tree we may make cgroups: at its root, else in the cgroup we run in, which was given to us."""
    if os.access(mount.path, os.W_OK | os.X_OK):
        return mount.path
    for line in cgroup.read("/proc/self/cgroup").splitlines():
        if line.startswith("0::/"):
            own = mount.path + line[3:].rstrip("/")
            # A service started after one that has moved aside is in the leaf, as that one is.
            return own.removesuffix(f"/{SERVICES}")
    return mount.path


def _move_aside(above: str) -> None:
    """Moves this pair's services from a cgroup that is to have children with controllers into a leaf of it."""
    leaf = os.path.join(above, SERVICES)
    with contextlib.suppress(FileExistsError):
        os.mkdir(leaf)
    there = set(cgroup.processes(above))
    for pid in _family(there):
        with contextlib.suppress(ProcessLookupError):
            cgroup.write(os.path.join(leaf, "cgroup.procs"), str(pid))


def _family(there: set[int]) -> Iterator[int]:
    """This process, and of those above it what is tightship's, with their children: the services of a pair."""
    yield os.getpid()
    above = os.getppid()
    ours = {os.getpid()}
    while above in there and "tightship" in cgroup.read(f"/proc/{above}/cmdline"):
        ours.add(above)
        yield above
        stat = process.stat(above)
        above = stat.parent if stat is not None else 0
    for pid in there - ours:
        stat = process.stat(pid)
        if stat is not None and stat.parent in ours:
            yield pid


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
