"""A pair of services for one `tightship run`, where none is up. It ends with this process, however that ends.

The run directory is `<tmp>/tightship-<uid>/<random>`. The supervisor watches a pipe that we hold: when that hangs up,
also because we were killed, it ends the services and removes all that they made. What it could not remove is swept at
the next start, a few directories each: one whose lock is free is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import subprocess
import sys
import tempfile
import time

from tightship.cli import machine, supervisor
from tightship.cli.failure import FAILED_PRECONDITION, INTERNAL, PERMISSION_DENIED, UNAVAILABLE, Failure

# Over the bounds of the supervisor's own end.
_END_S = 55.0

# The longest socket path, unix(7), less the longest name in a run directory.
_PATH_MAX = 107 - len("/containerizer.sock.new")

# One that is being made has no lock yet for an instant.
_MAKING_S = 60.0

# Of dead pairs' directories so many are swept at a start: a command pays little for those before it.
_SWEPT_MAX = 4
_SWEPT_S = 10.0


class EmbeddedPair:
    """Started by `start`, ready after `await_ready`, gone after `stop`."""

    def __init__(self) -> None:
        missing = machine.missing()
        if missing is not None:
            raise Failure(PERMISSION_DENIED, missing)
        base = _base()
        self._sweep = _sweep_dead(base)
        self.directory, lock = _make(base)
        hang_up, self._lifeline = os.pipe()
        options = ("--lifeline", str(hang_up), "--lock", str(lock))
        try:
            self._process, self._ready = supervisor.start(self.directory, *options, fds=(hang_up, lock))
        finally:
            os.close(hang_up)
            os.close(lock)

    def await_ready(self) -> None:
        """Raises Failure with the log's tail."""
        if not supervisor.await_ready(self._ready):
            tail = supervisor.log_tail(self.directory)
            raise Failure(UNAVAILABLE, f"the services for this command did not start:\n{tail}")

    def stop(self) -> str | None:
        """Ends the services and removes everything; what could not be removed within the bound, if anything."""
        os.close(self._lifeline)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"the services on {self.directory} are still ending after {_END_S:.0f} s"
        finally:
            if self._sweep is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._sweep.wait(_SWEPT_S)
        if os.path.exists(self.directory):
            return f"{self.directory} could not be removed; the next `tightship run` tries again"
        return None


def _base() -> str:
    """The directory of this user's embedded pairs. Raises Failure where it is not ours alone."""
    for parent in (tempfile.gettempdir(), "/tmp"):  # noqa: S108  checked below
        base = os.path.join(parent, f"tightship-{os.geteuid()}")
        if len(os.fsencode(base)) + 9 > _PATH_MAX:
            continue
        with contextlib.suppress(FileExistsError):
            os.mkdir(base, 0o700)
        found = os.lstat(base)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise Failure(
                FAILED_PRECONDITION, f"{base} is not a directory of this user alone: remove it, or set TMPDIR"
            )
        return base
    raise Failure(INTERNAL, "no short temporary directory")


def _make(base: str) -> tuple[str, int]:
    """A run directory with its lock taken. It appears by rename, so nobody finds it without."""
    name = secrets.token_hex(4)
    hidden, path = os.path.join(base, f".{name}"), os.path.join(base, name)
    os.mkdir(hidden, 0o750)
    lock = os.open(os.path.join(hidden, "lock.supervisor"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(hidden, path)
    return path, lock


def _sweep_dead(base: str) -> subprocess.Popen[bytes] | None:
    """Starts a sweep of run directories whose pair is dead, some of them. It holds their locks meanwhile."""
    locks: dict[str, int] = {}
    try:
        names = os.listdir(base)
        secrets.SystemRandom().shuffle(names)  # some that can't be swept don't hold up others for ever
        for name in names:
            path = os.path.join(base, name)
            if name.startswith("."):
                _remove_unmade(path)
            elif (lock := _free_lock(path)) is not None:
                locks[path] = lock
                if len(locks) == _SWEPT_MAX:
                    break
        if not locks:
            return None
        return subprocess.Popen(
            [sys.executable, "-m", "tightship.containerizer", "sweep", "--", *locks],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # it may outlive us, and what it leaves is tried again
            pass_fds=(*locks.values(),),
            start_new_session=True,
            cwd="/",
        )
    finally:
        for lock in locks.values():
            os.close(lock)


def _free_lock(path: str) -> int | None:
    """The lock of the run directory, taken; None where its pair lives, or it is gone or nothing of ours."""
    try:
        lock = os.open(os.path.join(path, "lock.supervisor"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _remove_unmade(path: str) -> None:
    """A directory that was never given its name."""
    with contextlib.suppress(OSError):
        if time.time() - os.lstat(path).st_mtime > _MAKING_S:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, "lock.supervisor"))
            os.rmdir(path)
