"""A child's system calls, prepared as data by its parent and made by machine code: no Python between clone and exec.

A Python child copies a page of its parent for nearly every object it touches, and is slower than what it asks of the
kernel. So the parent lays out the calls beforehand, and the child walks them: each is to succeed; the first that fails
is told with its index and errno on a pipe. Machine code does that on x86-64; elsewhere, where memory can't be made
executable, and where failpoints are to be passed, a loop in Python makes the same calls.
Sources: syscalls(2), syscall(2) on registers and errors, execvp(3) on which errors end a search.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from array import array
from collections.abc import Callable

from tightship.kernel import libc

# Numbers of the calls that differ between machines: arch/x86/entry/syscalls/syscall_64.tbl and
# include/uapi/asm-generic/unistd.h.
_GENERIC = {
    "read": 63, "write": 64, "close": 57, "openat": 56, "dup3": 24, "setsid": 157, "sethostname": 161, "mount": 40,
    "socket": 198, "ioctl": 29, "prlimit64": 261, "chdir": 49, "umask": 166, "rt_sigprocmask": 135, "execve": 221,
}  # fmt: skip
_X86_64 = {
    "read": 0, "write": 1, "close": 3, "openat": 257, "dup3": 292, "setsid": 112, "sethostname": 170, "mount": 165,
    "socket": 41, "ioctl": 16, "prlimit64": 302, "chdir": 80, "umask": 95, "rt_sigprocmask": 14, "execve": 59,
}  # fmt: skip
_MACHINE = os.uname().machine
NUMBERS = {"close_range": 436, **(_X86_64 if _MACHINE == "x86_64" else _GENERIC)}

# What else than an error ends the child, and which errors don't.
MUST_NOT_BE_ZERO = 1
SEARCHED = 2
LAST_SEARCHED = 4

# Passed over in a search, as in execvp(3); EACCES is what is told when nothing else is found.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EACCES)

_ARGUMENTS = 6
# Number, six arguments, flags; then the index and the errno of a failure, four bytes each.
_WORDS = 9
_POINT = -1

FAILURE_SIZE = 8

# long start(struct clone_args *args, size_t size, struct call *calls, long unused, long status)
# tests/kernel/native.S is its source; a test holds the two together.
_NATIVE_X86_64 = bytes.fromhex(
    "b8b30100000f054885c07401c34889d34d89c74531f6488b03488b7b0848"
    "8b7310488b53184c8b53204c8b43284c8b4b300f058b4b38483d01f0ffff"
    "7313f7c10100000074054885c074494883c348ebc5f7d8f7c10200000074"
    "2383f80d75054189c6eb0a83f802740583f814750ff7c10400000074d445"
    "85f6410f45c6894344b8010000004c89ff488d7340ba080000000f05b8e7"
    "000000bf010000000f05"
)


class Calls:
    """The calls in their order. What they point to is kept alive here."""

    __slots__ = ("_kept", "_points", "_words", "stages")

    def __init__(self) -> None:
        self._words = array("q")
        self._kept: list[object] = []
        self._points: list[str] = []
        self.stages: list[str] = []
        """What each call is for, by index: for the failure that names it."""

    def add(self, stage: str, name: str, *arguments: int | bytes, flags: int = 0) -> None:
        """One call. `bytes` are passed by address; a string must end with its own NUL."""
        words = [NUMBERS[name]]
        for argument in arguments:
            if isinstance(argument, bytes):
                self._kept.append(argument)
                words.append(_address(argument))
            else:
                words.append(argument)
        words += [0] * (1 + _ARGUMENTS - len(words))
        self._append(stage, words, flags)

    def point(self, stage: str, name: str) -> None:
        """A failpoint between two calls. A child with one runs in Python."""
        self._points.append(name)
        self._append(stage, [_POINT, len(self._points) - 1, 0, 0, 0, 0, 0], 0)

    def keep(self, thing: object) -> None:
        self._kept.append(thing)

    def start(self, arguments: int, size: int, status: int, reach: Callable[[str], None]) -> int:
        """Clones with the clone_args at that address: the child's pid. The child makes the calls, and never returns.

        `status` is where the child tells a failure; `reach` passes a failpoint there. Raises OSError of clone3(2).
        """
        calls, _ = self._words.buffer_info()
        if _native is not None and not self._points:
            pid: int = _native(arguments, size, calls, 0, status)
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            return pid
        pid = libc.held_syscall(_SYS_CLONE3, ctypes.c_void_p(arguments), ctypes.c_size_t(size))
        if pid == 0:
            self._run(status, reach)
        return pid

    def _append(self, stage: str, words: list[int], flags: int) -> None:
        self._words.extend(words)
        self._words.append(flags)
        self._words.append(len(self.stages))
        self.stages.append(stage)

    def _run(self, status: int, reach: Callable[[str], None]) -> None:
        refused = False
        index = 0
        code = errno.EIO
        try:
            for index in range(len(self.stages)):
                number, *words, flags, _ = self._words[index * _WORDS : (index + 1) * _WORDS]
                try:
                    if number == _POINT:
                        reach(self._points[words[0]])
                        continue
                    result = libc.held_syscall(number, *(ctypes.c_long(word) for word in words))
                except OSError as error:
                    code = error.errno or errno.EIO
                    if not flags & SEARCHED or code not in _ABSENT:
                        break
                    refused = refused or code == errno.EACCES
                    if flags & LAST_SEARCHED:
                        code = errno.EACCES if refused else code
                        break
                else:
                    if flags & MUST_NOT_BE_ZERO and result == 0:
                        os._exit(1)
            os.write(status, index.to_bytes(4, "little") + code.to_bytes(4, "little"))
        finally:
            os._exit(1)


def read_failure(data: bytes, stages: list[str]) -> tuple[str, int]:
    """Stage and errno of what a child told."""
    index = int.from_bytes(data[:4], "little")
    return stages[index], int.from_bytes(data[4:FAILURE_SIZE], "little")


def _address(data: bytes) -> int:
    # The bytes of a bytes object stay where they are while it lives.
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


_SYS_CLONE3 = 435


def _load() -> Callable[[int, int, int, int, int], int] | None:
    if _MACHINE != "x86_64":
        return None
    area = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.write(_NATIVE_X86_64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    try:
        libc.make_executable(address, mmap.PAGESIZE)
    except OSError:
        return None  # a policy against it: slower, and the same
    long = ctypes.c_long
    prototype = ctypes.PYFUNCTYPE(long, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, long, long)
    _kept.append(area)
    return prototype(address)


_kept: list[mmap.mmap] = []
_native = _load()
