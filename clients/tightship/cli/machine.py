"""What a pair needs of the machine, looked at before anything is started: cgroup trees that this user may write."""

from __future__ import annotations

import os
import re

# Trees that the containerizer makes directories in, where they are mounted.
_CONTROLLERS = frozenset({"cpu", "cpuset", "memory", "pids"})


def missing() -> str | None:
    """One line that says what is missing and what to do; None when nothing is."""
    trees = _trees()
    if not trees:
        return "no cgroup file system is mounted: mount cgroup2 on /sys/fs/cgroup (as root)"
    refused = sorted(mounts[0] for mounts in trees.values() if not any(map(_writable, mounts)))
    if not refused:
        return None
    who = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    where = refused[0] + (f" and {len(refused) - 1} more" if len(refused) > 1 else "")
    do = (
        "mount the cgroup file systems writable here"
        if os.geteuid() == 0
        else "run it as root (sudo), or ask for cgroups delegated to you"
    )
    return f"{who} may not make cgroups in {where}: {do}"


def _writable(mount: str) -> bool:
    ours = os.path.join(mount, "tightship")  # may have been made for this user
    return os.access(ours if os.path.isdir(ours) else mount, os.W_OK | os.X_OK)


def _trees() -> dict[str, list[str]]:
    """Where each tree of interest is mounted, by controller. /proc/PID/mountinfo is in proc_pid_mountinfo(5)."""
    found: dict[str, list[str]] = {}
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split()[:3]
            path = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4])
            if kind == "cgroup2":
                found.setdefault(kind, []).append(path)
            elif kind == "cgroup":
                for controller in _CONTROLLERS.intersection(options.split(",")):
                    found.setdefault(controller, []).append(path)
    return found
