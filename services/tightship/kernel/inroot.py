"""Reading a small file below a directory that somebody else may have filled. Source: openat2(2)."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct

from tightship.kernel import libc

# The same on every architecture.
_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x2
_RESOLVE_IN_ROOT = 0x10
_OPEN_HOW = struct.Struct("=3Q")


def read(root: str, path: str, size_max: int) -> bytes:
    """The regular file's bytes; no link in the path leads out of `root`, and no pipe makes it wait.

    Raises OSError: EINVAL for what is no regular file, EFBIG for one over `size_max` bytes.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    how = _OPEN_HOW.pack(flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = libc.syscall(
            _SYS_OPENAT2, ctypes.c_int(directory), os.fsencode(path) + b"\0", how, ctypes.c_size_t(len(how))
        )
    finally:
        os.close(directory)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path)
        data = file.read(size_max + 1)
    if len(data) > size_max:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    return data
