"""The signals that end a command, at every moment: before it has begun anything they end it at once.

The exit status is 128 + the number, as of a program that the signal ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], None]


def handle(handler: Handler) -> None:
    """Makes it the handler of all of them; of SIGHUP not where it is ignored, as under nohup(1)."""
    for number in STOP:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def leave(number: int, _frame: FrameType | None) -> None:
    """Ends this process now. An exception instead could be lost in an import or in gRPC."""
    os._exit(128 + number)
