"""A launch: claim, clone, bind, ready, the gate, exec, as one generator whose `finally` blocks are its only clean-up.

Error, time-out, ABORT and the end of the client's connection are the same: an exception where the steps are parked.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

from tightship.common import failpoints
from tightship.common.packets import Packet
from tightship.kernel import fdframes, fdpass, namespaces, process
from tightship.kernel.fdframes import Frame, Stream, Type
from tightship.spawner import child, fdclient
from tightship.spawner.contained import Contained, Ending
from tightship.spawner.gate import Gate
from tightship.spawner.loop import Loop, Timer
from tightship.spawner.notices import notice_exception
from tightship.spawner.orders import LaunchOrder, OrderError
from tightship.spawner.routine import Routine, Steps

Reply = Callable[[Packet], None]

_CONNECT_S = 2.0
_HOLD_POLL_S = 0.005
_WAITING_MAX = 64
# The kernel takes a quarter of a millisecond to take a mount namespace down, in the exit of its last process and before
# anybody is told of that, unless somebody else holds it. So we do, for commands that are over in a moment, until their
# exit is acknowledged.
_MOUNTS_HELD_S = 1.0


class Surroundings:
    """What every launch works with. `limits` are those that a child sets back; `tell` sends an event."""

    __slots__ = ("children", "launches", "limits", "loop", "null", "switchboard", "tell", "unopened")

    def __init__(
        self, loop: Loop, switchboard: fdclient.Switchboard, limits: child.Limits, tell: Callable[[Packet], None]
    ) -> None:
        self.loop = loop
        self.switchboard = switchboard
        self.limits = limits
        self.tell = tell
        self.null = os.open("/dev/null", os.O_RDWR)
        self.unopened = 0
        self.launches: dict[str, Contained] = {}
        self.children: dict[int, Launch] = {}
        """Launches by the pid of their living child."""


class Launch(Contained):
    """One LAUNCH order and the process made for it."""

    def __init__(self, order: LaunchOrder, around: Surroundings) -> None:
        super().__init__(order.id, order.meta)
        self._around = around
        self._token = order.token
        self._prepare = order.prepare
        self.times: dict[str, int] = {}
        self._stage = "claim"
        self.failure: OrderError | None = None
        # Whoever waits for READY, for what came of OPEN, for the end of an abort.
        self._on_ready: list[Reply] = []
        self._on_open: list[Reply] = []
        self._on_gone: list[Callable[[], None]] = []
        # What the steps hold and hear.
        self._streams: dict[Stream, int] = {}
        self._connection = 0
        self._claim_asked = 0.0
        self._claimed = False
        self._bind_asked = False
        self._bound = False
        self._open_asked = False
        self._stopping = False
        self._hurried = False
        self._timer = around.loop.later(order.timeout_s, self._timed_out)
        self._mounts = -1
        self._mounts_timer: Timer | None = None
        self._routine = Routine(self._steps(order), self._launched)
        self._gate = Gate(around.loop, around.null, self._routine.wake)
        around.unopened += 1

    def begin(self) -> None:
        self._routine.start()

    # Orders

    @property
    def unopened(self) -> bool:
        """Its gate is shut, or it is coming to its end without having run."""
        return self.state in ("claiming", "claimed", "ready") or (self._stopping and self.state != "failed")

    def when_ready(self, reply: Reply) -> None:
        """Answers LAUNCH, now or later: when the command runs, where it was only to be prepared."""
        if self.failure is not None:
            reply(self.failure.reply())
        elif self._prepare and self.state not in ("opened", "exited"):
            _wait(self._on_open, reply)
        elif self.state in ("claiming", "claimed"):
            _wait(self._on_ready, reply)
        else:
            reply(self._reply())

    def open(self, reply: Reply) -> None:
        """OPEN, which may come before LAUNCH is answered: answers once the command runs, or why it doesn't."""
        if self.failure is not None:
            reply(self.failure.reply())
        elif self.state in ("opened", "exited"):
            reply(self._reply())
        else:
            _wait(self._on_open, reply)
            if not self._open_asked:
                self._open_asked = True
                self._routine.wake()

    def abort(self, gone: Callable[[], None]) -> None:
        """Ends an unopened launch; `gone` is called when nothing of it is left."""
        self._on_gone.append(gone)
        self._stop(OrderError("aborted", errno.ECANCELED, "aborted"))

    def hurry(self) -> None:
        """Ends its wait at a failpoint: nobody is left who waits for it."""
        self._hurried = True
        self._routine.wake()

    def _stop(self, failure: OrderError) -> None:
        if not self._stopping:
            self._stopping = True
            self._routine.throw(failure)

    def _timed_out(self) -> None:
        ready = self.state == "ready"
        self._stop(OrderError("gate" if ready else self._stage, errno.ETIMEDOUT, "timed out"))

    # What the loop tells

    def child_ended(self) -> None:
        """The child is a zombie: reads how it ended, and reaps it."""
        # To be asked while the zombie is there: it alone tells whether the command ever ran.
        execed = self.state == "opened" or self._execed()
        _, status, usage = os.wait4(self.pid, 0)
        del self._around.children[self.pid]
        cpu_us = round((usage.ru_utime + usage.ru_stime) * 1_000_000)
        self.ending = Ending(status, execed, cpu_us)
        self.close_pidfd()
        if self.state == "opened":
            self._routine = Routine(self._exit_steps(), self._exited)
            self._routine.start()
        else:
            self._routine.wake()

    def descriptors(self) -> list[int]:
        mounts = [] if self._mounts < 0 else [self._mounts]
        return [*super().descriptors(), *self._streams.values(), *self._gate.descriptors(), *mounts]

    def entry(self) -> Packet:
        entry = super().entry()
        if self.failure is not None:
            entry["stage"] = self.failure.stage
            entry["errno"] = self.failure.errno
        return entry

    # The steps

    def _steps(self, order: LaunchOrder) -> Steps:
        try:
            try:
                yield from self._reach("spawner.claim.before")
                yield from self._claim(order)
                yield from self._reach("spawner.claim.after")
                self._stage = "clone"
                self._gate.prepare(order, self._streams, self._around.limits, self._entered(order))
                yield from self._prepared()
                yield from self._reach("spawner.clone.before")
                self._clone(order)
            finally:
                self._close_streams()
                self._gate.cloned()
            yield from self._reach("spawner.clone.after")
            self._stage = "bind"
            yield from self._reach("spawner.bind.before")
            self._bind()
            if "mount" in order.namespaces:
                self._hold_mounts()
            # Read while the child is at work.
            stat = process.stat(self.pid)
            self.start = stat.start if stat is not None else 0
            while not self._is_ready():
                yield
            yield from self._reach("spawner.bind.after")
            self._stage = "ready"
            yield from self._reach("spawner.ready.after")
            self._become_ready(order)
            while not self._open_asked:
                self._check_child()
                yield
            yield from self._open()
        except OSError as error:
            yield from self._undo()
            raise OrderError(self._stage, error.errno or errno.EIO, str(error)) from None
        except BaseException:
            yield from self._undo()
            raise
        finally:
            self._timer.cancel()
            self._gate.close()

    def _claim(self, order: LaunchOrder) -> Steps:
        switchboard = self._around.switchboard
        yield from self._connected()
        if switchboard.epoch != order.epoch:
            raise OrderError("claim", errno.ESTALE, "the switchboard is not the one that made the lease")
        self._connection = switchboard.connection
        self._claim_asked = time.monotonic()
        try:
            if order.acquire is None:
                switchboard.claim(order.token, order.traceparent, self._claim_answered)
            else:
                switchboard.take(order.token, order.traceparent, order.acquire, self._claim_answered)
        except fdclient.Busy:
            raise OrderError("claim", errno.EAGAIN, "too many requests to the switchboard are open") from None
        except ValueError as error:
            raise OrderError("claim", errno.EPROTONOSUPPORT, str(error)) from None
        while not self._claimed:
            yield
        wanted = {Stream.STDIN, Stream.STDOUT, Stream.STDERR} if order.stdin else {Stream.STDOUT, Stream.STDERR}
        if set(self._streams) != wanted:
            raise OrderError("claim", errno.EPROTO, "the lease has other streams than were ordered")
        self.times["claim"] = time.monotonic_ns()

    def _prepared(self) -> Steps:
        """Where only that was asked: its cgroups are there when OPEN comes."""
        self.state = "claimed"
        while self._prepare and not self._open_asked:
            yield

    def _connected(self) -> Steps:
        switchboard = self._around.switchboard
        if switchboard.epoch is not None:
            return
        deadline = time.monotonic() + _CONNECT_S
        wake = self._routine.wake
        timer = self._around.loop.later(_CONNECT_S, wake)
        try:
            while switchboard.epoch is None:
                if time.monotonic() >= deadline:
                    raise OrderError("claim", errno.ECONNREFUSED, "the switchboard is away")
                switchboard.wait_connected(wake)
                yield
        finally:
            timer.cancel()
            switchboard.stop_waiting(wake)

    def _claim_answered(self, frame: Frame | None, fds: list[int]) -> None:
        if frame is None:
            self._stop(OrderError("claim", errno.ECONNRESET, "the switchboard went away"))
        elif frame.type is not Type.FDS:
            fdpass.close_all(fds)
            self._stop(_refused("claim", frame))
        elif self._stopping:
            # Too late: the launch is over.
            fdpass.close_all(fds)
            self._around.switchboard.letgo(self._token)
        else:
            self._take(frame, fds)

    def _take(self, frame: Frame, fds: list[int]) -> None:
        self._claimed = True
        try:
            bind_ms, streams = fdframes.read_fds(frame.payload)
            self._streams = dict(zip(streams, fds, strict=True))
        except (fdframes.BadFrame, ValueError):
            fdpass.close_all(fds)
            self._stop(OrderError("claim", errno.EPROTO, "a bad FDS frame"))
            return
        # It may have lain here unread; how long nobody tells, but not longer than since we asked.
        if time.monotonic() - self._claim_asked > bind_ms / 1000:
            self._stop(OrderError("claim", errno.ETIMEDOUT, "the answer came after the lease's time"))
        else:
            self._routine.wake()

    def _entered(self, order: LaunchOrder) -> namespaces.Surrounding | None:
        """Whose namespaces it enters, where it was told so. Raises OrderError."""
        if not order.enter:
            return None
        target = self._around.launches.get(order.enter)
        if target is None or target.state != "opened" or target.pidfd < 0:
            raise OrderError("enter", errno.ESRCH, "the process whose namespaces were to be entered has ended")
        try:
            return namespaces.Surrounding(target.pid, target.pidfd)
        except (FileNotFoundError, ProcessLookupError):
            raise OrderError("enter", errno.ESRCH, "the process whose namespaces were to be entered ends") from None

    def _clone(self, order: LaunchOrder) -> None:
        try:
            self.pid, self.pidfd = self._gate.clone(order)
        except OSError as error:
            if order.enter and error.errno == errno.ENOMEM:  # so the kernel calls a pid namespace whose init has died
                raise OrderError("enter", errno.ESRCH, "the process whose namespaces were to be entered ends") from None
            raise
        self._around.children[self.pid] = self
        self.times["clone"] = time.monotonic_ns()

    def _bind(self) -> None:
        self._check_connection()
        try:
            self._around.switchboard.bind(self._token, self.pidfd, self._bind_answered)
        except fdclient.Busy:
            raise OrderError("bind", errno.EAGAIN, "too many requests to the switchboard are open") from None
        self._bind_asked = True

    def _check_connection(self) -> None:
        """Raises OrderError where the connection of the claim has ended: the lease ends with it."""
        switchboard = self._around.switchboard
        if switchboard.epoch is None or switchboard.connection != self._connection:
            raise _connection_lost()

    def _bind_answered(self, frame: Frame | None, fds: list[int]) -> None:
        fdpass.close_all(fds)
        if frame is None:
            failure = _connection_lost()
        elif frame.type is not Type.OK:
            failure = _refused("bind", frame)
        else:
            self._bound = True
            self.times["bind"] = time.monotonic_ns()
            self._routine.wake()
            return
        self._stop(failure)

    def _is_ready(self) -> bool:
        """Whether BIND is answered and the child is at its gate. Raises OrderError."""
        self._check_child()
        return self._bound and self._gate.ready

    def _listen(self) -> None:
        """Raises OrderError where the child tells its failure."""
        self._gate.read()
        if self._gate.failure is not None:
            raise OrderError(*self._gate.failure)

    def _check_child(self) -> None:
        """Raises OrderError where the child can't get to its command any more."""
        self._listen()
        if self.ending is not None or self._gate.ended:
            raise OrderError("gate", errno.ECHILD, "the process died before its gate was opened")

    def _become_ready(self, order: LaunchOrder) -> None:
        self._timer.cancel()
        self._timer = self._around.loop.later(order.gate_s, self._timed_out)
        self.times["ready"] = time.monotonic_ns()
        self.state = "ready"
        _tell(self._on_ready, self._reply())

    def _open(self) -> Steps:
        self._stage = "open"
        yield from self._reach("spawner.open.before")
        self._check_child()
        self._check_connection()
        self._timer.cancel()
        self.state = "opening"
        try:
            self._gate.open()
        except BrokenPipeError:
            raise OrderError("gate", errno.ECHILD, "the process died at its gate") from None
        self.times["open"] = time.monotonic_ns()
        while not self._runs():
            yield
        self.times["exec"] = time.monotonic_ns()
        yield from self._reach("spawner.open.after")

    def _runs(self) -> bool:
        """Whether the command has begun. Raises OrderError where it never will.

        End-of-file on the status pipe says that exec closed it, or that the process is dying: its flags tell which.
        """
        self._listen()
        if self.ending is not None:
            execed = self.ending.execed
        elif self._gate.ended:
            execed = self._execed()
        else:
            return False
        if not execed:
            raise OrderError("gate", errno.ECHILD, "the process died before exec")
        return True

    def _execed(self) -> bool:
        stat = process.stat(self.pid)
        return stat is not None and stat.execed

    def _hold_mounts(self) -> None:
        try:
            self._mounts = namespaces.hold_mounts(self.pid)
        except OSError:
            return  # it has died, or there is no descriptor left: then its exit is told later
        self._mounts_timer = self._around.loop.later(_MOUNTS_HELD_S, self._drop_mounts)

    def forgotten(self) -> None:
        self._drop_mounts()

    def _drop_mounts(self) -> None:
        if self._mounts_timer is not None:
            self._mounts_timer.cancel()
            self._mounts_timer = None
        if self._mounts >= 0:
            os.close(self._mounts)
            self._mounts = -1

    def _undo(self) -> Steps:
        """Kills the child, waits for its reap, and tells the switchboard. Nothing interrupts it."""
        self._stopping = True
        self._drop_mounts()
        if self.pid:
            while self.ending is None:
                self.kill()
                yield
            yield from self._reach("spawner.reap.after")
        if self._bind_asked:
            self._tell_exit()
        elif self._claimed:
            self._around.switchboard.letgo(self._token)

    def _tell_exit(self) -> None:
        assert self.ending is not None
        tell, event = self._around.tell, {"id": 0, "event": "closed", "launch": self.id}
        self._around.switchboard.exited(self._token, self.ending.kind, self.ending.value, lambda: tell(event))

    def _launched(self, error: Exception | None) -> None:
        """The steps are over: the command runs, or nothing is left of it."""
        self._around.unopened -= 1
        if error is None:
            self.state = "opened"
            _tell(self._on_open, self._reply())
            if self.ending is not None:
                self._routine = Routine(self._exit_steps(), self._exited)
                self._routine.start()
            return
        if not isinstance(error, OrderError):
            notice_exception(error)
            error = OrderError(self._stage, errno.EIO, f"internal error: {error}")
        # A copy, without the traceback: its frames hold us.
        self.failure = OrderError(error.stage, error.errno, error.message)
        unasked = self.state in ("claimed", "ready") and not (self._on_ready or self._on_open or self._on_gone)
        self.state = "failed"
        if unasked:
            self._around.tell({"id": 0, "event": "died", "launch": self.id, "stage": error.stage, "errno": error.errno})
        reply = error.reply()
        _tell(self._on_ready, reply)
        _tell(self._on_open, reply)
        gone, self._on_gone = self._on_gone, []
        for call in gone:
            call()

    def _exit_steps(self) -> Steps:
        yield from self._reach("spawner.reap.after")
        self._tell_exit()

    def _exited(self, _: Exception | None) -> None:
        self.state = "exited"
        self._around.tell(self.exited_event())

    def _reach(self, name: str) -> Steps:
        """Passes a failpoint; a wait there ends when the launch is stopping, or its child has ended."""
        hold = failpoints.reach(name)
        while hold is not None and not hold.released() and not (self._stopping or self._hurried):
            timer = self._around.loop.later(_HOLD_POLL_S, self._routine.wake)
            try:
                yield
            finally:
                timer.cancel()

    def _close_streams(self) -> None:
        fdpass.close_all(tuple(self._streams.values()))
        self._streams.clear()

    # Replies

    def _reply(self) -> Packet:
        return {"ok": True, "pid": self.pid, "start": self.start, "times": self.times}


def _wait(replies: list[Reply], reply: Reply) -> None:
    """Raises OrderError where too many wait already."""
    if len(replies) >= _WAITING_MAX:
        raise OrderError("order", errno.EBUSY, "too many of the same order are waiting")
    replies.append(reply)


def _tell(replies: list[Reply], packet: Packet) -> None:
    for reply in replies:
        reply(packet)
    replies.clear()


def _refused(stage: str, frame: Frame) -> OrderError:
    if frame.type is not Type.ERROR:
        return OrderError(stage, errno.EPROTO, f"the switchboard answered {frame.type.name}")
    code, message = fdframes.read_error(frame.payload)
    return OrderError(stage, fdclient.errno_of(code), message)


def _connection_lost() -> OrderError:
    return OrderError("bind", errno.ECONNRESET, "the connection to the switchboard that took the claim has ended")
