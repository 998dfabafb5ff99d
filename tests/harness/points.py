"""Failpoints from the test's side: a directory with a file for each armed point (docs/architecture.md, section 5)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tightship.common import failpoints


class Failpoints:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def arm(self, name: str, action: str) -> None:
        """`action` is "errno EIO", "wait", "kill" or "hit"; it appears whole."""
        new = self.directory / f".{name}.new"
        new.write_text(action + "\n")
        os.rename(new, self.directory / name)

    def disarm(self, name: str) -> None:
        """Releases a wait."""
        with contextlib.suppress(FileNotFoundError):
            (self.directory / name).unlink()

    def was_hit(self, name: str) -> bool:
        return (self.directory / f"{name}.hit").exists()

    def hit_by(self, name: str) -> list[int]:
        """Pids of the processes that reached the point, oldest first; a child's is that of its own pid namespace."""
        try:
            return [int(line) for line in (self.directory / f"{name}.hit").read_text().split()]
        except FileNotFoundError:
            return []

    def await_hit(self, name: str, timeout_s: float = 10.0) -> None:
        until = time.monotonic() + timeout_s
        while not self.was_hit(name):
            assert time.monotonic() < until, f"{name} was not reached within {timeout_s:g} s"
            time.sleep(0.002)

    def hits(self) -> set[str]:
        """Names of the points reached since `clear`."""
        return {path.name.removesuffix(".hit") for path in self.directory.glob("*.hit")}

    def clear(self) -> None:
        """Disarms everything and forgets the hits."""
        for path in list(self.directory.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    @contextlib.contextmanager
    def armed(self, name: str, action: str) -> Iterator[None]:
        self.arm(name, action)
        try:
            yield
        finally:
            self.disarm(name)


@dataclass(frozen=True)
class Generated:
    """What the code says of itself."""

    operations: dict[str, list[str]]
    """Operation (OPERATIONS of failpoint_names) to its points, in order."""
    cannot_fail: frozenset[str]
    """Points where an errno means nothing."""


def generated() -> Generated:
    out = subprocess.run(
        [sys.executable, "-m", "tightship.containerizer", "failpoints", "--json"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    lists = json.loads(out)
    return Generated(lists, failpoints.CANNOT_FAIL)
