"""Calls and connections that were refused: counted by door and code, and logged, so many lines a second at most.

A stranger may knock as often as it likes; neither memory nor the log grows with it. The counts are plain integers of
this process, for whoever shows them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

counts: Counter[tuple[str, str]] = Counter()
"""By door (`unix`, `client`, `tls`, `loopback`, `fd.sock`) and the name of the gRPC code."""

_LINES_A_SECOND = 10

_log = logging.getLogger(__name__)


class _Lines:
    second = 0
    written = 0
    left_out = 0


def note(door: str, code: str, why: str, *, client: str = "", method: str = "") -> None:
    """Counts a refusal, and logs it. `why` holds no secret and nothing unbounded that a stranger sent."""
    counts[door, code] += 1
    say("refused: door %s, %s, client %s, method %s: %s", door, code, client or "-", method or "-", why)


def say(text: str, *values: object) -> None:
    """A line about a stranger, where this second has one left."""
    now = int(time.monotonic())
    if now != _Lines.second:
        _Lines.second, _Lines.written = now, 0
    if _Lines.written >= _LINES_A_SECOND:
        _Lines.left_out += 1
        return
    _Lines.written += 1
    more, _Lines.left_out = _Lines.left_out, 0
    _log.warning(text + (f" ({more} more before)" if more else ""), *values)
