"""The client for asyncio. One channel to each service, opened by the first call that needs it.

Every unary call has a deadline (30 s unless told); calls that last (a launch, `wait`, streams) end as Unavailable where
the service is silent for 25 s. A call is made again only where that can't do a thing twice. Failures are
TightshipError.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc

from tightship.client import channel, forks, requests, retry, streams, where
from tightship.client.errors import TightshipError, raised
from tightship.client.launch import AsyncLaunch
from tightship.client.tracing import CallSpan
from tightship.telemetry import Tracer
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import switchboard_pb2
from tightship.v1.containerizer_pb2_grpc import ContainerizerServiceStub
from tightship.v1.switchboard_pb2_grpc import SwitchboardServiceStub

if TYPE_CHECKING:
    from tightship.v1.containerizer_pb2_grpc import ContainerizerServiceAsyncStub
    from tightship.v1.switchboard_pb2_grpc import SwitchboardServiceAsyncStub

Response = TypeVar("Response")

TIMEOUT_S = 30.0

# Beyond the service's longest cleanup budget (60 s), so that the budget and not the call's deadline decides.
CLEANUP_TIMEOUT_S = 65.0


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that has run, with its output."""

    record: pb.Record
    cleanup: pb.Cleanup
    stdout: bytes
    stderr: bytes
    lost: int = 0
    """Bytes of its output that were not kept: beyond `log_cap`, or on a full disk."""


