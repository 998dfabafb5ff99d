"""execve(2) as the last of a child's calls, with files found by PATH as execvp(3) finds them."""

from __future__ import annotations

import os

from tightship.kernel.calls import LAST_SEARCHED, SEARCHED, Calls

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Program:
    """A command with its environment, ready to be executed.

    `environment` are `NAME=VALUE` strings, the whole of it; its PATH, or the default one, is where a command without a
    slash is looked for. Raises ValueError for an embedded NUL or an empty `argv`.
    """

    def __init__(self, argv: list[str], environment: list[str]) -> None:
        self._argv = [_encode(word) for word in argv]
        self._environment = [_encode(entry) for entry in environment]
        self._candidates = _candidates(argv, environment)

    def execute(self, calls: Calls, stage: str) -> None:
        """The last calls: the candidates one after another, until one is executed or is refused for good."""
        last = len(self._candidates) - 1
        for index, candidate in enumerate(self._candidates):
            flags = SEARCHED | (LAST_SEARCHED if index == last else 0)
            calls.add(stage, "execve", candidate, self._argv, self._environment, flags=flags)


def _encode(word: str) -> bytes:
    data = word.encode(errors="surrogateescape")
    if b"\0" in data:
        raise ValueError("embedded NUL")
    return data + b"\0"


def _candidates(argv: list[str], environment: list[str]) -> list[bytes]:
    if not argv:
        raise ValueError("empty argv")
    name = _encode(argv[0])
    if b"/" in name or name == b"\0":
        return [name]
    path = DEFAULT_PATH
    for entry in environment:
        if entry.startswith("PATH="):
            path = entry.removeprefix("PATH=")
            break
    # An empty element is the working directory.
    return [os.fsencode(directory or ".") + b"/" + name for directory in path.split(":")]
