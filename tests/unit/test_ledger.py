"""The lease ledger as a state machine, with a fake clock: every lease ends by itself, and nothing leaves CLOSED."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tightship.common.errors import Code, ServiceError
from tightship.switchboard import ledger as ledgers
from tightship.switchboard.ledger import (
    AskKernel,
    Bound,
    Claimed,
    Close,
    Closed,
    Drain,
    Draining,
    Effects,
    Exit,
    LastCopy,
    Lease,
    Ledger,
    Offered,
    Step,
    Terms,
)

IDS = st.sampled_from(["a", "b", "c", "d", "e"])
CLAIMERS = st.sampled_from([1, 2, 3])
SESSIONS = st.sampled_from([None, 10, 11])
TTLS = st.floats(0.01, 60.0)


def terms(lease_id: str = "a", owner: str = "me", session: int | None = None, **changes: Any) -> Terms:
    known: dict[str, Any] = {"stdin": False, "claim_ttl": 10.0, "bind_ttl": 30.0, "log_cap": 1}
    return Terms(lease_id, owner, session, **(known | changes))


def token_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Machine(RuleBasedStateMachine):
    """The ledger with an obedient outside: closes are told at once, pipes end when the other side is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.ledger = Ledger(4)
        self.last_token = 0
        self.winners: dict[bytes, int] = {}
        self.all: list[Lease] = []
        self.closed: list[Lease] = []
        self.stubborn: set[str] = set()
        self.copies: dict[str, int] = {}

    # The outside

    def obey(self, effects: Effects) -> None:
        for effect in effects:
            lease = effect.lease
            match effect:
                case Drain() if lease.id not in self.stubborn:
                    self.obey(self.ledger.drained(self.now, lease))
                case LastCopy():
                    self.copies[lease.id] = self.copies.get(lease.id, 0) + 1
                case AskKernel():
                    self.obey(self.ledger.exited(self.now, lease, Exit()))
                case Close():
                    assert isinstance(lease.state, Draining)
                    assert lease.state.step is Step.CLOSE
                    self.ledger.closed(lease)
                    self.closed.append(lease)
                case _:
                    pass

    def attempt(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except ServiceError:
            return None

    def one(self, lease_id: str) -> Lease | None:
        return self.ledger.get(lease_id)

    # Rules

    @rule(lease_id=IDS, session=SESSIONS, claim_ttl=TTLS, bind_ttl=TTLS, stubborn=st.booleans())
    def acquire(self, lease_id: str, session: int | None, claim_ttl: float, bind_ttl: float, stubborn: bool) -> None:
        asked = terms(lease_id, "me", session, claim_ttl=claim_ttl, bind_ttl=bind_ttl)
        try:
            known = self.ledger.admit(self.now, asked)
        except ServiceError as error:
            assert error.code in (Code.ALREADY_EXISTS, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED)
            return
        if known is None:
            assert not self.ledger.buried(self.now, lease_id)
            self.last_token += 1
            self.all.append(self.ledger.offer(self.now, asked, token_of(self.last_token)))
            (self.stubborn.add if stubborn else self.stubborn.discard)(lease_id)
        else:
            assert known.terms == asked

    @rule(number=st.integers(1, 30), claimer=CLAIMERS, sent=st.booleans())
    def claim(self, number: int, claimer: int, sent: bool) -> None:
        token = token_of(number)
        lease = self.attempt(lambda: self.ledger.claim(self.now, token, claimer))
        if lease is not None:
            assert token not in self.winners
            self.winners[token] = claimer
            if sent:
                self.ledger.sent(lease)

    @rule(number=st.integers(1, 30), claimer=CLAIMERS)
    def bind(self, number: int, claimer: int) -> None:
        lease = self.attempt(lambda: self.ledger.bind(self.now, token_of(number), claimer))
        if lease is not None:
            assert self.winners[token_of(number)] == claimer

    @rule(number=st.integers(1, 30), claimer=CLAIMERS)
    def let_go(self, number: int, claimer: int) -> None:
        self.obey(self.attempt(lambda: self.ledger.let_go(self.now, token_of(number), claimer)) or [])

    @rule(claimer=CLAIMERS)
    def claimer_gone(self, claimer: int) -> None:
        self.obey(self.ledger.claimer_gone(self.now, claimer))
        for lease in self.ledger:
            assert not (isinstance(lease.state, Claimed) and lease.state.claimer == claimer)

    @rule(lease_id=IDS)
    def process_ends(self, lease_id: str) -> None:
        if (lease := self.one(lease_id)) is not None:
            self.ledger.process_ended(self.now, lease)

    @rule(lease_id=IDS, code=st.integers(0, 255))
    def exited(self, lease_id: str, code: int) -> None:
        if (lease := self.one(lease_id)) is not None:
            before = lease.exit
            self.obey(self.ledger.exited(self.now, lease, Exit(code=code)))
            assert before is None or lease.exit == before

    @rule(lease_id=IDS)
    def drained(self, lease_id: str) -> None:
        if (lease := self.one(lease_id)) is not None:
            self.obey(self.ledger.drained(self.now, lease))

    @rule(lease_id=IDS, ttl=TTLS)
    def renew(self, lease_id: str, ttl: float) -> None:
        if (lease := self.one(lease_id)) is not None:
            with contextlib.suppress(ServiceError):
                self.ledger.renew(self.now, lease, ttl)
                assert isinstance(lease.state, Offered | Claimed)
                assert lease.state.deadline == self.now + ttl

    @rule(lease_id=IDS)
    def release(self, lease_id: str) -> None:
        if (lease := self.one(lease_id)) is not None:
            self.obey(self.ledger.release(self.now, lease))
            assert isinstance(lease.state, Draining | Closed)
        else:
            self.ledger.bury(self.now, lease_id)
            with pytest.raises(ServiceError):
                self.ledger.admit(self.now, terms(lease_id))

    @rule(lease_id=IDS)
    def revoke(self, lease_id: str) -> None:
        if (lease := self.one(lease_id)) is not None:
            self.obey(self.ledger.revoke(self.now, lease))
            assert isinstance(lease.state, Closed)

    @rule(session=st.sampled_from([10, 11]))
    def session_ends(self, session: int) -> None:
        others = {lease.id: lease.state for lease in self.ledger if lease.terms.session != session}
        bound = {lease.id for lease in self.ledger if isinstance(lease.state, Bound)}
        self.obey(self.ledger.session_ended(self.now, session))
        for lease in self.ledger:
            if lease.terms.session == session:
                assert not isinstance(lease.state, Offered | Claimed)
        assert all(self.one(lease_id) is not None and self.ledger.get(lease_id).state == state  # type: ignore[union-attr]
                   for lease_id, state in others.items())  # fmt: skip
        assert bound <= {lease.id for lease in self.ledger if isinstance(lease.state, Bound)}

    @rule(step=st.floats(0.0, 20.0))
    def time_passes(self, step: float) -> None:
        self.now += step
        self.obey(self.ledger.advance(self.now))
        upcoming = self.ledger.next_deadline()
        assert upcoming is None or upcoming > self.now

    # Invariants

    @invariant()
    def closed_is_final(self) -> None:
        for lease in self.closed:
            assert isinstance(lease.state, Closed)
            assert self.ledger.get(lease.id) is not lease

    @invariant()
    def a_holder_means_not_closed(self) -> None:
        for lease in self.all:
            assert bool(lease.state.holders) is not isinstance(lease.state, Closed)
            assert len(set(lease.state.holders)) == len(lease.state.holders)

    @invariant()
    def deadlines_are_bounded(self) -> None:
        for lease in self.ledger:
            match lease.state:
                case Offered(deadline) | Claimed(deadline):
                    assert deadline <= self.now + ledgers.TTL_MAX_S
                case Bound(deadline) if deadline != float("inf"):
                    assert deadline <= self.now + ledgers.EXIT_WAIT_S
                case Draining(deadline, Step.COPY):
                    assert deadline <= self.now + ledgers.DRAIN_EXIT_S
                case Draining(deadline, Step.LAST):
                    assert deadline <= self.now + ledgers.LAST_COPY_S
                case _:
                    pass

    @invariant()
    def the_next_deadline_is_the_earliest(self) -> None:
        deadlines = [lease.state.deadline for lease in self.ledger if lease.state.deadline != float("inf")]
        assert self.ledger.next_deadline() == min(deadlines, default=None)

    @invariant()
    def what_is_remembered_is_bounded(self) -> None:
        assert len(self.ledger) <= self.ledger.limit
        assert len(self.ledger._deadlines) <= 2 * self.ledger.limit + 65

    def teardown(self) -> None:
        """Left alone, every lease ends by itself as soon as its process does."""
        for lease in self.ledger:
            self.ledger.process_ended(self.now, lease)
        begun = self.now
        while (deadline := self.ledger.next_deadline()) is not None:
            assert deadline <= begun + ledgers.TTL_MAX_S + ledgers.DRAIN_S + ledgers.LAST_COPY_S
            self.now = max(self.now, deadline)
            self.obey(self.ledger.advance(self.now))
        assert len(self.ledger) == 0
        assert all(isinstance(lease.state, Closed) for lease in self.all)


TestLedger = Machine.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class Shutdown(Machine):
    """The same, with SIGTERM: everything ends by its one deadline."""

    def teardown(self) -> None:
        final = self.now + 4.0
        self.obey(self.ledger.shut_down(self.now, final))
        with pytest.raises(ServiceError) as refused:
            self.ledger.admit(self.now, terms("new"))
        assert refused.value.code is Code.UNAVAILABLE
        while (deadline := self.ledger.next_deadline()) is not None:
            assert deadline <= final
            self.now = max(self.now, deadline)
            self.obey(self.ledger.advance(self.now))
        assert len(self.ledger) == 0


TestShutdown = Shutdown.TestCase
TestShutdown.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# Cases by hand


def offered(ledger: Ledger, now: float = 0.0, **changes: Any) -> Lease:
    asked = terms(**changes)
    assert ledger.admit(now, asked) is None
    return ledger.offer(now, asked, token_of(len(ledger) + 1))


def bound(ledger: Ledger) -> Lease:
    lease = offered(ledger)
    ledger.claim(0.0, lease.token, 1)
    ledger.sent(lease)
    return ledger.bind(0.0, lease.token, 1)


def test_of_100_takers_of_one_token_one_wins() -> None:
    ledger = Ledger(1)
    lease = offered(ledger)
    wins = 0
    for claimer in range(100):
        with contextlib.suppress(ServiceError):
            ledger.claim(0.0, lease.token, claimer)
            wins += 1
    assert wins == 1


def test_a_claim_or_bind_past_the_deadline_is_refused_before_the_timer_runs() -> None:
    ledger = Ledger(1)
    lease = offered(ledger, claim_ttl=1.0, bind_ttl=1.0)
    with pytest.raises(ServiceError):
        ledger.claim(1.0, lease.token, 1)
    ledger.claim(0.5, lease.token, 1)
    ledger.sent(lease)
    with pytest.raises(ServiceError):
        ledger.bind(1.5, lease.token, 1)
    with pytest.raises(ServiceError):
        ledger.renew(1.5, lease, 5.0)


def test_holders_name_who_has_a_copy() -> None:
    ledger = Ledger(1)
    lease = offered(ledger)
    assert lease.state.holders == ("near", "far")
    ledger.claim(0.0, lease.token, 1)
    assert lease.state.holders == ("near", "far")
    ledger.sent(lease)
    assert lease.state.holders == ("near", "claimer")
    ledger.bind(0.0, lease.token, 1)
    assert lease.state.holders == ("near", "process")
    ledger.process_ended(1.0, lease)
    assert list(lease.state.holders) == ["near"]


def test_a_bind_from_another_connection_is_refused() -> None:
    ledger = Ledger(1)
    lease = offered(ledger)
    ledger.claim(0.0, lease.token, 1)
    ledger.sent(lease)
    with pytest.raises(ServiceError) as refused:
        ledger.bind(0.0, lease.token, 2)
    assert refused.value.code is Code.PERMISSION_DENIED


def test_an_exit_drains_two_seconds_then_copies_once_then_closes() -> None:
    ledger = Ledger(1)
    lease = bound(ledger)
    assert ledger.exited(1.0, lease, Exit(code=3)) == [Drain(lease)]
    assert ledger.next_deadline() == 3.0
    assert ledger.advance(2.9) == []
    assert ledger.advance(3.0) == [LastCopy(lease)]
    assert ledger.advance(3.4) == []
    assert ledger.advance(3.5) == [Close(lease, 3.5)]
    assert lease.end_reason == "exit"


def test_when_the_pidfd_tells_first_the_exit_is_awaited_two_seconds() -> None:
    ledger = Ledger(1)
    lease = bound(ledger)
    ledger.process_ended(1.0, lease)
    assert ledger.advance(2.9) == []
    assert ledger.advance(3.0) == [AskKernel(lease)]


def test_the_far_ends_of_a_claim_that_was_never_answered_are_drained_at_once() -> None:
    ledger = Ledger(1)
    lease = offered(ledger)
    ledger.claim(0.0, lease.token, 1)
    assert ledger.release(0.0, lease) == [Drain(lease)]
    assert lease.state.holders == ("near",)


def test_no_far_end_left_before_a_bind_means_that_the_claimer_let_go() -> None:
    ledger = Ledger(1)
    lease = offered(ledger)
    ledger.claim(0.0, lease.token, 1)
    assert ledger.drained(0.0, lease) == []
    ledger.sent(lease)
    assert ledger.drained(0.0, lease) == [Close(lease, 0.0)]
    assert lease.end_reason == "let go"


def test_a_process_that_closes_its_outputs_stays_bound() -> None:
    ledger = Ledger(1)
    lease = bound(ledger)
    assert ledger.drained(1.0, lease) == []
    assert lease.state == Bound()


def test_a_tombstone_refuses_a_late_acquire_for_its_time() -> None:
    ledger = Ledger(1)
    ledger.bury(0.0, "a")
    with pytest.raises(ServiceError) as refused:
        ledger.admit(119.0, terms())
    assert refused.value.code is Code.FAILED_PRECONDITION
    assert ledger.admit(120.0, terms()) is None


def test_too_many_tombstones_refuse_every_acquire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "TOMBSTONES_MAX", 3)
    ledger = Ledger(1)
    for number in range(4):
        ledger.bury(0.0, f"gone-{number}")
    with pytest.raises(ServiceError) as refused:
        ledger.admit(1.0, terms())
    assert refused.value.code is Code.RESOURCE_EXHAUSTED
    assert ledger.admit(121.0, terms()) is None


def test_the_limit_of_leases_is_refused_by_name() -> None:
    ledger = Ledger(1)
    offered(ledger)
    with pytest.raises(ServiceError) as refused:
        ledger.admit(0.0, terms("b"))
    assert refused.value.code is Code.RESOURCE_EXHAUSTED


def test_a_repeated_acquire_is_the_same_lease_and_other_terms_are_refused() -> None:
    ledger = Ledger(2)
    lease = offered(ledger)
    assert ledger.admit(0.0, terms()) is lease
    for other in (terms(owner="you"), terms(session=7), terms(stdin=True)):
        with pytest.raises(ServiceError) as refused:
            ledger.admit(0.0, other)
        assert refused.value.code is Code.ALREADY_EXISTS


@pytest.mark.parametrize("limit", [0.0, -1.0, 60.1, float("nan")])
def test_a_ttl_out_of_range_names_its_field(limit: float) -> None:
    with pytest.raises(ServiceError) as refused:
        ledgers.check_ttl("claim_ttl", limit)
    assert refused.value.metadata["field"] == "claim_ttl"
