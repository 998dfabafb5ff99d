"""The tests' own look at what exists: cgroups, processes, descriptors, threads, mounts. It asks no service.

Standard library only, since the keeper imports it without site packages.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.patience import PATIENCE

# The kinds of which a leak would show; the others (eventfd, files of the database, ...) belong to the runtime.
KINDS = ("pipe", "pidfd", "segment", "socket", "memfd")

_GRPC_THREADS = ("event_engine", "grpc_global_tim", "lifeguard")

# Number of the descriptor that the keeper makes a service inherit, where a test asks for it.
PLANTED = 60


def cgroup_mounts() -> list[Path]:
    """Mount points of every cgroup hierarchy, v1 and v2, from /proc/self/mountinfo: proc(5)."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ")
        if after.split()[0] in ("cgroup", "cgroup2"):
            mounts.append(Path(before.split()[4]))
    return mounts


def cgroup_bases(instance: str) -> list[Path]:
    """The trees of an instance that exist, in every hierarchy, also below this process' own cgroup."""
    if not instance:
        return []
    own = {line.split(":")[2].lstrip("/") for line in Path("/proc/self/cgroup").read_text().splitlines()} | {""}
    candidates = {mount / above / "tightship" / instance for mount in cgroup_mounts() for above in own}
    return sorted(base for base in candidates if base.is_dir())


def cgroups(instance: str) -> list[str]:
    """Every directory below the trees of an instance, the trees themselves not counted."""
    found = []
    for base in cgroup_bases(instance):
        for directory, _, _ in os.walk(base):
            if Path(directory) != base:
                found.append(directory)
    return sorted(found)


def members(directories: Iterable[str | Path]) -> set[int]:
    """Processes in the cgroups given."""
    pids: set[int] = set()
    for directory in directories:
        for file in ("cgroup.procs", "tasks"):
            try:
                pids.update(int(pid) for pid in Path(directory, file).read_text().split())
            except OSError:
                continue  # gone meanwhile, or a threaded cgroup
    return pids


def descendants(root: int) -> set[int]:
    """Every process below `root`, zombies too."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path("/proc", name, "stat").read_text()
            except OSError:
                continue
            parent = int(text[text.rindex(")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    queue = [root]
    while queue:
        for child in children.get(queue.pop(), []):
            found.add(child)
            queue.append(child)
    return found


def command(pid: int) -> str:
    """The command line of a process, or its name in brackets; empty where it is gone."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return line or f"[{Path(f'/proc/{pid}/comm').read_text().strip()}]"
    except OSError:
        return ""


def kind(target: str) -> str:
    """The kind of the descriptor whose link in /proc/PID/fd reads `target`."""
    if target.startswith("pipe:"):
        return "pipe"
    if target.startswith("socket:"):
        return "socket"
    if "pidfd" in target:
        return "pidfd"
    if target.startswith("/memfd:"):
        return "memfd"
    if re.search(r"/logs/[^/]+/(stdout|stderr)", target):
        return "segment"
    if target.startswith("anon_inode:"):
        return target.removeprefix("anon_inode:").strip("[]")
    return "cgroup" if target.startswith("/sys/fs/cgroup") else "file"


def descriptors(pid: int) -> dict[int, str]:
    """Descriptor number to what it refers to; empty where the process is gone."""
    found = {}
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return {}
    for number in numbers:
        try:
            found[int(number)] = os.readlink(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
    return found


def kinds(pid: int) -> Counter[str]:
    return Counter(kind(target) for target in descriptors(pid).values())


def threads(pid: int) -> int:
    """Threads of the process' own. Those of gRPC are a pool that follows the machine's load, and have names."""
    count = 0
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    for task in tasks:
        try:
            name = Path(f"/proc/{pid}/task/{task}/comm").read_text().strip()
        except OSError:
            continue
        count += name not in _GRPC_THREADS
    return count


def anonymous_kib(pid: int) -> int:
    """KiB of memory that is the process' own and no file's: what grows when it keeps things."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1])
    raise AssertionError("no Anonymous line in smaps_rollup")


@dataclass(frozen=True)
class Census:
    """What there was at one moment. Equal to another when nothing was left in between."""

    cgroups: tuple[str, ...]
    processes: tuple[tuple[int, str], ...]
    descriptors: dict[str, Counter[str]]
    """Service to the number of descriptors by kind."""
    mounts: tuple[str, ...]
    threads: dict[str, int] = field(compare=False)
    """Service to its threads: pools grow to their size, so not compared."""

    def difference(self, before: Census) -> list[str]:
        """What is in this one and was not in `before`, and the other way round, in words."""
        lines = []
        pairs: list[tuple[str, Iterable[object], Iterable[object]]] = [
            ("cgroup", self.cgroups, before.cgroups),
            ("process", self.processes, before.processes),
            ("mount", self.mounts, before.mounts),
        ]
        for name, now, then in pairs:
            lines += [f"new {name} {thing}" for thing in now if thing not in set(then)]
            lines += [f"gone {name} {thing}" for thing in then if thing not in set(now)]
        for service in sorted(self.descriptors.keys() | before.descriptors.keys()):
            now_kinds = self.descriptors.get(service, Counter())
            then_kinds = before.descriptors.get(service, Counter())
            for one in KINDS:
                if now_kinds[one] != then_kinds[one]:
                    lines.append(f"{service}: {then_kinds[one]} -> {now_kinds[one]} {one}")
        return lines


def take(instance: str, keeper: int, services: dict[str, int]) -> Census:
    """Looks now. `services` are the pids that belong; every other process below `keeper` or in a cgroup is counted."""
    directories = cgroups(instance)
    pids = (descendants(keeper) | members(directories) | members(cgroup_bases(instance))) - set(services.values())
    return Census(
        tuple(directories),
        tuple(sorted((pid, command(pid)) for pid in pids)),
        {service: kinds(pid) for service, pid in services.items()},
        tuple(sorted(_mounts())),
        {service: threads(pid) for service, pid in services.items()},
    )


def settle(look: Callable[[], Census], before: Census, timeout_s: float = 10.0) -> Census:
    """Looks until it is as before. Raises AssertionError with the difference after `timeout_s`."""
    until = time.monotonic() + timeout_s * PATIENCE
    while True:
        now = look()
        difference = now.difference(before)
        if not difference:
            return now
        if time.monotonic() > until:
            raise AssertionError(f"left after {timeout_s:g} s:\n  " + "\n  ".join(difference))
        time.sleep(0.02)


def _mounts() -> list[str]:
    """Mounts of our namespace without their ids, which are given anew, and without those of a Docker beside."""
    lines = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "docker" not in line]
    return [" ".join(line.split(" - ")[0].split()[3:6]) + " " + line.split(" - ")[1] for line in lines]
