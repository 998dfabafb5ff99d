"""Progress of what takes long: one line on stderr, drawn again and again, and gone at the end. Nothing but a terminal
gets it, and nothing that ends within half a second."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from tightship.cli import style, tables

_QUIET_S = 0.5
_EVERY_S = 0.1
_WHEEL = "-\\|/"


class Progress:
    """What is going on: `detail` may be changed from any thread."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.detail = ""


@contextlib.contextmanager
def shown(what: str) -> Iterator[Progress]:
    """Around the work. A thread draws, so that it may block."""
    progress = Progress(what)
    if not os.isatty(2) or os.environ.get("TERM") == "dumb":
        yield progress
        return
    over = threading.Event()
    thread = threading.Thread(target=_draw, args=(progress, over), daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        over.set()
        thread.join(1.0)


def _draw(progress: Progress, over: threading.Event) -> None:
    begun = time.monotonic()
    turn = 0
    wait = _QUIET_S
    with contextlib.suppress(OSError):
        while not over.wait(wait):
            wait = _EVERY_S
            detail = f": {progress.detail}" if progress.detail else ""
            text = f"{_WHEEL[turn % len(_WHEEL)]} {progress.what}, {time.monotonic() - begun:.1f} s{detail}"
            line = tables.cut(text, (style.width(2) or 80) - 1, middle=False)
            os.write(2, f"\r{line}\x1b[K".encode())
            turn += 1
        if turn:
            os.write(2, b"\r\x1b[K")
