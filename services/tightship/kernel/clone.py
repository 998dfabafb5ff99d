"""Making a child by clone3(2): with its pidfd, straight into a cgroup, in new namespaces; and its first act.

The system call is made raw: no after-fork handler runs in the child, so only a process of one thread may call this.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

from tightship.kernel import libc
from tightship.kernel.calls import Calls, before_python_child

# include/uapi/linux/sched.h
_CLONE_PIDFD = 0x00001000
_CLONE_INTO_CGROUP = 0x200000000

NAMESPACES = {
    "mount": 0x00020000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
"""Names of the namespaces that a child may get for itself, with their clone flags."""

# The same on every architecture.
_SYS_CLONE3 = 435
_SYS_CLOSE_RANGE = 436

LAST_FD = 0xFFFFFFFF
"""Above any descriptor: "to the end" for close_range."""


class _CloneArgs(ctypes.Structure):
    """struct clone_args with its cgroup (CLONE_ARGS_SIZE_VER2, Linux 5.7)."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "flags",
            "pidfd",
            "child_tid",
            "parent_tid",
            "exit_signal",
            "stack",
            "stack_size",
            "tls",
            "set_tid",
            "set_tid_size",
            "cgroup",
        )
    )


_SIZE = ctypes.c_size_t(ctypes.sizeof(_CloneArgs))
_NO_FLAGS = ctypes.c_uint(0)


def clone3(namespaces: tuple[str, ...] = (), cgroup: int | None = None) -> tuple[int, int]:
    """Makes a child that goes on here, as fork(2) does: (pid, pidfd) in the parent, (0, -1) in the child.

    `namespaces` are keys of NAMESPACES; `cgroup` is a descriptor of a v2 cgroup's directory. The pidfd is
    close-on-exec. Raises OSError with the errno of clone3(2): EBUSY or EOPNOTSUPP for a cgroup that takes no process,
    EAGAIN at a limit of processes.
    """
    before_python_child()
    pidfd, arguments = _arguments(namespaces, cgroup)
    pid = libc.held_syscall(_SYS_CLONE3, ctypes.byref(arguments), _SIZE)
    return pid, pidfd.value if pid else -1


def start(
    calls: Calls, namespaces: tuple[str, ...], cgroup: int | None, status: int, reach: Callable[[str], None]
) -> tuple[int, int]:
    """Makes a child that makes these calls, the last of them an execve: its pid and pidfd. Else like `clone3`."""
    pidfd, arguments = _arguments(namespaces, cgroup)
    pid = calls.start(ctypes.addressof(arguments), ctypes.sizeof(arguments), status, reach)
    return pid, pidfd.value


def _arguments(namespaces: tuple[str, ...], cgroup: int | None) -> tuple[ctypes.c_int, _CloneArgs]:
    pidfd = ctypes.c_int(-1)
    arguments = _CloneArgs(flags=_CLONE_PIDFD, pidfd=ctypes.addressof(pidfd), exit_signal=signal.SIGCHLD)
    for name in namespaces:
        arguments.flags |= NAMESPACES[name]
    if cgroup is not None:
        arguments.flags |= _CLONE_INTO_CGROUP
        arguments.cgroup = cgroup
    return pidfd, arguments


def close_range(first: int, last: int) -> None:
    """Closes every descriptor from `first` to `last`. Raises OSError.

    `os.closerange` is one system call or billions, as Python was built.
    """
    libc.held_syscall(_SYS_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), _NO_FLAGS)
