"""What a new child does between clone3 and execve. Nothing here may return, log, or touch more memory than it must.

The order is that of docs/architecture.md. Each stage that fails is told on the status pipe as (stage, detail, errno).
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import struct

from tightship.common import failpoints
from tightship.kernel import namespaces, signals
from tightship.kernel.clone import LAST_FD, close_range
from tightship.kernel.fdframes import Stream
from tightship.spawner.orders import LaunchOrder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

STAGES = (
    "stdio",
    "cgroups",
    "session",
    "hostname",
    "mounts",
    "proc",
    "loopback",
    "namespaces",
    "limits",
    "oom_score_adj",
    "cwd",
    "umask",
    "process",
    "ready",
    "gate",
    "exec",
)
_NUMBER = {name: number for number, name in enumerate(STAGES)}

Limits = tuple[tuple[int, tuple[int, int]], ...]
"""RLIMIT numbers with (soft, hard)."""

READY = b"R"
FAILURE = struct.Struct("<cBHi")
"""`E`, stage, detail (the index of a tasks file), errno."""


class Prepared:
    """All that a child needs, made by the parent: what the child allocates it pays with copied pages.

    A stream that is not there is /dev/null. `limits` are to be set back to what the spawner was started with.
    """

    __slots__ = ("gaps", "gate", "limits", "order", "status", "stderr", "stdin", "stdout")

    def __init__(
        self,
        order: LaunchOrder,
        streams: dict[Stream, int],
        gate: int,
        status: int,
        limits: Limits,
    ) -> None:
        self.order = order
        self.stdin = streams.get(Stream.STDIN)
        self.stdout = streams[Stream.STDOUT]
        self.stderr = streams[Stream.STDERR]
        self.gate = gate
        self.status = status
        self.limits = limits
        own = sorted((*streams.values(), gate, status))
        starts = [3, *(fd + 1 for fd in own)]
        ends = [*(fd - 1 for fd in own), LAST_FD]
        self.gaps = [(start, end) for start, end in zip(starts, ends, strict=True) if start <= end]


def run(prepared: Prepared) -> NoReturn:
    """Becomes the contained process, or ends."""
    stage = "stdio"
    detail = 0
    code = errno.EIO
    try:
        order = prepared.order
        for start, end in prepared.gaps:
            close_range(start, end)
        stdin = prepared.stdin
        if stdin is None:
            stdin = os.open("/dev/null", os.O_RDONLY)
        os.dup2(stdin, 0)
        os.dup2(prepared.stdout, 1)
        os.dup2(prepared.stderr, 2)
        os.close(stdin)
        os.close(prepared.stdout)
        os.close(prepared.stderr)
        _reach("child.stdio", prepared.gate)
        stage = "cgroups"
        for path in order.tasks_files:
            fd = os.open(path, os.O_WRONLY)
            os.write(fd, b"0")
            os.close(fd)
            detail += 1
        detail = 0
        _reach("child.cgroups", prepared.gate)
        stage = "session"
        os.setsid()
        wanted = order.namespaces
        if wanted:
            if order.hostname:
                stage = "hostname"
                socket.sethostname(order.hostname)
            if "mount" in wanted:
                stage = "mounts"
                namespaces.make_mounts_private()
                if "pid" in wanted:
                    stage = "proc"
                    namespaces.mount_proc()
            if "net" in wanted:
                stage = "loopback"
                namespaces.bring_loopback_up()
        stage = "namespaces"
        _reach("child.namespaces", prepared.gate)
        stage = "limits"
        for kind, limit in prepared.limits:
            resource.setrlimit(kind, limit)
        if order.oom_score_adj is not None:
            stage = "oom_score_adj"
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(fd, b"%d" % order.oom_score_adj)
            os.close(fd)
        stage = "cwd"
        os.chdir(order.cwd)
        # Fails where the directory can't be reached from the root.
        os.getcwd()
        stage = "umask"
        os.umask(order.umask)
        signals.unblock_all()
        stage = "process"
        _reach("child.process", prepared.gate)
        stage = "ready"
        os.write(prepared.status, READY)
        _reach("child.ready", prepared.gate)
        stage = "gate"
        if not os.read(prepared.gate, 1):
            os._exit(1)
        _reach("child.gate", prepared.gate)
        stage = "exec"
        code = order.program.execute()
    except OSError as error:
        code = error.errno or errno.EIO
    finally:
        _fail(prepared.status, stage, detail, code)


def read_failure(data: bytes) -> tuple[str, int, str]:
    """Stage, errno and words of a failure on the status pipe."""
    _, number, detail, code = FAILURE.unpack(data)
    stage = STAGES[number]
    message = os.strerror(code)
    return stage, code, f"tasks file {detail}: {message}" if stage == "cgroups" else f"{stage}: {message}"


def _fail(status: int, stage: str, detail: int, code: int) -> NoReturn:
    try:
        os.write(status, FAILURE.pack(b"E", _NUMBER[stage], detail, code))
    finally:
        os._exit(1)


def _reach(name: str, gate: int) -> None:
    """Passes a failpoint; a wait there ends, and the process with it, when the gate's far end has gone."""
    if failpoints.DIRECTORY is None:
        return
    poll = select.poll()
    poll.register(gate, 0)
    failpoints.block(name, until=lambda: bool(poll.poll(0)))
    if poll.poll(0):
        os._exit(1)
