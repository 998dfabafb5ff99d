"""Waits between tries: random and growing, from tenacity."""

from __future__ import annotations

import tenacity


class Backoff:
    """Seconds until the next try, `most` at most; `reset` after a success."""

    def __init__(self, first: float, most: float) -> None:
        self._wait = tenacity.wait_random_exponential(multiplier=first, max=most)
        self._state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        self.reset()

    def next(self) -> float:
        seconds = self._wait(self._state)
        self._state.attempt_number += 1
        return seconds

    def reset(self) -> None:
        self._state.attempt_number = 1
