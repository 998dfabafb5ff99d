"""spawner.sock: who may be the client, and what each order does with the table of launches.

One client at a time. A new HELLO ends the old connection and aborts its unopened launches before it is answered.
"""

from __future__ import annotations

import errno
import functools
import gc
import os
import resource
import socket
import time
from collections.abc import Callable

from tightship.common.packets import Packet
from tightship.kernel import fdpass, process
from tightship.spawner import orders
from tightship.spawner.child import Limits
from tightship.spawner.client import Client
from tightship.spawner.contained import Adopted, Contained
from tightship.spawner.fdclient import Switchboard
from tightship.spawner.launch import Launch, Surroundings
from tightship.spawner.loop import Loop
from tightship.spawner.notices import notice, notice_exception
from tightship.spawner.orders import LaunchOrder, OrderError

_GREETINGS_MAX = 16
_GREETING_S = 1.0
_ABORTS_S = 2.0
_ABORT_S = 10.0
_TOMBSTONE_S = 120.0
_TOMBSTONES_MAX = 65_536
_SIGNAL_MAX = 64
# The collector is off, so that it doesn't touch every page after a fork.
_COLLECT_EVERY = 1000

# A launch holds up to eight descriptors until it is opened, then one; some are ours.
_FDS_UNOPENED = 8
_FDS_RESERVED = 64

Reply = Callable[[Packet], None]


