"""The containerizer as the spawner's child: started, started again with backoff when it dies, ended with us."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable

from tightship.kernel import calls, clone, process, signals
from tightship.spawner.child import Limits
from tightship.spawner.loop import Loop, Timer
from tightship.spawner.notices import notice

_BACKOFF_FIRST_S = 0.05
_BACKOFF_MOST_S = 5.0
_HEALTHY_S = 10.0
_TERM_S = 20.0

REFUSED = 78
"""EX_CONFIG: a containerizer that ends so would end so again, and is not started again."""


class Service:
    """`ended` gets the status that the spawner is to end with, once the child is gone for good."""

    def __init__(self, loop: Loop, command: list[str], limits: Limits, ended: Callable[[int], None]) -> None:
        self._loop = loop
        self._command = command
        self._limits = limits
        self._ended = ended
        self.pid = 0
        self._began = 0.0
        self._backoff_s = _BACKOFF_FIRST_S
        self._stopping = False
        self._timer: Timer | None = None

    def start(self) -> None:
        self._timer = None
        self._began = time.monotonic()
        parent = os.getpid()
        calls.before_python_child()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(parent)
            finally:
                os._exit(127)
        self.pid = pid

    def stop(self) -> None:
        """SIGTERM, and SIGKILL 20 s later; then `ended`."""
        if self._stopping:
            return
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if self.pid == 0:
            self._ended(0)
            return
        os.kill(self.pid, signal.SIGTERM)  # a child of ours that is not reaped: the number is its own
        self._timer = self._loop.later(_TERM_S, self._kill)

    def child_ended(self) -> None:
        """The child is a zombie: reaps it."""
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if self._stopping:
            if self._timer is not None:
                self._timer.cancel()
            self._ended(0)
            return
        code = os.waitstatus_to_exitcode(status)
        if code == REFUSED:
            notice("the containerizer can't work as it is set up; not started again")
            self._ended(REFUSED)
            return
        if time.monotonic() - self._began >= _HEALTHY_S:
            self._backoff_s = _BACKOFF_FIRST_S
        how = f"signal {-code}" if code < 0 else f"status {code}"
        notice(f"the containerizer ended with {how}; starting it again in {self._backoff_s:.2f} s")
        self._timer = self._loop.later(self._backoff_s, self.start)
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MOST_S)

    def _kill(self) -> None:
        notice(f"the containerizer did not end within {_TERM_S:.0f} s of SIGTERM: killed")
        os.kill(self.pid, signal.SIGKILL)

    def _become(self, parent: int) -> None:
        clone.close_range(3, clone.LAST_FD)
        # Not SIGTERM: an orderly shutdown needs a spawner, and recovery is there for this.
        process.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            return
        for kind, limit in self._limits:
            resource.setrlimit(kind, limit)
        signals.unblock_all()
        try:
            os.execvp(self._command[0], self._command)  # noqa: S606 - our own service
        except OSError as error:
            os.write(2, f"tightship-spawner: can't start {self._command[0]}: {error.strerror}\n".encode())
