"""How commands fail: a message for stderr, and the exit status, which is the gRPC code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tightship.client import TightshipError

OK = 0
CANCELLED = 1
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
NOT_FOUND = 5
PERMISSION_DENIED = 7
FAILED_PRECONDITION = 9
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14

# 128 + SIGPIPE: whoever read our output has gone.
BROKEN_PIPE = 141

# Of those that commands find themselves.
_NAMES = {
    CANCELLED: "CANCELLED",
    INVALID_ARGUMENT: "INVALID_ARGUMENT",
    DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    NOT_FOUND: "NOT_FOUND",
    PERMISSION_DENIED: "PERMISSION_DENIED",
    FAILED_PRECONDITION: "FAILED_PRECONDITION",
    UNIMPLEMENTED: "UNIMPLEMENTED",
    INTERNAL: "INTERNAL",
    UNAVAILABLE: "UNAVAILABLE",
}

# In which a failed call's facts are told; others follow.
_ORDER = ("field", "line", "column", "file", "value", "errno", "stage", "name")


class Failure(Exception):
    """Ends the command with the gRPC code and the message."""

    def __init__(self, code: int, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.name = name or _NAMES[code]

    def shown(self) -> str:
        return f"{self.code} {self.name}: {self.message}"


def failed_call(error: TightshipError, directory: str, *, embedded: bool = False) -> Failure:
    """A failed call on the pair of the run directory, with all that the service tells, for people."""
    message = error.message
    if error.number == UNAVAILABLE and not error.reason:
        do = "" if embedded else "; look with `tightship list`, start with `tightship up -d`"
        message = f"a service on {directory} is away: {message}{do}"
    keys = sorted(error.metadata, key=lambda key: (_ORDER.index(key) if key in _ORDER else len(_ORDER), key))
    facts = [f"{key} {error.metadata[key]}" for key in keys if error.metadata[key]]
    if facts:
        message += f"\n  {', '.join(facts)}"
    return Failure(error.number, message, error.code.name)


def no_service(directory: str) -> Failure:
    where = "" if directory == "/run/tightship" else f" --run-dir {directory}"
    return Failure(UNAVAILABLE, f"no service on {directory}; start one: tightship{where} up -d")
