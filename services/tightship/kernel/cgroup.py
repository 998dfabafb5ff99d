"""The cgroup file system: where it is mounted, directories that carry our mark, control files, and killing and
removing what is inside one.

Everything blocks and is called from worker threads. Nothing here knows a container: a mark is text, and whether a
directory inside may be taken is the caller's to say. Sources: cgroups(7); Documentation/admin-guide/cgroup-v2.rst and
cgroup-v1/*.rst of the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

# The kernel lets only CAP_SYS_ADMIN of the first user namespace use `trusted.`; `user.` works on v2 since 5.7.
_ATTRIBUTES = ("trusted.tightship", "user.tightship")

# A directory of ours has the sticky bit from the mkdir itself, so that a crash before the mark leaves a trace.
_MODE = 0o1755

_PAGE = 4096

_PAUSES_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


def _none(_path: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted hierarchy. `controllers` of v1 are its names ("cpu", "cpuacct"); of v2 what it offers."""

    path: str
    version: int
    controllers: frozenset[str]
    writable: bool


def mounts(mountinfo: str = "/proc/self/mountinfo") -> list[Mount]:
    """Every cgroup mount this process sees: proc_pid_mountinfo(5). Named v1 hierarchies have no controller."""
    found = []
    with open(mountinfo) as file:
        for line in file:
            head, _, tail = line.partition(" - ")
            fs_type, _source, super_options = tail.split()[:3]
            if fs_type not in ("cgroup", "cgroup2"):
                continue
            words = head.split()
            path = words[4].encode().decode("unicode_escape")
            writable = "ro" not in words[5].split(",") and "ro" not in super_options.split(",")
            if fs_type == "cgroup2":
                names = _words(os.path.join(path, "cgroup.controllers"))
                found.append(Mount(path, 2, frozenset(names), writable))
            else:
                plain = {"rw", "ro", "xattr", "noprefix", "clone_children", "none"}
                names = [word for word in super_options.split(",") if word not in plain and "=" not in word]
                found.append(Mount(path, 1, frozenset(names), writable))
    return found


def make(path: str, mark: str) -> None:
    """Makes the directory and marks it. Raises OSError; FileExistsError where there is one, which is left alone."""
    os.mkdir(path, _MODE)
    for attribute in _ATTRIBUTES:
        try:
            os.setxattr(path, attribute, mark.encode())
            return
        except OSError as error:
            if attribute == _ATTRIBUTES[-1] or error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                raise


def mark_of(path: str) -> str | None:
    """The mark on the directory, None where there is none. Raises FileNotFoundError."""
    for attribute in _ATTRIBUTES:
        try:
            return os.getxattr(path, attribute).decode(errors="replace")
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise
    return None


def is_unfinished(path: str) -> bool:
    """Whether it is what a crash between our mkdir and our mark leaves: no mark, the sticky bit, our uid, empty."""
    try:
        status = os.stat(path)
        return (
            bool(status.st_mode & stat.S_ISVTX)
            and status.st_uid == os.geteuid()
            and mark_of(path) is None
            and not processes(path)
            and not children(path)
        )
    except OSError:
        return False


def read(path: str) -> str:
    """A control file's content without its last newline. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
    finally:
        os.close(fd)
    return b"".join(parts).decode(errors="replace").rstrip("\n")


def write(path: str, value: str) -> None:
    """Writes a control file in one write(2), as the kernel asks. Raises OSError, the refusal of the kernel."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def enable(path: str, controllers: Sequence[str]) -> None:
    """Lets the children of this v2 cgroup have these controllers. Raises OSError: EBUSY where it has processes."""
    if controllers:
        write(os.path.join(path, "cgroup.subtree_control"), " ".join(f"+{each}" for each in controllers))


def keyed(path: str, key: str) -> int | None:
    """The number after `key` in a flat keyed file such as cpu.stat; None where file or key is absent."""
    with contextlib.suppress(OSError, ValueError):
        for line in _read_page(path).splitlines():
            name, _, value = line.partition(b" ")
            if name == key.encode():
                return int(value)
    return None


def number(path: str) -> int | None:
    """The one number a control file holds; None where it is absent or holds none."""
    with contextlib.suppress(OSError, ValueError):
        return int(_read_page(path))
    return None


def _read_page(path: str) -> bytes:
    """A file of statistics, which the kernel gives in one read."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _PAGE)
    finally:
        os.close(fd)


def processes(path: str, *, threads: bool = False) -> list[int]:
    """Pids, or ids of threads, in this cgroup alone; empty when it is gone. Those of another pid namespace read 0."""
    name = "cgroup.procs" if not threads else "cgroup.threads"
    if threads and not os.path.exists(os.path.join(path, name)):
        name = "tasks"
    try:
        return [int(word) for word in read(os.path.join(path, name)).split()]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return []
        if error.errno == errno.EOPNOTSUPP:  # a threaded cgroup: its processes are listed by the domain above
            return []
        raise


def children(path: str) -> list[str]:
    """Names of the cgroups directly below; empty when it is gone."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def tree(path: str, spare: Callable[[str], bool] = _none, spared: list[str] | None = None) -> list[str]:
    """The cgroup and all below it, deepest first. Trees that `spare` takes are left out, and told in `spared`."""
    found = []
    todo = [path]
    while todo:
        here = todo.pop()
        found.append(here)
        for name in children(here):
            below = os.path.join(here, name)
            if not spare(below):
                todo.append(below)
            elif spared is not None:
                spared.append(below)
    found.reverse()
    return found


