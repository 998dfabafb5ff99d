"""Profiles of system calls as files: JSON in the form of the OCI runtime specification's `linux.seccomp`.

What is read is checked whole, and what isn't known is refused by its place in the file: a key passed over might be what
makes the filter tight. Source: config-linux.md of the runtime specification.
"""

from __future__ import annotations

import json
from typing import Any

from tightship.common.errors import ServiceError, errno_name, invalid
from tightship.kernel import inroot

FIELD = "security.seccomp_profile"

# include/seccomp.h of libseccomp.
_ACTIONS = {
    "SCMP_ACT_ALLOW": 0x7FFF0000,
    "SCMP_ACT_KILL": 0x00000000,
    "SCMP_ACT_KILL_THREAD": 0x00000000,
    "SCMP_ACT_KILL_PROCESS": 0x80000000,
    "SCMP_ACT_TRAP": 0x00030000,
    "SCMP_ACT_LOG": 0x7FFC0000,
    "SCMP_ACT_ERRNO": 0x00050000,
}
_COMPARISONS = ("NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ")
_OPERATORS = {f"SCMP_CMP_{name}": number for number, name in enumerate(_COMPARISONS, 1)}

_SIZE_MAX = 1 << 20
_ERRNO_MAX = 4095
_EPERM = 1
_VALUE_MAX = 2**64 - 1
_RULES_MAX = 1024
_NAME_MAX = 64


def read(path: str) -> list[Any]:
    """[default action, rules] as the spawner takes it. Raises INVALID_ARGUMENT naming field, file and place."""
    try:
        given = json.loads(inroot.read("/", path, _SIZE_MAX))
    except OSError as error:
        raise invalid(
            FIELD, f"{path}: {error.strerror}", "FILE_NOT_FOUND", file=path, errno=errno_name(error.errno)
        ) from None
    except (ValueError, RecursionError):
        raise invalid(FIELD, f"{path} is no JSON", "BAD_PROFILE", file=path) from None
    return _Reader(path).profile(given)


class _Reader:
    def __init__(self, path: str) -> None:
        self._path = path

    def profile(self, given: object) -> list[Any]:
        table = self._table("", given, {"defaultAction", "defaultErrnoRet", "syscalls", "comment"})
        rules = table.get("syscalls", [])
        if not isinstance(rules, list) or len(rules) > _RULES_MAX:
            raise self._wrong("syscalls", f"must be a list of {_RULES_MAX} at most")
        default = self._action("defaultAction", table.get("defaultAction"), table.get("defaultErrnoRet", _EPERM))
        return [default, [self._rule(f"syscalls[{index}]", rule) for index, rule in enumerate(rules)]]

    def _rule(self, where: str, given: object) -> list[Any]:
        table = self._table(where, given, {"names", "action", "errnoRet", "args", "comment"})
        names = table.get("names")
        if not isinstance(names, list) or not names or not all(_is_name(name) for name in names):
            raise self._wrong(f"{where}.names", "must be a list of names")
        args = table.get("args") or []
        if not isinstance(args, list) or len(args) > 6:
            raise self._wrong(f"{where}.args", "must be a list of 6 at most")
        action = self._action(f"{where}.action", table.get("action"), table.get("errnoRet", _EPERM))
        return [names, action, [self._argument(f"{where}.args[{index}]", arg) for index, arg in enumerate(args)]]

    def _argument(self, where: str, given: object) -> list[int]:
        table = self._table(where, given, {"index", "value", "valueTwo", "op"})
        operator = _OPERATORS.get(str(table.get("op")))
        if operator is None:
            raise self._wrong(f"{where}.op", f"must be one of {' '.join(_OPERATORS)}")
        return [
            self._number(f"{where}.index", table.get("index"), 5),
            operator,
            self._number(f"{where}.value", table.get("value"), _VALUE_MAX),
            self._number(f"{where}.valueTwo", table.get("valueTwo", 0), _VALUE_MAX),
        ]

    def _action(self, where: str, given: object, number: object) -> int:
        action = _ACTIONS.get(given) if isinstance(given, str) else None
        if action is None:
            raise self._wrong(where, f"must be one of {' '.join(_ACTIONS)}")
        return action | self._number(where, number, _ERRNO_MAX) if given == "SCMP_ACT_ERRNO" else action

    def _number(self, where: str, given: object, highest: int) -> int:
        if type(given) is not int or not 0 <= given <= highest:
            raise self._wrong(where, f"must be a number of 0 to {highest}")
        return given

    def _table(self, where: str, given: object, keys: set[str]) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise self._wrong(where, "must be an object")
        unknown = sorted(set(given) - keys)
        if unknown:
            raise self._wrong(f"{where}.{unknown[0][:80]}".lstrip("."), "is not known")
        return given

    def _wrong(self, where: str, why: str) -> ServiceError:
        place = where or "the profile"
        return invalid(FIELD, f"{self._path}: {place} {why}", "BAD_PROFILE", file=self._path, key=where)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= _NAME_MAX and name.isascii() and "\0" not in name
