"""Users and groups of a spec as numbers, by the passwd and group files of the root that the command will have.

The files alone are read, not the name service, which may ask a network. Sources: passwd(5), group(5).
"""

from __future__ import annotations

import os
from typing import NamedTuple

from tightship.common.errors import Code, ServiceError, errno_name, invalid
from tightship.kernel import inroot

ID_MAX = 2**32 - 2
"""The last one means "no change" to chown(2)."""

_FILE_MAX = 1 << 20


class User(NamedTuple):
    uid: int
    gid: int


def user(root: str, given: str, field: str) -> User:
    """A name, or a number; of a number without an entry the group is the same number, never root's.

    Raises NOT_FOUND or INVALID_ARGUMENT naming `field`.
    """
    number = _number(given, field)
    for words in _entries(root, "etc/passwd", field, optional=number is not None):
        if len(words) < 4 or not (words[2].isdecimal() and words[3].isdecimal()):
            continue
        if words[0] == given if number is None else int(words[2]) == number:
            return User(int(words[2]), int(words[3]))
    if number is None:
        raise _unknown(root, "etc/passwd", given, field)
    return User(number, number)


def group(root: str, given: str, field: str) -> int:
    """Raises like `user`."""
    number = _number(given, field)
    if number is not None:
        return number
    for words in _entries(root, "etc/group", field, optional=False):
        if len(words) >= 3 and words[0] == given and words[2].isdecimal():
            return int(words[2])
    raise _unknown(root, "etc/group", given, field)


def _number(given: str, field: str) -> int | None:
    if not (given.isascii() and given.isdecimal()):
        return None
    if len(given) > 10 or int(given) > ID_MAX:
        raise invalid(field, f"{given[:20]} is not within 0 to {ID_MAX}", "OUT_OF_RANGE", value=given[:20])
    return int(given)


def _entries(root: str, path: str, field: str, *, optional: bool) -> list[list[str]]:
    try:
        text = inroot.read(root, path, _FILE_MAX).decode(errors="replace")
    except OSError as error:
        if optional:
            return []
        file = os.path.join(root, path)
        raise invalid(
            field, f"{file} can't be read: {error.strerror}", "UNKNOWN_USER", file=file, errno=errno_name(error.errno)
        ) from None
    return [line.split(":") for line in text.splitlines()]


def _unknown(root: str, path: str, given: str, field: str) -> ServiceError:
    file = os.path.join(root, path)
    return ServiceError(
        Code.NOT_FOUND, "UNKNOWN_USER", f"{field}: {given[:64]!r} is not in {file}", None, field=field, file=file
    )
