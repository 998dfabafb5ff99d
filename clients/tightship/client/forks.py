"""What a fork of a process that uses clients means: gRPC does not survive it, so the child can't use any.

A child that never execs (of multiprocessing's "fork") has copies of the connections, though. If it kept them, a parent
that is killed would not be seen to be gone, and its containers would stay: so they are closed in the child.
"""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.parse
import weakref
from collections.abc import Iterable

_clients: weakref.WeakSet[object] = weakref.WeakSet()
_directories: set[str] = set()
_used_in = 0
_inherited: list[object] = []


def note(client: object, targets: Iterable[str]) -> None:
    """A client was made; `targets` are the gRPC targets that it may connect to."""
    global _used_in
    _clients.add(client)
    _used_in = os.getpid()
    for target in targets:
        if target.startswith("unix:"):
            path = urllib.parse.unquote(target.removeprefix("unix:").removeprefix("//"))
            _directories.add(os.path.dirname(os.path.abspath(path)))


def is_child() -> bool:
    """Whether this process was forked from one that had a client, and has not used exec since."""
    return _used_in not in (0, os.getpid())


def check() -> None:
    """Raises RuntimeError in a process that was forked from one that had a client."""
    if is_child():
        raise RuntimeError(
            "this process was forked from one that has used a tightship client, and gRPC does not survive that: "
            "fork before the first client is made, or use multiprocessing's start method 'spawn'"
        )


def _after_fork() -> None:
    # Their ends would wait for threads that are not here.
    _inherited.extend(_clients)
    if not _directories:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own, or a socket without a peer
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                peer = copy.getpeername() if copy.family == socket.AF_UNIX else ""
            if isinstance(peer, str) and os.path.dirname(peer) in _directories:
                os.dup2(null, int(name), inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_after_fork)
