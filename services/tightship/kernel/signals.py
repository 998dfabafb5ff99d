"""Signals for a process that takes them from a descriptor and leaves none changed for its children.

Every disposition is the default and every signal is blocked: so a child made by a raw clone needs no more than to empty
its mask, no handler can ever run in it, and a write to a pipe without reader is an error, not a death.
Sources: signal(7), signalfd(2), sigprocmask(2).
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct

from tightship.kernel import libc

_SIGINFO_SIZE = 128
# nptl(7). Its posix_spawn, by which make(1) starts us, leaves them ignored, and so would every container find them.
_OF_GLIBC = (32, 33)
_NUMBER = struct.Struct("I")


def block_all() -> None:
    """Sets every disposition to the default and blocks every signal that can be."""
    for number in signal.valid_signals():
        # SIGKILL and SIGSTOP have no disposition to set.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    for internal in _OF_GLIBC:
        libc.default_action(internal)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def unblock_all() -> None:
    """Empties the mask; dispositions stay. Cheap enough for a child between clone and exec."""
    libc.empty_signal_mask()


def open_signalfd(*numbers: int) -> int:
    """A non-blocking, close-on-exec descriptor that tells these signals, which must be blocked. Raises OSError."""
    return libc.signalfd(numbers, os.O_CLOEXEC | os.O_NONBLOCK)


def read_signalfd(fd: int) -> list[int]:
    """Numbers of the signals that have come; equal ones may have merged into one."""
    try:
        data = os.read(fd, 16 * _SIGINFO_SIZE)
    except BlockingIOError:
        return []
    return [_NUMBER.unpack_from(data, at)[0] for at in range(0, len(data), _SIGINFO_SIZE)]
