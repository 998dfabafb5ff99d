"""fd.sock: where claimers take far ends and tie leases to processes. docs/fd-socket.md has its frames.

In the event loop, at most 16 packets per connection and turn. A connection that breaks a rule is closed, with every
descriptor it sent; its end is the claimer's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from tightship.common import failpoints, refused
from tightship.common.clients import ConfigError
from tightship.common.errors import Code, ServiceError
from tightship.common.rundir import seqpacket_listener
from tightship.kernel import fdframes, fdpass
from tightship.kernel.fdframes import BadFrame, ExitKind, Frame, Type
from tightship.switchboard.leases import Leases, as_service_error
from tightship.switchboard.ledger import Bound, Claimed, Exit, Offered
from tightship.switchboard.settings import Settings
from tightship.v1 import switchboard_pb2 as pb

CONNECTIONS_MAX = 64
STRANGERS_MAX = 16
PACKETS_PER_TURN = 16
HELLO_S = 1.0
# Only failpoints keep requests open.
_OPEN_MAX = 64

_log = logging.getLogger(__name__)


class FdServer:
    def __init__(self, settings: Settings, leases: Leases) -> None:
        self._settings = settings
        self._leases = leases
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._connections: set[Connection] = set()
        self._next = 1

    def start(self) -> None:
        """Raises ConfigError where peers of other users can't be let in."""
        try:
            self._listener = seqpacket_listener(self._settings.run.fd_sock, tuple(self._settings.peer_uids))
        except OSError as error:
            raise ConfigError(f"fd.sock for uids {sorted(self._settings.peer_uids)}: {error.strerror}") from error
        self._loop.add_reader(self._listener, self._accept)

    def stop_listening(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._settings.run.fd_sock)

    def close(self) -> None:
        self.stop_listening()
        for connection in list(self._connections):
            connection.close("the switchboard ends")

    def descriptors(self) -> set[int]:
        own = {self._listener.fileno()} if self._listener is not None else set()
        return own | {connection.sock.fileno() for connection in self._connections}

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(PACKETS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                _log.warning("fd.sock: can't accept: %s", error)
                return
            sock.setblocking(False)
            peer = fdpass.peer(sock)
            strangers = sum(not connection.greeted for connection in self._connections)
            if peer.uid != os.geteuid() and peer.uid not in self._settings.peer_uids:
                refused.note("fd.sock", Code.PERMISSION_DENIED.name, f"uid {peer.uid} is not allowed")
                sock.close()
            elif len(self._connections) >= CONNECTIONS_MAX or strangers >= STRANGERS_MAX:
                _log.debug("fd.sock: too many connections")
                sock.close()
            else:
                self._connections.add(Connection(sock, self._next, self._leases, self._loop, self._connections.discard))
                self._next += 1


class Connection:
    """One claimer."""

    def __init__(
        self,
        sock: socket.socket,
        number: int,
        leases: Leases,
        loop: asyncio.AbstractEventLoop,
        forget: Callable[[Connection], None],
    ) -> None:
        self.sock = sock
        self.greeted = False
        self._version = 0
        self._number = number
        self._leases = leases
        self._loop = loop
        self._forget = forget
        self._closed = False
        self._open: dict[int, asyncio.Task[None]] = {}
        self._draining: set[int] = set()
        """EXITs whose lease is not closed yet."""
        self._hello_timer = loop.call_later(HELLO_S, self.close, "no HELLO")
        loop.add_reader(sock, self._readable)

    def close(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        _log.debug("fd.sock: connection %d ends: %s", self._number, reason)
        self._hello_timer.cancel()
        self._loop.remove_reader(self.sock)
        self.sock.close()
        self._forget(self)
        self._leases.claimer_gone(self._number)

    def _readable(self) -> None:
        for _ in range(PACKETS_PER_TURN):
            if self._closed:
                return
            try:
                packet, fds = fdpass.receive(self.sock, fdframes.FRAME_MAX)
            except BlockingIOError:
                return
            except (fdpass.FramingError, OSError) as error:
                self.close(str(error))
                return
            if not packet and not fds:
                self.close("end of connection")
                return
            try:
                self._take(packet, fds)
            except BadFrame as error:
                self.close(str(error))
            except Exception:  # noqa: BLE001  it must not end the others
                _log.exception("fd.sock: a frame failed")
                self.close("internal error")
            finally:
                # Whoever keeps one has taken it out of the list.
                fdpass.close_all(fds)

    def _take(self, packet: bytes, fds: list[int]) -> None:
        frame = fdframes.decode(packet, len(fds))
        if frame.request in self._open or frame.request in self._draining:
            raise BadFrame(f"request {frame.request} is still open")
        if len(self._open) >= _OPEN_MAX:
            raise BadFrame("too many open requests")
        if frame.fds != (1 if frame.type is Type.BIND else 0):
            raise BadFrame(f"{frame.fds} descriptors with {frame.type.name}")
        if self.greeted is (frame.type is Type.HELLO):
            raise BadFrame("a second HELLO" if self.greeted else "the first frame is not HELLO")
        match frame.type:
            case Type.HELLO:
                self._hello(frame)
            case Type.CLAIM:
                token, traceparent = fdframes.read_claim(frame.payload)
                self._request("claim", frame.request, token, None, lambda: self._claim(frame, token, traceparent))
            case Type.TAKE:
                token, traceparent, acquire = fdframes.read_take(frame.payload)
                self._take_lease(frame, token, traceparent, acquire)
            case Type.BIND:
                token = fdframes.read_token(frame.payload)
                pidfd = _Owned(fds.pop())
                self._request("bind", frame.request, token, pidfd, lambda: self._bind(frame, token, pidfd))
            case Type.EXIT:
                token, kind, value = fdframes.read_exit(frame.payload)
                self._request("exit", frame.request, token, None, lambda: self._exit(frame, token, kind, value))
            case Type.LETGO:
                self._let_go(frame)
            case _:
                raise BadFrame(f"{frame.type.name} is no request")

    def _hello(self, frame: Frame) -> None:
        lowest, highest = fdframes.read_hello(frame.payload)
        if highest < fdframes.LOWEST_VERSION or lowest > fdframes.VERSION:
            message = f"versions {fdframes.LOWEST_VERSION} to {fdframes.VERSION} are spoken here"
            self._send(fdframes.error(frame.request, Code.UNIMPLEMENTED.value[0], message))
            self.close("no common version")
            return
        self.greeted = True
        self._hello_timer.cancel()
        self._version = min(highest, fdframes.VERSION)
        self._send(fdframes.hello_ok(frame.request, self._version, self._leases.epoch))

    # Requests

    def _request(
        self, name: str, request: int, token: bytes, owned: _Owned | None, act: Callable[[], Callable[[], object]]
    ) -> None:
        """Acts, then answers. `act` returns what sends the answer; `owned` is closed unless it was taken."""
        if failpoints.DIRECTORY is None:
            try:
                act()()
            except ServiceError as error:
                self._refuse(request, error)
            finally:
                _close(owned)
        else:
            self._open[request] = self._loop.create_task(self._held(name, request, token, owned, act))

    def _take_lease(self, frame: Frame, token: bytes, traceparent: str, acquire: bytes) -> None:
        """Offers a lease for its owner, and goes on as for a CLAIM."""
        try:
            request = pb.AcquireRequest.FromString(acquire)
        except DecodeError:
            raise BadFrame("no AcquireRequest in TAKE") from None
        request.token = token

        def owner() -> str:
            return self._leases.owner_of(request.session)

        def claim() -> Callable[[], None]:
            return self._claim(frame, token, traceparent)

        def take() -> Callable[[], None]:
            self._leases.admit(request, owner(), request.session).taken = True
            return claim()

        def gone() -> bool:
            return self._closed or not self._leases.stands(request.session)

        async def held() -> None:
            try:
                await self._leases.acquire_held(request, owner(), request.session, gone)
            except ServiceError as error:
                self._open.pop(frame.request, None)
                self._refuse(frame.request, error)
            else:
                await self._held("claim", frame.request, token, None, claim)

        if failpoints.DIRECTORY is None:
            self._request("claim", frame.request, token, None, take)
        else:
            self._open[frame.request] = self._loop.create_task(held())

    async def _held(
        self, name: str, request: int, token: bytes, owned: _Owned | None, act: Callable[[], Callable[[], object]]
    ) -> None:
        """A request past its failpoints; they hold it no longer than what it is about."""
        states: dict[tuple[str, str], tuple[type, ...]] = {
            ("claim", "before"): (Offered,),
            ("claim", "after"): (Claimed,),
            ("bind", "before"): (Claimed,),
            ("bind", "after"): (Bound,),
            ("exit", "before"): (Bound,),
            ("exit", "after"): (object,),
        }
        limit = time.monotonic() + 60.0

        def until(when: str) -> Callable[[], bool]:
            def over() -> bool:
                state = self._leases.state(token)
                ended = state is None or not isinstance(state, states[name, when])
                return ended or self._leases.stopping or self._closed or time.monotonic() >= limit

            return over

        answer: Callable[[], object] | None = None
        try:
            with as_service_error():
                await failpoints.hold(f"switchboard.{name}.before", until("before"))
            if self._closed and name != "exit":
                return
            answer = act()
            with as_service_error():
                await failpoints.hold(f"switchboard.{name}.after", until("after"))
            answer()
        except ServiceError as error:
            if name == "claim" and answer is not None:
                self._leases.withheld(token)
            if name == "exit" and answer is not None and request not in self._draining:
                return  # it has been answered
            self._draining.discard(request)
            self._refuse(request, error)
        finally:
            _close(owned)
            self._open.pop(request, None)

    def _claim(self, frame: Frame, token: bytes, traceparent: str) -> Callable[[], None]:
        live = self._leases.claim(token, self._number, traceparent)

        def answer() -> None:
            left, streams, fds = self._leases.to_send(live, self._number)
            if self._send(fdframes.fds(frame.request, left, streams), fds):
                self._leases.handed(live)

        return answer

    def _bind(self, frame: Frame, token: bytes, pidfd: _Owned) -> Callable[[], object]:
        self._leases.bind(token, self._number, pidfd.fd)
        pidfd.fd = -1
        return lambda: self._ok(frame)

    def _exit(self, frame: Frame, token: bytes, kind: ExitKind, value: int) -> Callable[[], object]:
        match kind:
            case ExitKind.EXITED:
                status = Exit(code=value)
            case ExitKind.SIGNALLED:
                status = Exit(signal=value)
            case _:
                status = Exit()
        # The answer says that the lease is closed.

        def closed() -> bool:
            if frame.request not in self._draining:
                return False
            self._draining.discard(frame.request)
            return self._ok(frame)

        if self._version < fdframes.ANSWERS_CLOSED:
            self._leases.exited(token, status, None)
            return lambda: self._ok(frame)
        self._draining.add(frame.request)
        if self._leases.exited(token, status, closed):
            return _nothing
        return closed

    def _let_go(self, frame: Frame) -> None:
        try:
            self._leases.let_go(fdframes.read_token(frame.payload), self._number)
        except ServiceError as error:
            self._refuse(frame.request, error)
        else:
            self._ok(frame)

    # Answers

    def _ok(self, frame: Frame) -> bool:
        return self._send(fdframes.ok(frame.request))

    def _refuse(self, request: int, error: ServiceError) -> None:
        number: int = error.code.value[0]
        self._send(fdframes.error(request, number, error.message))

    def _send(self, frame: Frame, fds: tuple[int, ...] = ()) -> bool:
        """Whether it went; a peer that doesn't read its answers loses the connection."""
        if self._closed:
            return False
        try:
            fdpass.send(self.sock, frame.encode(), fds)
        except OSError as error:
            self.close(f"can't answer: {error}")
            return False
        return True


def _nothing() -> None:
    pass


class _Owned:
    """A descriptor that is closed unless somebody takes it."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd


def _close(owned: _Owned | None) -> None:
    if owned is not None and owned.fd >= 0:
        os.close(owned.fd)
