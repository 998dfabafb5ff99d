"""libc by ctypes: raw system calls with errno as OSError."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def syscall(number: int, *arguments: object) -> int:
    """The system call's result. Raises OSError with its errno."""
    result: int = _syscall(ctypes.c_long(number), *arguments)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prctl(option: int, argument: int) -> None:
    """prctl(2) with one argument. Raises OSError."""
    unused = ctypes.c_ulong(0)
    if _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), unused, unused, unused) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
