"""What a child does about namespaces: enters those of another process, or sets up its own new ones with
private mounts, its own /proc, a loopback interface that is up.

As calls to be made by it, see kernel/calls.py. Sources: setns(2), prctl(2), mount(2), mount_namespaces(7),
pid_namespaces(7), netdevice(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
from collections.abc import Iterator

from tightship.kernel import libc
from tightship.kernel.calls import NUMBERS, Calls

# include/uapi/linux/mount.h
_MS_NOSUID = 0x2
_MS_NODEV = 0x4
_MS_NOEXEC = 0x8
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000

# include/uapi/linux/sockios.h and if.h
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_IFREQ = struct.Struct("16sH22x")


# include/uapi/linux/sched.h
_KINDS = {"mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "user": 0x10000000, "net": 0x40000000}
_CLONE_NEWPID = 0x20000000
# include/uapi/linux/prctl.h
_PR_SET_DUMPABLE = 4


class Surrounding:
    """The namespaces of a living process that are others than ours. Owns its copy of the pidfd until `close`."""

    __slots__ = ("_flags", "_in_ours", "pidfd")

    def __init__(self, pid: int, pidfd: int) -> None:
        """Raises OSError, ENOENT or ESRCH where it has ended."""
        self.pidfd = os.dup(pidfd)
        try:
            differing = (flag for kind, flag in _KINDS.items() if _namespace(pid, kind) != _namespace("self", kind))
            self._flags = sum(differing)
            self._in_ours = _namespace(pid, "pid") == _namespace("self", "pid")
            # Alive still, so that was its /proc, and not that of another of its number.
            signal.pidfd_send_signal(self.pidfd, 0)
        except BaseException:
            self.close()
            raise

    def enter(self, calls: Calls, stage: str) -> None:
        """All but the pid namespace, in which it is made. Root and working directory become those of the mounts."""
        # Until its exec nobody inside may trace it, nor reach our program or a descriptor by its /proc.
        calls.add(stage, "prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
        if self._flags:
            calls.add(stage, "setns", self.pidfd, self._flags)

    @contextlib.contextmanager
    def children_in(self) -> Iterator[None]:
        """Meanwhile our children are made in that process's pid namespace; we stay in ours. Raises OSError."""
        if self._in_ours:
            yield
            return
        own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(self.pidfd)
            try:
                yield
            finally:
                try:
                    _setns(own)
                except OSError:
                    os.abort()  # never seen; but nothing may be made in a stranger's namespace
        finally:
            os.close(own)

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _namespace(pid: int | str, kind: str) -> tuple[int, int]:
    found = os.stat(f"/proc/{pid}/ns/{kind}")
    return found.st_dev, found.st_ino


def _setns(fd: int) -> None:
    libc.held_syscall(NUMBERS["setns"], ctypes.c_int(fd), ctypes.c_int(_CLONE_NEWPID))


def make_mounts_private(calls: Calls, stage: str) -> None:
    """No mount made here is seen outside, and none made outside appears here."""
    calls.add(stage, "mount", 0, b"/\0", 0, _MS_REC | _MS_PRIVATE)


def mount_proc(calls: Calls, stage: str) -> None:
    """Mounts the /proc of this process's pid namespace over the one in place."""
    calls.add(stage, "mount", b"proc\0", b"/proc\0", b"proc\0", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def bring_loopback_up(calls: Calls, stage: str, free: int) -> None:
    """`free` is the lowest descriptor that is not open."""
    calls.add(stage, "socket", socket.AF_INET, socket.SOCK_DGRAM | os.O_CLOEXEC, 0)
    calls.add(stage, "ioctl", free, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", _IFF_UP))
    calls.add(stage, "close", free)


def hold_mounts(pid: int) -> int:
    """A descriptor of the process's mount namespace, which keeps it until it is closed. Raises OSError."""
    return os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
