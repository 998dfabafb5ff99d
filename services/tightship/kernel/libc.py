"""libc by ctypes: raw system calls with errno as OSError."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

# The same library, called without giving up the interpreter's lock.
_held = ctypes.PyDLL(None, use_errno=True)
_held_syscall = _held.syscall
_held_syscall.restype = ctypes.c_long
_sigprocmask = _held.sigprocmask
_thread_self = _held.pthread_self
_thread_self.restype = ctypes.c_ulong

# sizeof(sigset_t) in glibc and musl.
_SIGSET_SIZE = 128
# struct sigaction and sigset_t of the kernel, at most and exactly.
_SIGACTION_SIZE = 64
_KERNEL_SIGSET_SIZE = 8
_SYS_RT_SIGACTION = 13 if os.uname().machine == "x86_64" else 134  # 134 in asm-generic/unistd.h
_EMPTY_SIGSET = ctypes.create_string_buffer(_SIGSET_SIZE)
_MASK_NOW = ctypes.c_int(signal.SIG_SETMASK)
_NOWHERE = ctypes.c_void_p(None)


def syscall(number: int, *arguments: object) -> int:
    """The system call's result. Raises OSError with its errno."""
    result: int = _syscall(ctypes.c_long(number), *arguments)
    return _checked(result)


def held_syscall(number: int, *arguments: object) -> int:
    """The same, keeping the interpreter's lock: for a call that returns at once, or twice."""
    result: int = _held_syscall(ctypes.c_long(number), *arguments)
    return _checked(result)


def prctl(option: int, argument: int) -> None:
    """prctl(2) with one argument. Raises OSError."""
    unused = ctypes.c_ulong(0)
    _checked(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), unused, unused, unused))


def make_executable(address: int, size: int) -> None:
    """mprotect(2) of whole pages to be read and executed, not written any more. Raises OSError."""
    readable_and_executable = 0x1 | 0x4
    _checked(_libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(readable_and_executable)))


def advise(address: int, size: int, advice: int) -> None:
    """madvise(2), which is advice: what can't be taken is passed over."""
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice))


def thread_block() -> int:
    """The address of this thread's control block: pthread_self(3)."""
    block: int = _thread_self()
    return block


def signalfd(numbers: Iterable[int], flags: int) -> int:
    """A new signalfd(2) for these signals. Raises OSError."""
    bits = sum(1 << (number - 1) for number in numbers)
    mask = ctypes.create_string_buffer(bits.to_bytes(8, sys.byteorder), _SIGSET_SIZE)
    return _checked(_libc.signalfd(ctypes.c_int(-1), mask, ctypes.c_int(flags)))


def default_action(number: int) -> None:
    """rt_sigaction(2) to SIG_DFL without the C library, which refuses its own signals. Raises OSError."""
    action = ctypes.create_string_buffer(_SIGACTION_SIZE)  # zeros: SIG_DFL, no flags, no mask
    syscall(_SYS_RT_SIGACTION, ctypes.c_int(number), action, _NOWHERE, ctypes.c_size_t(_KERNEL_SIGSET_SIZE))


def empty_signal_mask() -> None:
    """sigprocmask(2) to the empty set."""
    _checked(_sigprocmask(_MASK_NOW, _EMPTY_SIGSET, _NOWHERE))


def _checked(result: int) -> int:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
