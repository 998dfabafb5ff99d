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
import struct
from array import array
from collections.abc import Callable

from tightship.kernel import forkmemory, libc

# Numbers of the calls that differ between machines: arch/x86/entry/syscalls/syscall_64.tbl and
# include/uapi/asm-generic/unistd.h.
_GENERIC = {
    "read": 63, "write": 64, "close": 57, "openat": 56, "dup3": 24, "setsid": 157, "sethostname": 161, "mount": 40,
    "socket": 198, "ioctl": 29, "prlimit64": 261, "chdir": 49, "umask": 166, "rt_sigprocmask": 135, "execve": 221,
    "fchdir": 50, "getcwd": 17, "umount2": 39, "pivot_root": 41, "mkdirat": 34, "mknodat": 33, "symlinkat": 36,
    "setgroups": 159, "setresgid": 149, "setresuid": 147, "prctl": 167, "capset": 91, "fchown": 55,
    "seccomp": 277, "setns": 268,
}  # fmt: skip
_X86_64 = {
    "read": 0, "write": 1, "close": 3, "openat": 257, "dup3": 292, "setsid": 112, "sethostname": 170, "mount": 165,
    "socket": 41, "ioctl": 16, "prlimit64": 302, "chdir": 80, "umask": 95, "rt_sigprocmask": 14, "execve": 59,
    "fchdir": 81, "getcwd": 79, "umount2": 166, "pivot_root": 155, "mkdirat": 258, "mknodat": 259, "symlinkat": 266,
    "setgroups": 116, "setresgid": 119, "setresuid": 117, "prctl": 157, "capset": 126, "fchown": 93,
    "seccomp": 317, "setns": 308,
}  # fmt: skip
_MACHINE = os.uname().machine
_COMMON = {"open_tree": 428, "move_mount": 429, "close_range": 436, "openat2": 437, "mount_setattr": 442}
NUMBERS = _COMMON | (_X86_64 if _MACHINE == "x86_64" else _GENERIC)

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


class Counted:
    """An argument that is the address of a count, two bytes, and of a pointer to `data`: struct sock_fprog."""

    __slots__ = ("count", "data")

    def __init__(self, count: int, data: bytes) -> None:
        self.count = count
        self.data = data


Argument = int | bytes | bytearray | list[bytes] | Counted


