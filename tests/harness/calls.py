"""Calls of the two services as tests make them: stubs, a launch as an object, a run as a result.

Synchronous on purpose: a test that cancels, kills or times a call must not share an event loop with it.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tightship.v1 import containerizer_pb2 as cpb
from tightship.v1 import containerizer_pb2_grpc, switchboard_pb2_grpc
from tightship.v1 import switchboard_pb2 as spb

_names = itertools.count(1)

# Cpu, memory and pids limits and own namespaces: every step that a launch can have.
FULL_SPEC = (
    "cpu { limit: 500 max_limit: 1500 } memory { limit: 268435456 } tasks { limit: 64 }"
    " virtual_host { virtual_hostname: 'inside' }"
)


def fresh_name(stem: str = "t") -> str:
    return f"/{stem}{next(_names)}"


@dataclass(frozen=True)
class Result:
    """A run from its start to GONE, with its output."""

    started: cpb.LaunchResponse.Started
    record: cpb.Record
    cleanup: cpb.Cleanup
    stdout: bytes
    stderr: bytes

    @property
    def code(self) -> int | None:
        return self.record.exit_code if self.record.HasField("exit_code") else None


class Launching:
    """A launch's stream. Ending it before GONE cancels it."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.events: list[str] = []

    def event(self, kind: str) -> Any:
        """The next message, which must be of this kind. Raises grpc.RpcError."""
        response = next(self.call)
        found = response.WhichOneof("event")
        self.events.append(found)
        assert found == kind, f"{found} where {kind} was due"
        return getattr(response, found)

    def started(self) -> cpb.LaunchResponse.Started:
        return self.event("started")  # type: ignore[no-any-return]

    def exited(self) -> cpb.Record:
        return self.event("exited").record  # type: ignore[no-any-return]

    def gone(self) -> cpb.Cleanup:
        cleanup: cpb.Cleanup = self.event("gone").cleanup
        assert next(self.call, None) is None, "a message after GONE"
        return cleanup

    def cancel(self) -> None:
        self.call.cancel()

    def error(self) -> grpc.RpcError:
        """Reads to the end, which must be an error."""
        try:
            for response in self.call:
                self.events.append(response.WhichOneof("event"))
        except grpc.RpcError as error:
            return error
        raise AssertionError(f"no error; events {self.events}")


