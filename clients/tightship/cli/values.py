"""Values of options: durations, K=V pairs, and specs from an argument or a file."""

from __future__ import annotations

import os
import re
from typing import NoReturn

import click

from tightship.cli.failure import INVALID_ARGUMENT, NOT_FOUND, Failure

# As a FILE.
STDIN = "-"

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|s|m|h)?")
_LONGEST_S = 10 * 365.25 * 86400
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


class Seconds(click.ParamType[float]):
    """`2`, `1.5s`, `500ms`, `10m`, `1h`."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _DURATION.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no duration: write 2, 1.5s, 500ms, 10m or 1h", param, ctx)
        seconds = float(match[1]) * _UNITS[match[2]]
        if seconds > _LONGEST_S:
            self.fail(f"{value!r} is longer than ten years", param, ctx)
        return seconds


def pairs(given: tuple[str, ...], option: str) -> dict[str, str]:
    """`K=V` words as a mapping."""
    made = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise _usage(f"{option} {word!r}: write K=V")
        made[key] = value
    return made


def environment(given: tuple[str, ...]) -> dict[str, str]:
    """`K=V` words; `K` alone takes the caller's value."""
    made = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not equals and key in os.environ:
            value = os.environ[key]
        elif not (key and equals):
            raise _usage(f"--env {word!r}: write K=V, or the name of a variable that is set")
        if not is_text(value):
            raise _usage(f"--env {key}: the value is not UTF-8")
        made[key] = value
    return made


def is_text(word: str) -> bool:
    """Whether the word was UTF-8; Python keeps other bytes as lone surrogates, which no message can hold."""
    return not any("\ud800" <= letter <= "\udfff" for letter in word)


def spec(text: str | None, file: str | None) -> str | None:
    """The spec's text, from the argument or the file; None where neither is given."""
    if text is not None and file is not None:
        raise _usage("give the spec as text or as -c FILE, not both")
    if file is None:
        return text
    try:
        # Not sys.stdin, which has an encoding of its own.
        with open(0 if file == STDIN else file, encoding="utf-8", closefd=file != STDIN) as opened:
            return opened.read()
    except OSError as error:
        _unreadable(NOT_FOUND if isinstance(error, FileNotFoundError) else INVALID_ARGUMENT, file, error.strerror or "")
    except UnicodeDecodeError as error:
        _unreadable(INVALID_ARGUMENT, file, f"not UTF-8 text: byte {error.start}")


def _usage(message: str) -> click.UsageError:
    return click.UsageError(message, click.get_current_context())


def _unreadable(code: int, file: str, why: str) -> NoReturn:
    raise Failure(code, f"can't read the spec from {file}: {why}")
