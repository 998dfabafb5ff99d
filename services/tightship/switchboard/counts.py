"""What the switchboard counts while it works, and what it tells as metrics.

`told` is read by threads of whoever asks: bytes of a stream are in its log while the lease lives and in the sums after,
never in both and never in none, or a counter would seem to fall.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tightship.common import metrics
from tightship.common.telemetry import Tracer
from tightship.switchboard.ledger import Bound, Claimed, Draining, Offered
from tightship.switchboard.segments import NAMES, Log

if TYPE_CHECKING:
    from tightship.switchboard.leases import Leases

_STATES = (Offered, Claimed, Bound, Draining)


class Counts:
    """Since this process started."""

    def __init__(self) -> None:
        self.stdin = 0
        """Bytes written to standard inputs."""
        self.moving = threading.Lock()
        """Held while a lease's logs go from the living to the sums."""
        self._size: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()

    def closed(self, logs: Iterable[Log]) -> None:
        """A lease has ended. With `moving` held."""
        for log in logs:
            self._size[NAMES[log.stream]] += log.size
            self._lost[NAMES[log.stream]] += log.lost

    def sums(self, leases: Leases) -> tuple[Counter[str], Counter[str]]:
        """Bytes that containers wrote, and those of them that were not kept, by stream."""
        with self.moving:
            living = leases.living()
            size, lost = self._size.copy(), self._lost.copy()
        for log in (log for live in living for log in live.logs):
            size[NAMES[log.stream]] += log.size
            lost[NAMES[log.stream]] += log.lost
        return size, lost


def told(leases: Leases, tracer: Tracer) -> list[metrics.Series | metrics.Timed]:
    """What the switchboard's metrics are."""
    counts = leases.counts

    def states() -> metrics.Values:
        found = Counter(type(live.lease.state) for live in leases.living())
        return [({"state": each.__name__.lower()}, found[each]) for each in _STATES]

    def size() -> metrics.Values:
        by_stream = counts.sums(leases)[0]
        return [({"stream": "stdin"}, counts.stdin), *(({"stream": each}, by_stream[each]) for each in NAMES.values())]

    def lost() -> metrics.Values:
        by_stream = counts.sums(leases)[1]
        return [({"stream": each}, by_stream[each]) for each in NAMES.values()]

    return [
        metrics.Series("tightship.leases", "level", "Leases there are.", states),
        metrics.Series("tightship.stream.bytes", "counter", "Bytes through standard streams.", size, "By"),
        metrics.Series("tightship.stream.lost", "counter", "Bytes of output that were not kept.", lost, "By"),
        *metrics.common(tracer),
    ]
