"""The client for code without asyncio: the same calls, run by one event loop in a thread that all clients share."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from tightship.client import requests, streams
from tightship.client.aio import TIMEOUT_S, AsyncClient, Completed
from tightship.client.launch import AsyncLaunch
from tightship.telemetry import Tracer
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import switchboard_pb2

T = TypeVar("T")


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
        """The coroutine's result. An exception here, as KeyboardInterrupt, cancels the coroutine."""
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


_LOOP = _Loop()


class Client:
    """A client of one pair, for any thread; `with` it, or call `close`. See AsyncClient for the arguments."""

    def __init__(
        self,
        directory: str | None = None,
        *,
        containerizer: str | None = None,
        switchboard: str | None = None,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = 2.0,
        tracer: Tracer | None = None,
    ) -> None:
        self.aio = AsyncClient(
            directory,
            containerizer=containerizer,
            switchboard=switchboard,
            timeout_s=timeout_s,
            patience_s=patience_s,
            tracer=tracer,
        )
        self._open = True
        _LOOP.enter()
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls and the channels."""
        if self._open:
            self._open = False
            atexit.unregister(self.close)
            try:
                _LOOP.run(self.aio.close())
            finally:
                _LOOP.leave()

    def launch(self, command: Sequence[str], **options: Unpack[requests.LaunchOptions]) -> Launch:
        """Runs `command` (argv) in a new container, for `with`."""
        return Launch(self.aio, requests.launch(command, options))

    def run(
        self, command: Sequence[str], stdin_data: bytes | None = None, **options: Unpack[requests.LaunchOptions]
    ) -> Completed:
        """Runs `command` to its end and returns its output, which is held in memory: `log_cap` bounds it."""
        return _LOOP.run(self.aio.run(command, stdin_data, **options))

    def create(
        self,
        name: str,
        spec: requests.Spec = None,
        *,
        parents: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> pb.CreateResponse:
        """Makes a container without a process."""
        return _LOOP.run(self.aio.create(name, spec, parents=parents, labels=labels))

    def destroy(self, name: str, *, force: bool = False, budget: float | None = None) -> pb.Cleanup:
        """Ends a container (name or id) and all below it; returns when everything is gone. `budget` in seconds."""
        return _LOOP.run(self.aio.destroy(name, force=force, budget=budget))

    def cleanup(self, name: str = "", *, all: bool = False, budget: float | None = None) -> pb.Cleanup:
        """Removes everything of a name, whatever its state; with `all` the residue of all names."""
        return _LOOP.run(self.aio.cleanup(name, all=all, budget=budget))

    def kill(self, name: str, signal: str = "") -> None:
        """A signal (name or number; KILL when empty) to the main process of a container (name or id)."""
        _LOOP.run(self.aio.kill(name, signal))

    def wait(self, name: str, *, timeout: float | None = None) -> pb.Record:
        """The record of a container (name or id), when its main process has ended. No deadline unless given (s)."""
        return _LOOP.run(self.aio.wait(name, timeout=timeout))

    def get(self, name: str) -> pb.Container:
        """A container, living or recorded (name or id)."""
        return _LOOP.run(self.aio.get(name))

    def list(
        self, name: str = "", *, recursive: bool = False, records: bool = False, usage: bool = False
    ) -> list[pb.Container]:
        """The containers at and below `name`; `records`: also the ended; `usage`: with what the living use now."""
        return _LOOP.run(self.aio.list(name, recursive=recursive, records=records, usage=usage))

    def remove(self, name: str) -> int:
        """Forgets records and logs of an ended container (name or id); how many."""
        return _LOOP.run(self.aio.remove(name))

    def audit(self, *, fix: bool = False) -> pb.AuditResponse:
        """Looks for what no living container or lease explains; `fix` removes what is this pair's."""
        return _LOOP.run(self.aio.audit(fix=fix))

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
        """The output of a container, living or ended (name or id); goes on by offset over a new switchboard."""
        chunks = self.aio.logs(name, *names, follow=follow, stdout_offset=stdout_offset, stderr_offset=stderr_offset)
        return _iterate(chunks)

    def input(self, name: str) -> Input:
        """Standard input of a container (name or id) that was launched with `stdin`."""
        return Input(_LOOP.run(self.aio.input(name)))

    def ready(self, timeout_s: float) -> None:
        """Waits until both services say that they serve."""
        _LOOP.run(self.aio.ready(timeout_s))


class Launch:
    """A running command; see AsyncLaunch."""

    def __init__(self, client: AsyncClient, request: pb.LaunchRequest) -> None:
        self._client = client
        self._request = request
        self._launch: AsyncLaunch | None = None

    @property
    def aio(self) -> AsyncLaunch:
        if self._launch is None:
            raise RuntimeError("the launch has not begun: use it in a `with`, or call start()")
        return self._launch

    @property
    def id(self) -> str:
        return self.aio.id

    @property
    def name(self) -> str:
        return self.aio.name

    @property
    def pid(self) -> int:
        return self.aio.pid

    @property
    def started(self) -> pb.LaunchResponse.Started:
        return self.aio.started

    def start(self) -> Self:
        """Runs the command, as `with` does first. Raises TightshipError when it did not run."""
        self._launch = _LOOP.run(_make(self._client, self._request))
        try:
            _LOOP.run(self._launch.start())
        except BaseException:
            _LOOP.run(self._launch.cancel())  # an interrupt here may come when it has just begun
            raise
        return self

    def exited(self) -> pb.Record:
        """The record as soon as the process has ended; cleanup may still run."""
        return _LOOP.run(self.aio.exited())

    def wait(self) -> pb.Record:
        """The record when the process has ended and nothing of the container is left."""
        return _LOOP.run(self.aio.wait())

    def gone(self) -> pb.Cleanup:
        """What the cleanup did, when it has ended."""
        return _LOOP.run(self.aio.gone())

    def output(
        self, *names: streams.StreamName, stdout_offset: int = 0, stderr_offset: int = 0, follow: bool = True
    ) -> Iterator[streams.Chunk]:
        """Output from the start, both streams unless named, until its end."""
        return _iterate(
            self.aio.output(*names, stdout_offset=stdout_offset, stderr_offset=stderr_offset, follow=follow)
        )

    def write(self, data: bytes) -> None:
        """To standard input. Raises BrokenPipeError when the process reads no more."""
        _LOOP.run(self.aio.write(data))

    def close_stdin(self) -> int:
        """End of file on standard input; the bytes that were taken."""
        return _LOOP.run(self.aio.close_stdin())

    def kill(self, signal: str = "") -> None:
        """A signal to the main process: name or number; KILL when empty."""
        _LOOP.run(self.aio.kill(signal))

    def cancel(self) -> None:
        """Ends the launch and waits until nothing is left."""
        _LOOP.run(self.aio.cancel())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _LOOP.run(self.aio.__aexit__(kind, error, trace))


class Input:
    """Standard input of a container; see AsyncInput."""

    def __init__(self, aio: streams.AsyncInput) -> None:
        self.aio = aio

    def write(self, data: bytes) -> None:
        """Raises BrokenPipeError when the process reads no more."""
        _LOOP.run(self.aio.write(data))

    def close(self) -> int:
        """End of file for the process; the bytes that were taken."""
        return _LOOP.run(self.aio.close())


async def _make(client: AsyncClient, request: pb.LaunchRequest) -> AsyncLaunch:
    return AsyncLaunch(client, request)


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
        _LOOP.run(close())
