"""Requests checked before anything is made: what is wrong is INVALID_ARGUMENT naming the field. Pure.

Only what is surely wrong is refused; whether a command exists is the kernel's to say. Sources: execve(2) on limits of
arguments and environment.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping, Sequence

from google.protobuf.message import Message

from tightship.common.errors import invalid
from tightship.containerizer import spec
from tightship.v1 import containerizer_pb2 as pb

# include/uapi/linux/binfmts.h: MAX_ARG_STRLEN, with the closing NUL.
ARG_MAX = 131072
# fs/exec.c: three quarters of _STK_LIM.
_TOTAL_MAX = 6 << 20
_TOTAL_MIN = 131072
_POINTER = 8
_PATH_MAX = 4096

_REQUEST_ID = re.compile(r"[\x21-\x7e]{0,128}\Z")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,62}\Z")
_LABELS_MAX = 64
_LABEL_VALUE_MAX = 1024


def known(request: Message) -> None:
    """Raises INVALID_ARGUMENT naming the first field that the schema doesn't have."""
    found = spec.unknown_field(request)
    if found is not None:
        raise invalid(found, "no such field in this version", "UNKNOWN_FIELD")


def check_launch(request: pb.LaunchRequest) -> None:
    """All of a LaunchRequest but name and spec. Raises INVALID_ARGUMENT."""
    check_request_id(request.request_id)
    check_labels(request.labels)
    if not request.command:
        raise invalid("command", "a command is needed", "MISSING")
    if not request.command[0]:
        raise invalid("command[0]", "is empty")
    size = check_words("command", request.command)
    size_env = check_words("env", request.env)
    _check_environment(request.env)
    limit = total_max()
    if size + size_env > limit:
        field = "command" if size >= size_env else "env"
        raise invalid(
            field,
            f"command and environment have {size + size_env} bytes; the kernel's limit is {limit}",
            "TOO_LONG",
            value=size + size_env,
        )
    cwd = request.cwd
    if cwd and not cwd.startswith("/"):
        raise invalid("cwd", f"{cwd[:80]!r} is not absolute")
    if "\0" in cwd or len(cwd.encode()) >= _PATH_MAX:
        raise invalid("cwd", f"has a NUL byte, or {_PATH_MAX} bytes or more")
    if request.stdin not in pb.StdinMode.values():
        raise invalid("stdin", f"{request.stdin} is none of its values")
    spec.duration(request, "timeout", "timeout", positive=True)
    spec.duration(request, "max_lifetime", "max_lifetime", positive=True)
    if request.HasField("umask") and request.umask > 0o777:
        raise invalid("umask", f"{request.umask:#o} is not within 0 to 0o777", "OUT_OF_RANGE")
    if request.HasField("log_cap") and request.log_cap < 0:
        raise invalid("log_cap", f"{request.log_cap} is negative", "OUT_OF_RANGE")


def check_request_id(request_id: str) -> None:
    if not _REQUEST_ID.match(request_id):
        raise invalid("request_id", "has 128 printable ASCII characters at most, without blanks")


def check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > _LABELS_MAX:
        raise invalid("labels", f"{len(labels)} labels are over the limit of {_LABELS_MAX}")
    for key, value in labels.items():
        if not _LABEL.match(key):
            raise invalid(
                f'labels["{key[:64]}"]', "a key has 1 to 63 of [A-Za-z0-9_./-] and starts with a letter or digit"
            )
        if len(value.encode()) > _LABEL_VALUE_MAX or "\0" in value:
            raise invalid(f'labels["{key}"]', f"a value has {_LABEL_VALUE_MAX} bytes at most, and no NUL byte")


def check_words(field: str, words: Sequence[str]) -> int:
    """Bytes that argv or the environment take in the new program; raises INVALID_ARGUMENT naming the word."""
    total = 0
    for index, word in enumerate(words):
        size = (len(word) if word.isascii() else len(word.encode())) + 1
        if "\0" in word:
            raise invalid(f"{field}[{index}]", "has a NUL byte")
        if size > ARG_MAX:
            raise invalid(f"{field}[{index}]", f"has {size - 1} bytes; the kernel's limit is {ARG_MAX - 1}", "TOO_LONG")
        total += size + _POINTER
    return total


def total_max() -> int:
    """Bytes the kernel takes for argv and environment together, under our stack limit, which the child gets too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    quarter = _TOTAL_MAX if soft == resource.RLIM_INFINITY else soft // 4
    return max(_TOTAL_MIN, min(_TOTAL_MAX, quarter))


def _check_environment(env: Sequence[str]) -> None:
    seen: set[str] = set()
    for index, entry in enumerate(env):
        name, equals, _ = entry.partition("=")
        if not name or not equals:
            raise invalid(f"env[{index}]", f"{entry[:80]!r} is not NAME=VALUE")
        if name in seen:
            raise invalid(f"env[{index}]", f"{name[:80]!r} is set twice", "DUPLICATE")
        seen.add(name)
