"""What the spawner can't explain: descriptors of its own, and children that nobody launched. It only looks."""

from __future__ import annotations

import os

from tightship.common.packets import Packet
from tightship.kernel import process


def examine(descriptors: set[int], children: set[int]) -> Packet:
    """Compares with what there should be: 0, 1, 2 and `descriptors`; `children` by pid.

    Orphans of contained processes become our children; in a container's cgroup they are for whoever walks that, and
    only those beside us in our own are told here.
    """
    findings: list[Packet] = []
    fds = _open_fds()
    for fd, target in fds.items():
        if fd > 2 and fd not in descriptors:
            findings.append(
                {
                    "kind": "descriptor",
                    "what": f"fd {fd} of pid {os.getpid()}",
                    "origin": f"the spawner: {target}, which nothing there accounts for",
                    "ours": True,
                }
            )
    pids = _children()
    for pid in pids:
        if pid in children or not _beside_us(pid):
            continue
        findings.append(
            {
                "kind": "process",
                "what": f"pid {pid} ({_name(pid)})",
                "origin": "an orphan of a contained process, outside of every container",
                # The first process of a pid namespace is given strangers too.
                "ours": os.getpid() != 1,
            }
        )
    return {"findings": findings, "examined": {"descriptor": len(fds), "process": len(pids)}}


def _open_fds() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the listing itself
    return found


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if (stat := process.stat(pid)) is not None and stat.parent == os.getpid()]


def _beside_us(pid: int) -> bool:
    stat = process.stat(pid)
    if stat is None or stat.state == "Z":
        return False
    try:
        with open(f"/proc/{pid}/cgroup") as theirs, open("/proc/self/cgroup") as ours:
            return theirs.read() == ours.read()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
