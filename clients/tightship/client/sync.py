"""The client for code without asyncio: the same calls, run by one event loop in a thread that all clients share."""

from __future__ import annotations

import asyncio
import atexit
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import grpc

from tightship.client import forks, requests, streams
from tightship.client.aio import TIMEOUT_S, AsyncClient, Completed
from tightship.client.launch import AsyncLaunch
from tightship.telemetry import Tracer
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import switchboard_pb2

T = TypeVar("T")

# How late an interrupt may be seen that came in the moment before the wait.
_LOOK_S = 0.5


class _Loop:
    """An event loop in a thread, living while a client uses it. (One loop per process: gRPC shares its poller.)"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="tightship-client", daemon=True)
                self._thread.start()

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                assert self._loop is not None and self._thread is not None
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
                self._loop = self._thread = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An exception here, as KeyboardInterrupt, cancels the coroutine, and goes on when that
        has ended: so what it cleans up is cleaned up by then. A second one does not wait."""
        loop = self._loop
        try:
            forks.check()
            if loop is None:
                raise RuntimeError("the client is closed")
            if threading.current_thread() is self._thread:
                raise RuntimeError("a callback of the client may not call it")
        except RuntimeError:
            coroutine.close()
            raise
        outcome: _Outcome[T] = _Outcome()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(outcome.take)

        def end() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # the interrupt came before `begin` was on its way
                coroutine.close()
                outcome.release()

        try:
            loop.call_soon_threadsafe(begin)
            outcome.wait()
        except BaseException:
            if outcome.task is None:
                loop.call_soon_threadsafe(end)
                outcome.wait()
            raise
        assert outcome.task is not None
        return outcome.task.result()

    def post(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Has the coroutine run, without waiting: from where nothing may block, as a collected object."""
        loop = self._loop
        if loop is None or forks.is_child():
            coroutine.close()
            return
        try:
            asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:  # closed meanwhile
            coroutine.close()


class _Outcome(Generic[T]):
    """A task that is done, handed to the thread that waits for it.

    One lock, taken by one C call: an interrupt in the middle of a Future's condition could leave that locked.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[T] | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def take(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self._done.release()

    def release(self) -> None:
        self._done.release()

    def wait(self) -> None:
        """Until there is one. A signal that comes just before the lock sleeps is seen when it wakes up again."""
        while not self._done.acquire(timeout=_LOOK_S):
            pass


_LOOP = _Loop()
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """At the interpreter's end. What a client that is killed leaves is ended by the services."""
    for client in list(_clients):
        client.close()


class Client:
    """A client of one pair, for any thread; `with` it, or call `close`. See AsyncClient for the arguments, errors and
    deadlines.

    One that is dropped is closed (ResourceWarning); at the interpreter's end all are. An interrupt (KeyboardInterrupt)
    of a call cancels it, and is raised when that has cleaned up; a second one at once.
    """

    def __init__(
        self,
        directory: str | None = None,
        *,
        containerizer: str | None = None,
        switchboard: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = 2.0,
        tracer: Tracer | None = None,
    ) -> None:
        self._open = False
        self.aio = AsyncClient(
            directory,
            containerizer=containerizer,
            switchboard=switchboard,
            credentials=credentials,
            timeout_s=timeout_s,
            patience_s=patience_s,
            tracer=tracer,
        )
        _LOOP.enter()
        self._open = True
        _clients.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls, launches with them, and the channels."""
        if self._open:
            self._open = False
            if forks.is_child():
                return
            try:
                _LOOP.run(self.aio.close())
            finally:
                _LOOP.leave()

    def __del__(self) -> None:
        if self._open and not forks.is_child():
            self._open = False
            warnings.warn("a tightship client was dropped without close()", ResourceWarning, source=self, stacklevel=2)
            # Collected wherever that happens to be, maybe in the loop's own thread: that thread is left running.
            _LOOP.post(self.aio.close())

    def launch(self, command: Sequence[str], **options: Unpack[requests.LaunchOptions]) -> Launch:
        """Runs `command` (argv) in a new container, for `with`. The options: requests.LaunchOptions."""
        return Launch(self.aio.launch(command, **options))

    def run(
        self, command: Sequence[str], stdin_data: bytes | None = None, **options: Unpack[requests.LaunchOptions]
    ) -> Completed:
        """Runs `command` to its end and returns its output, which is held in memory: `log_cap` bounds it.

        Raises DATA_LOSS, reason OUTPUT_CUT, where the switchboard died and nobody knows what the command wrote then.
        `timeout` (s) bounds the run. Interrupted, it raises when the container is gone.
        """
        return _LOOP.run(self.aio.run(command, stdin_data, **options))

    def create(
        self,
        name: str,
        spec: requests.Spec = None,
        *,
        parents: bool = False,
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> pb.CreateResponse:
        """Makes a container without a process; `parents`: the missing ones above it too.

        With the `request_id` of a call that was made before (one is made up when empty) the answer is what that made.
        """
        return _LOOP.run(self.aio.create(name, spec, parents=parents, labels=labels, request_id=request_id))

    def destroy(self, name: str, *, force: bool = False, budget: float | None = None) -> pb.Cleanup:
        """Ends a container and all below it; returns when everything is gone, or raises DeadlineExceeded (reason
        CLEANUP_PENDING, with `cleanup`) when `budget` is spent (s; the spec's, else 10, when None; 60 at most).

        Without `force` one in use is refused (FailedPrecondition, reason IN_USE).
        """
        return _LOOP.run(self.aio.destroy(name, force=force, budget=budget))

    def cleanup(self, name: str = "", *, all: bool = False, budget: float | None = None) -> pb.Cleanup:
        """Removes everything of a name, whatever its state; with `all` the residue of all names. `budget` and errors as
        of `destroy`."""
        return _LOOP.run(self.aio.cleanup(name, all=all, budget=budget))

    def kill(self, name: str, signal: str = "") -> None:
        """A signal (name or number; KILL when empty) to the main process of a container."""
        _LOOP.run(self.aio.kill(name, signal))

    def kill_all(self, name: str, signal: str = "") -> int:
        """A signal (name or number; KILL when empty) to every process of a container and those below; how many."""
        return _LOOP.run(self.aio.kill_all(name, signal))

    def pause(self, name: str, *, budget: float | None = None) -> None:
        """Stops all processes of a container and those below; returns when the kernel says so. DeadlineExceeded where
        that is not within `budget` (s; 5 when None): then they run on."""
        _LOOP.run(self.aio.pause(name, budget=budget))

    def resume(self, name: str) -> None:
        """Ends a pause."""
        _LOOP.run(self.aio.resume(name))

    def update(self, name: str, spec: requests.Spec, *, diff: bool = False) -> pb.UpdateResponse:
        """Changes a living container's limits to `spec`, or with `diff` what that says of them: all, or nothing."""
        return _LOOP.run(self.aio.update(name, spec, diff=diff))

    def stats(self, name: str) -> pb.StatsResponse:
        """What a container, with those below it, has used and uses."""
        return _LOOP.run(self.aio.stats(name))

    def processes(self, name: str, *, recursive: bool = False, threads: bool = False) -> Sequence[int]:
        """Ids of the processes, or threads, of a container; `recursive`: of those below it too."""
        return _LOOP.run(self.aio.processes(name, recursive=recursive, threads=threads))

    def detect(self, pid: int) -> pb.DetectResponse:
        """The container that a process is in. NotFound where it is in none."""
        return _LOOP.run(self.aio.detect(pid))

    def wait(self, name: str, *, timeout: float | None = None) -> pb.Record:
        """The record of a container, when its main process has ended: as long as that takes, where no `timeout` (s) is
        given. A containerizer that is started anew meanwhile is asked again."""
        return _LOOP.run(self.aio.wait(name, timeout=timeout))

    def get(self, name: str) -> pb.Container:
        """A container, living or recorded."""
        return _LOOP.run(self.aio.get(name))

    def list(
        self, name: str = "", *, recursive: bool = False, records: bool = False, usage: bool = False
    ) -> list[pb.Container]:
        """The containers at and below `name`; `records`: also the ended; `usage`: with what the living use now."""
        return _LOOP.run(self.aio.list(name, recursive=recursive, records=records, usage=usage))

    def remove(self, name: str) -> int:
        """Forgets records and logs of an ended container; how many."""
        return _LOOP.run(self.aio.remove(name))

    def audit(self, *, fix: bool = False) -> pb.AuditResponse:
        """Looks for what no living container or lease explains; `fix` removes what is this pair's."""
        return _LOOP.run(self.aio.audit(fix=fix))

    def trace(self, name: str) -> pb.TraceResponse:
        """What happened to a container (name, id, or "last"), as spans; from the service's journal."""
        return _LOOP.run(self.aio.trace(name))

    def lease(self, lease_id: str) -> switchboard_pb2.Lease:
        """A lease, living or closed."""
        return _LOOP.run(self.aio.lease(lease_id))

    def leases(self, *, owner: str = "", closed: bool = False) -> Sequence[switchboard_pb2.Lease]:
        """The leases of an owner, or all; `closed`: also those whose logs are kept."""
        return _LOOP.run(self.aio.leases(owner=owner, closed=closed))

    def logs(
        self,
        name: str,
        *names: streams.StreamName,
        follow: bool = False,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
    ) -> Iterator[streams.Chunk]:
        """The output of a container, living or ended, both streams unless named, from the offsets (bytes); with
        `follow` until it ends. Goes on by offset over a new switchboard."""
        chunks = self.aio.logs(name, *names, follow=follow, stdout_offset=stdout_offset, stderr_offset=stderr_offset)
        return _iterate(chunks)

    def input(self, name: str) -> Input:
        """Standard input of a living container that was launched with `stdin`."""
        return Input(_LOOP.run(self.aio.input(name)))

    def ready(self, timeout_s: float) -> None:
        """Waits until both services say that they serve. Raises the last TightshipError after `timeout_s` seconds."""
        _LOOP.run(self.aio.ready(timeout_s))


class Launch:
    """A running command, for `with`; made by `Client.launch`. See AsyncLaunch.

    Leaving the block, however that happens, ends the container and waits until nothing of it is left. Time-outs are in
    seconds; what they end is the waiting, never the launch. They raise TimeoutError.
    """

    def __init__(self, aio: AsyncLaunch) -> None:
        self.aio = aio

    @property
    def id(self) -> str:
        """The container's id, never used again."""
        return self.aio.id

    @property
    def name(self) -> str:
        """The container's absolute name."""
        return self.aio.name

    @property
    def pid(self) -> int:
        """Of the main process, in the service's pid namespace."""
        return self.aio.pid

    @property
    def started(self) -> pb.LaunchResponse.Started:
        """What STARTED told. Raises RuntimeError where the launch has not begun."""
        return self.aio.started

    @property
    def output_end(self) -> switchboard_pb2.AttachOutputResponse.AttachEnd | None:
        """How a followed `output` ended: exit, state of the lease, and why it ended."""
        return self.aio.output_end

    @property
    def output_cut(self) -> str:
        """Why an output that was read to its end may not be whole ("switchboard died"); empty where it is."""
        return self.aio.output_cut

    def start(self) -> Self:
        """Runs the command, as `with` does first. Raises TightshipError when it did not run.

        A handle that is started without `with` ends with `cancel`, or when it is dropped (ResourceWarning).
        """
        try:
            _LOOP.run(self.aio.start())
        except BaseException:
            _LOOP.run(self.aio.cancel())  # an interrupt here may come when it has just begun
            raise
        return self

    def exited(self, timeout: float | None = None) -> pb.Record:
        """The record as soon as the process has ended; cleanup may still run. Raises TightshipError, TimeoutError."""
        return _LOOP.run(self.aio.exited(timeout))

    def wait(self, timeout: float | None = None) -> pb.Record:
        """The record when the process has ended and nothing of the container is left (of a detached one: when the
        process has ended). After a cancel, its record (reason CANCELLED).

        Raises TimeoutError, and TightshipError: with reason CLEANUP_PENDING where something is left.
        """
        return _LOOP.run(self.aio.wait(timeout))

    def gone(self, timeout: float | None = None) -> pb.Cleanup:
        """What the cleanup did, when it has ended. Not told of a launch that its caller cancelled (Cancelled)."""
        return _LOOP.run(self.aio.gone(timeout))

    def output(
        self, *names: streams.StreamName, stdout_offset: int = 0, stderr_offset: int = 0, follow: bool = True
    ) -> Iterator[streams.Chunk]:
        """Output from the offsets (bytes), both streams unless named, until its end; without `follow`, what there is.

        Goes on by offset over a new switchboard. Raises TightshipError.
        """
        return _iterate(
            self.aio.output(*names, stdout_offset=stdout_offset, stderr_offset=stderr_offset, follow=follow)
        )

    def write(self, data: bytes) -> None:
        """To standard input. Raises BrokenPipeError when the process reads no more; TightshipError."""
        _LOOP.run(self.aio.write(data))

    def close_stdin(self) -> int:
        """End of file on standard input; the bytes that were taken. Raises BrokenPipeError, TightshipError."""
        return _LOOP.run(self.aio.close_stdin())

    def kill(self, signal: str = "") -> None:
        """A signal to the main process: name or number; KILL when empty."""
        _LOOP.run(self.aio.kill(signal))

    def cancel(self) -> None:
        """Ends the launch and waits until nothing is left (65 s at most). Of a detached one, nothing.

        Raises TightshipError with reason CLEANUP_PENDING where something is: the service goes on with it.
        """
        _LOOP.run(self.aio.cancel())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not forks.is_child():  # which is none of the launch's
            _LOOP.run(self.aio.__aexit__(kind, error, trace))


class Input:
    """Standard input of a container; see AsyncInput."""

    def __init__(self, aio: streams.AsyncInput) -> None:
        self.aio = aio

    def write(self, data: bytes) -> None:
        """Raises BrokenPipeError when the process reads no more; TightshipError."""
        _LOOP.run(self.aio.write(data))

    def close(self) -> int:
        """End of file for the process; the bytes that were taken. Raises BrokenPipeError, TightshipError."""
        return _LOOP.run(self.aio.close())


def _iterate(chunks: AsyncIterator[streams.Chunk]) -> Iterator[streams.Chunk]:
    async def following() -> streams.Chunk | None:
        return await anext(chunks, None)

    async def close() -> None:
        async with streams.closing(chunks):
            pass

    try:
        while (chunk := _LOOP.run(following())) is not None:
            yield chunk
    finally:
        _LOOP.post(close())
