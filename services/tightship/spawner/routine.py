"""A generator that the loop resumes: it yields to be parked, and looks again at what it waits for when woken.

Waking one for nothing is harmless, so whoever changes what a routine may be waiting for just wakes it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

Steps = Generator[None, None, None]


class Routine:
    """Runs `steps` to their end, then calls `done` with the exception that ended them, or None.

    `done` is called from within the last `start`, `wake` or `throw`.
    """

    __slots__ = ("_again", "_done", "_running", "_steps")

    def __init__(self, steps: Steps, done: Callable[[Exception | None], None]) -> None:
        self._steps: Steps | None = steps
        self._done = done
        self._running = False
        self._again = False

    def start(self) -> None:
        self.wake()

    def wake(self) -> None:
        """Resumes the steps, or makes them look once more where they are what is running."""
        if self._running:
            self._again = True
        else:
            self._resume(None)

    def throw(self, error: Exception) -> None:
        """Raises `error` where the steps are parked. Must not be called by the steps themselves."""
        self._resume(error)

    def _resume(self, error: Exception | None) -> None:
        self._running = self._again = True
        while self._again and self._steps is not None:
            self._again = False
            try:
                if error is None:
                    next(self._steps)
                else:
                    self._steps.throw(error)
            except StopIteration:
                self._end(None)
            except Exception as failure:  # noqa: BLE001 - it is handed on
                self._end(failure)
            error = None
        self._running = False

    def _end(self, failure: Exception | None) -> None:
        self._steps = None
        done, self._done = self._done, _nothing
        done(failure)


def _nothing(_: Exception | None) -> None:
    """In place of what was called, so that no cycle is left behind."""
