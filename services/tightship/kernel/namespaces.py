"""What a process does inside its own new namespaces: private mounts, its own /proc, a loopback interface that is up.

Sources: mount(2), mount_namespaces(7), pid_namespaces(7), netdevice(7).
"""

from __future__ import annotations

import fcntl
import socket
import struct

from tightship.kernel import libc

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


def make_mounts_private() -> None:
    """No mount made here is seen outside, and none made outside appears here. Raises OSError."""
    libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE)


def mount_proc() -> None:
    """Mounts the /proc of this process's pid namespace over the one in place. Raises OSError."""
    libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def bring_loopback_up() -> None:
    """Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", _IFF_UP))
