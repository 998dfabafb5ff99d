"""What a new child does between clone3 and execve: its system calls, in the order of docs/architecture.md.

Only the execve comes after the gate, so that whatever else can fail has failed before.
"""

from __future__ import annotations

import itertools
import os
import select
import struct

from tightship.common import failpoints
from tightship.kernel import namespaces
from tightship.kernel.calls import MUST_NOT_BE_ZERO, Calls
from tightship.kernel.clone import LAST_FD
from tightship.kernel.namespaces import Surrounding
from tightship.spawner.orders import LaunchOrder

# Kinds with their soft and hard values: what a child sets back.
Limits = tuple[tuple[int, tuple[int, int]], ...]

READY = b"R"

_AT_FDCWD = -100
_SIG_SETMASK = 2
_SIGSET_SIZE = 8
_RLIMIT = struct.Struct("=QQ")


def calls_of(  # noqa: PLR0917
    order: LaunchOrder,
    stdio: tuple[int, int, int],
    gate: int,
    status: int,
    limits: Limits,
    entered: Surrounding | None = None,
) -> Calls:
    """No descriptor given is 0, 1 or 2: what the child's are to be. It enters what is `entered`."""
    calls = Calls()
    for number, fd in enumerate(stdio):
        calls.add("stdio", "dup3", fd, number, 0)
    taken = {0, 1, 2, gate, status}
    if entered is not None:
        taken.add(entered.pidfd)
    kept = [*sorted(taken), LAST_FD + 1]
    for before, after in itertools.pairwise(kept):
        if before >= 2 and before + 1 < after:
            calls.add("stdio", "close_range", before + 1, after - 1, 0)
    free = _free(taken)
    _point(calls, "child.stdio")
    for number, path in enumerate(order.tasks_files):
        _write_file(calls, f"cgroups: tasks file {number}", path, b"0", free)
    _point(calls, "child.cgroups")
    if entered is not None:
        entered.enter(calls, "enter")
        calls.add("enter", "close", entered.pidfd)
        taken.remove(entered.pidfd)
        free = _free(taken)
    calls.add("session", "setsid")
    if order.hostname:
        name = order.hostname.encode()
        calls.add("hostname", "sethostname", name, len(name))
    isolation = order.isolation
    # The failpoints' directory may be out of sight.
    hidden = entered is not None or (isolation is not None and isolation.confined)
    confinement = isolation if isolation is not None and isolation.confined else None
    if confinement is not None:
        confinement.mount(calls, taken, stdin=order.stdin)
    elif "mount" in order.namespaces:
        namespaces.make_mounts_private(calls, "mounts")
        if "pid" in order.namespaces:
            namespaces.mount_proc(calls, "proc")
    if "net" in order.namespaces:
        namespaces.bring_loopback_up(calls, "loopback", free)
    _point(calls, "child.namespaces", hidden=hidden)
    for kind, values in limits:
        calls.add("limits", "prlimit64", 0, kind, _RLIMIT.pack(*(value & (1 << 64) - 1 for value in values)), 0)
    if isolation is not None:
        isolation.limit(calls)
    if order.oom_score_adj is not None:
        _write_file(calls, "oom_score_adj", "/proc/self/oom_score_adj", b"%d" % order.oom_score_adj, free)
    if confinement is not None:
        confinement.become_user(calls, stdin=order.stdin)
        confinement.enter(calls, order.cwd, taken)
    else:
        # Absolute, and from the root that the container has: no descriptor is left by which it could lead elsewhere.
        calls.add("cwd", "chdir", os.fsencode(order.cwd) + b"\0")
    calls.add("umask", "umask", order.umask)
    calls.add("signals", "rt_sigprocmask", _SIG_SETMASK, bytes(_SIGSET_SIZE), 0, _SIGSET_SIZE)
    if confinement is not None:
        confinement.give_up(calls)
    _point(calls, "child.process", hidden=hidden)
    calls.add("ready", "write", status, READY, len(READY))
    _point(calls, "child.ready", hidden=hidden)
    room = b"." * len(READY)
    calls.add("gate", "read", gate, room, len(room), flags=MUST_NOT_BE_ZERO)
    _point(calls, "child.gate", hidden=hidden)
    order.program.execute(calls, "exec")
    return calls


def reach(name: str, gate: int) -> None:
    """Passes a failpoint in a child; a wait there ends, and the process with it, when the gate's far end has gone."""
    poll = select.poll()
    poll.register(gate, 0)
    failpoints.block(name, until=lambda: bool(poll.poll(0)))
    if poll.poll(0):
        os._exit(1)


def _write_file(calls: Calls, stage: str, path: str, data: bytes, free: int) -> None:
    calls.add(stage, "openat", _AT_FDCWD, os.fsencode(path) + b"\0", os.O_WRONLY | os.O_CLOEXEC)
    calls.add(stage, "write", free, data, len(data))
    calls.add(stage, "close", free)


def _free(taken: set[int]) -> int:
    """What the next open gets: all others are closed."""
    return next(fd for fd in range(3, 7) if fd not in taken)


def _point(calls: Calls, name: str, *, hidden: bool = False) -> None:
    if failpoints.DIRECTORY is not None and not hidden:
        calls.point(name.removeprefix("child."), name)
