"""Segments: where the bytes of an output stream are, for whoever writes and whoever reads.

`<logs>/<lease id>/stdout` and `stderr` hold each kept byte at its own offset in the stream, so that an offset means the
same to the pump, to a reader and after a restart; bytes that were not kept are a gap, which is a hole or the missing
end of the file. A pump's thread writes a `Log`, the event loop reads it without a lock: the gap is noted before the
size grows over it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tightship.kernel.fdframes import Stream

NAMES = {Stream.STDOUT: "stdout", Stream.STDERR: "stderr"}

# Past this many gaps nothing more is kept: what is lost stays exact, and the list bounded.
GAPS_MAX = 256


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes from `start` up to `end` that were not kept."""

    start: int
    end: int
    reason: str


@dataclass(slots=True)
class Log:
    """One output stream. `size` counts all bytes written by the container, gaps included."""

    stream: Stream
    path: str
    size: int = 0
    ended: bool = False
    gaps: list[Gap] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return sum(gap.end - gap.start for gap in self.gaps)

    @property
    def full_of_gaps(self) -> bool:
        return len(self.gaps) >= GAPS_MAX

    def grow(self, count: int) -> None:
        """`count` bytes were kept at the end."""
        self.size += count

    def lose(self, count: int, reason: str) -> None:
        """`count` bytes at the end were not kept."""
        if count <= 0:
            return
        last = self.gaps[-1] if self.gaps else None
        end = self.size + count
        if last is not None and last.end == self.size and (last.reason == reason or self.full_of_gaps):
            self.gaps[-1] = Gap(last.start, end, last.reason)
        else:
            self.gaps.append(Gap(self.size, end, reason))
        self.size = end

    def gap_at(self, offset: int) -> Gap | None:
        """The gap that holds `offset`."""
        return next((gap for gap in self.gaps if gap.start <= offset < gap.end), None)

    def kept_until(self, offset: int, limit: int) -> int:
        """Where the kept bytes that begin at `offset` end, at most at `limit`."""
        return min([limit, *(gap.start for gap in self.gaps if gap.start > offset)])


class Store:
    """The directory of all segments."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root = str(root)
        os.makedirs(root, mode=0o700, exist_ok=True)

    def logs(self, lease_id: str) -> tuple[Log, Log]:
        """New, empty ones."""
        directory = f"{self._root}/{lease_id}/"  # not a Path: this is on the way of a launch
        return (
            Log(Stream.STDOUT, directory + NAMES[Stream.STDOUT]),
            Log(Stream.STDERR, directory + NAMES[Stream.STDERR]),
        )

    def found(self, lease_id: str) -> tuple[Log, Log]:
        """Those that a switchboard left which died: ended, as long as their files."""
        logs = self.logs(lease_id)
        for log in logs:
            log.ended = True
            try:
                log.size = os.stat(log.path).st_size
            except FileNotFoundError:
                pass
        return logs

    def lease_ids(self) -> Iterator[str]:
        """Every lease that has a directory."""
        with os.scandir(self.root) as entries:
            yield from (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def remove(self, lease_id: str) -> None:
        """Drops the segments of a lease; harmless when there are none. Blocks on a disk: not for an event loop."""
        shutil.rmtree(self.root / lease_id, ignore_errors=True)


def open_for_writing(path: str) -> int:
    """The segment file, with its directory. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)
