"""One service under the supervisor: its command, its process, and when it is started again."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from tightship.common.rundir import RunDir
from tightship.kernel import process

# A start that lasts this long (s) resets the backoff.
_GOOD_S = 10.0
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0


class Service:
    """A child process that should run. At most one at a time."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.command = command
        self.pid: int | None = None
        self.due = 0.0
        """When it may be started (monotonic seconds), where it does not run."""
        self._started = 0.0
        self._backoff = _FIRST_BACKOFF_S

    def start(self, now: float) -> None:
        parent = os.getpid()
        self._started = now
        try:
            self.pid = os.fork()  # single-threaded here, so a fork is a fork
        except OSError:
            self._later(now)  # no memory or no process now
            return
        if self.pid == 0:
            try:
                self._become(parent)
            finally:
                os._exit(127)

    def ended(self, status: int) -> str:
        """Notes that its process was reaped with the wait status; says how it ended."""
        self.pid = None
        self._later(time.monotonic())
        code = os.waitstatus_to_exitcode(status)
        return f"exited with status {code}" if code >= 0 else f"was ended by a signal: {signal.strsignal(-code)}"

    def _later(self, now: float) -> None:
        if now - self._started > _GOOD_S:
            self._backoff = _FIRST_BACKOFF_S
        self.due = now + self._backoff
        self._backoff = min(2 * self._backoff, _LONGEST_BACKOFF_S)

    def signal(self, number: int) -> None:
        """To its process, where it runs: our child and not reaped yet, so the number is still its own."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _become(self, parent: int) -> None:
        """In the child: a session of its own (a terminal's Ctrl-C is the supervisor's), and its command."""
        try:
            os.setsid()
            process.set_parent_death_signal(signal.SIGTERM)
            if os.getppid() != parent:
                return  # the supervisor died before that
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            os.dup2(null, 0)
            os.dup2(2, 1)  # what a service prints is a log
            os.execv(self.command[0], self.command)  # noqa: S606  no shell is wanted
        except OSError as error:
            os.write(2, f"supervisor: can't start the {self.name}: {error}\n".encode())


def pair(run: RunDir) -> tuple[Service, Service]:
    """The spawner, which starts the containerizer, and the switchboard."""
    spawner = Path(__file__).parents[1] / "spawner" / "__main__.py"
    where = ["--run-dir", str(run.path)]
    return (
        Service("spawner", [sys.executable, "-I", "-S", str(spawner), *where]),
        Service("switchboard", [sys.executable, "-m", "tightship.switchboard", *where]),
    )
