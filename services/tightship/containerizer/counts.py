"""What the containerizer counts while it works, and what it tells as metrics.

Counting is an addition where the thing happens, and nothing else. `told` is read by threads of whoever asks: it only
looks, and a copy of a dict's values is of one moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tightship.common import metrics
from tightship.v1 import containerizer_pb2 as pb

if TYPE_CHECKING:
    from tightship.containerizer.operations import Parts

_STATES = (
    pb.Container.LAUNCHING, pb.Container.CREATED, pb.Container.RUNNING, pb.Container.CLOSING,
    pb.Container.CLEANUP_PENDING, pb.Container.RECOVERING,
)  # fmt: skip

# Seconds. A cleanup takes milliseconds; one that waits for a stop signal's grace, seconds.
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Counts:
    """Since this process started."""

    def __init__(self) -> None:
        self.launches: Counter[int] = Counter({reason: 0 for reason in pb.Record.Reason.values() if reason})
        """Launches that are over, by the reason of their record."""
        self.residue: Counter[int] = Counter({kind: 0 for kind in pb.Finding.Kind.values() if kind})
        """What audits found, by kind; found again is counted again."""
        self.cleanup_took: Callable[[float], None] = _off
        """Gets the seconds of every cleanup that is over, from its beginning until nothing was left."""


def _off(_seconds: float) -> None:
    """Nobody asks."""


def told(parts: Parts) -> list[metrics.Series | metrics.Timed]:
    """What the containerizer's metrics are."""
    counts = parts.counts

    def switch_on(record: Callable[[float], None]) -> None:
        counts.cleanup_took = record

    def containers() -> metrics.Values:
        states = Counter(each.state for each in list(parts.registry.by_id.values()) if not each.gone)
        return [({"state": pb.Container.State.Name(state).lower()}, states[state]) for state in _STATES]

    def pending() -> metrics.Values:
        return [({}, sum(bool(operation.left) for operation in list(parts.registry.by_id.values())))]

    return [
        metrics.Series("tightship.containers", "level", "Containers there are.", containers),
        metrics.Series(
            "tightship.launches", "counter", "Launches that are over, by how they ended.",
            lambda: _named("reason", pb.Record.Reason.Name, counts.launches),
        ),
        metrics.Timed("tightship.cleanup.duration", "Until nothing was left.", _BOUNDS, switch_on),
        metrics.Series("tightship.cleanups.pending", "level", "Cleanups past their budget, which go on.", pending),
        metrics.Series(
            "tightship.residue.found", "counter", "Findings of audits.",
            lambda: _named("kind", pb.Finding.Kind.Name, counts.residue),
        ),
        *metrics.common(parts.tracer),
    ]  # fmt: skip


def _named(label: str, name: Callable[..., str], counter: Counter[int]) -> Iterable[tuple[dict[str, str], int]]:
    return [({label: name(number).lower()}, count) for number, count in counter.items()]
