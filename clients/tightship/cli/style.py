"""How output looks on a terminal: its width, and colours, which nothing but a terminal gets.

NO_COLOR (https://no-color.org), when it is set and not empty, and TERM=dumb switch colours off.
"""

from __future__ import annotations

import os

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

# Of containers, leases, and what audit and doctor say; other words are plain.
_WORDS = {
    "RUNNING": "green",
    "BOUND": "green",
    "CREATED": "cyan",
    "PAUSED": "yellow",
    "LAUNCHING": "yellow",
    "CLOSING": "yellow",
    "RECOVERING": "yellow",
    "OFFERED": "yellow",
    "CLAIMED": "yellow",
    "DRAINING": "yellow",
    "CLEANUP_PENDING": "red",
    "ENDED": "dim",
    "CLOSED": "dim",
    "fixed": "green",
    "ours": "red",
    "ok": "green",
    "note": "cyan",
    "warn": "yellow",
    "missing": "red",
}


def coloured(fd: int) -> bool:
    """Whether what is written to the FD may have colours."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and os.isatty(fd)


def paint(text: str, look: str, fd: int = 1) -> str:
    return f"\x1b[{_CODES[look]}m{text}\x1b[0m" if text and coloured(fd) else text


def by_word(text: str) -> str:
    """A table's cell in the colour of its first word."""
    look = _WORDS.get(text.split(" ", 1)[0])
    return paint(text, look) if look else text


def width(fd: int = 1) -> int | None:
    """Columns of the terminal; None where it is none."""
    try:
        return os.get_terminal_size(fd).columns or None
    except OSError:
        return None
