"""The process above a pair under test: starts its services, starts again what dies, and leaves nothing at its end.

It does what `tightship up` does, without a backoff and by order of the test, so that a fault suite can kill a service a
thousand times. A child subreaper: what a killed spawner leaves comes here and is reaped. Its standard input is its
lifeline: when that ends, also because the test run was killed, it ends the services, kills and removes the cgroups of
their instance, and removes the run directory.

Orders, one a line: `start NAME` (where it does not run, and again whenever it dies), `hold NAME` (no new start when it
dies).
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / part) for part in (".", "services")]

from tests.harness.census import PLANTED, cgroup_bases  # noqa: E402  needs the path above
from tightship.kernel import process  # noqa: E402

_STOP_S = 6.0
# A service that can't start must not spin.
_AGAIN_S = 0.05


class Keeper:
    def __init__(self, config: dict[str, Any]) -> None:
        self.run_dir = Path(config["run_dir"])
        self.commands: dict[str, list[str]] = config["services"]
        self.environment: dict[str, str] = config["environment"]
        self.planted: str | None = config["planted"]
        """The service that inherits the write end of a pipe, as if somebody had forgotten one."""
        self.pipe = os.pipe2(os.O_CLOEXEC)
        self.kept: set[str] = set()
        self.running: dict[int, str] = {}

    def start(self, name: str) -> None:
        self.kept.add(name)
        if name in self.running.values():
            return
        log = str(self.run_dir / f"{name}.log")
        planted = [(os.POSIX_SPAWN_DUP2, self.pipe[1], PLANTED)] if name == self.planted else []
        pid = os.posix_spawn(
            self.commands[name][0],
            self.commands[name],
            self.environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                *planted,
            ],
            setsigdef=[signal.SIGPIPE, signal.SIGINT],
            setsigmask=[],
        )
        self.running[pid] = name

    def obey(self, order: str) -> None:
        verb, name = order.split()
        if verb == "start":
            self.start(name)
        else:
            self.kept.discard(name)

    def reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self.running.pop(pid, None)
            if name is None:
                continue
            if name in self.kept:
                time.sleep(_AGAIN_S)
                self.start(name)

    def finish(self) -> None:
        """Ends the services in order, then by force, and removes what the instance has left."""
        self.kept.clear()
        for name in ("spawner", "switchboard"):
            for pid, running in self.running.items():
                if running == name:
                    os.kill(pid, signal.SIGTERM)  # our child, not reaped: the number is its own
            self._await_end(name)
        for _ in range(100):
            for pid in _children():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # reaped since we looked; nothing else reaps our children
            left = [base for base in cgroup_bases(self._instance()) if not _remove(base)]
            self.reap()
            if not left and not _children():
                break
            time.sleep(0.02)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def _await_end(self, name: str) -> None:
        until = time.monotonic() + _STOP_S
        while name in self.running.values() and time.monotonic() < until:
            self.reap()
            time.sleep(0.01)

    def _instance(self) -> str:
        try:
            return (self.run_dir / "instance").read_text().strip()
        except FileNotFoundError:
            return ""


def _remove(base: Path) -> bool:
    """Kills what is in the cgroup tree at `base` and removes it; True when it is gone."""
    for directory, _, _ in os.walk(base, topdown=False):
        try:
            for pid in Path(directory, "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass
        try:
            os.rmdir(directory)
        except OSError:
            return False
    try:
        os.rmdir(base.parent)
    except OSError:
        pass  # another pair's
    return True


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except FileNotFoundError:
        return []


def main() -> None:
    process.set_child_subreaper()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    keeper = Keeper(json.loads(sys.argv[1]))
    pending = b""
    try:
        while True:
            ready, _, _ = select.select([0, wake_read], [], [])
            if wake_read in ready:
                os.read(wake_read, 4096)
            keeper.reap()
            if 0 in ready:
                data = os.read(0, 65536)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    keeper.obey(line.decode())
    finally:
        keeper.finish()


if __name__ == "__main__":
    main()
