"""Failpoints: named places where a test makes a process fail, wait or die.

`TIGHTSHIP_FAILPOINTS` names a directory; unset, a point costs one comparison. A file NAME in it arms the point
NAME with its content: `errno EIO` (or a number), `wait` (until the file is removed), `kill` (SIGKILL of the process
that reaches it), or `hit` (only mark). Reaching an armed point makes `NAME.hit`, holding the pid. A file `_all`
holding `hit` marks every point reached. Standard library only: the spawner and its children import this.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable

DIRECTORY = os.environ.get("TIGHTSHIP_FAILPOINTS") or None

_POLL_S = 0.005

# In the order in which a launch and its end reach them. The containerizer's follow from its plans.
SPAWNER = (
    "spawner.claim.before",
    "spawner.claim.after",
    "spawner.clone.before",
    "spawner.clone.after",
    "spawner.bind.before",
    "spawner.bind.after",
    "spawner.ready.after",
    "spawner.open.before",
    "spawner.open.after",
    "spawner.reap.after",
)
CHILD_BEFORE_NAMESPACES = ("child.stdio", "child.cgroups")
CHILD = (
    *CHILD_BEFORE_NAMESPACES,
    "child.namespaces",
    "child.process",
    "child.ready",
    "child.gate",
)
SWITCHBOARD = (
    "switchboard.acquire.before",
    "switchboard.acquire.after",
    "switchboard.claim.before",
    "switchboard.claim.after",
    "switchboard.bind.before",
    "switchboard.bind.after",
    "switchboard.exit.before",
    "switchboard.exit.after",
    "switchboard.close.before",
    "switchboard.close.after",
)
# Where an armed errno makes no sense: nothing there can fail.
CANNOT_FAIL = frozenset({"spawner.reap.after", "child.gate", "switchboard.close.before", "switchboard.close.after"})


class Hold:
    """A point that is armed with `wait` and was reached."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def released(self) -> bool:
        return not os.path.exists(self._path)


def reach(name: str) -> Hold | None:
    """Passes the point `name`: None to go on, a Hold to wait for.

    Raises the armed OSError. For code with a loop of its own; others call `block` or `hold`.
    """
    if DIRECTORY is None:
        return None
    return _reach(DIRECTORY, name)


def block(name: str, until: Callable[[], bool] | None = None) -> None:
    """Passes the point in a thread or a child, sleeping while it is held; `until` ends the wait early."""
    held = reach(name)
    while held is not None and not held.released() and not (until is not None and until()):
        time.sleep(_POLL_S)


async def hold(name: str, until: Callable[[], bool] | None = None) -> None:
    """Passes the point in an event loop; `until` ends the wait early."""
    import asyncio  # not at the top: the spawner's forks pay for each page of it

    held = reach(name)
    while held is not None and not held.released() and not (until is not None and until()):
        await asyncio.sleep(_POLL_S)


def _reach(directory: str, name: str) -> Hold | None:
    path = os.path.join(directory, name)
    try:
        with open(path) as file:
            words = file.read().split()
    except FileNotFoundError:
        if os.path.exists(os.path.join(directory, "_all")):
            _mark(path)
        return None
    _mark(path)
    match words:
        case ["wait"]:
            return Hold(path)
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(128 + signal.SIGKILL)  # the first process of a pid namespace can't kill itself
        case ["errno", code]:
            number = int(code) if code.isdigit() else getattr(errno, code)
            raise OSError(number, os.strerror(number), f"failpoint {name}")
        case _:
            pass
    return None


def _mark(path: str) -> None:
    fd = os.open(path + ".hit", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.write(fd, f"{os.getpid()}\n".encode())
    os.close(fd)
