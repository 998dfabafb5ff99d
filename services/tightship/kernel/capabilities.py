"""Capabilities of a child: what it may still do as root, or as another user. Sources: capabilities(7), capset(2).

As calls to be made by it, see kernel/calls.py.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # its memory is for who makes children
    from tightship.kernel.calls import Calls

# include/uapi/linux/capability.h, in the order of their numbers from 0.
_NAMES = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
    NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
    SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE
    MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE
"""
_DEFAULT = "CHOWN DAC_OVERRIDE FOWNER FSETID KILL NET_BIND_SERVICE SETGID SETUID SYS_CHROOT"

NUMBERS = {f"CAP_{name}": number for number, name in enumerate(_NAMES.split())}
"""Numbers by name ("CAP_CHOWN")."""

DEFAULT = frozenset(NUMBERS[f"CAP_{name}"] for name in _DEFAULT.split())
"""What a confined root keeps: files, users and low ports of its own; nothing that reaches the kernel or a device."""

CHOWN = NUMBERS["CAP_CHOWN"]

# include/uapi/linux/prctl.h and capability.h
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_VERSION_3 = struct.pack("=Ii", 0x20080522, 0)
_SETS = struct.Struct("=6I")


@functools.cache
def of_this_process() -> frozenset[int]:
    """What this process may give on: its permitted ones, those that are in its bounding set too."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    bits = int(fields["CapPrm"], 16) & int(fields["CapBnd"], 16)
    return frozenset(number for number in range(64) if bits >> number & 1)


def bound(calls: Calls, stage: str, kept: frozenset[int]) -> None:
    """No exec gives more than `kept`. Needs CAP_SETPCAP."""
    for number in range(_last() + 1):
        if number not in kept:
            calls.add(stage, "prctl", _PR_CAPBSET_DROP, number, 0, 0, 0)


def keep_over_setuid(calls: Calls, stage: str) -> None:
    """Permitted capabilities outlive the change to another user. The exec takes that back."""
    calls.add(stage, "prctl", _PR_SET_KEEPCAPS, 1, 0, 0, 0)


def limit(calls: Calls, stage: str, kept: frozenset[int], *, ambient: bool) -> None:
    """Keeps these, and no other. `ambient`: over the exec of a user that is not root, too."""
    bits = sum(1 << number for number in kept)
    inherited = bits if ambient else 0
    halves = (bits & 0xFFFFFFFF, bits & 0xFFFFFFFF, inherited & 0xFFFFFFFF, bits >> 32, bits >> 32, inherited >> 32)
    calls.add(stage, "prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    calls.add(stage, "capset", _VERSION_3, _SETS.pack(*halves))
    if ambient:
        for number in sorted(kept):
            calls.add(stage, "prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number, 0, 0)


def no_new_privileges(calls: Calls, stage: str) -> None:
    """No exec gives a privilege by set-user-ID bits or file capabilities."""
    calls.add(stage, "prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


@functools.cache
def _last() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())
