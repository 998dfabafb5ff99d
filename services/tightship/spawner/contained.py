"""A contained process as the spawner keeps it: its identity, its pidfd, and how it ended until that is acknowledged."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from tightship.common.packets import Packet
from tightship.kernel import process
from tightship.kernel.fdframes import ExitKind
from tightship.spawner.loop import Loop

KINDS = {ExitKind.EXITED: "exited", ExitKind.SIGNALLED: "signalled", ExitKind.UNKNOWN: "unknown"}


class Ending:
    """How a process ended, and when (monotonic ns). `cpu_us` is None where nobody told."""

    __slots__ = ("cpu_us", "execed", "kind", "time", "value")

    def __init__(self, status: int | None, execed: bool, cpu_us: int | None = None) -> None:
        """`status` is a wait status, None where nobody knows."""
        self.time = time.monotonic_ns()
        self.execed = execed
        self.cpu_us = cpu_us
        if status is None:
            self.kind, self.value = ExitKind.UNKNOWN, 0
        elif os.WIFSIGNALED(status):
            self.kind, self.value = ExitKind.SIGNALLED, os.WTERMSIG(status)
        else:
            self.kind, self.value = ExitKind.EXITED, os.WEXITSTATUS(status)

    def fields(self) -> Packet:
        fields: Packet = {"status": {"kind": KINDS[self.kind], "value": self.value}, "time": self.time}
        if self.cpu_us is not None:
            fields["rusage"] = {"cpu_us": self.cpu_us}
        return fields


class Contained:
    """States: claiming, claimed, ready, opening, opened, failed, exited. `pid` is 0 and `pidfd` -1 before the clone."""

    def __init__(self, launch_id: str, meta: object) -> None:
        self.id = launch_id
        self.meta = meta
        self.state = "claiming"
        self.pid = 0
        self.start = 0
        self.pidfd = -1
        self.ending: Ending | None = None

    def descriptors(self) -> list[int]:
        return [] if self.pidfd < 0 else [self.pidfd]

    def signal(self, number: int) -> None:
        """Raises OSError: ESRCH where it has ended."""
        if self.pidfd < 0:
            raise ProcessLookupError
        signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close_pidfd(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def forgotten(self) -> None:
        """It is acknowledged, and out of the table."""

    def entry(self) -> Packet:
        """What HELLO tells of it."""
        entry: Packet = {
            "launch": self.id,
            "state": self.state,
            "pid": self.pid,
            "start": self.start,
            "meta": self.meta,
        }
        if self.ending is not None:
            entry.update(self.ending.fields())
        return entry

    def exited_event(self) -> Packet:
        assert self.ending is not None
        return {"id": 0, "event": "exited", "launch": self.id, **self.ending.fields()}


class Adopted(Contained):
    """A process of an earlier spawner: not our child, so watched by its pidfd, and somebody else reaps it."""

    # Until it is reaped the kernel keeps the status to its parent.
    _STATUS_POLL_S = 0.01
    _STATUS_WAIT_S = 2.0

    def __init__(self, loop: Loop, launch_id: str, meta: object, pid: int, stat: process.Stat, pidfd: int) -> None:  # noqa: PLR0917
        """Owns `pidfd` from now on."""
        super().__init__(launch_id, meta)
        self.state = "opened"
        self.pid = pid
        self.start = stat.start
        self.pidfd = pidfd
        self._loop = loop
        self._execed = stat.execed
        self._ended: Callable[[], None] | None = None
        self._give_up = 0.0

    def watch(self, ended: Callable[[], None]) -> None:
        """Calls `ended` when it has ended and what is to be known of that is known."""
        self._ended = ended
        self._loop.watch(self.pidfd, self._ready)

    def _ready(self, _: int) -> None:
        self._loop.forget(self.pidfd)
        self._give_up = time.monotonic() + self._STATUS_WAIT_S
        self._look()

    def _look(self) -> None:
        status = process.exit_status(self.pidfd)
        if status is None and time.monotonic() < self._give_up:
            self._loop.later(self._STATUS_POLL_S, self._look)
            return
        self.ending = Ending(status, self._execed)
        self.state = "exited"
        self.close_pidfd()
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()
