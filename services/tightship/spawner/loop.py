"""An epoll loop with timers. Single-threaded: a callback that blocks stops everything, so none may."""

from __future__ import annotations

import heapq
import select
import time
from collections.abc import Callable

from tightship.spawner.notices import notice_exception

IN = select.EPOLLIN
OUT = select.EPOLLOUT

# Cancelled timers are swept out of the heap when they are more than this and more than half of it.
_SWEEP = 64


class Timer:
    """One call at a time to come. `cancel` is harmless when it has been made."""

    __slots__ = ("_loop", "callback", "when")

    def __init__(self, loop: Loop, when: float, callback: Callable[[], None]) -> None:
        self._loop = loop
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self._loop.timer_cancelled()


class Loop:
    """Calls back for ready descriptors and due timers until told to stop.

    An exception that escapes a callback is a mistake: it is noted, and the others are served on.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = 0
        self._cancelled = 0
        self._stopped = False

    def descriptors(self) -> list[int]:
        return [self._epoll.fileno()]

    def watch(self, fd: int, callback: Callable[[int], None], events: int = IN) -> None:
        """`callback` gets the events. It may be called when there is nothing: reads must not block."""
        self._watched[fd] = callback
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Call it before the descriptor is closed."""
        del self._watched[fd]
        self._epoll.unregister(fd)

    def later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self, time.monotonic() + seconds, callback)
        self._sequence += 1
        heapq.heappush(self._timers, (timer.when, self._sequence, timer))
        return timer

    def timer_cancelled(self) -> None:
        self._cancelled += 1
        if self._cancelled > _SWEEP and self._cancelled > len(self._timers) // 2:
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        while not self._stopped:
            for fd, events in self._epoll.poll(self._until_timer()):
                # An earlier callback of this round may have forgotten it.
                callback = self._watched.get(fd)
                if callback is not None:
                    try:
                        callback(events)
                    except Exception as error:  # noqa: BLE001 - noted; the other descriptors must be served
                        notice_exception(error)
            self._run_timers()

    def _until_timer(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _run_timers(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            callback = heapq.heappop(self._timers)[2]
            self._fire(callback)

    def _fire(self, timer: Timer) -> None:
        callback, timer.callback = timer.callback, None
        if callback is None:
            self._cancelled -= 1
            return
        try:
            callback()
        except Exception as error:  # noqa: BLE001 - noted; the other timers must run
            notice_exception(error)
