"""What callers may ask for: fields checked, with the field named in the error, and leases as messages."""

from __future__ import annotations

import re

from google.protobuf import duration_pb2

from tightship.common.errors import invalid
from tightship.switchboard.ledger import Bound, Claimed, Closed, Draining, Exit, Lease, Offered, State, Terms, check_ttl
from tightship.v1 import switchboard_pb2 as pb

CLAIM_TTL_S = 10.0
BIND_TTL_S = 30.0

_ID = re.compile(r"[a-z0-9-]{1,64}")
_OWNER_MAX = 128
_LABELS_MAX = 64
_LABELS_SIZE_MAX = 16 << 10
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_STATES: dict[type[State], pb.Lease.State.ValueType] = {
    Offered: pb.Lease.OFFERED,
    Claimed: pb.Lease.CLAIMED,
    Bound: pb.Lease.BOUND,
    Draining: pb.Lease.DRAINING,
    Closed: pb.Lease.CLOSED,
}


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def check_id(lease_id: str) -> str:
    if not is_id(lease_id):
        raise invalid("lease_id", "must be 1 to 64 of [a-z0-9-]")
    return lease_id


def check_owner(owner: str) -> str:
    if not owner or len(owner) > _OWNER_MAX or not owner.isprintable():
        raise invalid("owner", f"must be 1 to {_OWNER_MAX} printable characters")
    return owner


def terms(request: pb.AcquireRequest, owner: str, session: int | None, log_cap: int) -> Terms:
    """The request's terms. `owner` is of the session, where there is one; `log_cap` where the request has none."""
    if session is not None and request.owner not in ("", owner):
        raise invalid("owner", "is not the session's")
    cap = request.log_cap if request.HasField("log_cap") else log_cap
    if cap < 0:
        raise invalid("log_cap", "must not be negative")
    size = sum(len(key) + len(value) for key, value in request.labels.items())
    if len(request.labels) > _LABELS_MAX or size > _LABELS_SIZE_MAX:
        raise invalid("labels", f"must be at most {_LABELS_MAX}, of {_LABELS_SIZE_MAX} characters together")
    return Terms(
        lease_id=check_id(request.lease_id),
        owner=check_owner(owner),
        session=session,
        stdin=request.stdin,
        claim_ttl=_ttl(request, "claim_ttl", CLAIM_TTL_S),
        bind_ttl=_ttl(request, "bind_ttl", BIND_TTL_S),
        log_cap=cap,
    )


def renewal(request: pb.RenewRequest) -> float:
    return check_ttl("ttl", seconds(request.ttl))


def traceparent(text: str) -> str:
    """`text` where it is one; a wrong one is no reason to refuse a launch."""
    return text if _TRACEPARENT.fullmatch(text) else ""


def seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos * 1e-9


def describe(message: pb.Lease, lease: Lease, now: float) -> None:
    """Fills in what the ledger knows."""
    message.lease_id = lease.id
    message.owner = lease.terms.owner
    message.state = _STATES[type(lease.state)]
    message.holders.extend(lease.state.holders)
    message.end_reason = lease.end_reason
    if lease.exit is not None:
        message.exit.CopyFrom(exit_message(lease.exit))
    if isinstance(lease.state, Offered | Claimed | Draining):
        left = max(0.0, lease.state.deadline - now)
        if left != float("inf"):
            message.time_left.FromNanoseconds(int(left * 1e9))


def exit_message(exit: Exit) -> pb.Exit:
    return pb.Exit(code=exit.code, signal=exit.signal)


def _ttl(request: pb.AcquireRequest, name: str, default: float) -> float:
    return check_ttl(name, seconds(getattr(request, name))) if request.HasField(name) else default  # type: ignore[arg-type]
