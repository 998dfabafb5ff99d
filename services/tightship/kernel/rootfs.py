"""What a confined child makes of its mount namespace: its root, mounts, /proc, /dev, and kernel paths closed.

As calls to be made by it, see kernel/calls.py. Trees are cloned by descriptor while the host's paths are there, and
attached when the new root is the root: no symbolic link in it leads anywhere else. Sources: pivot_root(2), mount(2),
mount_setattr(2), open_tree(2) and move_mount(2), the OCI runtime specification on default devices.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from dataclasses import dataclass

from tightship.kernel import libc
from tightship.kernel.calls import NUMBERS, Calls

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
"""The nodes of /dev, with a pseudo-terminal file system of its own."""

_LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
# What tells of the host, or reaches its hardware; and what a write to would change for all.
_MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/kmsg",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
)
_MASKED_IN_SYS = ("/sys/firmware", "/sys/devices/virtual/powercap", "/sys/kernel/debug", "/sys/kernel/tracing")
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

# include/uapi/linux/mount.h
_MS_RDONLY = 0x1
_MS_NOSUID = 0x2
_MS_NODEV = 0x4
_MS_NOEXEC = 0x8
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_MS_SLAVE = 0x80000
_MNT_DETACH = 0x2
_OPEN_TREE_CLONE = 0x1
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOVE_MOUNT_T_SYMLINKS = 0x10
_ATTR_RDONLY = 0x1
_ATTR_NOSUID = 0x2
_ATTR_NODEV = 0x4
_ATTR_NOEXEC = 0x8
# struct mount_attr: set, clear, propagation, user namespace.
_MOUNT_ATTR = struct.Struct("=4Q")
# include/uapi/linux/fcntl.h and openat2.h
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_O_PATH = 0x200000
_RESOLVE_NO_MAGICLINKS = 0x2
_RESOLVE_NO_SYMLINKS = 0x04
_OPEN_HOW = struct.Struct("=3Q")
_PATH_MAX = 4096
# Bytes of a tmpfs for each file that it may hold, and how many more.
_TMPFS_FILE = 4096
_TMPFS_FILES = 16


@dataclass(frozen=True, slots=True)
class Bind:
    """A tree of the host's at `target`. `stage` is what its failures are told as, with `.source` or `.target`."""

    stage: str
    source: str
    target: str
    read_only: bool
    private: bool
    """Nothing that the host mounts below it later appears."""


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """An empty file system in memory at `target`, of so many bytes at most."""

    stage: str
    target: str
    size: int
    read_only: bool


class Descriptors:
    """The numbers that a child's opens get: always the lowest free one."""

    def __init__(self, taken: set[int]) -> None:
        self._taken = set(taken)

    def take(self) -> int:
        number = 0
        while number in self._taken:
            number += 1
        self._taken.add(number)
        return number

    def close(self, calls: Calls, stage: str, number: int) -> None:
        calls.add(stage, "close", number)
        self._taken.discard(number)


def probe() -> None:
    """Raises OSError where the kernel, or a filter, has not the latest of the calls made here: Linux 5.12."""
    packed = _MOUNT_ATTR.pack(0, 0, 0, 0)
    # It changes nothing.
    libc.syscall(
        NUMBERS["mount_setattr"], ctypes.c_int(_AT_FDCWD), b"/", ctypes.c_uint(0), packed, ctypes.c_size_t(len(packed))
    )


