"""The process above a pair on a machine without a container engine: `tightship up`.

It starts the spawner, which starts the containerizer, and the switchboard; starts either again when it dies, with
backoff; is a child subreaper, so that what a killed spawner leaves comes here, and reaps everything; and ends the
spawner's side first, then the switchboard, each within a bound. A service that ends with status 78 (EX_CONFIG of
sysexits.h) can't run as it is configured: then all ends, with that status.

With `--lifeline FD` the pair belongs to whoever holds the other end of that pipe: its hang-up ends everything, and what
the instance has left is removed, with the run directory. Standard library only; run with `python -I -S`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tightship.common.rundir import RunDir, RunDirError
from tightship.common.timestamps import rfc3339
from tightship.kernel import process
from tightship.supervisor.services import Service, pair

EX_CONFIG = 78

# Over a containerizer's own bound for its shutdown, and a switchboard's (5 s).
_SPAWNER_STOP_S = 20.0
_SWITCHBOARD_STOP_S = 8.0
_SWEEP_S = 20.0

# How long a dead spawner's containerizer may take to end before a new spawner starts its own.
_ORPHAN_S = 3.0

# Variables by which the services of a lasting pair let others in.
_DOORS = (
    "TIGHTSHIP_CONTAINERIZER_LISTEN", "TIGHTSHIP_SWITCHBOARD_LISTEN", "TIGHTSHIP_CLIENTS", "TIGHTSHIP_GROUP",
    "TIGHTSHIP_PEER_UID",
)  # fmt: skip

_READY_POLL_S = 0.03
_LOG_POLL_S = 5.0
_LOG_MAX = 8 << 20


class Supervisor:
    def __init__(self, run: RunDir, lifeline: int | None, ready: int | None, log: Path | None) -> None:
        self.run_dir = run
        self.spawner, self.switchboard = self.services = pair(run)
        self.lifeline = lifeline
        self.ready = ready
        self.log = log
        self.is_ready = False
        self.status = 0
        self.stopping = False
        self.stop_signals = 0
        self._log_looked_at = 0.0
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop_asked)
        # `tightship up` blocks them: one that came while this process was starting comes now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))

    def serve(self) -> int:
        """Until a signal, the lifeline's hang-up or a configuration error. The exit status."""
        while not self.stopping:
            now = time.monotonic()
            for service in self.services:
                if service.pid is None and now >= service.due and not self._orphan(service, now):
                    service.start(now)
            self._wait(min((each.due for each in self.services if each.pid is None), default=now + 60.0))
            self._look()
        self._end(self.spawner, _SPAWNER_STOP_S)
        self._end(self.switchboard, _SWITCHBOARD_STOP_S)
        if self.lifeline is not None:
            self._sweep()
        return self.status

    def _stop_asked(self, _number: int, _frame: object) -> None:
        self.stopping = True
        self.stop_signals += 1

    def _wait(self, until: float) -> None:
        """Until something happens, or the time; reaps."""
        now = time.monotonic()
        until = min(until, now + (_LOG_POLL_S if self.log else 60.0), now + (60.0 if self.is_ready else _READY_POLL_S))
        watched = [self._wake] if self.lifeline is None or self.stopping else [self._wake, self.lifeline]
        readable, _, _ = select.select(watched, [], [], max(0.0, until - now))
        if self._wake in readable:
            os.read(self._wake, 4096)
        if self.lifeline in readable:
            self.stopping = True
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for service in self.services:
                if service.pid == pid:
                    how = service.ended(status)
                    if self.stopping:
                        continue
                    if os.waitstatus_to_exitcode(status) == EX_CONFIG:
                        _say(f"the {service.name} can't run as it is configured; see above")
                        self.stopping, self.status = True, EX_CONFIG
                    else:
                        _say(f"the {service.name} {how}; starting it again")

    def _orphan(self, service: Service, now: float) -> bool:
        """Whether a new spawner has to wait for the containerizer of the one before, which ends by itself."""
        if service is not self.spawner or now > service.due + _ORPHAN_S:
            return False
        try:
            holder = (self.run_dir.path / "lock.containerizer").read_text().strip()
        except FileNotFoundError:
            return False
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if holder not in children:
            return False
        time.sleep(_READY_POLL_S)
        self._reap()
        return True

    def _look(self) -> None:
        """Tells once that both services accept calls; keeps the log short."""
        sockets = (self.run_dir.switchboard_sock, self.run_dir.containerizer_sock)
        if not self.is_ready and all(map(_accepts, sockets)):
            self.is_ready = True
            if self.ready is not None:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self.ready, b"ready\n")
                os.close(self.ready)
            if self.lifeline is None:
                _say(f"up: run directory {self.run_dir.path}, instance {self.run_dir.instance()}, pid {os.getpid()}")
        now = time.monotonic()
        if self.log is not None and now > self._log_looked_at + _LOG_POLL_S:
            self._log_looked_at = now
            _cut(self.log)

    def _end(self, service: Service, bound_s: float) -> None:
        """Ends a service: SIGTERM, and SIGKILL after the bound or a second stop signal."""
        begun = time.monotonic()
        asked = self.stop_signals
        service.signal(signal.SIGTERM)
        while service.pid is not None and time.monotonic() < begun + bound_s and self.stop_signals <= max(asked, 1):
            self._wait(begun + bound_s)
        if service.pid is not None:
            _say(f"the {service.name} did not end within {time.monotonic() - begun:.1f} s; killed")
            service.signal(signal.SIGKILL)
            while service.pid is not None:
                self._wait(time.monotonic() + 1.0)

    def _sweep(self) -> None:
        """Kills and removes what the instance has left, and the run directory."""
        command = [sys.executable, "-m", "tightship.containerizer", "sweep", "--run-dir", str(self.run_dir.path)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, timeout=_SWEEP_S, check=False)


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fsencode(path))
        except OSError:
            return False
    return True


