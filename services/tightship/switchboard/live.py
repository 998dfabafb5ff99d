"""A living lease's descriptors, times and watchers; its pipes and, when it has ended, its span."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

from tightship.common.telemetry import Tracer
from tightship.kernel.fdframes import Stream
from tightship.switchboard.ledger import Lease
from tightship.switchboard.pumps import Pump, Source
from tightship.switchboard.segments import Log
from tightship.telemetry import child
from tightship.telemetry import conventions as names
from tightship.v1 import switchboard_pb2 as pb

_LINKS_MAX = 32


class Live:
    """A living lease's descriptors and times."""

    __slots__ = (
        "acquired_ns", "bound_ns", "cancel_reason", "claimed_ns", "exited_ns", "far", "given_up", "labels", "lease",
        "links", "on_closed", "pidfd", "pump", "sources", "stdin", "taken", "traceparent", "waiters", "writing",
    )  # fmt: skip

    def __init__(self, lease: Lease, pump: Pump, traceparent: str, labels: dict[str, str]) -> None:
        self.lease = lease
        self.pump = pump
        self.traceparent = traceparent
        self.labels = labels
        self.far: dict[Stream, int] = {}
        self.stdin = -1
        self.sources: tuple[Source, ...] = ()
        self.pidfd = -1
        self.waiters: set[asyncio.Event] = set()
        self.writing = False
        """Whether an AttachInput has standard input."""
        self.cancel_reason = ""
        self.given_up = False
        """The owner has ended it: no failpoint holds it any longer."""
        self.taken = False
        """Its claimer made it, and tells the owner that it is closed, where it is told."""
        self.on_closed: Callable[[], bool] | None = None
        """Tells the claimer, when it is closed; whether that worked."""
        self.links: tuple[str, ...] = ()
        """Traces of who claimed it, or read or wrote its streams."""
        self.acquired_ns = time.time_ns()
        self.claimed_ns = self.bound_ns = self.exited_ns = 0

    def link(self, traceparent: str) -> None:
        if len(self.links) < _LINKS_MAX:
            self.links = (*self.links, traceparent)

    @property
    def logs(self) -> tuple[Log, ...]:
        return tuple(source.log for source in self.sources)

    @property
    def outputs_ended(self) -> bool:
        return all(source.log.ended for source in self.sources)

    @contextlib.contextmanager
    def watched(self) -> Iterator[asyncio.Event]:
        """An event that is set when a stream grows, or the lease changes; for a reader or writer to clear and await."""
        event = asyncio.Event()
        self.waiters.add(event)
        for source in self.sources:
            source.watched = True
        try:
            yield event
        finally:
            self.waiters.discard(event)
            if not self.waiters:
                for source in self.sources:
                    source.watched = False

    def wake(self) -> None:
        for source in self.sources:
            source.told = False
        for event in self.waiters:
            event.set()


def make_pipes(streams: tuple[Stream, ...]) -> dict[Stream, tuple[int, int]]:
    """Near and far end of a new pipe for each; only our near ends are non-blocking. Raises OSError, leaving none."""
    ends: dict[Stream, tuple[int, int]] = {}
    try:
        for stream in streams:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            ends[stream] = (writer, reader) if stream is Stream.STDIN else (reader, writer)
            os.set_blocking(ends[stream][0], False)
    except OSError:
        for near, far in ends.values():
            os.close(near)
            os.close(far)
        raise
    return ends


def is_pidfd(fd: int) -> bool:
    # Since Linux 6.9 pidfds have a file system of their own.
    target = os.readlink(f"/proc/self/fd/{fd}")
    return target == "anon_inode:[pidfd]" or target.startswith("pidfd:")


def emit_span(tracer: Tracer, live: Live, lease: pb.Lease) -> None:
    """The lease's span: from Acquire to CLOSED, with what happened between as events."""
    if not live.traceparent:
        return
    moments = (("claimed", live.claimed_ns), ("bound", live.bound_ns), ("exited", live.exited_ns))
    tracer.emit(
        child(live.traceparent, names.LEASE_KEY),
        live.traceparent,
        names.LEASE,
        live.acquired_ns,
        lease.closed.ToNanoseconds(),
        attributes={
            names.LEASE_ID: lease.lease_id,
            names.LEASE_END: lease.end_reason,
            names.CANCEL_REASON: live.cancel_reason or None,
            names.EXIT_CODE: lease.exit.code if lease.exit.HasField("code") else None,
            names.EXIT_SIGNAL: _signal_name(lease.exit.signal) if lease.exit.HasField("signal") else None,
            names.STDOUT_BYTES: lease.streams[0].size,
            names.STDERR_BYTES: lease.streams[1].size,
            names.LEASE_FDS: 2 * (len(live.sources) + live.lease.terms.stdin) + bool(live.bound_ns),
            names.LOST_BYTES: sum(info.lost for info in lease.streams),
        },
        events=[(name, moment, {}) for name, moment in moments if moment],
        links=live.links,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