def populated(path: str) -> bool:
    """Whether a live process is in the cgroup or below."""
    told = keyed(os.path.join(path, "cgroup.events"), "populated")
    if told is not None:
        return bool(told)
    return any(processes(each) for each in tree(path))


def kill(path: str, spare: Callable[[str], bool] = _none) -> set[int]:
    """Kills once what is in the cgroup and below, but for trees whose path `spare` takes; the pids listed.

    cgroup.kill where the kernel has it (5.14) and nothing is spared; else each frozen cgroup's processes by pidfd:
    opened, listed again, signalled only when still listed, so that a recycled pid is never hit. Not waited for. Raises
    OSError.
    """
    spared: list[str] = []
    places = tree(path, spare, spared)
    listed = {pid for each in places for pid in processes(each)}
    if not listed:
        return listed
    switch = os.path.join(path, "cgroup.kill")
    if not spared and os.path.exists(switch):
        write(switch, "1")
    else:
        for each in places:
            _kill_frozen(each)
    return listed


def signal_all(path: str, number: int) -> int:
    """Signals every process in the cgroup and below, once, by pidfd; how many there were. Raises OSError."""
    if number == signal.SIGKILL:
        return len(kill(path))
    count = 0
    for each in tree(path):
        for pid in processes(each):
            with contextlib.suppress(ProcessLookupError):
                held = os.pidfd_open(pid)
                try:
                    # Listed still, so it is that process and not another of its number.
                    if pid in processes(each):
                        signal.pidfd_send_signal(held, number)
                        count += 1
                finally:
                    os.close(held)
    return count


def of_process(pid: int, base: str) -> str | None:
    """The directory at or below `base` that the process is in, or None. Raises OSError where there is no process."""
    where = read(f"/proc/{pid}/cgroup").splitlines()
    mount = next((each.path for each in mounts() if base.startswith(each.path + "/")), None)
    if mount is None:
        return None
    tail = base.removeprefix(mount)
    for line in where:
        inside = line.split(":", 2)[2]
        # A namespace of cgroups, or a bind mount, may hide what is above.
        at = (inside + "/").find(tail + "/")
        if at >= 0 and os.path.isdir(found := mount + inside[at:]):
            return found
    return None


@dataclass(slots=True)
class Removal:
    """What `remove` did. `left` says why a directory stayed, by path; empty when all is gone."""

    removed: list[str] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)


def remove(path: str, deadline: float, spare: Callable[[str], bool] = _none) -> Removal:
    """Removes the cgroup with all inside it, deepest first: kills, then rmdir until it is not busy.

    `deadline` is of time.monotonic(); one attempt is made in any case. Trees that `spare` takes stay, and what is above
    them. Never raises OSError: `left` tells.
    """
    done = Removal()
    attempt = 0
    while True:
        spared: list[str] = []
        try:
            busy = _remove_once(path, spare, spared, done)
        except OSError as error:
            busy = {path: error.strerror or str(error)}
        done.left = dict.fromkeys(spared, "belongs to a living container") | busy
        pause = _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]
        attempt += 1
        if not busy or time.monotonic() + pause > deadline:
            return done
        time.sleep(pause)


def _remove_once(path: str, spare: Callable[[str], bool], spared: list[str], done: Removal) -> dict[str, str]:
    """What is still busy, with why."""
    if not _try_rmdir(path, done):  # nearly always it is empty: one call, no listing
        return {}
    done.killed |= kill(path, spare)
    busy = {}
    for each in tree(path, spare, spared):
        if not any(kept.startswith(each + "/") for kept in spared) and (reason := _try_rmdir(each, done)):
            busy[each] = reason
    return busy


def _try_rmdir(path: str, done: Removal) -> str:
    """Why it is still there, or empty. Raises OSError where no later try can help."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return error.strerror or str(error)
    done.removed.append(path)
    return ""


def _kill_frozen(path: str) -> None:
    with _frozen(path):
        held: dict[int, int] = {}
        try:
            for pid in processes(path):
                if pid > 0:
                    with contextlib.suppress(OSError):
                        held[pid] = os.pidfd_open(pid)
            for pid in processes(path):
                if pid in held:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(held[pid], signal.SIGKILL)
        finally:
            for fd in held.values():
                os.close(fd)


@contextlib.contextmanager
def _frozen(path: str) -> Iterator[None]:
    """Frozen while inside, where the hierarchy can freeze (v2, or v1's freezer): nothing forks between the lists."""
    found = freezer_of(path)
    if found is None:
        yield
        return
    switch, on, off = found
    with contextlib.suppress(OSError):
        write(switch, on)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            write(switch, off)


def freezer_of(path: str) -> tuple[str, str, str] | None:
    """The control file that stops what is in the cgroup, with its words for that and for going on; v2's or v1's."""
    for name, on, off in (("cgroup.freeze", "1", "0"), ("freezer.state", "FROZEN", "THAWED")):
        switch = os.path.join(path, name)
        if os.path.exists(switch):
            return switch, on, off
    return None


def _words(path: str) -> list[str]:
    try:
        return read(path).split()
    except OSError:
        return []