class Calls:
    """The calls in their order, with what they point to."""

    __slots__ = ("_arrays", "_data", "_pointers", "_points", "_rooms", "_words", "stages")

    def __init__(self) -> None:
        self._words = array("q")
        self._data = bytearray()
        # Places in the words, and in the data, that hold an offset into the data; with it they become an address.
        self._pointers: tuple[list[int], list[int]] = ([], [])
        self._arrays: dict[int, tuple[int, list[bytes]]] = {}
        self._rooms: dict[int, tuple[int, bytearray]] = {}
        self._points: list[str] = []
        self.stages: list[str] = []
        """What each call is for, by index: for the failure that names it."""

    def add(self, stage: str, name: str, *arguments: Argument, flags: int = 0) -> None:
        """One call. `bytes` are passed by address, and so is a list of strings, with its closing null pointer.

        A string must end with its own NUL. A list used again is laid out once; so is a bytearray, by which one call
        gets what another one wrote.
        """
        words = [NUMBERS[name]]
        for argument in arguments:
            if isinstance(argument, int):
                words.append(argument)
                continue
            self._pointers[0].append(len(self._words) + len(words))
            words.append(self._put(argument) if isinstance(argument, bytes) else self._put_other(argument))
        words += [0] * (1 + _ARGUMENTS - len(words))
        self._append(stage, words, flags)

    def point(self, stage: str, name: str) -> None:
        """A failpoint between two calls. A child with one runs in Python."""
        self._points.append(name)
        self._append(stage, [_POINT, len(self._points) - 1, 0, 0, 0, 0, 0], 0)

    def start(self, arguments: int, size: int, status: int, reach: Callable[[str], None]) -> int:
        """Clones with the clone_args at that address: the child's pid. The child makes the calls, and never returns.

        `status` is where the child tells a failure; `reach` passes a failpoint there. Raises OSError of clone3(2).
        """
        if _native is None or self._points:
            before_python_child()
            area = self._lay_out()
            forked = libc.held_syscall(_SYS_CLONE3, ctypes.c_void_p(arguments), ctypes.c_size_t(size))
            if forked == 0:
                self._run(status, reach)
            del area
            return forked
        _native.prepare()
        area = self._lay_out()
        pid: int = _native.start(arguments, size, _address(area), 0, status)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def _put(self, data: bytes) -> int:
        """Its offset in the data."""
        offset = len(self._data)
        self._data += data
        # The next one may be an array of words.
        self._data += bytes(-len(self._data) % 8)
        return offset

    def _put_other(self, argument: bytearray | list[bytes] | Counted) -> int:
        if isinstance(argument, list):
            return self._put_array(argument)
        if isinstance(argument, Counted):
            data = self._put(argument.data)
            start = self._put(_COUNTED.pack(argument.count, data))
            self._pointers[1].append(start + _COUNTED.size - _WORD.size)
            return start
        known = self._rooms.get(id(argument))
        if known is None:
            known = self._rooms[id(argument)] = (self._put(bytes(argument)), argument)
        return known[0]

    def _put_array(self, strings: list[bytes]) -> int:
        known = self._arrays.get(id(strings))
        if known is not None:
            return known[0]
        offsets = array("q", [self._put(string) for string in strings])
        start = self._put(offsets.tobytes() + bytes(8))
        self._pointers[1].extend(range(start, start + 8 * len(strings), 8))
        self._arrays[id(strings)] = (start, strings)
        return start

    def _append(self, stage: str, words: list[int], flags: int) -> None:
        self._words.extend(words)
        self._words.append(flags)
        self._words.append(len(self.stages))
        self.stages.append(stage)

    def _lay_out(self) -> mmap.mmap:
        """Everything in memory that a fork copies, addresses filled in: the words first, then the data."""
        size = 8 * len(self._words)
        area = _area if size + len(self._data) <= len(_area) else _map(size + len(self._data))
        base = _address(area) + size
        in_words, in_data = self._pointers
        for place in in_words:
            self._words[place] += base
        data = self._data
        for place in in_data:
            _WORD.pack_into(data, place, _WORD.unpack_from(data, place)[0] + base)
        area[:size] = self._words.tobytes()
        area[size : size + len(data)] = bytes(data)
        return area

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


def _address(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def _map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _Native:
    """The machine code, in memory that can be executed and no more be written. Raises OSError where that is refused."""

    def __init__(self, code: bytes) -> None:
        self._code = _map(mmap.PAGESIZE)
        self._code.write(code)
        libc.make_executable(_address(self._code), mmap.PAGESIZE)
        long = ctypes.c_long
        prototype = ctypes.PYFUNCTYPE(long, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, long, long)
        self.start = prototype(_address(self._code))
        self._starts = 0

    def prepare(self) -> None:
        """Before each start: sheds from the fork what was mapped since, now and then."""
        if self._starts % _SHED_EVERY == 0:
            forkmemory.shed(_address(self._code), _address(_area))
        self._starts += 1

    def whole(self) -> None:
        """The next fork is of another kind, and copies everything."""
        if self._starts:
            forkmemory.unshed()
        self._starts = 0


def before_python_child() -> None:
    """To be called before a clone whose child goes on in Python."""
    if _native is not None:
        _native.whole()


def _load() -> _Native | None:
    if _MACHINE != "x86_64":
        return None
    try:
        return _Native(_NATIVE_X86_64)
    except OSError:
        return None  # a policy against it: slower, and the same


_SYS_CLONE3 = 435
_WORD = struct.Struct("=q")
_COUNTED = struct.Struct("=H6xq")
# Starts between two looks at what was mapped: a look takes about as long as it saves in one.
_SHED_EVERY = 256
# Holds any but the largest command.
_area = _map(64 << 10)
_native = _load()
