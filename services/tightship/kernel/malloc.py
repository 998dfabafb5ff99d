"""The C library's allocator, kept from holding what a burst needed: glibc's mallopt(3) and malloc_trim(3).

Where the C library has neither (musl), these do nothing.
"""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)
_mallopt = getattr(_libc, "mallopt", None)
_malloc_trim = getattr(_libc, "malloc_trim", None)

# malloc.h
_M_ARENA_MAX = -8


def one_arena() -> None:
    """To be called before there are threads: all share one arena, which holds its spare memory once."""
    if _mallopt is not None:
        _mallopt(ctypes.c_int(_M_ARENA_MAX), ctypes.c_int(1))


def trim() -> None:
    """Gives free pages back to the kernel. Takes about a millisecond, without the interpreter's lock."""
    if _malloc_trim is not None:
        _malloc_trim(ctypes.c_size_t(0))
