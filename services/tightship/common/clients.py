"""The clients file: who may come in through a door of its own, and what it may do there. docs/security.md has its keys.

TOML, with one `[[client]]` table each. What is unknown or wrong is a ConfigError that names the file and the key.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOPBACK = "loopback"
"""The entry of whoever comes in by TCP without TLS."""

LAUNCHES_MAX = 1000
CALLS_MAX = 1000

_UID_MAX = 2**32 - 2  # the last one means "no change" to chown(2)
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}\Z")
_PREFIX = re.compile(r"(/[A-Za-z0-9][A-Za-z0-9_.-]{0,254})+\Z")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}\Z")
_CERTIFICATE_MAX = 2048
_KEYS = frozenset({"name", "uid", "certificate", "prefixes", "launches_max", "calls_max", "run_as"})


class ConfigError(Exception):
    """A setting can't be used; the message names it, and the file and key where there are some."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One client. It has a `uid` or a `certificate`; the one named `loopback` has neither."""

    name: str
    prefixes: tuple[str, ...]
    """Names at or below these are its own; `("/",)` is all."""
    uid: int | None = None
    certificate: str | None = None
    """A URI or DNS name of its certificate, else the common name."""
    launches_max: int = LAUNCHES_MAX
    """Living containers that it made."""
    calls_max: int = CALLS_MAX
    """Calls open at the same time, at one service."""
    run_as: str | None = None
    """The user, name or uid, that its containers run as; None where specs may say."""


def load(path: Path) -> tuple[Entry, ...]:
    """Raises ConfigError."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise ConfigError(f"clients file {path}: everybody may write it: chmod o-w it")
            text = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"clients file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"clients file {path}: {error}") from None
    return _File(path).read(text)


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, text: dict[str, Any]) -> tuple[Entry, ...]:
        for key in text:
            if key != "client":
                raise self._wrong(key, "is no key of this file; it has [[client]] tables")
        tables = text.get("client", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise self._wrong("client", "must be [[client]] tables")
        entries = tuple(self._entry(f"client[{index}]", table) for index, table in enumerate(tables))
        for key in ("name", "certificate"):
            seen: set[str] = set()
            for index, entry in enumerate(entries):
                value = getattr(entry, key)
                if value is not None and value in seen:
                    raise self._wrong(f"client[{index}].{key}", f"{value!r} is another client's")
                seen.add(value)
        return entries

    def _entry(self, where: str, table: dict[str, Any]) -> Entry:
        for key in table:
            if key not in _KEYS:
                raise self._wrong(f"{where}.{key}", f"is unknown; there are {', '.join(sorted(_KEYS))}")
        name = table.get("name")
        if not isinstance(name, str) or not _NAME.match(name):
            raise self._wrong(f"{where}.name", "must be 1 to 32 of a-z 0-9 _ . - and start with a letter or digit")
        uid, certificate = table.get("uid"), table.get("certificate")
        known = [key for key in ("uid", "certificate") if key in table]
        if name == LOOPBACK:
            if known:
                raise self._wrong(f"{where}.{known[0]}", f"{LOOPBACK} has none: it is whoever is on the host")
        elif len(known) != 1:
            raise self._wrong(f"{where}.uid", "a client has either a uid or a certificate")
        if "uid" in table and not (type(uid) is int and 0 <= uid <= _UID_MAX):
            raise self._wrong(f"{where}.uid", f"must be a number of 0 to {_UID_MAX}")
        if "certificate" in table and not (isinstance(certificate, str) and 0 < len(certificate) <= _CERTIFICATE_MAX):
            raise self._wrong(f"{where}.certificate", "must be a name that its certificate has")
        return Entry(
            name=name,
            prefixes=self._prefixes(f"{where}.prefixes", table.get("prefixes")),
            uid=uid,
            certificate=certificate,
            launches_max=self._limit(f"{where}.launches_max", table.get("launches_max", LAUNCHES_MAX)),
            calls_max=self._limit(f"{where}.calls_max", table.get("calls_max", CALLS_MAX)),
            run_as=self._user(f"{where}.run_as", table.get("run_as")),
        )

    def _prefixes(self, where: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            raise self._wrong(where, 'must be a list of container names; ["/"] is all')
        for index, prefix in enumerate(value):
            if prefix != "/" and not (isinstance(prefix, str) and _PREFIX.match(prefix)):
                raise self._wrong(f"{where}[{index}]", f"{prefix!r} is no absolute container name")
        return tuple(value)

    def _user(self, where: str, value: object) -> str | None:
        if value is None:
            return None
        user = str(value) if type(value) is int else value
        if not isinstance(user, str) or not _USER.match(user):
            raise self._wrong(where, "must be a user's name or uid")
        if user.isdecimal() and not 0 <= int(user) <= _UID_MAX:
            raise self._wrong(where, f"must be a name, or a number of 0 to {_UID_MAX}")
        return user

    def _limit(self, where: str, value: object) -> int:
        if type(value) is not int or value < 1:
            raise self._wrong(where, "must be a number of 1 or more")
        return value

    def _wrong(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"clients file {self._path}: {key}: {why}")
