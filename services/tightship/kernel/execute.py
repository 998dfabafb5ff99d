"""execve(2) with everything encoded beforehand, and files found by PATH as execvp(3) finds them.

What a child between clone and exec allocates it pays with copied pages: so the parent makes the arrays.
"""

from __future__ import annotations

import ctypes

from tightship.kernel.calls import LAST_SEARCHED, SEARCHED, Calls

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Program:
    """A command with its environment, ready to be executed.

    `environment` are `NAME=VALUE` strings, the whole of it; its PATH, or the default one, is where a command without a
    slash is looked for. Raises ValueError for an embedded NUL or an empty `argv`.
    """

    def __init__(self, argv: list[str], environment: list[str]) -> None:
        self._argv = _array(argv)
        self._environment = _array(environment)
        self._candidates = [name + b"\0" for name in _candidates(argv, environment)]

    def execute(self, calls: Calls, stage: str) -> None:
        """The last calls: the candidates one after another, until one is executed or is refused for good."""
        calls.keep((self._argv, self._environment))
        argv = ctypes.addressof(self._argv)
        environment = ctypes.addressof(self._environment)
        last = len(self._candidates) - 1
        for index, candidate in enumerate(self._candidates):
            flags = SEARCHED | (LAST_SEARCHED if index == last else 0)
            calls.add(stage, "execve", candidate, argv, environment, flags=flags)


def _array(words: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [_encode(word) for word in words]
    return (ctypes.c_char_p * (len(encoded) + 1))(*encoded, None)


def _encode(word: str) -> bytes:
    data = word.encode(errors="surrogateescape")
    if b"\0" in data:
        raise ValueError("embedded NUL")
    return data


def _candidates(argv: list[str], environment: list[str]) -> list[bytes]:
    if not argv:
        raise ValueError("empty argv")
    name = _encode(argv[0])
    if b"/" in name or not name:
        return [name]
    path = DEFAULT_PATH
    for entry in environment:
        if entry.startswith("PATH="):
            path = entry.removeprefix("PATH=")
            break
    # An empty element is the working directory.
    return [(_encode(directory) or b".") + b"/" + name for directory in path.split(":")]