def _cut(log: Path) -> None:
    """Keeps a log within twice the bound: what is over goes to `.1`, whose older text is lost."""
    try:
        if log.stat().st_size < _LOG_MAX:
            return
        # The writers append to this very file, so it is copied and emptied, not renamed.
        log.with_name(log.name + ".1").write_bytes(log.read_bytes()[-_LOG_MAX:])
        os.truncate(log, 0)
    except OSError as error:
        _say(f"can't cut {log}: {error.strerror}")


def _say(text: str) -> None:
    line = f"tightship: {text}\n"
    if os.environ.get("TIGHTSHIP_LOG_FORMAT") == "json":
        line = (
            json.dumps({"time": rfc3339(time.time()), "level": "INFO", "service": "supervisor", "message": text}) + "\n"
        )
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


def main() -> int:
    parser = argparse.ArgumentParser(prog="tightship-supervisor", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--lifeline", type=int, metavar="FD", help="read end of a pipe whose hang-up ends everything")
    parser.add_argument("--lock", type=int, metavar="FD", help="the run directory's lock.supervisor, taken already")
    parser.add_argument("--ready", type=int, metavar="FD", help="gets a line when both services accept calls")
    parser.add_argument("--log", action="store_true", help="write to service.log of the run directory")
    options = parser.parse_args()
    for fd in (options.lifeline, options.lock, options.ready):
        if fd is not None:
            os.set_inheritable(fd, False)
    try:
        run = RunDir.open(options.run_dir)
        if options.lock is None:
            run.lock("supervisor")
        else:
            os.ftruncate(options.lock, 0)
            os.pwrite(options.lock, f"{os.getpid()}\n".encode(), 0)
        log = run.path / "service.log" if options.log else None
        if log is not None:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.close(fd)
    except (RunDirError, OSError) as error:
        _say(str(error))
        return EX_CONFIG
    os.chdir("/")
    if options.lifeline is not None:
        os.environ["TIGHTSHIP_EPHEMERAL"] = "1"  # the containerizer destroys all at its end, detached too
        for name in _DOORS:
            os.environ.pop(name, None)  # it has one client, and must not take another pair's addresses
    process.set_child_subreaper()
    return Supervisor(run, options.lifeline, options.ready, log).serve()


if __name__ == "__main__":
    sys.exit(main())
