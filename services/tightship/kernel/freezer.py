"""Stopping and going on with all processes of a cgroup and those below it: cgroup.freeze of v2, freezer.state of v1.

Sources: Documentation/admin-guide/cgroup-v2.rst, "cgroup.freeze" and "frozen" of cgroup.events; cgroup-v1/freezer-
subsystem.rst.
"""

from __future__ import annotations

import contextlib
import errno
import os

from tightship.kernel import cgroup


def freeze(path: str) -> None:
    """Asks for it; `is_frozen` tells when it has come. Raises OSError, ENOENT where the hierarchy has no freezer."""
    switch, on, _ = _switch(path)
    cgroup.write(switch, on)


def thaw(path: str) -> None:
    """Raises like `freeze`."""
    switch, _, off = _switch(path)
    cgroup.write(switch, off)


def is_frozen(path: str) -> bool:
    """Whether all of it stands still. Raises OSError."""
    if _has_v1(path):
        return cgroup.read(os.path.join(path, "freezer.state")) == "FROZEN"
    return cgroup.keyed(os.path.join(path, "cgroup.events"), "frozen") == 1


def is_asked(path: str) -> bool:
    """Whether it was asked for this cgroup itself, and not only for one above. False where it is gone."""
    name = "freezer.self_freezing" if _has_v1(path) else "cgroup.freeze"
    with contextlib.suppress(OSError):
        return cgroup.read(os.path.join(path, name)) == "1"
    return False


def _switch(path: str) -> tuple[str, str, str]:
    found = cgroup.freezer_of(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return found


def _has_v1(path: str) -> bool:
    return os.path.exists(os.path.join(path, "freezer.state"))
