"""The run directory: names of its sockets and files, its locks, and how a socket appears in it.

Standard library only: the spawner imports this.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

DEFAULT = "/run/tightship"

# sun_path is 108 bytes with its closing NUL: unix(7).
SOCKET_PATH_MAX = 107

# Room for the suffix of a socket that is not published yet.
_UNPUBLISHED = ".new"


# What a pair may have written before it has an instance id, beside the switchboard's logs. The locks, by which a
# directory is known for a run directory, are last.
_EARLY = ("instance.*", "service.log*", "*.sock", "*.sock" + _UNPUBLISHED, "lock.*")


class RunDirError(Exception):
    """The run directory can't be used; the message says what to do."""


class RunDir:
    """Paths of one pair. `path` must be absolute."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """The run directory at `path`, made with mode 0750 where absent.

        Raises RunDirError when a socket in it would be over the kernel's limit, or it can't be made.
        """
        run = cls(Path(os.path.abspath(path)))
        longest = max((run.containerizer_sock, run.switchboard_sock, run.fd_sock, run.spawner_sock), key=_size)
        if _size(longest) + len(_UNPUBLISHED) > SOCKET_PATH_MAX:
            raise RunDirError(
                f"run directory {run.path} is too long: {longest} has {_size(longest)} bytes, and with"
                f" {len(_UNPUBLISHED)} of ours a Unix socket's path may have {SOCKET_PATH_MAX}; use a shorter --run-dir"
            )
        try:
            _make(run.path)
        except FileExistsError:
            raise RunDirError(f"run directory {run.path} is not a directory; use another --run-dir") from None
        except OSError as error:
            raise RunDirError(f"can't make run directory {run.path}: {error.strerror}; use --run-dir") from error
        return run

    @property
    def containerizer_sock(self) -> Path:
        return self.path / "containerizer.sock"

    @property
    def switchboard_sock(self) -> Path:
        return self.path / "switchboard.sock"

    @property
    def fd_sock(self) -> Path:
        return self.path / "fd.sock"

    @property
    def spawner_sock(self) -> Path:
        return self.path / "spawner.sock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def clients(self) -> Path:
        return self.path / "clients"

    def door(self, client: str, service: str) -> Path:
        """The socket of a client's own door. Raises RunDirError where it would be over the kernel's limit."""
        path = self.clients / client / f"{service}.sock"
        if _size(path) + len(_UNPUBLISHED) > SOCKET_PATH_MAX:
            raise RunDirError(
                f"the socket {path} of client {client} would have {_size(path)} bytes, and with {len(_UNPUBLISHED)} of"
                f" ours a Unix socket's path may have {SOCKET_PATH_MAX}; use a shorter --run-dir or name"
            )
        return path

    def journal(self, boot_id: str) -> Path:
        return self.path / f"journal-{boot_id}.db"

    def instance(self) -> str:
        """The instance id of this pair: 8 hex digits, made once. Raises RunDirError."""
        try:
            return self._instance()
        except OSError as error:
            raise _unusable(error, self.path) from error

    def _instance(self) -> str:
        file = self.path / "instance"
        with contextlib.suppress(FileNotFoundError):
            text = file.read_text().strip()
            if len(text) == 8 and all(c in "0123456789abcdef" for c in text):
                return text
            raise RunDirError(f"{file} does not hold an instance id of 8 hex digits; remove it if nothing runs")
        new = self.path / f"instance.{os.urandom(4).hex()}"  # a pid is not unique over namespaces
        new.write_text(os.urandom(4).hex() + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(new, file)  # the first one wins; rename would replace
        new.unlink()
        return file.read_text().strip()

    def lock(self, service: str) -> int:
        """Takes the lock of `service`; the descriptor holds it. Raises RunDirError when another has it."""
        file = self.path / f"lock.{service}"
        try:
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(error, self.path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise RunDirError(
                f"another {service} (pid {holder}) serves {self.path}; stop it or use another --run-dir"
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        return fd

    def remove_files(self) -> None:
        """Removes what a pair without an instance id may have written, and the directory when nothing else is in it."""
        import shutil  # heavy for the spawner, which imports this file

        if not self.logs.is_symlink():
            shutil.rmtree(self.logs, ignore_errors=True)
        for pattern in _EARLY:
            for file in self.path.glob(pattern):
                with contextlib.suppress(OSError):
                    file.unlink()
        with contextlib.suppress(OSError):
            self.path.rmdir()


def _make(path: Path) -> None:
    """With its own mode, and those above with theirs, whatever the umask is: a group must get through."""
    if path.is_dir():
        return
    for each, mode in (*((above, 0o755) for above in reversed(path.parents)), (path, 0o750)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, mode)
            os.chmod(each, mode)
    os.makedirs(path, exist_ok=True)  # raises where a file has its name


def _unusable(error: OSError, path: Path) -> RunDirError:
    return RunDirError(f"can't use run directory {path}: {error.strerror} ({error.filename}); use --run-dir")


def _size(path: Path) -> int:
    return len(os.fsencode(path))


@contextlib.contextmanager
def publishing(path: Path, mode: int, gid: int | None = None, users: tuple[int, ...] = ()) -> Iterator[Path]:
    """Gives a hidden path to bind and listen on; afterwards the socket appears at `path` by rename.

    Its mode and group, and the `users` that may connect beside its owner, are set before. So a client never finds a
    socket that does not accept yet, or that takes others. Call it with the service's lock held.
    """
    hidden = path.with_name(path.name + _UNPUBLISHED)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(hidden)
    old = os.umask(0o777 & ~mode)
    try:
        yield hidden
    finally:
        os.umask(old)
    os.chmod(hidden, mode)
    if gid is not None:
        os.chown(hidden, -1, gid)
    if users:
        from tightship.common import acl  # nothing for the spawner

        acl.set_users(hidden, users, acl.READ_WRITE)
    os.rename(hidden, path)


def seqpacket_listener(path: Path, users: tuple[int, ...] = (), backlog: int = 64) -> socket.socket:
    """A non-blocking, close-on-exec SOCK_SEQPACKET listener published at `path`, for us and `users` alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        with publishing(path, 0o600, users=users) as hidden:
            listener.bind(os.fsencode(hidden))
            listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener
