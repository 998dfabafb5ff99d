"""The lease ledger: a pure state machine over the descriptors of containers' standard streams.

OFFERED → CLAIMED → BOUND → DRAINING → CLOSED, one frozen type per state, each with its deadline and who holds a copy.
Every call gets the monotonic time and returns what has to be done outside (effects); nothing here does I/O. Whoever
carries out a `Close` tells so with `closed`: until then the lease is DRAINING, since its near ends are open. A lease
ends by itself: OFFERED and CLAIMED by their deadlines, BOUND with its process, DRAINING within 2.5 s.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from tightship.common.errors import Code, ServiceError, invalid

TTL_MAX_S = 60.0
DRAIN_EXIT_S = 2.0
DRAIN_S = 1.0
LAST_COPY_S = 0.5
EXIT_WAIT_S = 2.0
TOMBSTONE_S = 120.0
TOMBSTONES_MAX = 65_536

_FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Exit:
    """How the process ended, by the kernel's report; both None where nobody knows."""

    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """What the owner asked for: times in seconds, the cap in bytes. `session` is None for an owner without one."""

    lease_id: str
    owner: str
    session: int | None
    stdin: bool
    claim_ttl: float
    bind_ttl: float
    log_cap: int


@dataclass(frozen=True, slots=True)
class Offered:
    deadline: float
    holders = ("near", "far")


@dataclass(frozen=True, slots=True)
class Claimed:
    """`claimer` is the connection that won; until the answer is `sent` the far ends are still here."""

    deadline: float
    claimer: int
    sent: bool = False

    @property
    def holders(self) -> tuple[str, ...]:
        return ("near", "claimer" if self.sent else "far")


@dataclass(frozen=True, slots=True)
class Bound:
    """The deadline is of the report on an exit that the pidfd told; infinite while the process lives."""

    deadline: float = _FOREVER

    @property
    def holders(self) -> tuple[str, ...]:
        return ("near", "process") if self.deadline == _FOREVER else ("near",)


class Step(enum.IntEnum):
    COPY = 1
    """To end-of-file, or the deadline."""
    LAST = 2
    """What was in the pipes at one moment."""
    CLOSE = 3
    """The near ends are being closed."""


@dataclass(frozen=True, slots=True)
class Draining:
    """`other` is who may still have a far end."""

    deadline: float
    step: Step
    other: str | None = None
    claimer: int | None = None

    @property
    def holders(self) -> tuple[str, ...]:
        return ("near", self.other) if self.other else ("near",)


@dataclass(frozen=True, slots=True)
class Closed:
    deadline = _FOREVER
    holders: tuple[str, ...] = ()


State = Offered | Claimed | Bound | Draining | Closed


@dataclass(slots=True)
class Lease:
    terms: Terms
    token: bytes = field(repr=False)
    state: State
    end_reason: str = ""
    exit: Exit | None = None

    @property
    def id(self) -> str:
        return self.terms.lease_id