class Calls:
    def __init__(self, containerizer: grpc.Channel, switchboard: grpc.Channel) -> None:
        self.containerizer = containerizer_pb2_grpc.ContainerizerServiceStub(containerizer)
        self.switchboard = switchboard_pb2_grpc.SwitchboardServiceStub(switchboard)

    def touch(self) -> None:
        """Connects both channels anew where their service was started anew. Raises grpc.RpcError."""
        self.containerizer.List(cpb.ListRequest(), timeout=5)
        self.leases()

    def launch(
        self,
        command: Sequence[str],
        name: str = "",
        spec: str | None = None,
        *,
        timeout: float | None = None,
        stdin: bool = False,
        limit_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        **fields: Any,
    ) -> Launching:
        """Starts the call; the caller reads its events. `timeout` (s) is the call's deadline, `limit_s` the run's."""
        if limit_s is not None:
            fields["timeout"] = datetime.timedelta(seconds=limit_s)
        request = cpb.LaunchRequest(
            name=name,
            command=command,
            spec=None if spec is None else cpb.SpecInput(text=spec),
            stdin=cpb.STDIN_MODE_PIPE if stdin else cpb.STDIN_MODE_NULL,
            **fields,
        )
        return Launching(self.containerizer.Launch(request, timeout=timeout, metadata=tuple(metadata)))

    def run(
        self,
        command: Sequence[str],
        name: str = "",
        spec: str | None = None,
        *,
        input: bytes | None = None,
        output: bool = True,
        timeout: float = 60,
        **fields: Any,
    ) -> Result:
        """Launches, passes `input` on (None: /dev/null), reads all output, waits for GONE."""
        launching = self.launch(command, name, spec, timeout=timeout, stdin=input is not None, **fields)
        try:
            started = launching.started()
            writer = None
            if input is not None:
                writer = threading.Thread(target=self._pass_on, args=(started.lease_id, input), daemon=True)
                writer.start()
            streams = self.output(started.lease_id) if output else {1: b"", 2: b""}
            record = launching.exited()
            cleanup = launching.gone()
            if writer is not None:
                writer.join(timeout)
            return Result(started, record, cleanup, streams[1], streams[2])
        finally:
            launching.cancel()

    def detach(self, command: Sequence[str], name: str = "", spec: str | None = None, **fields: Any) -> Any:
        """A detached launch; its Started."""
        launching = self.launch(command, name, spec, detach=True, **fields)
        started = launching.started()
        assert next(launching.call, None) is None
        return started

    def output(self, lease_id: str, *, stdout_offset: int = 0, timeout: float = 60) -> dict[int, bytes]:
        """All bytes of both streams (1 stdout, 2 stderr) to their end. Raises AssertionError at a gap."""
        streams, gaps, _ = self.attach(lease_id, stdout_offset=stdout_offset, timeout=timeout)
        assert not gaps, f"gaps in the output: {gaps}"
        return streams

    def attach(
        self, lease_id: str, *, stdout_offset: int = 0, follow: bool = True, timeout: float = 60
    ) -> tuple[dict[int, bytes], list[spb.AttachOutputResponse.Gap], spb.AttachOutputResponse.AttachEnd | None]:
        """Reads both streams; checks that offsets are without a hole but for the gaps told."""
        data = {1: bytearray(), 2: bytearray()}
        next_offset = {1: stdout_offset, 2: 0}
        gaps = []
        end = None
        call = self.switchboard.AttachOutput(
            spb.AttachOutputRequest(lease_id=lease_id, follow=follow, stdout_offset=stdout_offset), timeout=timeout
        )
        numbers = {spb.STREAM_STDOUT: 1, spb.STREAM_STDERR: 2}
        with contextlib.closing(_cancelling(call)) as responses:
            for response in responses:
                match response.WhichOneof("event"):
                    case "data":
                        stream = numbers[response.data.stream]
                        assert response.data.offset == next_offset[stream]
                        data[stream] += response.data.data
                        next_offset[stream] += len(response.data.data)
                    case "gap":
                        stream = numbers[response.gap.stream]
                        assert response.gap.offset == next_offset[stream]
                        next_offset[stream] += response.gap.size
                        gaps.append(response.gap)
                    case "ended":
                        assert response.ended.size == next_offset[numbers[response.ended.stream]]
                    case "end":
                        end = response.end
        return {stream: bytes(value) for stream, value in data.items()}, gaps, end

    def write_input(self, lease_id: str, data: bytes, *, eof: bool = True, chunk: int = 256 << 10) -> Any:
        def messages() -> Iterator[spb.AttachInputRequest]:
            yield spb.AttachInputRequest(lease_id=lease_id)
            for at in range(0, len(data), chunk):
                yield spb.AttachInputRequest(data=data[at : at + chunk])
            if eof:
                yield spb.AttachInputRequest(eof=True)

        return self.switchboard.AttachInput(messages(), timeout=60)

    def _pass_on(self, lease_id: str, data: bytes) -> None:
        try:
            self.write_input(lease_id, data)
        except grpc.RpcError as error:
            if code(error) != grpc.StatusCode.FAILED_PRECONDITION:  # the process ended before it was written to
                raise

    def destroy(self, name: str, *, force: bool = True, timeout: float = 30) -> cpb.Cleanup:
        return self.containerizer.Destroy(cpb.DestroyRequest(name=name, force=force), timeout=timeout).cleanup

    def create(self, name: str, spec: str = "", *, parents: bool = False, timeout: float = 30) -> cpb.CreateResponse:
        request = cpb.CreateRequest(name=name, spec=cpb.SpecInput(text=spec), parents=parents)
        return self.containerizer.Create(request, timeout=timeout)

    def wait(self, name: str, timeout: float = 30) -> cpb.Record:
        return self.containerizer.Wait(cpb.WaitRequest(name=name), timeout=timeout).record

    def get(self, name: str) -> cpb.Container:
        return self.containerizer.Get(cpb.GetRequest(name=name), timeout=10).container

    def living(self) -> dict[str, cpb.Container]:
        """Name to container, all levels, records not counted."""
        listed = self.containerizer.List(cpb.ListRequest(recursive=True), timeout=10).containers
        return {one.name: one for one in listed}

    def lease(self, lease_id: str) -> spb.Lease:
        return self.switchboard.GetLease(spb.GetLeaseRequest(lease_id=lease_id), timeout=10).lease

    def leases(self) -> dict[str, spb.Lease]:
        """Living leases by id."""
        listed = self.switchboard.ListLeases(spb.ListLeasesRequest(), timeout=10).leases
        return {one.lease_id: one for one in listed}


def code(error: grpc.RpcError) -> grpc.StatusCode:
    found: grpc.StatusCode = error.code()
    return found


def info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo:
    """The google.rpc.ErrorInfo of an error."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, f"no details: {error}"
    found = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(found):
            assert found.domain == "tightship"
            return found
    raise AssertionError(f"no ErrorInfo: {error}")


def _cancelling(call: Any) -> Generator[Any, None, None]:
    try:
        yield from call
    finally:
        call.cancel()
