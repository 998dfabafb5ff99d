"""`python -m tightship.containerizer.doctor`: what this machine offers to a pair, as JSON, without starting one.

Each finding has `what`, `state` (ok; note: for your knowledge; warn: something will be refused or is not as good;
missing: nothing works without), `found`, and `step`, what to do. Nothing is changed but two cgroups a hierarchy, which
are made and removed again: whether they can be made is only known so. Light: no gRPC is imported.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tightship.common import clients
from tightship.common.rundir import RunDirError
from tightship.containerizer import machine
from tightship.containerizer.machine import LEAF, Hierarchy, Machine
from tightship.kernel import cgroup, clone, process, rootfs, seccomp

State = Literal["ok", "note", "warn", "missing"]

_KERNEL = (5, 10)
_PYTHON = (3, 11)
# What click takes for a flag that is given.
_TRUE = ("1", "true", "t", "yes", "y", "on")

# linux/capability.h. What each is for, when it is missing.
_CAPABILITIES = (
    ("CAP_SYS_ADMIN", 21, "namespaces of virtual_host and security, and a mark on cgroups that no user can set"),
    ("CAP_KILL", 5, "ending processes that have become another user"),
    ("CAP_DAC_OVERRIDE", 1, "writing cgroups that were given to an owner"),
    ("CAP_CHOWN", 0, "owner and owner_group"),
    ("CAP_SETUID", 7, "security.user"),
    ("CAP_SETGID", 6, "security.user and groups"),
    ("CAP_SETPCAP", 8, "security, which drops capabilities"),
    ("CAP_NET_ADMIN", 12, "the loopback interface of virtual_host { network {} }"),
    ("CAP_SYS_PTRACE", 19, "an audit's look at descriptors of other users' processes"),
    ("CAP_SYS_RESOURCE", 24, "memory.eviction_priority above its default"),
)

# Fields of the spec, and the file that honours each, of v1 and of v2; each is named after its controller.
_FIELDS = (
    ("cpu.limit", "cpu.shares", "cpu.weight"),
    ("cpu.max_limit", "cpu.cfs_quota_us", "cpu.max"),
    ("cpu.scheduling_latency", "cpu.idle", "cpu.idle"),
    ("cpu.mask", "cpuset.cpus", "cpuset.cpus"),
    ("memory.limit", "memory.limit_in_bytes", "memory.max"),
    ("memory.max_limit", "", "memory.high"),
    ("memory.swap_limit", "memory.memsw.limit_in_bytes", "memory.swap.max"),
    ("memory.reservation", "memory.soft_limit_in_bytes", "memory.low"),
    ("tasks.limit", "pids.max", "pids.max"),
    ("blockio.device_limit_set", "blkio.weight", "io.weight"),
    ("blockio.max_device_limit_set", "blkio.throttle.read_bps_device", "io.max"),
    ("device.restrictions_set", "devices.allow", ""),
)

# Descriptors that a container takes in the switchboard, and what that takes for itself.
_FDS_PER_CONTAINER = 6
_FDS_RESERVED = 512
_FDS_FEW = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    group: str
    what: str
    state: State
    found: str
    step: str = ""


def findings() -> Iterator[Finding]:
    """All of them, in the order in which they are to be shown."""
    yield from _system()
    yield from _calls()
    yield from _capabilities()
    yield from _cgroups()
    yield _open_files()
    yield from _loopback()


def _system() -> Iterator[Finding]:
    release = platform.release()
    new_enough = _version(release) >= _KERNEL
    yield Finding(
        "system", "kernel", "ok" if new_enough else "missing", release, "" if new_enough else "use Linux 5.10 or newer"
    )
    native = platform.machine() == "x86_64"
    yield Finding(
        "system", "processor", "ok" if native else "note", platform.machine(),
        "" if native else "launches go through Python here and take somewhat longer: nothing to do",
    )  # fmt: skip
    good = sys.version_info[:2] >= _PYTHON
    yield Finding(
        "system", "Python", "ok" if good else "missing", platform.python_version(), "" if good else "use 3.11 or newer"
    )
    root = os.geteuid() == 0
    yield Finding(
        "system", "user", "ok" if root else "warn", "root" if root else f"uid {os.geteuid()}",
        "" if root else "run it as root, or with cgroups and capabilities given to this user",
    )  # fmt: skip


def _calls() -> Iterator[Finding]:
    """Each is made: a seccomp profile may refuse what the kernel has."""
    told: list[bool] = []
    yield _call("clone3 with a pidfd", lambda: told.append(_child(())))
    yield _call("pidfd_open", lambda: os.close(os.pidfd_open(os.getpid())))
    yield _call("close_range", lambda: clone.close_range(clone.LAST_FD, clone.LAST_FD))
    yield _call("namespaces of virtual_host", lambda: _child(tuple(clone.NAMESPACES)), "warn")
    yield _call("mounts of security and filesystem", rootfs.probe, "warn")
    filters = seccomp.available()
    yield Finding(
        "kernel", "filter of system calls", "ok" if filters else "warn", "yes" if filters else "no libseccomp.so.2",
        "" if filters else "without it security confines without its default filter: apt-get install libseccomp2",
    )  # fmt: skip
    knows = told == [True]
    yield Finding(
        "kernel", "exit status by pidfd", "ok" if knows else "note", "yes" if knows else "no",
        "" if knows else "from Linux 6.15 on the status of what ends while the spawner is started anew is known, too",
    )  # fmt: skip


def _call(name: str, attempt: Callable[[], object], state: State = "missing") -> Finding:
    try:
        attempt()
    except OSError as error:
        step = "allow it in this container's seccomp profile and capabilities, or use a newer kernel"
        return Finding("kernel", name, state, f"refused: {error.strerror}", step)
    return Finding("kernel", name, "ok", "yes")


def _child(namespaces: tuple[str, ...]) -> bool:
    """A child that ends at once; whether the kernel tells its status after the reap. Raises OSError."""
    pid, pidfd = clone.clone3(namespaces)
    if pid == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        return process.exit_status(pidfd) is not None
    finally:
        os.close(pidfd)


def _capabilities() -> Iterator[Finding]:
    effective = process.capabilities()
    for name, number, purpose in _CAPABILITIES:
        if effective >> number & 1:
            yield Finding("capabilities", name, "ok", "yes")
        else:
            step = f"without it not: {purpose}; add it (cap_add: {name.removeprefix('CAP_')} in a compose file)"
            yield Finding("capabilities", name, "warn", "no", step)


def _cgroups() -> Iterator[Finding]:
    mounts = cgroup.mounts()
    by_version = {version: [each for each in mounts if each.version == version] for version in (1, 2)}
    controllers = set().union(*(each.controllers for each in by_version[1]))
    layout = "v2 alone" if not controllers else "hybrid: v1 with v2" if by_version[2] else "v1"
    layout = layout if mounts else "none is mounted"
    yield Finding("cgroups", "layout", "ok" if mounts else "missing", layout, "" if mounts else "mount /sys/fs/cgroup")
    for each in sorted(mounts, key=lambda mount: (mount.version, mount.path)):
        offers = " ".join(sorted(each.controllers)) or ("no controller" if each.version == 2 else "a name alone")
        told = f"v{each.version}: {offers}, {_access(each)}"
        yield Finding("cgroups", each.path, "ok" if _writable(each) else "note", told)
    try:
        found = machine.look(secrets.token_hex(4))
    except (RunDirError, OSError) as error:
        yield Finding("cgroups", "cgroups of ours", "missing", str(error), "run it as root, with the tree writable")
        return
    try:
        yield from _offered(found)
    finally:
        machine.leave(found)


def _offered(found: Machine) -> Iterator[Finding]:
    """By what is in a new cgroup of ours, as the planner sees it."""
    yield Finding("cgroups", "cgroups of ours", "ok", "can be made in " + " ".join(each.name for each in found.trees))
    if found.tracker.has_leaves:
        yield Finding("cgroups", "processes", "ok", f"in a leaf {LEAF} of each container, as v2 asks for")
    for controller in machine.CONTROLLERS:
        place = found.limits(controller)
        yield Finding(
            "cgroups", f"controller {controller}", "missing" if place is None else "ok", _place(place),
            "" if place else "enable it in the kernel, and in cgroup.subtree_control of the cgroup given to this user",
        )  # fmt: skip
    for controller, other in (("io", "blkio"), ("devices", ""), ("perf_event", "")):
        place = found.limits(controller) or found.limits(other)
        implied = controller == "perf_event" and found.perf_on_v2 and place is None
        yield Finding(
            "cgroups", f"controller {controller}", "ok" if place or implied else "note",
            "v2, in every cgroup" if implied else _place(place),
            "" if place or implied else "a spec that asks for what it does is refused: nothing else to do",
        )  # fmt: skip
    by_kill = "cgroup.kill" in found.tracker.files
    yield Finding(
        "cgroups", "cgroup.kill", "ok" if by_kill else "note", "yes" if by_kill else "no",
        "" if by_kill else "a cgroup is frozen and its processes killed one by one: nothing to do",
    )  # fmt: skip
    honoured = []
    for field, v1, v2 in _FIELDS:
        file = _file_here(found, v1, v2)
        if file:
            honoured.append(field)
        elif file is not None:
            lacking = " or ".join(each for each in (v1, v2) if each)
            step = _ENABLE.get(field, "a spec that asks for it is refused")
            yield Finding("cgroups", field, "note" if field in _RARE else "warn", f"no {lacking} here", step)
    yield Finding("cgroups", "fields honoured", "ok", " ".join(honoured))


def _place(place: Hierarchy | None) -> str:
    return "nowhere" if place is None else f"v{place.version}, {os.path.dirname(place.base)}"


def _file_here(found: Machine, v1: str, v2: str) -> str | None:
    """The file that honours a field here; "" where its controller lacks it, None where there is no controller."""
    controllers = {file.partition(".")[0] for file in (v1, v2) if file}
    places = [place for each in sorted(controllers) if (place := found.limits(each)) is not None]
    if not places:
        return None
    for place in places:
        file = v1 if place.version == 1 else v2
        # A v1 kernel with the BFQ scheduler has shares under its name.
        for each in (file, file.replace("blkio.weight", "blkio.bfq.weight")):
            if each and each in place.files:
                return each
    return ""


# What a spec seldom asks for, and the other version, or another kernel, has.
_RARE = frozenset({"memory.max_limit", "blockio.device_limit_set", "device.restrictions_set"})
_ENABLE = {
    "memory.max_limit": "a spec that asks for it is refused; cgroup v2 has it",
    "memory.swap_limit": "a spec that asks for it is refused; boot kernels before 6.1 with swapaccount=1",
    "cpu.max_limit": "a spec that asks for it is refused; the kernel needs CONFIG_CFS_BANDWIDTH",
}


def _writable(mount: cgroup.Mount) -> bool:
    return mount.writable and os.access(mount.path, os.W_OK | os.X_OK)


def _access(mount: cgroup.Mount) -> str:
    """systemd marks what it delegates by an attribute."""
    for attribute in ("trusted.delegate", "user.delegate"):
        try:
            if os.getxattr(mount.path, attribute) == b"1":
                return "delegated to us" if _writable(mount) else "delegated, not writable"
        except OSError:
            continue
    return "writable" if _writable(mount) else "read-only" if not mount.writable else "not writable by this user"


def _loopback() -> Iterator[Finding]:
    """By the environment, which a pair started from here would have too."""
    if os.environ.get("TIGHTSHIP_INSECURE_LOOPBACK", "").lower() not in _TRUE:
        return
    path = os.environ.get("TIGHTSHIP_CLIENTS")
    try:
        limited = path is not None and any(entry.name == clients.LOOPBACK for entry in clients.load(Path(path)))
    except clients.ConfigError as error:
        yield Finding("doors", "insecure loopback", "warn", str(error), "a service does not start with it: repair it")
        return
    yield Finding(
        "doors", "insecure loopback", "ok" if limited else "warn",
        "has the rights of the entry loopback" if limited else "every user and process of this host has all rights",
        "" if limited else "add an entry named loopback to the clients file, or use TLS: docs/security.md",
    )  # fmt: skip


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("limits", "open files", "ok", "no limit")
    number = max(0, (hard - _FDS_RESERVED) // _FDS_PER_CONTAINER)
    found = f"{soft}, raised to {hard}: {number} containers at a time"
    if hard >= _FDS_FEW:
        return Finding("limits", "open files", "ok", found)
    step = "raise the hard limit: LimitNOFILE= of the unit, ulimits: of the compose file, or ulimit -Hn"
    return Finding("limits", "open files", "warn" if number else "missing", found, step)


def _version(release: str) -> tuple[int, int]:
    major, _, rest = release.partition(".")
    minor = rest.partition(".")[0].partition("-")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


if __name__ == "__main__":
    print(json.dumps([asdict(each) for each in findings()]))
