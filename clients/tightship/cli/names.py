"""Names as a user types them: joined to the caller's own container and cleaned. The service judges what comes out."""

from __future__ import annotations

import re

# What the services make as ids: they never begin with "/", and no sensible name looks like one.
_ID = re.compile(r"[0-9a-f]{16,64}")


def resolve(typed: str, own: str) -> str:
    """The absolute name of `typed`, read from the container `own` ("/" for an ordinary shell).

    `//`, `.`, `..` and a trailing `/` are cleaned; `..` never climbs above "/". "" stays "", for the service to refuse.
    """
    if not typed:
        return ""
    parts: list[str] = []
    for part in (typed if typed.startswith("/") else f"{own}/{typed}").split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def resolve_or_id(typed: str, own: str) -> str:
    """Like `resolve`, but 16 and more hex digits are an id; a container named like that is written `./NAME`."""
    return typed if _ID.fullmatch(typed) else resolve(typed, own)


def own_container(run_dir: str) -> str:
    """The container of this pair that the calling process is in; "/" when in none."""
    try:
        with open(f"{run_dir}/instance") as file:
            instance = file.read().strip()
        with open("/proc/self/cgroup") as file:
            return within(file.read(), instance)
    except OSError:
        return "/"


def within(cgroups: str, instance: str) -> str:
    """The container that /proc/PID/cgroup (`cgroups`) tells for the instance; "/" for none. See cgroups(7)."""
    base = f"/tightship/{instance}/"
    for line in cgroups.splitlines():
        path = line.split(":", 2)[-1]
        if instance and base in path:
            return "/" + path.partition(base)[2].strip("/")
    return "/"