def confine(calls: Calls, root: str | None, mounts: tuple[Bind | Tmpfs, ...], descriptors: Descriptors) -> None:
    """In new mount and pid namespaces. Without `root` the host's files stay, devices and kernel paths apart."""
    trees = _clone_binds(calls, [each for each in mounts if isinstance(each, Bind)], descriptors)
    calls.add("mounts", "mount", 0, b"/\0", 0, _MS_REC | _MS_PRIVATE)
    nodes = {name: _clone_node(calls, f"/dev/{name}", descriptors) for name in DEVICES if _is_there(f"/dev/{name}")}
    if root is not None:
        _pivot(calls, "filesystem.rootfs", root, descriptors)
    else:
        _set(calls, "mounts", _AT_FDCWD, b"/\0", _AT_RECURSIVE, _ATTR_NODEV)
    calls.add("proc", "mount", b"proc\0", b"/proc\0", b"proc\0", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _make_dev(calls, "dev", nodes, descriptors)
    _close_kernel_paths(calls, "kernel paths", sys=root is None)
    for mount in mounts:
        stage = f"{mount.stage}.target"
        if isinstance(mount, Tmpfs):
            _mount_tmpfs(calls, stage, mount)
        else:
            _attach(calls, stage, trees.pop(0), mount.target, descriptors)


def replace_null(calls: Calls, stage: str, number: int, descriptors: Descriptors) -> None:
    """Puts the confined child's own /dev/null in the place of the host's: by that one a root could change its mode.

    A root inside may have made something else of it by now, but nothing that leads elsewhere.
    """
    how = _OPEN_HOW.pack(os.O_RDWR | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS)
    calls.add(stage, "openat2", _AT_FDCWD, b"/dev/null\0", how, len(how))
    opened = descriptors.take()
    calls.add(stage, "dup3", opened, number, 0)
    descriptors.close(calls, stage, opened)


def enter(calls: Calls, stage: str, directory: str, descriptors: Descriptors) -> None:
    """Makes it the working directory. It is inside the root: not reached through a magic link of /proc, and getcwd(2)
    tells a path, which leads there; what is outside has none ("(unreachable)/...")."""
    how = _OPEN_HOW.pack(_O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_NO_MAGICLINKS)
    calls.add(stage, "openat2", _AT_FDCWD, _path(directory), how, len(how))
    opened = descriptors.take()
    calls.add(stage, "fchdir", opened)
    descriptors.close(calls, stage, opened)
    room = bytearray(_PATH_MAX)
    calls.add(stage, "getcwd", room, len(room))
    calls.add(stage, "chdir", room)


def _clone_binds(calls: Calls, binds: list[Bind], descriptors: Descriptors) -> list[int]:
    if not all(bind.private for bind in binds):
        # The clones of slaves are slaves: they get what the host mounts, and the host gets nothing.
        calls.add("mounts", "mount", 0, b"/\0", 0, _MS_REC | _MS_SLAVE)
    trees = []
    for bind in binds:
        stage = f"{bind.stage}.source"
        tree = _clone(calls, stage, bind.source, descriptors, _AT_RECURSIVE)
        attributes = _ATTR_NOSUID | _ATTR_NODEV | (_ATTR_RDONLY if bind.read_only else 0)
        propagation = _MS_PRIVATE if bind.private else 0
        _set(calls, stage, tree, b"\0", _AT_EMPTY_PATH | _AT_RECURSIVE, attributes, propagation)
        trees.append(tree)
    return trees


def _mount_tmpfs(calls: Calls, stage: str, tmpfs: Tmpfs) -> None:
    flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if tmpfs.read_only else 0)
    # Empty files take no page: their number is what bounds the kernel's memory for them.
    options = f"mode=1777,size={tmpfs.size},nr_inodes={tmpfs.size // _TMPFS_FILE + _TMPFS_FILES}"
    calls.add(stage, "mount", b"tmpfs\0", _path(tmpfs.target), b"tmpfs\0", flags, options.encode() + b"\0")


def _pivot(calls: Calls, stage: str, root: str, descriptors: Descriptors) -> None:
    tree = _clone(calls, stage, root, descriptors, _AT_RECURSIVE)
    _set(calls, stage, tree, b"\0", _AT_EMPTY_PATH | _AT_RECURSIVE, _ATTR_NODEV)
    calls.add(
        stage, "move_mount", tree, b"\0", _AT_FDCWD, _path(root), _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_SYMLINKS
    )
    calls.add(stage, "fchdir", tree)
    # The old root is then on top of the new one, at its "/": pivot_root(2).
    calls.add(stage, "pivot_root", b".\0", b".\0")
    calls.add(stage, "umount2", b".\0", _MNT_DETACH)
    calls.add(stage, "chdir", b"/\0")
    descriptors.close(calls, stage, tree)


