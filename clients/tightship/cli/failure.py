"""How commands fail: a message for stderr, and the exit status, which is the gRPC code."""

from __future__ import annotations

import contextlib
import errno
import json
from typing import TYPE_CHECKING

import click

from tightship.cli import hints, style
from tightship.client import where

if TYPE_CHECKING:
    from tightship.client import TightshipError

OK = 0
CANCELLED = 1
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
NOT_FOUND = 5
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14

# Of `run`, for any failure of ours.
RUN_FAILED = 125

# 128 + SIGPIPE: whoever read our output has gone.
BROKEN_PIPE = 141

# Of those that commands find themselves.
_NAMES = {
    CANCELLED: "CANCELLED",
    INVALID_ARGUMENT: "INVALID_ARGUMENT",
    DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    NOT_FOUND: "NOT_FOUND",
    PERMISSION_DENIED: "PERMISSION_DENIED",
    RESOURCE_EXHAUSTED: "RESOURCE_EXHAUSTED",
    FAILED_PRECONDITION: "FAILED_PRECONDITION",
    UNIMPLEMENTED: "UNIMPLEMENTED",
    INTERNAL: "INTERNAL",
    UNAVAILABLE: "UNAVAILABLE",
}

# In the meta of a click context: the command was asked for JSON.
JSON = "tightship.json"

# In which a failed call's facts are told; others follow.
_ORDER = ("field", "line", "column", "file", "value", "errno", "stage", "name")


class Failure(Exception):
    """Ends the command with the gRPC code and the message; `reason` and `metadata` are the service's, `step` is what
    to do next."""

    def __init__(
        self,
        code: int,
        message: str,
        name: str | None = None,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        *,
        step: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.name = name or _NAMES[code]
        self.reason = reason
        self.metadata = metadata or {}
        self.step = step

    def shown(self) -> str:
        keys = sorted(self.metadata, key=lambda key: (_ORDER.index(key) if key in _ORDER else len(_ORDER), key))
        facts = ", ".join(f"{key} {self.metadata[key]}" for key in keys if self.metadata[key])
        told = f"{style.paint(f'{self.code} {self.name}', 'red', 2)}: {self.message}"
        return told + (f"\n  {facts}" if facts else "") + (f"\n  next: {self.step}" if self.step else "")

    def json(self) -> str:
        """One line: `code` (number), `status` (its name), `reason`, `message`, `metadata`, `next` (step, or empty)."""
        return json.dumps(
            {
                "code": self.code,
                "status": self.name,
                "reason": self.reason,
                "message": self.message,
                "metadata": self.metadata,
                "next": self.step,
            },
            ensure_ascii=False,
        )


def say(text: str) -> None:
    """A line of ours on stderr, where that can be written."""
    _print(f"tightship: {text}")


def tell(failed: Failure, *, as_json: bool) -> None:
    """The failure on stderr."""
    if as_json:
        _print(failed.json())
    else:
        say(failed.shown())


def _print(line: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def of_system(error: OSError) -> Failure:
    """A system call that failed where nothing better is known: as a rule our output can't be written."""
    codes = {errno.ENOSPC: RESOURCE_EXHAUSTED, errno.EDQUOT: RESOURCE_EXHAUSTED, errno.EACCES: PERMISSION_DENIED}
    what = error.filename or "can't write the output"
    return Failure(codes.get(error.errno or 0, INTERNAL), f"{what}: {error.strerror}")


def of_directory(directory: str, error: OSError) -> Failure:
    """A run directory that can't be used."""
    if isinstance(error, PermissionError):
        return Failure(PERMISSION_DENIED, f"{directory}: {error.strerror}; run it as root, or as a user of its group")
    return Failure(FAILED_PRECONDITION, f"run directory {directory}: {error.strerror}; use another --run-dir")


def failed_call(error: TightshipError, directory: str, *, embedded: bool = False) -> Failure:
    """A failed call on the pair of the run directory, with all that the service tells, for people."""
    if error.number == UNAVAILABLE and not error.reason:
        remote = [
            target
            for each in ("containerizer", "switchboard")
            if not (target := where.address(directory, each)).startswith("/")
        ]
        if remote:
            place = " and ".join(remote)
            step = "look whether it runs there, and at TIGHTSHIP_TLS_CA, TIGHTSHIP_TLS_CERT and TIGHTSHIP_TLS_KEY"
        else:
            place, step = directory, "" if embedded else "look: tightship doctor; start: tightship up -d"
        return Failure(UNAVAILABLE, f"a service on {place} is away: {error.message}", step=step)
    step = hints.following(error.code.name, error.reason, error.metadata)
    return Failure(error.number, error.message, error.code.name, error.reason, error.metadata, step=step)


def no_service(directory: str) -> Failure:
    where = "" if directory == "/run/tightship" else f" --run-dir {directory}"
    return Failure(UNAVAILABLE, f"no service on {directory}", step=f"start one: tightship{where} up -d")
