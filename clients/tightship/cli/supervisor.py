"""Starting and finding the process above a pair. Clients import no service: it is started as a program."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import select
import signal
import subprocess
import sys
import time

from tightship.cli.failure import INTERNAL, Failure, of_directory

# A machine under load may take seconds to import gRPC twice.
_READY_S = 30.0


def command(directory: str, *options: str) -> list[str]:
    """argv of the supervisor of the run directory."""
    spec = importlib.util.find_spec("tightship.supervisor")
    if spec is None or not spec.submodule_search_locations:
        raise Failure(INTERNAL, "the services are not installed here, only the client")
    program = os.path.join(next(iter(spec.submodule_search_locations)), "__main__.py")
    return [sys.executable, "-I", "-S", program, "--run-dir", directory, *options]


def start(directory: str, *options: str, fds: tuple[int, ...] = ()) -> tuple[subprocess.Popen[bytes], int]:
    """A supervisor in a session of its own, and the FD that tells when the pair is ready (see `await_ready`)."""
    ready, told = os.pipe()
    try:
        process = subprocess.Popen(
            command(directory, "--log", "--ready", str(told), *options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(told, *fds),
            start_new_session=True,
        )
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(told)
    return process, ready


def await_ready(ready: int, bound_s: float = _READY_S) -> bool:
    """Whether both services accept calls within the bound; closes the FD."""
    try:
        readable, _, _ = select.select([ready], [], [], bound_s)
        return bool(readable) and os.read(ready, 64) != b""
    finally:
        os.close(ready)


def log_size(directory: str) -> int:
    """Bytes of the services' log so far."""
    try:
        return os.stat(os.path.join(directory, "service.log")).st_size
    except OSError:
        return 0


def log_tail(directory: str, since: int = 0, lines: int = 15) -> str:
    """The last lines of the services' log, of what came after `since` bytes."""
    try:
        with open(os.path.join(directory, "service.log"), "rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


def running(directory: str) -> tuple[int, int] | None:
    """(pid, pidfd) of the supervisor that holds the run directory; None where there is none. Raises Failure."""
    try:
        lock = os.open(os.path.join(directory, "lock.supervisor"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise of_directory(directory, error) from None
    try:
        with contextlib.suppress(ValueError, ProcessLookupError):
            pid = int(os.pread(lock, 32, 0))
            pidfd = os.pidfd_open(pid)
            # Held after the pidfd is there and still by this pid: so the pidfd is the holder's.
            if _held(lock) and os.pread(lock, 32, 0).strip() == str(pid).encode():
                return pid, pidfd
            os.close(pidfd)
    finally:
        os.close(lock)
    return None


def stop(pidfd: int, bound_s: float) -> bool:
    """SIGTERM; whether it has ended within the bound. Raises PermissionError."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    return await_end(pidfd, bound_s)


def await_end(pidfd: int, bound_s: float) -> bool:
    """Whether the process has ended within the bound."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    until = time.monotonic() + bound_s
    while (left := until - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            return True
    return False


def _held(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False
