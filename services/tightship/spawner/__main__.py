"""`python -m tightship.spawner [--run-dir D] [--containerizer CMD... | --no-containerizer] [-- ARGUMENT...]`

Serves spawner.sock and keeps a containerizer running, which gets the ARGUMENTs. Without site-packages (`-I -S`, with
which it starts itself again) and with few modules: each page this process has is a page that each launch must map.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    if not (sys.flags.isolated and sys.flags.no_site):
        _words = [sys.executable, "-I", "-S", os.path.abspath(__file__), *sys.argv[1:]]
        os.execv(sys.executable, _words)  # noqa: S606 - this program again
    # -I and -S leave no path to us.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import gc
import resource
import signal
import time

from tightship.common.rundir import DEFAULT, RunDir, RunDirError, seqpacket_listener
from tightship.kernel import clone, process, signals
from tightship.spawner import audit
from tightship.spawner.child import Limits
from tightship.spawner.fdclient import Switchboard
from tightship.spawner.loop import Loop
from tightship.spawner.notices import notice
from tightship.spawner.server import Reply, Server
from tightship.spawner.service import REFUSED, Service

_USAGE = __doc__.split("\n", 1)[0] if __doc__ else ""
_LOCK_S = 5.0
_LOCK_POLL_S = 0.05


class UsageError(Exception):
    """The command line is wrong."""


class Arguments:
    """The command line. `containerizer` is None where none is to be started."""

    def __init__(self, words: list[str]) -> None:
        """Raises UsageError."""
        self.run_dir = os.environ.get("TIGHTSHIP_RUN_DIR") or DEFAULT
        self.containerizer: list[str] | None = []
        rest: list[str] = []
        if "--" in words:
            at = words.index("--")
            words, rest = words[:at], words[at + 1 :]
        while words:
            word = words.pop(0)
            if word == "--run-dir" and words:
                self.run_dir = words.pop(0)
            elif word == "--no-containerizer":
                self.containerizer = None
            elif word == "--containerizer" and words:
                self.containerizer, words = words, []
            else:
                raise UsageError(f"unexpected {word!r}")
        self.run_dir = os.path.abspath(self.run_dir)
        if self.containerizer is not None:
            default = [sys.executable, "-m", "tightship.containerizer", "--run-dir", self.run_dir]
            self.containerizer = [*(self.containerizer or default), *rest]


class Spawner:
    """The parts of the process, and what signals do with them."""

    def __init__(self, run: RunDir, command: list[str] | None, limits: Limits) -> None:
        self.status = 0
        self._run = run
        self._loop = Loop()
        self._signals = signals.open_signalfd(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
        self._lock = _lock(run)
        self._switchboard = Switchboard(self._loop, os.fspath(run.fd_sock))
        self._server = Server(
            self._loop, seqpacket_listener(run.spawner_sock), self._switchboard, limits, self._examine
        )
        self._service = None if command is None else Service(self._loop, command, limits, self._end)
        self._loop.watch(self._signals, self._signalled)

    def serve(self) -> None:
        """Returns when all is over; `status` is the exit status then."""
        self._switchboard.start()
        # From here on nothing that was made before is ever looked at by the collector, before or after a fork.
        gc.collect()
        gc.freeze()
        gc.disable()
        if self._service is not None:
            self._service.start()
        self._loop.run()

    def _signalled(self, _: int) -> None:
        for number in signals.read_signalfd(self._signals):
            if number == signal.SIGCHLD:
                self._reap()
            elif self._service is not None:
                self._service.stop()
            else:
                self._end(0)

    def _reap(self) -> None:
        """Hands each ended child to whom it belongs; orphans that became ours are just reaped.

        WNOWAIT keeps the zombie, and with it the pid, until its owner has taken the status. Stops are not asked for.
        """
        launches = self._server.around.children
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            launch = launches.get(ended.si_pid)
            if launch is not None:
                launch.child_ended()
            elif self._service is not None and self._service.pid == ended.si_pid:
                self._service.child_ended()
            else:
                os.waitpid(ended.si_pid, 0)

    def _end(self, status: int) -> None:
        self.status = status
        self._run.spawner_sock.unlink(missing_ok=True)
        self._server.end(self._loop.stop)

    def _examine(self, reply: Reply) -> None:
        own = {self._signals, self._lock, *self._loop.descriptors()}
        own.update(self._switchboard.descriptors(), self._server.descriptors())
        children = set(self._server.around.children)
        if self._service is not None:
            children.add(self._service.pid)
        reply({"ok": True, **audit.examine(own, children)})


def _lock(run: RunDir) -> int:
    """Waits a little: the one before may be ending. Raises RunDirError."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            return run.lock("spawner")
        except RunDirError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOCK_POLL_S)


def _own_descriptors() -> None:
    """Nothing inherited but 0, 1 and 2, and those open: so no descriptor we make or get is ever one of them."""
    clone.close_range(3, clone.LAST_FD)
    while (fd := os.open("/dev/null", os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _raise_limits() -> Limits:
    """Takes all the descriptors we may have; what is to be set back for children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return ()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return ((resource.RLIMIT_NOFILE, (soft, hard)),)


def main(words: list[str]) -> int:
    try:
        arguments = Arguments(words)
    except UsageError as error:
        os.write(2, f"{error}\nusage: {_USAGE}\n".encode())
        return 2
    _own_descriptors()
    signals.block_all()
    process.set_child_subreaper()
    os.umask(0o022)
    try:
        spawner = Spawner(RunDir.open(arguments.run_dir), arguments.containerizer, _raise_limits())
    except RunDirError as error:
        notice(str(error))
        return REFUSED
    spawner.serve()
    return spawner.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