@dataclass(frozen=True, slots=True)
class Drain:
    """Close the far ends that are still here, and tell with `drained` when the outputs are at their end."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class LastCopy:
    """Copy what is in the pipes now and no more, then tell with `drained`."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class AskKernel:
    """The report on the exit did not come: ask the kernel by pidfd, and tell with `exited`."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Close:
    """Close every descriptor of the lease, then tell with `closed`. A test may hold it until `deadline`."""

    lease: Lease
    deadline: float


Effect = Drain | LastCopy | AskKernel | Close
Effects = list[Effect]


class Ledger:
    """The living leases, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._leases: dict[str, Lease] = {}
        self._tokens: dict[bytes, Lease] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._tombstones: dict[str, float] = {}
        self._refuse_until = -_FOREVER
        self._final = _FOREVER

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, lease_id: str) -> Lease | None:
        return self._leases.get(lease_id)

    # The owner

    def admit(self, now: float, terms: Terms) -> Lease | None:
        """The living lease that the same request made before; None where a new one may be offered.

        Raises ServiceError: ALREADY_EXISTS for another lease of that id, FAILED_PRECONDITION for an id that was ended,
        RESOURCE_EXHAUSTED at the limit, UNAVAILABLE at the end of the service.
        """
        lease = self._leases.get(terms.lease_id)
        if lease is not None:
            if isinstance(lease.state, Draining | Closed):
                raise _ended(lease.id)
            if lease.terms != terms:
                raise ServiceError(
                    Code.ALREADY_EXISTS, "LEASE_EXISTS", f"lease {lease.id} exists with other terms or another owner"
                )
            return lease
        if self._final != _FOREVER:
            raise shutting_down()
        self._bury_old(now)
        if terms.lease_id in self._tombstones:
            raise _ended(terms.lease_id)
        if now < self._refuse_until:
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED, "TOMBSTONES", "too many unknown leases were ended", self._refuse_until - now
            )
        if len(self._leases) >= self.limit:
            raise ServiceError(Code.RESOURCE_EXHAUSTED, "LEASES", f"{self.limit} leases live, which is the limit", 1.0)
        return None

    def offer(self, now: float, terms: Terms, token: bytes) -> Lease:
        """A new lease that `admit` let in."""
        assert terms.lease_id not in self._leases
        assert token not in self._tokens
        lease = Lease(terms, token, Closed())
        self._leases[lease.id] = self._tokens[token] = lease
        self._enter(lease, Offered(now + min(terms.claim_ttl, TTL_MAX_S)))
        return lease

    def renew(self, now: float, lease: Lease, ttl: float) -> None:
        """Moves the deadline to `ttl` seconds from now, at most 60. Raises FAILED_PRECONDITION in other states."""
        deadline = now + min(ttl, TTL_MAX_S)
        match lease.state:
            case Offered(old) if now < old:
                self._enter(lease, Offered(deadline))
            case Claimed(old, claimer, sent) if now < old:
                self._enter(lease, Claimed(deadline, claimer, sent))
            case _:
                raise _illegal(lease, "renewed")

    def release(self, now: float, lease: Lease, reason: str = "released") -> Effects:
        """Ends a lease, with a drain where somebody may have written. Harmless when it ends already."""
        match lease.state:
            case Offered():
                return self._close(now, lease, reason)
            case Claimed(_, claimer, sent):
                return self._drain(now, lease, reason, DRAIN_S, other="claimer" if sent else None, claimer=claimer)
            case Bound(deadline):
                return self._drain(now, lease, reason, DRAIN_S, other="process" if deadline == _FOREVER else None)
            case _:
                return []

    def revoke(self, now: float, lease: Lease) -> Effects:
        """Ends a lease without a drain."""
        match lease.state:
            case Closed() | Draining(step=Step.CLOSE):
                return []
            case _:
                return self._close(now, lease, "revoked")

    def bury(self, now: float, lease_id: str) -> None:
        """Notes the end of an id that was never seen: a late Acquire of it is refused for 120 s."""
        self._bury_old(now)
        if len(self._tombstones) >= TOMBSTONES_MAX and lease_id not in self._tombstones:
            self._refuse_until = now + TOMBSTONE_S
            return
        self._tombstones.pop(lease_id, None)
        self._tombstones[lease_id] = now + TOMBSTONE_S

    def buried(self, now: float, lease_id: str) -> bool:
        return self._tombstones.get(lease_id, -_FOREVER) > now

    def session_ended(self, now: float, session: int) -> Effects:
        """The owner is gone: its leases that no process is bound to end."""
        return [
            effect
            for lease in list(self)
            if lease.terms.session == session and isinstance(lease.state, Offered | Claimed)
            for effect in self.release(now, lease, "owner gone")
        ]

    # The claimer

    def claim(self, now: float, token: bytes, claimer: int) -> Lease:
        """The token's only winner; `sent` follows when the far ends are on their way.

        Raises NOT_FOUND for a token of no living lease, FAILED_PRECONDITION for one that was used or is over.
        """
        lease = self._of(token)
        match lease.state:
            case Offered(deadline) if now < deadline:
                self._enter(lease, Claimed(now + min(lease.terms.bind_ttl, TTL_MAX_S), claimer))
                return lease
            case _:
                raise _illegal(lease, "claimed")

    def sent(self, lease: Lease) -> None:
        """The claimer has the far ends, and nobody here any more."""
        assert isinstance(lease.state, Claimed)
        lease.state = Claimed(lease.state.deadline, lease.state.claimer, True)

    def bind(self, now: float, token: bytes, claimer: int) -> Lease:
        """Ties the lease to a process. Raises as `claim` does; PERMISSION_DENIED where another connection claimed."""
        lease = self._of(token)
        match lease.state:
            case Claimed(deadline, owner, sent) if now < deadline and sent:
                if owner != claimer:
                    raise _foreign(lease)
                self._enter(lease, Bound())
                return lease
            case _:
                raise _illegal(lease, "bound")

    def let_go(self, now: float, token: bytes, claimer: int) -> Effects:
        """The claimer has closed its copies and will not bind. Harmless for a lease that ends or has ended."""
        lease = self._tokens.get(token)
        if lease is None:
            return []
        match lease.state:
            case Claimed(_, owner, _) if owner == claimer:
                return self._drain(now, lease, "let go", DRAIN_S)
            case Draining(deadline, step, "claimer", owner) if owner == claimer:
                lease.state = Draining(deadline, step)
                return []
            case Draining() | Closed():
                return []
            case Claimed():
                raise _foreign(lease)
            case _:
                raise _illegal(lease, "let go")

    def claimer_gone(self, now: float, claimer: int) -> Effects:
        """A connection ended: what it claimed and did not bind ends."""
        effects: Effects = []
        for lease in list(self):
            match lease.state:
                case Claimed(_, owner, sent) if owner == claimer:
                    # A child at its gate may have copies for as long as that gate's hang-up takes.
                    effects += self._drain(now, lease, "claimer gone", DRAIN_S, other="claimer" if sent else None)
                case _:
                    pass
        return effects

    # The process

    def process_ended(self, now: float, lease: Lease) -> None:
        """The pidfd tells the end; the report on it is awaited 2 s."""
        if lease.state == Bound():
            self._enter(lease, Bound(now + EXIT_WAIT_S))

    def exited(self, now: float, lease: Lease, exit: Exit) -> Effects:
        """The kernel's report, from whoever reaped, or asked. Late and repeated ones are harmless."""
        if isinstance(lease.state, Offered | Closed):
            return []
        if lease.exit is None:
            lease.exit = exit
        match lease.state:
            case Claimed() | Bound():
                return self._drain(now, lease, "exit", DRAIN_EXIT_S)
            case Draining(deadline, step, _, _):
                lease.state = Draining(deadline, step)
        return []

    def by_token(self, token: bytes) -> Lease | None:
        return self._tokens.get(token)

    # The streams

    def drained(self, now: float, lease: Lease) -> Effects:
        """All outputs are at their end."""
        match lease.state:
            case Claimed(_, _, True):
                # No far end is left anywhere, and none was bound.
                return self._close(now, lease, "let go")
            case Draining(step=Step.COPY | Step.LAST):
                return self._close(now, lease, lease.end_reason)
            case _:
                return []

    def closed(self, lease: Lease) -> None:
        """Every descriptor is closed: the last transition. The ledger forgets the lease."""
        assert isinstance(lease.state, Draining)
        assert lease.state.step is Step.CLOSE
        lease.state = Closed()
        del self._leases[lease.id]
        del self._tokens[lease.token]

    # Time

    def next_deadline(self) -> float | None:
        while self._deadlines:
            deadline, lease_id = self._deadlines[0]
            lease = self._leases.get(lease_id)
            if lease is not None and lease.state.deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def advance(self, now: float) -> Effects:
        """What the time that has passed brings."""
        effects: Effects = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            lease = self._leases[heapq.heappop(self._deadlines)[1]]
            match lease.state:
                case Offered():
                    effects += self._close(now, lease, "expired")
                case Claimed(_, claimer, sent):
                    effects += self._drain(
                        now, lease, "expired", DRAIN_S, other="claimer" if sent else None, claimer=claimer
                    )
                case Bound():
                    self._enter(lease, Bound(now + EXIT_WAIT_S))
                    effects.append(AskKernel(lease))
                case Draining(_, Step.COPY, other, claimer):
                    self._enter(lease, Draining(min(now + LAST_COPY_S, self._final), Step.LAST, other, claimer))
                    effects.append(LastCopy(lease))
                case Draining(_, Step.LAST):
                    effects += self._close(now, lease, lease.end_reason)
                case _:
                    raise AssertionError(lease)
        return effects

    def shut_down(self, now: float, final: float) -> Effects:
        """Admits nothing more and ends everything by `final`: what is in the pipes now is copied."""
        self._final = final
        effects: Effects = []
        for lease in list(self):
            match lease.state:
                case Offered():
                    effects += self._close(now, lease, "shutdown")
                case Claimed(_, claimer, sent):
                    effects += self._last(lease, "claimer" if sent else None, claimer)
                case Bound(deadline):
                    effects += self._last(lease, "process" if deadline == _FOREVER else None)
                case Draining(deadline, Step.COPY as step, other, claimer):
                    self._enter(lease, Draining(min(deadline, max(now, final - LAST_COPY_S)), step, other, claimer))
                case _:
                    pass
        return effects

    # Transitions

    def _last(self, lease: Lease, other: str | None, claimer: int | None = None) -> Effects:
        lease.end_reason = "shutdown"
        self._enter(lease, Draining(self._final, Step.LAST, other, claimer))
        return [LastCopy(lease)]

    def _drain(
        self,
        now: float,
        lease: Lease,
        reason: str,
        bound: float,
        *,
        other: str | None = None,
        claimer: int | None = None,
    ) -> Effects:
        lease.end_reason = reason
        self._enter(lease, Draining(min(now + bound, self._final), Step.COPY, other, claimer))
        return [Drain(lease)]

    def _close(self, now: float, lease: Lease, reason: str) -> Effects:
        limit = now
        match lease.state:
            case Draining(deadline, step):
                limit = min(self._final, deadline + (LAST_COPY_S if step is Step.COPY else 0.0))
            case _:
                lease.end_reason = reason
        self._enter(lease, Draining(_FOREVER, Step.CLOSE))
        return [Close(lease, limit)]

    def _enter(self, lease: Lease, state: State) -> None:
        lease.state = state
        if state.deadline == _FOREVER:
            return
        heapq.heappush(self._deadlines, (state.deadline, lease.id))
        # Deadlines that were overtaken stay in the heap until they come up; there must not be many.
        if len(self._deadlines) > 2 * len(self._leases) + 64:
            living = ((one.state.deadline, one.id) for one in self)
            self._deadlines = [entry for entry in living if entry[0] != _FOREVER]
            heapq.heapify(self._deadlines)

    def _of(self, token: bytes) -> Lease:
        lease = self._tokens.get(token)
        if lease is None:
            raise ServiceError(Code.NOT_FOUND, "NO_LEASE", "the token belongs to no living lease")
        return lease

    def _bury_old(self, now: float) -> None:
        """Tombstones are in the order of their ends."""
        while self._tombstones:
            oldest = next(iter(self._tombstones))
            if self._tombstones[oldest] > now:
                break
            del self._tombstones[oldest]


def shutting_down() -> ServiceError:
    return ServiceError(Code.UNAVAILABLE, "SHUTDOWN", "the switchboard shuts down", 1.0)


def check_ttl(name: str, seconds: float) -> float:
    """`seconds` when it is over 0 and at most 60, else INVALID_ARGUMENT naming the field."""
    if not 0 < seconds <= TTL_MAX_S:
        raise invalid(name, f"must be over 0 s and at most {TTL_MAX_S:g} s")
    return seconds


def _ended(lease_id: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "LEASE_ENDED", f"lease {lease_id} was ended before")


def _illegal(lease: Lease, verb: str) -> ServiceError:
    state = type(lease.state).__name__.upper()
    return ServiceError(
        Code.FAILED_PRECONDITION, "LEASE_STATE", f"lease {lease.id} is {state} and can't be {verb}", None, state=state
    )


def _foreign(lease: Lease) -> ServiceError:
    return ServiceError(Code.PERMISSION_DENIED, "NOT_CLAIMER", f"lease {lease.id} was claimed by another connection")
