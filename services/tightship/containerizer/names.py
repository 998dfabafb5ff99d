"""Names of containers: absolute paths of components that can't collide with a control file. Pure.

A component becomes a directory in every hierarchy, so it must not look like the kernel's files there, and those that
begin with `_` or `.` stay free for internal use.
"""

from __future__ import annotations

import re

from tightship.common.errors import invalid

COMPONENT_MAX = 255
# A path in a cgroup file system must fit PATH_MAX with the mount and our base before it.
NAME_MAX = 2048
# Levels. Each is a directory in every hierarchy, and the kernel walks them all at every charge.
DEPTH_MAX = 64

_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")

# Files of the kernel in a cgroup directory, v1 and v2, and the prefixes of the controllers' files.
_CONTROL_FILES = frozenset({"tasks", "notify_on_release", "release_agent"})
_CONTROL_PREFIXES = frozenset(
    {
        "cgroup", "cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "io", "pids", "net_cls",
        "net_prio", "perf_event", "hugetlb", "rdma", "misc", "irq", "dmem", "debug",
    }
)  # fmt: skip


def normalize(name: str, field: str = "name") -> str:
    """The one spelling of an absolute name. Raises INVALID_ARGUMENT naming `field`; "/" itself passes."""
    if not name:
        raise invalid(field, "a name is needed", "BAD_NAME")
    if len(name) > NAME_MAX:  # before anything that takes time for each component
        raise invalid(field, f"a name of {len(name)} characters is over the limit of {NAME_MAX}", "BAD_NAME")
    if not name.startswith("/"):
        raise invalid(field, f"{_shown(name)} is not absolute: it must start with /", "BAD_NAME")
    kept: list[str] = []
    for part in name.split("/"):
        if part in ("", "."):
            continue
        if part == "..":
            if kept:
                kept.pop()
            continue
        _check(part, field)
        kept.append(part)
    if len(kept) > DEPTH_MAX:
        raise invalid(field, f"a name of {len(kept)} levels is over the limit of {DEPTH_MAX}", "BAD_NAME")
    return "/" + "/".join(kept)


def container(name: str, field: str = "name") -> str:
    """Like `normalize`, for a name that must be a container's: "/" is none."""
    clean = normalize(name, field)
    if clean == "/":
        raise invalid(field, "/ is the root and no container", "BAD_NAME")
    return clean


def parent(name: str) -> str:
    """The name above; "/" at the top."""
    return name.rpartition("/")[0] or "/"


def lineage(name: str) -> list[str]:
    """The names above, the nearest first, without "/"."""
    above = []
    while (name := parent(name)) != "/":
        above.append(name)
    return above


def is_below(name: str, top: str) -> bool:
    """Whether `name` is at any depth below `top`."""
    return name != top and (top == "/" or name.startswith(top + "/"))


def _check(part: str, field: str) -> None:
    if not _COMPONENT.match(part):
        raise invalid(
            field,
            f"{_shown(part)}: a component has letters, digits, _ . - and starts with a letter or digit",
            "BAD_NAME",
        )
    if len(part) > COMPONENT_MAX:
        raise invalid(field, f"a component of {len(part)} bytes is over the limit of {COMPONENT_MAX}", "BAD_NAME")
    prefix, dot, _ = part.partition(".")
    if part in _CONTROL_FILES or (dot and prefix in _CONTROL_PREFIXES):
        raise invalid(field, f"{_shown(part)} collides with a control file of the kernel", "BAD_NAME")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