class Server:
    """Owns the launches. `around` is what they work with."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        switchboard: Switchboard,
        limits: Limits,
        examine: Callable[[Reply], None],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._switchboard = switchboard
        self.around = Surroundings(loop, switchboard, limits, self._tell)
        self._launches = self.around.launches
        self._client: Client | None = None
        self._greetings: set[Client] = set()
        self._leaving: set[Adopted] = set()
        self._forgotten = 0
        self._descriptors_most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Ended unknown, so that a late LAUNCH is refused; in order of time.
        self._tombstones: dict[str, float] = {}
        self._operations: dict[str, Callable[[Packet, Reply], None]] = {
            "LAUNCH": self._launch,
            "OPEN": self._open,
            "SIGNAL": self._signal,
            "ABORT": self._abort,
            "KILL": self._kill,
            "ADOPT": self._adopt,
            "ACK": self._ack,
            "AUDIT": lambda _, reply: examine(reply),
        }
        loop.watch(listener.fileno(), self._accept)

    def descriptors(self) -> list[int]:
        fds = [self._listener.fileno(), self.around.null]
        for client in self._clients():
            fds += client.descriptors()
        for launch in (*self._launches.values(), *self._leaving):
            fds += launch.descriptors()
        return fds

    def end(self, done: Callable[[], None]) -> None:
        """Takes no more orders; aborts what is unopened, then calls `done`, after 2 s at most."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for client in self._clients():
            client.close()
        self._client = None
        self._abort_unopened(done)

    def _clients(self) -> list[Client]:
        return [*self._greetings, *([self._client] if self._client is not None else [])]

    def _tell(self, event: Packet) -> None:
        if self._client is not None:
            self._client.send(event)

    # Connections

    def _accept(self, _: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        uid = fdpass.peer(sock).uid
        if uid != os.geteuid():
            notice(f"spawner.sock: uid {uid} is not allowed")
        if len(self._greetings) >= _GREETINGS_MAX or uid != os.geteuid():
            sock.close()
            return
        client = Client(self._loop, sock, self._received, self._ended)
        self._greetings.add(client)
        self._loop.later(_GREETING_S, lambda: self._not_greeted(client))

    def _not_greeted(self, client: Client) -> None:
        if client in self._greetings and not client.greeted:
            self._ended(client)
            client.close()

    def _ended(self, client: Client) -> None:
        self._greetings.discard(client)
        if client is self._client:
            self._client = None
            self._abort_unopened(_nothing)

    def _received(self, client: Client, packet: Packet) -> None:
        number = packet.get("id")
        greeted = client is self._client
        if not isinstance(number, int) or number < (0 if greeted else 1):
            raise fdpass.FramingError("an order without id")

        def reply(answer: Packet) -> None:
            if number:  # else nobody waits for it
                client.send({"id": number, **answer})

        try:
            if greeted:
                operation = self._operations.get(str(packet.get("op")))
                if operation is None:
                    raise OrderError("order", errno.ENOSYS, f"unknown op {packet.get('op')!r}")
                operation(packet, reply)
            else:
                self._hello(client, packet, reply)
        except OrderError as error:
            reply(error.reply())
        except fdpass.FramingError:
            raise
        except Exception as error:  # noqa: BLE001 - a mistake of ours: this order fails, the others are served
            notice_exception(error)
            reply(OrderError("order", errno.EIO, f"internal error: {error}").reply())

    def _hello(self, client: Client, packet: Packet, reply: Reply) -> None:
        if packet.get("op") != "HELLO" or client.greeted:
            raise fdpass.FramingError("no HELLO, or a second one")
        highest = orders.number(packet, "version", None, 1, 1 << 16)
        lowest = orders.number(packet, "lowest", highest, 1, highest)
        version = min(highest, orders.VERSION)
        if version < max(lowest, orders.LOWEST_VERSION):
            ours = f"{orders.LOWEST_VERSION} to {orders.VERSION}"
            raise OrderError("hello", errno.EPROTONOSUPPORT, f"this spawner speaks versions {ours} of its protocol")
        client.greeted = True
        for other in self._clients():
            if other.greeted and other is not client:
                other.close()
                self._greetings.discard(other)
        self._client = None

        def answer() -> None:
            if client.closed:
                return
            self._greetings.discard(client)
            self._client = client
            reply(
                {
                    "ok": True,
                    "version": version,
                    "pid": os.getpid(),
                    "epoch": self._switchboard.epoch or "",
                    "launches": [launch.entry() for launch in self._launches.values()],
                }
            )

        self._abort_unopened(answer)

    # Launches

    def _launch(self, packet: Packet, reply: Reply) -> None:
        launch_id = orders.text(packet, "launch")
        known = self._launches.get(launch_id)
        if isinstance(known, Launch):
            known.when_ready(reply)
            return
        if known is not None:
            reply({"ok": True, "pid": known.pid, "start": known.start, "times": {}})
            return
        self._clear_tombstones()
        if launch_id in self._tombstones:
            raise OrderError("aborted", errno.ECANCELED, "the launch was aborted before")
        self._check_room()
        launch = Launch(LaunchOrder(packet), self.around)
        self._launches[launch_id] = launch
        launch.when_ready(reply)
        launch.begin()

    def _check_room(self) -> None:
        """Raises OrderError where descriptors would run out: the kernel drops those of an answer that don't fit."""
        needed = _FDS_RESERVED + len(self._launches) + _FDS_UNOPENED * (self.around.unopened + 1)
        if needed > self._descriptors_most:
            raise OrderError("claim", errno.EMFILE, "the spawner's limit of open files has no room for a launch")

    def _open(self, packet: Packet, reply: Reply) -> None:
        launch = self._known(packet)
        if isinstance(launch, Launch):
            launch.open(reply)
        else:
            reply({"ok": True, "times": {}})

    def _signal(self, packet: Packet, reply: Reply) -> None:
        number = orders.number(packet, "signal", None, 0, _SIGNAL_MAX)
        launch = self._known(packet)
        if launch.state != "opened":
            raise OrderError("signal", errno.ESRCH, "the launch is not running")
        try:
            launch.signal(number)
        except OSError as error:
            raise OrderError("signal", error.errno or errno.EIO, error.strerror or "") from None
        reply({"ok": True})

    def _kill(self, packet: Packet, reply: Reply) -> None:
        launch = self._launches.get(orders.text(packet, "launch"))
        if launch is not None:
            launch.kill()
            if isinstance(launch, Launch):
                launch.hurry()
        reply({"ok": True})

    def _abort(self, packet: Packet, reply: Reply) -> None:
        timeout_s = orders.seconds(packet, "timeout_ms", _ABORT_S)
        launch_id = orders.text(packet, "launch")
        launch = self._launches.get(launch_id)
        if launch is None:
            self._bury(launch_id)
            reply({"ok": True})
        elif launch.state in ("failed", "exited"):
            self._forget(launch)
            reply({"ok": True})
        elif isinstance(launch, Launch) and launch.unopened:
            answer = _Once(reply)
            late = OrderError("abort", errno.ETIMEDOUT, "the process is not gone yet; its end goes on by itself")
            timer = self._loop.later(timeout_s, lambda: answer(late.reply()))

            def gone() -> None:
                timer.cancel()
                answer({"ok": True})

            self._end_launch(launch, gone)
        else:
            raise OrderError("abort", errno.EBUSY, "the launch is opened")

    def _ack(self, packet: Packet, reply: Reply) -> None:
        launch = self._launches.get(orders.text(packet, "launch"))
        if launch is not None:
            if launch.state not in ("failed", "exited"):
                raise OrderError("ack", errno.EBUSY, "the launch has not ended")
            self._forget(launch)
        reply({"ok": True})

    def _adopt(self, packet: Packet, reply: Reply) -> None:
        launch_id = orders.text(packet, "launch")
        known = self._launches.get(launch_id)
        if known is not None:
            reply({"ok": True, "alive": known.ending is None, "execed": known.state in ("opened", "exited")})
            return
        pid = orders.number(packet, "pid", None, 1, 1 << 31)
        start = orders.number(packet, "start", None, 0, 1 << 63)
        pidns = orders.number(packet, "pidns", None, 0, 1 << 63)
        boot = orders.text(packet, "boot")
        pidfd = None
        if boot == process.boot_id() and pidns == process.pid_namespace():
            pidfd = process.open_pidfd(pid, start)
        stat = None if pidfd is None else process.stat(pid)
        if pidfd is None or stat is None:
            if pidfd is not None:
                os.close(pidfd)
            reply({"ok": True, "alive": False})
            return
        adopted = Adopted(self._loop, launch_id, packet.get("meta"), pid, stat, pidfd)
        if stat.execed and stat.state != "Z":
            self._launches[launch_id] = adopted
            adopted.watch(lambda: self._tell(adopted.exited_event()))
            reply({"ok": True, "alive": True, "execed": True})
            return
        # Never at a command, or at its end: answered when the kernel has told all it will.
        self._leaving.add(adopted)

        def gone() -> None:
            self._leaving.discard(adopted)
            assert adopted.ending is not None
            reply({"ok": True, "alive": False, "execed": stat.execed, **adopted.ending.fields()})

        adopted.watch(gone)
        adopted.kill()

    def _known(self, packet: Packet) -> Contained:
        """Raises OrderError for a launch that is unknown."""
        launch_id = orders.text(packet, "launch")
        launch = self._launches.get(launch_id)
        if launch is None:
            raise OrderError("order", errno.ESRCH, f"no launch {launch_id}")
        return launch

    # Ends

    def _end_launch(self, launch: Launch, then: Callable[[], None]) -> None:
        def gone() -> None:
            if self._launches.get(launch.id) is launch:
                self._forget(launch)
                self._bury(launch.id)
            then()

        launch.abort(gone)

    def _abort_unopened(self, done: Callable[[], None]) -> None:
        """Calls `done` when all are gone, or after 2 s."""
        once = _Once(lambda _: done())
        launches = [launch for launch in self._launches.values() if isinstance(launch, Launch)]
        left = {launch.id for launch in launches if launch.unopened}
        timer = self._loop.later(_ABORTS_S, lambda: once({}))

        def gone(launch_id: str) -> None:
            left.discard(launch_id)
            if not left:
                timer.cancel()
                once({})

        for launch in launches:
            if launch.unopened:
                self._end_launch(launch, functools.partial(gone, launch.id))
            else:
                launch.hurry()
        gone("")

    def _forget(self, launch: Contained) -> None:
        del self._launches[launch.id]
        launch.forgotten()
        self._forgotten += 1
        if self._forgotten % _COLLECT_EVERY == 0:
            gc.collect()

    def _bury(self, launch_id: str) -> None:
        self._clear_tombstones()
        if len(self._tombstones) >= _TOMBSTONES_MAX:
            del self._tombstones[next(iter(self._tombstones))]
        self._tombstones.pop(launch_id, None)
        self._tombstones[launch_id] = time.monotonic() + _TOMBSTONE_S

    def _clear_tombstones(self) -> None:
        now = time.monotonic()
        while self._tombstones:
            oldest = next(iter(self._tombstones))
            if self._tombstones[oldest] > now:
                return
            del self._tombstones[oldest]


class _Once:
    """Passes on the first of several answers."""

    def __init__(self, reply: Reply) -> None:
        self._reply: Reply | None = reply

    def __call__(self, packet: Packet) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply(packet)


def _nothing() -> None:
    pass
