"""The leases with their descriptors: carries out what the ledger decides.

Makes the pipes, closes near and far ends, starts and ends pumps, watches the pidfds, and keeps the one timer.
Everything here runs in the event loop and never waits, but for failpoints and for the removal of files. When the
switchboard dies without a word, the near ends close with it: a bound container gets EPIPE (SIGPIPE) at its next write
and end-of-file on its standard input, and the next switchboard knows its lease as CLOSED, "switchboard died", if it
has written anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from tightship.common import failpoints, logs
from tightship.common.errors import Code, ServiceError, errno_name, invalid
from tightship.common.telemetry import CallTrace, Tracer
from tightship.kernel import process
from tightship.kernel.fdframes import TOKEN_SIZE, Stream
from tightship.switchboard import requests
from tightship.switchboard.catalogue import Catalogue, Ended, stream_info
from tightship.switchboard.counts import Counts
from tightship.switchboard.ledger import (
    AskKernel,
    Claimed,
    Close,
    Drain,
    Effect,
    Effects,
    Exit,
    LastCopy,
    Lease,
    Ledger,
    Offered,
    Terms,
    shutting_down,
)
from tightship.switchboard.live import Live, emit_span, is_pidfd, make_pipes
from tightship.switchboard.pumps import Budget, Pump, Source
from tightship.switchboard.segments import Store
from tightship.switchboard.settings import Settings
from tightship.v1 import switchboard_pb2 as pb

_PUMPS = 2
_FLUSH_S = 0.05
_RETENTION_S = 5.0
_RETENTION_BATCH = 200
_SPANS_MAX = 1024

_log = logging.getLogger(__name__)


class Leases:
    """All leases of this switchboard, living and ended."""

    def __init__(self, settings: Settings, store: Store, catalogue: Catalogue, tracer: Tracer) -> None:
        self.epoch = secrets.token_hex(8)
        self.stopping = False
        """No new lease, and nothing held by a failpoint."""
        self.ending = False
        """Readers and writers end with RESUME."""
        self.catalogue = catalogue
        self.store = store
        self.counts = Counts()
        self._settings = settings
        self._tracer = tracer
        self._loop = asyncio.get_running_loop()
        self._ledger = Ledger(settings.leases_max)
        self._live: dict[str, Live] = {}
        self._listeners: dict[str, Callable[[pb.Lease], None]] = {}
        self._sessions: dict[int, str] = {}
        """Owners by the numbers of their sessions that stand."""
        self._timer: asyncio.TimerHandle | None = None
        self._flusher: asyncio.TimerHandle | None = None
        self._spans: list[tuple[Live, pb.Lease]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._pumps = [Pump(f"pump-{number}", self._tell) for number in range(_PUMPS)]
        self._next_pump = 0
        self._retention = self._loop.create_task(self._retain())

    # The owner

    def acquire(self, request: pb.AcquireRequest, owner: str, session: int | None) -> pb.AcquireResponse:
        """Raises ServiceError, also for what the kernel refuses."""
        live = self.admit(request, owner, session)
        lease = self._message(live, time.monotonic())
        return pb.AcquireResponse(lease=lease, token=live.lease.token, epoch=self.epoch)

    def admit(self, request: pb.AcquireRequest, owner: str, session: int | None) -> Live:
        """`acquire` without an answer."""
        terms = requests.terms(request, owner, session, self._settings.log_cap)
        now = time.monotonic()
        lease = self._ledger.admit(now, terms)
        if lease is None:
            if self.stopping:
                raise shutting_down()
            if self.catalogue.known(terms.lease_id):
                raise ServiceError(Code.FAILED_PRECONDITION, "LEASE_ENDED", f"lease {terms.lease_id} was ended before")
            lease = self._offer(now, request, terms)
        elif request.token not in (b"", lease.token):
            raise ServiceError(Code.ALREADY_EXISTS, "LEASE_EXISTS", f"lease {lease.id} exists with another token")
        return self._live[lease.id]

    async def acquire_held(
        self, request: pb.AcquireRequest, owner: str, session: int | None, gone: Callable[[], bool]
    ) -> pb.AcquireResponse:
        """`acquire` past its failpoints; `gone` tells that the owner has left."""
        limit = time.monotonic() + requests.CLAIM_TTL_S

        def ended() -> bool:
            now = time.monotonic()
            return self.stopping or gone() or now >= limit or self._ledger.buried(now, request.lease_id)

        def settled() -> bool:
            lease = self._ledger.get(request.lease_id)
            return self.stopping or gone() or lease is None or not isinstance(lease.state, Offered)

        with as_service_error():
            await failpoints.hold("switchboard.acquire.before", ended)
        if gone():
            raise ServiceError(Code.CANCELLED, "OWNER_GONE", "the owner has left")
        response = self.acquire(request, owner, session)
        with as_service_error():
            await failpoints.hold("switchboard.acquire.after", settled)
        return response

    def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        ttl = requests.renewal(request)
        now = time.monotonic()
        live = self._living(request.lease_id)
        self._ledger.renew(now, live.lease, ttl)
        self._arm()
        return pb.RenewResponse(lease=self._message(live, now))

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        lease_id = requests.check_id(request.lease_id)
        now = time.monotonic()
        live = self._live.get(lease_id)
        if live is not None:
            live.cancel_reason = live.cancel_reason or request.cancel_reason[:64]
            live.given_up = True
            self._carry_out(self._ledger.release(now, live.lease))
            if lease_id in self._live:
                return pb.ReleaseResponse(lease=self._message(live, now))
        ended = self.catalogue.get(lease_id)
        if ended is not None:
            return pb.ReleaseResponse(lease=ended.lease)
        if not self.catalogue.known(lease_id):
            self._ledger.bury(now, lease_id)
        return pb.ReleaseResponse()

    def revoke(self, request: pb.RevokeRequest) -> pb.RevokeResponse:
        live = self._live.get(requests.check_id(request.lease_id))
        if live is not None:
            live.given_up = True
            self._carry_out(self._ledger.revoke(time.monotonic(), live.lease))
        return pb.RevokeResponse(lease=self.get(request.lease_id))

    def get(self, lease_id: str) -> pb.Lease:
        """Raises NOT_FOUND."""
        live = self._live.get(requests.check_id(lease_id))
        return self._message(live, time.monotonic()) if live is not None else self.ended(lease_id).lease

    def ended(self, lease_id: str) -> Ended:
        """Raises NOT_FOUND where it is unknown, forgotten, or lives."""
        found = self.catalogue.get(lease_id)
        if found is None:
            raise no_lease(lease_id)
        return found

    def labels(self, lease_id: str) -> Mapping[str, str]:
        """Of a lease that lives or has ended. Raises NOT_FOUND."""
        live = self.find(lease_id)
        return live.labels if live is not None else self.ended(lease_id).lease.labels

    def find(self, lease_id: str) -> Live | None:
        return self._live.get(requests.check_id(lease_id))

    def all(self, owner: str, closed: bool = False) -> list[pb.Lease]:
        """Living ones of the owner, or of all when empty, and before them with `closed` those that have ended."""
        now = time.monotonic()
        living = [self._message(one, now) for one in self._live.values() if owner in ("", one.lease.terms.owner)]
        return (self.catalogue.all(owner) if closed else []) + living

    async def forget(self, lease_id: str) -> bool:
        """Drops the logs of an ended lease; whether there were any. Raises FAILED_PRECONDITION for a living one."""
        if self.find(lease_id) is not None:
            raise ServiceError(Code.FAILED_PRECONDITION, "LEASE_STATE", f"lease {lease_id} has not ended")
        forgotten = self.catalogue.forget([lease_id]) > 0
        if forgotten:
            await asyncio.to_thread(self.store.remove, lease_id)
        return forgotten

    # Sessions

    def session_begun(self, owner: str, session: int, listener: Callable[[pb.Lease], None]) -> None:
        """The owner's session gets its closed leases from now on."""
        self._sessions[session] = owner
        self._listeners[owner] = listener

    def stands(self, session: int) -> bool:
        return session in self._sessions

    def owner_of(self, session: int) -> str:
        """Raises FAILED_PRECONDITION where that session is over."""
        owner = self._sessions.get(session)
        if owner is None:
            raise ServiceError(Code.FAILED_PRECONDITION, "OWNER_GONE", "the owner's session is over")
        return owner

    def session_ended(self, owner: str, session: int, listener: Callable[[pb.Lease], None]) -> None:
        self._sessions.pop(session, None)
        if self._listeners.get(owner) == listener:
            del self._listeners[owner]
        self._carry_out(self._ledger.session_ended(time.monotonic(), session))

    # fd.sock

    def state(self, token: bytes) -> object:
        """The state that the token's lease is in; None where it has ended."""
        lease = self._ledger.by_token(token)
        return None if lease is None else lease.state

    def claim(self, token: bytes, claimer: int, traceparent: str) -> Live:
        """The winner's lease, with `far` to be sent; `handed` or `withheld` follows."""
        lease = self._ledger.claim(time.monotonic(), token, claimer)
        live = self._live[lease.id]
        live.claimed_ns = time.time_ns()
        if traceparent[3:35] != live.traceparent[3:35] and (link := requests.traceparent(traceparent)):
            live.link(link)
        self._arm()
        return live

    def link(self, lease_id: str, call: CallTrace) -> None:
        """The call reads or writes the lease's streams: each one's trace leads to the other's."""
        if not call.own:
            return
        live = self.find(lease_id)
        if live is not None:
            if call.link(live.traceparent):
                live.link(call.own)
        elif (ended := self.catalogue.get(lease_id)) is not None:
            call.link(ended.lease.traceparent)

    def to_send(self, live: Live, claimer: int) -> tuple[int, tuple[Stream, ...], tuple[int, ...]]:
        """Milliseconds until it must be bound, streams and descriptors. Raises where it ended after the claim."""
        state = live.lease.state
        if not isinstance(state, Claimed) or state.claimer != claimer or not live.far:
            raise ServiceError(Code.FAILED_PRECONDITION, "LEASE_ENDED", f"lease {live.lease.id} has ended")
        left = max(0, int((state.deadline - time.monotonic()) * 1000))
        return left, tuple(live.far), tuple(live.far.values())

    def handed(self, live: Live) -> None:
        """The far ends are in the claimer's hand, or on their way: ours are closed, and the pumps begin."""
        self._ledger.sent(live.lease)
        self._begin(live)

    def withheld(self, token: bytes) -> None:
        """The claimer was told an error instead: nobody has a far end, which the pumps will see."""
        lease = self._ledger.by_token(token)
        if lease is not None and isinstance(lease.state, Claimed):
            self.handed(self._live[lease.id])

    def bind(self, token: bytes, claimer: int, pidfd: int) -> None:
        """Takes the pidfd over, unless it raises."""
        if not is_pidfd(pidfd):
            raise ServiceError(Code.INVALID_ARGUMENT, "NOT_A_PIDFD", "the descriptor is no pidfd")
        lease = self._ledger.bind(time.monotonic(), token, claimer)
        live = self._live[lease.id]
        live.bound_ns = time.time_ns()
        live.wake()
        try:
            with as_service_error():
                self._loop.add_reader(pidfd, self._process_ended, live)
        except ServiceError:
            # Nobody would tell the end of the process.
            self._carry_out(self._ledger.release(time.monotonic(), lease))
            raise
        live.pidfd = pidfd

    def let_go(self, token: bytes, claimer: int) -> None:
        self._carry_out(self._ledger.let_go(time.monotonic(), token, claimer))

    def exited(self, token: bytes, exit: Exit, closed: Callable[[], bool] | None) -> bool:
        """Whether `closed` will be called, once the lease is closed; else it has ended, or nobody wants to know."""
        lease = self._ledger.by_token(token)
        if lease is None:
            return False
        self._live[lease.id].on_closed = closed
        self._exited(self._live[lease.id], exit)
        return closed is not None

    def claimer_gone(self, claimer: int) -> None:
        self._carry_out(self._ledger.claimer_gone(time.monotonic(), claimer))

    # The end of the service

    def stop_admitting(self) -> None:
        self.stopping = True

    async def shut_down(self, timeout_s: float) -> None:
        """Ends every lease: what is in the pipes is copied. `timeout_s` bounds it."""
        self.stopping = True
        now = time.monotonic()
        # A process that has ended may have told nobody yet.
        for live in list(self._live.values()):
            if live.pidfd >= 0 and live.exited_ns:
                self._ask_kernel(live)
        self._carry_out(self._ledger.shut_down(now, now + timeout_s))
        if self._live:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout_s + 0.1)
        self.ending = True
        for live in list(self._live.values()):
            live.wake()

    async def close(self) -> None:
        self._retention.cancel()
        for pump in self._pumps:
            pump.stop(0.1)
        self._flush()
        self.catalogue.close()

    # What the audit needs

    def living(self) -> list[Live]:
        return list(self._live.values())

    # Effects

    def _carry_out(self, effects: Effects) -> None:
        for effect in effects:
            live = self._live[effect.lease.id]
            try:
                self._carry_out_one(effect, live)
            except Exception:  # noqa: BLE001  the other leases' effects must not be lost
                _log.exception("the lease's %s failed", type(effect).__name__, extra=_about(live))
            live.wake()
        self._arm()

    def _carry_out_one(self, effect: Effect, live: Live) -> None:
        match effect:
            case Drain():
                self._drain(live)
            case LastCopy():
                self._begin(live)
                for source in live.sources:
                    live.pump.last_copy(source)
            case AskKernel():
                self._ask_kernel(live)
            case Close(deadline=deadline):
                if failpoints.DIRECTORY is None:
                    self._close(live)
                else:
                    self._spawn(self._close_held(live, deadline))

    def _drain(self, live: Live) -> None:
        self._begin(live)
        if live.outputs_ended:
            self._carry_out(self._ledger.drained(time.monotonic(), live.lease))

    def _begin(self, live: Live) -> None:
        """Closes our far ends and starts the pumps, once."""
        if not live.far:
            return
        far, live.far = live.far, {}
        for fd in far.values():
            os.close(fd)
        for source in live.sources:
            try:
                live.pump.add(source)
            except OSError as error:
                _log.error("can't watch an output: %s", error, extra=_about(live))
                live.pump.sever(source)

    def _ask_kernel(self, live: Live) -> None:
        status = process.exit_status(live.pidfd) if live.pidfd >= 0 else None
        self._exited(live, _exit_of(status))

    def _exited(self, live: Live, exit: Exit) -> None:
        live.exited_ns = live.exited_ns or time.time_ns()
        effects = self._ledger.exited(time.monotonic(), live.lease, exit)
        if live.lease.exit is not None:
            self._drop_pidfd(live)
        self._carry_out(effects)

    def _process_ended(self, live: Live) -> None:
        self._loop.remove_reader(live.pidfd)
        live.exited_ns = live.exited_ns or time.time_ns()
        self._ledger.process_ended(time.monotonic(), live.lease)
        self._arm()

    async def _close_held(self, live: Live, deadline: float) -> None:
        def over() -> bool:
            return self.stopping or live.given_up or time.monotonic() >= deadline

        with contextlib.suppress(OSError):
            await failpoints.hold("switchboard.close.before", over)
        self._close(live)
        with contextlib.suppress(OSError):
            await failpoints.hold("switchboard.close.after", over)

    def _close(self, live: Live) -> None:
        for fd in live.far.values():
            os.close(fd)
        live.far = {}
        for source in live.sources:
            live.pump.sever(source)
        self.close_stdin(live)
        self._drop_pidfd(live)
        self._ledger.closed(live.lease)
        with self.counts.moving:
            del self._live[live.lease.id]
            self.counts.closed(live.logs)
        message = self._message(live, time.monotonic())
        message.closed.FromNanoseconds(time.time_ns())
        told = live.on_closed is not None and live.on_closed()
        live.on_closed = None
        if not (told and live.taken) and (listener := self._listeners.get(live.lease.terms.owner)) is not None:
            listener(message)
        live.wake()
        for source in live.sources:
            source.owner = None  # a cycle would wait for the collector
        self.catalogue.add(Ended(message, live.logs))
        if self._tracer.enabled and len(self._spans) < _SPANS_MAX:
            self._spans.append((live, message))
        if self._flusher is None:
            self._flusher = self._loop.call_later(_FLUSH_S, self._flush)
        if self.stopping and not self._live:
            self._empty.set()

    def close_stdin(self, live: Live) -> None:
        """Closes the near end of standard input: end-of-file for the process."""
        fd, live.stdin = live.stdin, -1
        if fd >= 0:
            self._loop.remove_writer(fd)
            os.close(fd)

    def _drop_pidfd(self, live: Live) -> None:
        fd, live.pidfd = live.pidfd, -1
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)

    # Parts

    def _offer(self, now: float, request: pb.AcquireRequest, terms: Terms) -> Lease:
        streams = (Stream.STDIN, Stream.STDOUT, Stream.STDERR) if terms.stdin else (Stream.STDOUT, Stream.STDERR)
        token = request.token or secrets.token_bytes(TOKEN_SIZE)
        if len(token) != TOKEN_SIZE or self._ledger.by_token(token) is not None:
            raise invalid("token", f"must be {TOKEN_SIZE} random bytes, of one lease alone")
        with as_service_error():
            ends = make_pipes(streams)
        lease = self._ledger.offer(now, terms, token)
        self._next_pump = (self._next_pump + 1) % _PUMPS
        live = Live(
            lease, self._pumps[self._next_pump], requests.traceparent(request.traceparent), dict(request.labels)
        )
        live.far = {stream: far for stream, (_, far) in ends.items()}
        live.stdin = ends[Stream.STDIN][0] if terms.stdin else -1
        budget = Budget(terms.log_cap)
        live.sources = tuple(Source(ends[log.stream][0], log, budget, live) for log in self.store.logs(lease.id))
        self._live[lease.id] = live
        self._arm()
        return lease

    def _living(self, lease_id: str) -> Live:
        live = self.find(lease_id)
        if live is None:
            self.ended(lease_id)
            raise ServiceError(Code.FAILED_PRECONDITION, "LEASE_ENDED", f"lease {lease_id} has ended")
        return live

    def _message(self, live: Live, now: float) -> pb.Lease:
        message = pb.Lease(
            labels=live.labels, streams=[stream_info(log) for log in live.logs], traceparent=live.traceparent
        )
        message.acquired.FromNanoseconds(live.acquired_ns)
        requests.describe(message, live.lease, now)
        return message

    def _arm(self) -> None:
        deadline = self._ledger.next_deadline()
        if deadline is None or (self._timer is not None and self._timer.when() <= deadline):
            return  # a timer that comes too early finds nothing and is set anew
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self._ledger.advance(time.monotonic()))

    def _tell(self, changed: list[Source]) -> None:
        """In a pump's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._changed, changed)

    def _changed(self, changed: list[Source]) -> None:
        for source in changed:
            live = source.owner
            if not isinstance(live, Live):
                continue  # severed, and closed meanwhile
            live.wake()
            if live.outputs_ended:
                self._carry_out(self._ledger.drained(time.monotonic(), live.lease))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Later

    def _flush(self) -> None:
        """Rows and spans of what was closed, off the way of a launch."""
        self._flusher = None
        self.catalogue.flush()
        spans, self._spans = self._spans, []
        for live, lease in spans:
            emit_span(self._tracer, live, lease)

    async def _retain(self) -> None:
        """Drops logs by age and number."""
        while True:
            await asyncio.sleep(_RETENTION_S)
            try:
                while lease_ids := self.catalogue.overdue(_RETENTION_BATCH):
                    self.catalogue.forget(lease_ids)
                    await asyncio.to_thread(_remove_all, self.store, lease_ids)
            except Exception:  # noqa: BLE001  whatever it was, the next try may work
                _log.exception("retention failed; it is tried again")


def no_lease(lease_id: str) -> ServiceError:
    return ServiceError(Code.NOT_FOUND, "NO_LEASE", f"no lease {lease_id}", None, name=lease_id)


@contextlib.contextmanager
def as_service_error() -> Iterator[None]:
    """An OSError becomes what a caller can read, with its errno."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOSPC)
        raise ServiceError(
            Code.RESOURCE_EXHAUSTED if full else Code.INTERNAL,
            "OS_ERROR",
            f"{errno_name(error.errno)}: {error}",
            None,
            errno=errno_name(error.errno),
        ) from error


def _about(live: Live) -> dict[str, dict[str, str]]:
    return logs.about(live.lease.id, live.labels.get("container", ""), live.traceparent)


def _exit_of(status: int | None) -> Exit:
    if status is None:
        return Exit()
    code = os.waitstatus_to_exitcode(status)
    return Exit(signal=-code) if code < 0 else Exit(code=code)


def _remove_all(store: Store, lease_ids: list[str]) -> None:
    for lease_id in lease_ids:
        store.remove(lease_id)
