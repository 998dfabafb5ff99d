"""Facts about processes and about this one: identity that survives pid reuse, exec state, subreaper, parent death.

Sources: proc(5), prctl(2), pidfd_open(2), pid_namespaces(7).
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct

from tightship.kernel import libc

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# 52 numbers and a name of 64 bytes at most.
_STAT_SIZE = 2048

# include/linux/sched.h: forked but didn't exec.
_PF_FORKNOEXEC = 0x40

# include/uapi/linux/pidfd.h, Linux 6.13; exit information since 6.15.
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("<QQ11Ii")


class Stat:
    """What /proc/PID/stat tells; `start` is in clock ticks since boot (field 22)."""

    __slots__ = ("flags", "parent", "start", "state")

    def __init__(self, state: str, parent: int, flags: int, start: int) -> None:
        self.state = state
        self.parent = parent
        self.flags = flags
        self.start = start

    @property
    def execed(self) -> bool:
        """Whether the process has called execve since it was forked; true to the end, zombie included."""
        return not self.flags & _PF_FORKNOEXEC


def stat(pid: int) -> Stat | None:
    """None where there is no such process."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        text = os.read(fd, _STAT_SIZE)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
    # The name may hold blanks and parentheses; the last one closes it.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(fields[0].decode(), int(fields[1]), int(fields[6]), int(fields[19]))


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def pid_namespace() -> int:
    """The inode of our pid namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def open_pidfd(pid: int, start: int) -> int | None:
    """A pidfd of the process with this pid and start time (close-on-exec); None where it is gone or another."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    found = stat(pid)
    if found is None or found.start != start:
        os.close(fd)
        return None
    return fd


def capabilities() -> int:
    """The effective capabilities of this process, a bit each: capabilities(7), CapEff in /proc/PID/status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))


def exit_status(pidfd: int) -> int | None:
    """The wait status of an ended process, reaped or not, as waitpid(2) has it; None where the kernel doesn't tell.

    Needs Linux 6.15 and a pidfd opened before the reap.
    """
    buffer = bytearray(_PIDFD_INFO.size)
    struct.pack_into("<Q", buffer, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(buffer)
    return status if mask & _PIDFD_INFO_EXIT else None


def set_child_subreaper() -> None:
    """Orphans below this process become its children."""
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(number: int = signal.SIGKILL) -> None:
    """This process gets the signal when the thread that made it ends."""
    libc.prctl(_PR_SET_PDEATHSIG, number)


def catches(pid: int, number: int) -> bool:
    """Whether the first process of a pid namespace gets the signal: it has a handler (SigCgt in /proc/PID/status), or
    blocks it (SigBlk) to read it from a signalfd. The kernel drops others: sig_task_ignored in kernel/signal.c. One
    that sits in sigwait(3) gets it too, and can't be told: its mask there is without what it waits for."""
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith(("SigBlk:", "SigCgt:")) and int(line.split()[1], 16) >> (number - 1) & 1:
                    return True
    except (FileNotFoundError, ProcessLookupError):
        pass
    return False