def _make_dev(calls: Calls, stage: str, nodes: dict[str, int], descriptors: Descriptors) -> None:
    flags = _MS_NOSUID | _MS_NOEXEC
    calls.add(stage, "umask", 0)
    calls.add(stage, "mount", b"tmpfs\0", b"/dev\0", b"tmpfs\0", flags, b"mode=755,size=64k\0")
    for name, tree in nodes.items():
        path = f"/dev/{name}"
        calls.add(stage, "mknodat", _AT_FDCWD, _path(path), stat.S_IFREG | 0o444, 0)
        _attach(calls, stage, tree, path, descriptors)
    for name, target in _LINKS.items():
        calls.add(stage, "symlinkat", _path(target), _AT_FDCWD, _path(f"/dev/{name}"))
    calls.add(stage, "mkdirat", _AT_FDCWD, b"/dev/pts\0", 0o755)
    options = b"newinstance,ptmxmode=0666,mode=0620\0"
    calls.add(stage, "mount", b"devpts\0", b"/dev/pts\0", b"devpts\0", flags, options)
    calls.add(stage, "mkdirat", _AT_FDCWD, b"/dev/shm\0", 0o755)
    options = b"mode=1777,size=64m\0"
    calls.add(stage, "mount", b"shm\0", b"/dev/shm\0", b"tmpfs\0", flags | _MS_NODEV, options)


def _close_kernel_paths(calls: Calls, stage: str, *, sys: bool) -> None:
    # The kernel is the same in every /proc: what is in ours is in the child's.
    for path in (*_MASKED, *(_MASKED_IN_SYS if sys else ())):
        if not _is_there(path):
            continue
        target = _path(path)
        if os.path.isdir(path):
            flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
            calls.add(stage, "mount", b"tmpfs\0", target, b"tmpfs\0", flags, b"size=4k\0")
        else:
            calls.add(stage, "mount", b"/dev/null\0", target, 0, _MS_BIND)
    for path in _READ_ONLY:
        if _is_there(path):
            calls.add(stage, "mount", _path(path), _path(path), 0, _MS_BIND | _MS_REC)
            _set(calls, stage, _AT_FDCWD, _path(path), _AT_RECURSIVE, _ATTR_RDONLY)
    if sys and _is_there("/sys"):
        _set(calls, stage, _AT_FDCWD, b"/sys\0", _AT_RECURSIVE, _ATTR_RDONLY)


def _clone(calls: Calls, stage: str, path: str, descriptors: Descriptors, flags: int = 0) -> int:
    calls.add(stage, "open_tree", _AT_FDCWD, _path(path), _OPEN_TREE_CLONE | os.O_CLOEXEC | flags)
    return descriptors.take()


def _clone_node(calls: Calls, path: str, descriptors: Descriptors) -> int:
    """Of a device of the host's. Read-only it is written to all the same, but its owner and mode stay."""
    tree = _clone(calls, "dev", path, descriptors)
    _set(calls, "dev", tree, b"\0", _AT_EMPTY_PATH, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NOEXEC)
    return tree


def _attach(calls: Calls, stage: str, tree: int, target: str, descriptors: Descriptors) -> None:
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_SYMLINKS
    calls.add(stage, "move_mount", tree, b"\0", _AT_FDCWD, _path(target), flags)
    descriptors.close(calls, stage, tree)


def _set(  # noqa: PLR0917
    calls: Calls, stage: str, base: int, path: bytes, flags: int, attributes: int, propagation: int = 0
) -> None:
    packed = _MOUNT_ATTR.pack(attributes, 0, propagation, 0)
    calls.add(stage, "mount_setattr", base, path, flags, packed, len(packed))


def _is_there(path: str) -> bool:
    return os.path.lexists(path)


def _path(path: str) -> bytes:
    return os.fsencode(path) + b"\0"
