"""Orders of spawner.sock as typed values: what a packet must hold, checked before anything is done."""

from __future__ import annotations

import binascii
import errno
from typing import TYPE_CHECKING

from tightship.common.packets import Packet
from tightship.kernel.clone import NAMESPACES
from tightship.kernel.execute import Program
from tightship.kernel.fdframes import TOKEN_SIZE

if TYPE_CHECKING:
    from tightship.spawner.isolation import Isolation  # nothing of it where nobody asks

# 2: LAUNCH may make its lease by TAKE, and be prepared alone until OPEN clones; orders with id 0.
# 3: LAUNCH may isolate.
# 4: LAUNCH may enter the namespaces of another launch.
VERSION = 4
LOWEST_VERSION = 1

TIMEOUT_S = 10.0
GATE_S = 30.0

# Seconds; no order may ask for more.
_TIMEOUT_MAX_S = 3600.0


class OrderError(Exception):
    """Why an order failed: the stage it was at, the errno, and words for it. It becomes the reply."""

    def __init__(self, stage: str, code: int, message: str = "") -> None:
        super().__init__(message)
        self.stage = stage
        self.errno = code
        self.message = message

    def reply(self) -> Packet:
        return {"ok": False, "stage": self.stage, "errno": self.errno, "message": self.message}


class LaunchOrder:
    """LAUNCH, ready for the child: nothing is left to be encoded after the clone."""

    __slots__ = (
        "acquire",
        "cgroup_v2",
        "cwd",
        "enter",
        "epoch",
        "gate_s",
        "hostname",
        "id",
        "isolation",
        "lease",
        "meta",
        "namespaces",
        "oom_score_adj",
        "prepare",
        "program",
        "stdin",
        "tasks_files",
        "timeout_s",
        "token",
        "traceparent",
        "umask",
    )

    def __init__(self, packet: Packet) -> None:
        """Raises OrderError naming the field."""
        self.id = text(packet, "launch")
        self.lease = text(packet, "lease")
        self.epoch = text(packet, "epoch")
        self.token = _token(packet)
        self.acquire = _acquire(packet)
        self.stdin = boolean(packet, "stdin", False)
        argv = _texts(packet, "argv")
        if not argv:
            raise bad("argv", "must not be empty")
        try:
            self.program = Program(argv, _texts(packet, "env"))
        except ValueError as error:
            raise bad("argv", str(error)) from None
        self.cwd = path(packet, "cwd", "/")
        self.umask = number(packet, "umask", 0o022, 0, 0o7777)
        self.cgroup_v2 = path(packet, "cgroup_v2", "") or None
        self.tasks_files = _texts(packet, "tasks_files")
        self.namespaces = tuple(_texts(packet, "namespaces"))
        if any(name not in NAMESPACES for name in self.namespaces):
            raise bad("namespaces", f"must be of {' '.join(NAMESPACES)}")
        self.hostname = text(packet, "hostname", "")
        if self.hostname and "uts" not in self.namespaces:
            raise bad("hostname", "needs the namespace uts")
        self.enter = text(packet, "enter", "")
        if self.enter and self.namespaces:
            raise bad("enter", "leaves no room for namespaces of its own")
        self.isolation = _isolation(packet, self.namespaces)
        adjustment = packet.get("oom_score_adj")
        self.oom_score_adj = None if adjustment is None else number(packet, "oom_score_adj", 0, -1000, 1000)
        self.meta: object = packet.get("meta")
        self.traceparent = text(packet, "traceparent", "")
        self.prepare = boolean(packet, "prepare", False)
        self.timeout_s = seconds(packet, "timeout_ms", TIMEOUT_S)
        self.gate_s = seconds(packet, "gate_ms", GATE_S)


def text(packet: Packet, field: str, default: str | None = None) -> str:
    """A string; absent or null is the default. Raises OrderError."""
    value = packet.get(field)
    if value is None:
        value = default
    if not isinstance(value, str) or "\0" in value:
        raise bad(field, "must be a string without NUL")
    return value


def number(packet: Packet, field: str, default: int | None, lowest: int, highest: int) -> int:
    """Raises OrderError."""
    value = packet.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise bad(field, f"must be an integer from {lowest} to {highest}")
    return value


def seconds(packet: Packet, field: str, default: float) -> float:
    """From milliseconds. Raises OrderError."""
    value = packet.get(field)
    return default if value is None else number(packet, field, None, 0, int(_TIMEOUT_MAX_S * 1000)) / 1000


def boolean(packet: Packet, field: str, default: bool) -> bool:
    """Raises OrderError."""
    value = packet.get(field, default)
    if not isinstance(value, bool):
        raise bad(field, "must be a bool")
    return value


def _texts(packet: Packet, field: str) -> list[str]:
    value = packet.get(field) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise bad(field, "must be a list of strings")
    return value


def path(packet: Packet, field: str, default: str) -> str:
    """An absolute path; absent or empty is the default. Raises OrderError."""
    value = text(packet, field, default) or default
    if value and not value.startswith("/"):
        raise bad(field, "must be an absolute path")
    return value


def _isolation(packet: Packet, namespaces: tuple[str, ...]) -> Isolation | None:
    given = packet.get("isolation")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise bad("isolation", "must be an object")
    from tightship.spawner.isolation import Isolation  # nothing of it where nobody asks

    isolation = Isolation(given)
    if isolation.confined and not isolation.entered and not {"mount", "pid"} <= set(namespaces):
        raise bad("isolation", "needs the namespaces mount and pid")
    return isolation


def _token(packet: Packet) -> bytes:
    try:
        token = bytes.fromhex(text(packet, "token"))
    except ValueError:
        token = b""
    if len(token) != TOKEN_SIZE:
        raise bad("token", f"must be {TOKEN_SIZE} bytes in hex")
    return token


def _acquire(packet: Packet) -> bytes | None:
    given = packet.get("acquire")
    if given is None:
        return None
    try:
        return binascii.a2b_base64(text(packet, "acquire"), strict_mode=True)
    except ValueError:
        raise bad("acquire", "must be base64") from None


def bad(field: str, message: str) -> OrderError:
    """The refusal of an order for one of its fields."""
    return OrderError("order", errno.EINVAL, f"{field} {message}")