class AsyncClient:
    """A client of one pair. Use it in one event loop, with `async with`, or call `close`; not in a forked child.

    `directory` is the run directory (TIGHTSHIP_RUN_DIR, else /run/tightship); `containerizer` and `switchboard` are
    gRPC targets to use instead of its sockets, over TLS with `credentials` (grpc.ssl_channel_credentials).
    `timeout_s` is the deadline of a unary call that is given none; those that clean up have 65 s. `patience_s`: how
    long a service that went away is waited for, where a call may be made again, within its deadline. gRPC serves one
    event loop at a time well: don't use it beside a `Client` in one process.

    Where methods take a name, they take an id as well. All of them raise TightshipError; RuntimeError after `close`.
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
        forks.check()
        self.directory = where.run_dir(directory)
        self.timeout_s = timeout_s
        self.patience_s = patience_s
        self.tracer = tracer or Tracer.from_environment("tightship-client")
        # Until a service has answered once, one that can't be reached is not waited for.
        self.answered = False
        self._owns_tracer = tracer is None
        self._credentials = credentials
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._targets = {
            "containerizer": containerizer or channel.target(self.directory, "containerizer"),
            "switchboard": switchboard or channel.target(self.directory, "switchboard"),
        }
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._containerizer: ContainerizerServiceAsyncStub | None = None
        self._switchboard: SwitchboardServiceAsyncStub | None = None
        forks.note(self, self._targets.values())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all calls, launches with them, and the channels; queued spans are sent, for half a second at most."""
        self._closed = True
        for opened in self._channels.values():
            await opened.close()
        self._channels.clear()
        self._containerizer = self._switchboard = None
        if self.tracer.enabled and self._owns_tracer:
            await asyncio.to_thread(self.tracer.shutdown, 0.5, patient=False)

    @property
    def containerizer(self) -> ContainerizerServiceAsyncStub:
        """The stub, for calls that this class has no method for: they have no deadline and raise AioRpcError."""
        self._check()
        if self._containerizer is None:
            self._containerizer = ContainerizerServiceStub(self._channel("containerizer"))
        return self._containerizer

    @property
    def switchboard(self) -> SwitchboardServiceAsyncStub:
        """The stub, likewise."""
        self._check()
        if self._switchboard is None:
            self._switchboard = SwitchboardServiceStub(self._channel("switchboard"))
        return self._switchboard

    # Launching

    def launch(self, command: Sequence[str], **options: Unpack[requests.LaunchOptions]) -> AsyncLaunch:
        """Runs `command` (argv) in a new container, for `async with`. The options: requests.LaunchOptions."""
        return AsyncLaunch(self, requests.launch(command, options))

    async def run(
        self, command: Sequence[str], stdin_data: bytes | None = None, **options: Unpack[requests.LaunchOptions]
    ) -> Completed:
        """Runs `command` to its end and returns its output, which is held in memory: `log_cap` bounds it.

        Raises DATA_LOSS, reason OUTPUT_CUT, where the switchboard died and nobody knows what the command wrote then.
        `timeout` (s) bounds the run. When the task is cancelled, the container is gone before CancelledError goes on.
        """
        if stdin_data is not None:
            options["stdin"] = True
        async with self.launch(command, **options) as launched:
            feeding = asyncio.create_task(_feed(launched, stdin_data)) if stdin_data is not None else None
            try:
                parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
                lost = 0
                async with streams.closing(launched.output()) as chunks:
                    async for chunk in chunks:
                        parts[chunk.stream].append(chunk.data)
                        lost += chunk.lost
                record = await launched.wait()
                cleanup = await launched.gone()
            finally:
                if feeding is not None:
                    feeding.cancel()
                    await asyncio.wait([feeding])
        if launched.output_cut:
            raise TightshipError(
                grpc.StatusCode.DATA_LOSS, f"the output is not whole: {launched.output_cut}", "OUTPUT_CUT"
            )
        return Completed(record, cleanup, b"".join(parts["stdout"]), b"".join(parts["stderr"]), lost)

    # Containers

    async def create(
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
        request = pb.CreateRequest(
            name=name,
            spec=requests.spec_input(spec),
            parents=parents,
            labels=labels or {},
            request_id=request_id or requests.new_request_id(),
        )
        return await self._unary("ContainerizerService/Create", self.containerizer.Create, request, repeat=True)

    async def destroy(self, name: str, *, force: bool = False, budget: float | None = None) -> pb.Cleanup:
        """Ends a container and all below it; returns when everything is gone, or raises DeadlineExceeded (reason
        CLEANUP_PENDING, with `cleanup`) when `budget` is spent (s; the spec's, else 10, when None; 60 at most).

        Without `force` one in use is refused (FailedPrecondition, reason IN_USE).
        """
        request = pb.DestroyRequest(name=name, force=force, budget=requests.seconds(budget))
        response = await self._unary(
            "ContainerizerService/Destroy", self.containerizer.Destroy, request, timeout=CLEANUP_TIMEOUT_S
        )
        return response.cleanup

    async def cleanup(self, name: str = "", *, all: bool = False, budget: float | None = None) -> pb.Cleanup:
        """Removes everything of a name, whatever its state; with `all` the residue of all names. `budget` and errors as
        of `destroy`."""
        request = pb.CleanupRequest(name=name, all=all, budget=requests.seconds(budget))
        response = await self._unary(
            "ContainerizerService/Cleanup", self.containerizer.Cleanup, request, timeout=CLEANUP_TIMEOUT_S
        )
        return response.cleanup

    async def kill(self, name: str, signal: str = "") -> None:
        """A signal (name or number; KILL when empty) to the main process of a container."""
        await self._unary(
            "ContainerizerService/Kill", self.containerizer.Kill, pb.KillRequest(name=name, signal=signal)
        )

    async def kill_all(self, name: str, signal: str = "") -> int:
        """A signal (name or number; KILL when empty) to every process of a container and those below; how many."""
        request = pb.KillAllRequest(name=name, signal=signal)
        response = await self._unary("ContainerizerService/KillAll", self.containerizer.KillAll, request)
        return response.processes

    async def pause(self, name: str, *, budget: float | None = None) -> None:
        """Stops all processes of a container and those below; returns when the kernel says so. DeadlineExceeded where
        that is not within `budget` (s; 5 when None): then they run on."""
        request = pb.PauseRequest(name=name, budget=requests.seconds(budget))
        await self._unary("ContainerizerService/Pause", self.containerizer.Pause, request, repeat=True)

    async def resume(self, name: str) -> None:
        """Ends a pause."""
        request = pb.ResumeRequest(name=name)
        await self._unary("ContainerizerService/Resume", self.containerizer.Resume, request, repeat=True)

    async def update(self, name: str, spec: requests.Spec, *, diff: bool = False) -> pb.UpdateResponse:
        """Changes a living container's limits to `spec`, or with `diff` what that says of them: all, or nothing."""
        mode = pb.UpdateRequest.DIFF if diff else pb.UpdateRequest.REPLACE
        request = pb.UpdateRequest(name=name, spec=requests.spec_input(spec), mode=mode)
        return await self._unary("ContainerizerService/Update", self.containerizer.Update, request, repeat=True)

    async def stats(self, name: str) -> pb.StatsResponse:
        """What a container, with those below it, has used and uses."""
        request = pb.StatsRequest(name=name)
        return await self._unary("ContainerizerService/Stats", self.containerizer.Stats, request, repeat=True)

    async def processes(self, name: str, *, recursive: bool = False, threads: bool = False) -> Sequence[int]:
        """Ids of the processes, or threads, of a container; `recursive`: of those below it too."""
        request = pb.ListProcessesRequest(name=name, recursive=recursive, threads=threads)
        method = self.containerizer.ListProcesses
        return (await self._unary("ContainerizerService/ListProcesses", method, request, repeat=True)).ids

    async def detect(self, pid: int) -> pb.DetectResponse:
        """The container that a process is in. NotFound where it is in none."""
        request = pb.DetectRequest(pid=pid)
        return await self._unary("ContainerizerService/Detect", self.containerizer.Detect, request, repeat=True)

    async def wait(self, name: str, *, timeout: float | None = None) -> pb.Record:
        """The record of a container, when its main process has ended: as long as that takes, where no `timeout` (s) is
        given. A containerizer that is started anew meanwhile is asked again."""
        request = pb.WaitRequest(name=name)
        response = await self._unary(
            "ContainerizerService/Wait", self.containerizer.Wait, request, timeout=timeout, bounded=False, repeat=True
        )
        return response.record

    async def get(self, name: str) -> pb.Container:
        """A container, living or recorded."""
        response = await self._unary(
            "ContainerizerService/Get", self.containerizer.Get, pb.GetRequest(name=name), repeat=True
        )
        return response.container

    async def list(
        self, name: str = "", *, recursive: bool = False, records: bool = False, usage: bool = False
    ) -> list[pb.Container]:
        """The containers at and below `name`; `records`: also the ended; `usage`: with what the living use now.

        Asks for as many pages as there are.
        """
        request = pb.ListRequest(name=name, recursive=recursive, records=records, usage=usage)
        found: dict[str, pb.Container] = {}  # what ends between two pages is in both
        while True:
            response = await self._unary("ContainerizerService/List", self.containerizer.List, request, repeat=True)
            found |= {each.id: each for each in response.containers}
            if not response.next_page_token:
                return [*found.values()]
            request.page_token = response.next_page_token

    async def remove(self, name: str) -> int:
        """Forgets records and logs of an ended container; how many."""
        response = await self._unary(
            "ContainerizerService/Remove", self.containerizer.Remove, pb.RemoveRequest(name=name)
        )
        return response.records

    async def audit(self, *, fix: bool = False) -> pb.AuditResponse:
        """Looks for what no living container or lease explains; `fix` removes what is this pair's."""
        return await self._unary(
            "ContainerizerService/Audit", self.containerizer.Audit, pb.AuditRequest(fix=fix), repeat=not fix
        )

    async def trace(self, name: str) -> pb.TraceResponse:
        """What happened to a container (name, id, or "last"), as spans; from the service's journal."""
        return await self._unary(
            "ContainerizerService/Trace", self.containerizer.Trace, pb.TraceRequest(name=name), repeat=True
        )

    async def lease(self, lease_id: str) -> switchboard_pb2.Lease:
        """A lease, living or closed."""
        request = switchboard_pb2.GetLeaseRequest(lease_id=lease_id)
        response = await self._unary("SwitchboardService/GetLease", self.switchboard.GetLease, request, repeat=True)
        return response.lease

    # Streams

    async def leases(self, *, owner: str = "", closed: bool = False) -> Sequence[switchboard_pb2.Lease]:
        """The leases of an owner, or all; `closed`: also those whose logs are kept."""
        request = switchboard_pb2.ListLeasesRequest(owner=owner, closed=closed)
        response = await self._unary("SwitchboardService/ListLeases", self.switchboard.ListLeases, request, repeat=True)
        return response.leases

    async def logs(
        self,
        name: str,
        *names: streams.StreamName,
        follow: bool = False,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
    ) -> AsyncIterator[streams.Chunk]:
        """The output of a container, living or ended, both streams unless named, from the offsets (bytes); with
        `follow` until it ends. Goes on by offset over a new switchboard."""
        lease_id = _lease(await self.get(name))
        offsets = (stdout_offset, stderr_offset)
        chunks = streams.output(self, lease_id, streams=names, offsets=offsets, follow=follow)
        async with streams.closing(chunks):
            async for chunk in chunks:
                yield chunk

    async def input(self, name: str) -> streams.AsyncInput:
        """Standard input of a living container that was launched with `stdin`."""
        return streams.AsyncInput(self, _lease(await self.get(name)))

    async def ready(self, timeout_s: float) -> None:
        """Waits until both services say that they serve. Raises the last TightshipError after `timeout_s` seconds."""
        end = asyncio.get_running_loop().time() + timeout_s
        for service in ("containerizer", "switchboard"):
            try:
                await self._serving(service)
            except TightshipError as error:
                left = end - asyncio.get_running_loop().time()
                await retry.again(functools.partial(self._serving, service), error, retry.away, left)
        self.answered = True

    async def _serving(self, service: str) -> None:
        from grpc_health.v1 import health_pb2

        check = self._channel(service).unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        with raised():
            answer = await check(health_pb2.HealthCheckRequest(), timeout=5.0)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise TightshipError(grpc.StatusCode.UNAVAILABLE, f"{service} does not serve yet")

    def span(self, method: str, parent: str = "") -> CallSpan:
        """The span of a call of "Service/Method", below `parent` (a traceparent), else the caller's."""
        target = self._targets["containerizer" if method.startswith("Containerizer") else "switchboard"]
        return CallSpan(self.tracer, f"tightship.v1.{method}", parent, target)

    def _check(self) -> None:
        """Raises RuntimeError where this client can't be used."""
        forks.check()
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        elif self._loop is not asyncio.get_running_loop():
            raise RuntimeError("the client belongs to another event loop")

    def _channel(self, service: str) -> grpc.aio.Channel:
        self._check()
        if service not in self._channels:
            self._channels[service] = channel.connect(self._targets[service], self._credentials)
        return self._channels[service]

    async def _unary(
        self,
        name: str,
        method: Callable[..., Awaitable[Response]],
        request: object,
        *,
        timeout: float | None = None,
        bounded: bool = True,
        repeat: bool = False,
    ) -> Response:
        """`repeat`: doing it twice is the same as once. The deadline is of all attempts together."""
        span = self.span(name)
        limit = timeout if timeout is not None else self.timeout_s if bounded else None
        end = None if limit is None else asyncio.get_running_loop().time() + limit

        async def attempt() -> Response:
            left = None if end is None else max(0.0, end - asyncio.get_running_loop().time())
            with raised():
                answer = await method(request, timeout=left, metadata=span.metadata)
            self.answered = True
            return answer

        try:
            try:
                answer = await attempt()
            except TightshipError as error:
                safe = retry.away if repeat and self.answered else retry.refused
                if not safe(error):
                    raise
                answer = await retry.again(attempt, error, safe, self.patience_s)
        except TightshipError as error:
            span.end(error.code.name, error.message)
            raise
        except asyncio.CancelledError:
            span.end("CANCELLED", "cancelled by the caller")
            raise
        span.end()
        return answer


def _lease(container: pb.Container) -> str:
    lease_id = container.lease_id or container.record.lease_id
    if not lease_id:
        message = f"{container.name} has no standard streams: no process ran in it"
        raise TightshipError(grpc.StatusCode.NOT_FOUND, message, "NO_LEASE", {"name": container.name})
    return lease_id


async def _feed(launched: AsyncLaunch, data: bytes) -> None:
    # The process need not read its input; how it ends says all.
    with contextlib.suppress(BrokenPipeError, TightshipError):
        await launched.write(data)
        await launched.close_stdin()
