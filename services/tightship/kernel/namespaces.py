"""What a child does inside its own new namespaces: private mounts, its own /proc, a loopback interface that is up.

As calls to be made by it, see kernel/calls.py. Sources: mount(2), mount_namespaces(7), pid_namespaces(7), netdevice(7).
"""

from __future__ import annotations

import os
import socket
import struct

from tightship.kernel.calls import Calls

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
