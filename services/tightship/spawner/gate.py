"""The spawner's side of a new child: the gate that it waits at, and the status pipe on which it says how far it got.

All that can be done before the child's cgroups are there is done before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from tightship.kernel import clone
from tightship.kernel.calls import FAILURE_SIZE, Calls, read_failure
from tightship.kernel.fdframes import Stream
from tightship.kernel.namespaces import Surrounding
from tightship.spawner import child
from tightship.spawner.loop import Loop
from tightship.spawner.orders import LaunchOrder

_STATUS_READ = 64


class Gate:
    """`told` is called when the child may have said something; `read` then takes it in.

    `ready`: it waits at its gate. `failure`: stage, errno and words. `ended`: exec or death has closed its end of the
    status pipe.
    """

    __slots__ = (
        "_calls",
        "_entered",
        "_far",
        "_gate",
        "_loop",
        "_null",
        "_stages",
        "_status",
        "_told",
        "ended",
        "failure",
        "ready",
    )

    def __init__(self, loop: Loop, null: int, told: Callable[[], None]) -> None:
        self._loop = loop
        self._null = null
        self._stages: list[str] = []
        self._told = told
        self._gate = -1
        self._status = -1
        # The child's ends of both, until it has them.
        self._far: tuple[int, ...] = ()
        self._calls: Calls | None = None
        self._entered: Surrounding | None = None
        self.ready = False
        self.failure: tuple[str, int, str] | None = None
        self.ended = False

    def descriptors(self) -> list[int]:
        entered = -1 if self._entered is None else self._entered.pidfd
        return [fd for fd in (self._gate, self._status, entered, *self._far) if fd >= 0]

    def prepare(
        self, order: LaunchOrder, streams: dict[Stream, int], limits: child.Limits, entered: Surrounding | None
    ) -> None:
        """Everything that the child needs, but for its cgroups. `entered`, whose namespaces it enters, is ours from now
        on. Raises OSError; `close` is due either way."""
        self._entered = entered
        gate, self._gate = os.pipe()
        self._far = (gate,)
        self._status, status = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._far = (gate, status)
        self._loop.watch(self._status, self._status_ready)
        self._calls = child.calls_of(order, self._stdio(streams), gate, status, limits, entered)
        self._stages = self._calls.stages

    def clone(self, order: LaunchOrder) -> tuple[int, int]:
        """Makes the child that `prepare` has prepared: its pid and pidfd. Raises OSError."""
        calls, self._calls = self._calls, None
        assert calls is not None
        gate, status = self._far
        cgroup = None if order.cgroup_v2 is None else os.open(order.cgroup_v2, os.O_RDONLY | os.O_DIRECTORY)
        inside = contextlib.nullcontext() if self._entered is None else self._entered.children_in()
        try:
            with inside:
                return clone.start(calls, order.namespaces, cgroup, status, lambda name: child.reach(name, gate))
        finally:
            if cgroup is not None:
                os.close(cgroup)

    def cloned(self) -> None:
        """The child has its ends: ours are closed."""
        far, self._far = self._far, ()
        for fd in far:
            os.close(fd)
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.close()

    def _stdio(self, streams: dict[Stream, int]) -> tuple[int, int, int]:
        stdin, stdout, stderr = (streams.get(each, self._null) for each in Stream)
        return stdin, stdout, stderr

    def open(self) -> None:
        """Lets the child go on to its command. Raises BrokenPipeError where it has died."""
        os.write(self._gate, b"G")

    def read(self) -> None:
        """Takes in what the child has said."""
        if self.ended:
            return
        try:
            data = os.read(self._status, _STATUS_READ)
        except BlockingIOError:
            return
        if not data:
            self._close_status()
            self.ended = True
            return
        # A packet each: neither is ever written in two, and a failure's first byte may look like READY.
        if not self.ready and data.startswith(child.READY) and len(data) % FAILURE_SIZE:
            self.ready = True
            data = data[len(child.READY) :]
        if data:
            stage, code = read_failure(data, self._stages)
            self.failure = (stage.partition(":")[0], code, f"{stage}: {os.strerror(code)}")

    def close(self) -> None:
        self.cloned()
        self._close_status()
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1

    def _status_ready(self, _: int) -> None:
        self.read()
        self._told()

    def _close_status(self) -> None:
        if self._status >= 0:
            self._loop.forget(self._status)
            os.close(self._status)
            self._status = -1
