"""The client library against a gRPC server that answers as a test says: errors, what is repeated, rejoin and resume."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tightship.client import AsyncClient, Cancelled, Client, DeadlineExceeded, NotFound, TightshipError, requests
from tightship.common.errors import ServiceError, abort
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import spec_pb2, switchboard_pb2
from tightship.v1.containerizer_pb2_grpc import ContainerizerServiceServicer, add_ContainerizerServiceServicer_to_server
from tightship.v1.switchboard_pb2_grpc import SwitchboardServiceServicer, add_SwitchboardServiceServicer_to_server

Code = grpc.StatusCode
Handler = Callable[[Any, Any], Any]


class Fake:
    """Both services on the sockets of a run directory; `on` sets what a method does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.handlers: dict[str, Handler] = {}
        self.calls: list[tuple[str, Any]] = []
        self.metadata: list[dict[str, Any]] = []
        self._servers: list[grpc.aio.Server] = []

    def on(self, method: str, handler: Handler) -> None:
        self.handlers[method] = handler

    def count(self, method: str) -> int:
        return [name for name, _ in self.calls].count(method)

    async def start(self, *services: str) -> None:
        for service in services or ("containerizer", "switchboard"):
            server = grpc.aio.server()
            server.add_insecure_port(f"unix:{self.directory}/{service}.sock")
            if service == "containerizer":
                add_ContainerizerServiceServicer_to_server(self._servicer(ContainerizerServiceServicer), server)
            else:
                add_SwitchboardServiceServicer_to_server(self._servicer(SwitchboardServiceServicer), server)
            await server.start()
            self._servers.append(server)

    async def stop(self) -> None:
        for server in self._servers:
            await server.stop(None)
        self._servers.clear()

    def _servicer(self, base: type) -> Any:
        fake = self
        streams = {"Launch", "AttachOutput"}

        def unary(name: str) -> Any:
            async def handler(_self: object, request: Any, context: Any) -> Any:
                fake._note(name, request, context)
                return await fake.handlers[name](request, context)

            return handler

        def stream(name: str) -> Any:
            async def handler(_self: object, request: Any, context: Any) -> AsyncIterator[Any]:
                fake._note(name, request, context)
                async for response in fake.handlers[name](request, context):
                    yield response

            return handler

        methods = {name: stream(name) if name in streams else unary(name) for name in vars(base) if name[0].isupper()}
        return type("Servicer", (base,), methods)()

    def _note(self, name: str, request: Any, context: Any) -> None:
        self.calls.append((name, request))
        self.metadata.append(dict(context.invocation_metadata()))


@pytest.fixture
async def fake(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fake]:
    made = Fake(tmp_path_factory.mktemp("f"))
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client(fake: Fake) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(str(fake.directory), patience_s=5.0) as made:
        yield made


STARTED = pb.LaunchResponse(started=pb.LaunchResponse.Started(id="1", name="/a", lease_id="l", pid=9))
EXITED = pb.LaunchResponse(exited=pb.LaunchResponse.Exited(record=pb.Record(id="1", name="/a", exit_code=3)))
GONE = pb.LaunchResponse(gone=pb.LaunchResponse.Gone(cleanup=pb.Cleanup(outcome=pb.Cleanup.CLEAN)))


def answering(*responses: pb.LaunchResponse) -> Handler:
    async def launch(request: Any, context: Any) -> AsyncIterator[pb.LaunchResponse]:
        for response in responses:
            yield response

    return launch


def failing(code: Code, reason: str = "", retry_after: float | None = None, **metadata: object) -> Handler:
    async def handler(request: Any, context: Any) -> Any:
        await abort(context, ServiceError(code, reason, "no", retry_after, **metadata))

    return handler


async def test_errors_carry_what_the_service_tells(fake: Fake, client: AsyncClient) -> None:
    fake.on(
        "Create", failing(Code.INVALID_ARGUMENT, "BAD_SPEC", field="spec", line=2, column=7, errno="EINVAL", file="f")
    )
    with pytest.raises(TightshipError) as caught:
        await client.create("/a", "x")
    error = caught.value
    assert (error.code, error.number, error.reason, error.message) == (Code.INVALID_ARGUMENT, 3, "BAD_SPEC", "no")
    assert (error.field, error.file, error.errno, error.line, error.column) == ("spec", "f", "EINVAL", 2, 7)
    assert fake.count("Create") == 1


async def test_an_error_is_of_its_codes_class_and_can_be_sent_on(fake: Fake, client: AsyncClient) -> None:
    fake.on("Get", failing(Code.NOT_FOUND, "NO_SUCH", 1.5, name="/a"))
    with pytest.raises(NotFound) as caught:
        await client.get("/a")
    sent = pickle.loads(pickle.dumps(caught.value))
    assert type(sent) is NotFound
    assert (sent.code, sent.message, sent.reason) == (Code.NOT_FOUND, "no", "NO_SUCH")
    assert (sent.metadata, sent.retry_after) == ({"name": "/a"}, 1.5)
    assert type(TightshipError(Code.DATA_LOSS, "x")) is TightshipError


async def test_a_pending_cleanup_comes_with_its_error(fake: Fake, client: AsyncClient) -> None:
    async def destroy(request: Any, context: Any) -> Any:
        error = ServiceError(Code.DEADLINE_EXCEEDED, "CLEANUP_PENDING", "goes on")
        error.details.append(pb.Cleanup(left=["cgroup /x"]))
        await abort(context, error)

    fake.on("Destroy", destroy)
    with pytest.raises(DeadlineExceeded) as caught:
        await client.destroy("/a")
    assert caught.value.cleanup is not None
    assert [*caught.value.cleanup.left] == ["cgroup /x"]


async def test_one_deadline_over_all_attempts(fake: Fake) -> None:
    left: list[float] = []

    async def listing(request: Any, context: Any) -> Any:
        left.append(context.time_remaining())
        if len(left) < 3:
            await asyncio.sleep(0.1)
            await failing(Code.UNAVAILABLE, "RECOVERING", 0.01)(request, context)
        return pb.ListResponse()

    fake.on("List", listing)
    async with AsyncClient(str(fake.directory), timeout_s=3.0) as client:
        await client.list()
    # On the wire a time-out is rounded up, to some hundredths of it.
    assert left[0] > left[1] + 0.05 > left[2] + 0.1, left


async def test_a_client_of_the_past(fake: Fake) -> None:
    client = AsyncClient(str(fake.directory))
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.get("/a")


def test_a_client_of_another_loop(tmp_path: Path) -> None:
    client = AsyncClient(str(tmp_path))

    async def use() -> None:
        await client.get("/a")

    with pytest.raises(TightshipError):
        asyncio.run(use())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(use())


async def test_a_plain_grpc_error_too(fake: Fake, client: AsyncClient) -> None:
    async def handler(request: Any, context: Any) -> Any:
        await context.abort(Code.INTERNAL, "plain")

    fake.on("Get", handler)
    with pytest.raises(TightshipError, match="INTERNAL: plain"):
        await client.get("/a")


async def test_refused_with_a_hint_is_repeated_whatever_the_call(fake: Fake, client: AsyncClient) -> None:
    async def kill(request: Any, context: Any) -> Any:
        if fake.count("Kill") < 3:
            await failing(Code.UNAVAILABLE, "RECOVERING", 0.01)(request, context)
        return pb.KillResponse()

    fake.on("Kill", kill)
    await client.kill("/a")
    assert fake.count("Kill") == 3


async def test_what_may_have_been_done_is_not_repeated(fake: Fake, client: AsyncClient) -> None:
    fake.on("Kill", failing(Code.UNAVAILABLE))
    with pytest.raises(TightshipError):
        await client.kill("/a")
    assert fake.count("Kill") == 1


async def test_no_service_fails_at_once(tmp_path: Path) -> None:
    async with AsyncClient(str(tmp_path), patience_s=60.0) as client:
        with pytest.raises(TightshipError) as caught:
            async with asyncio.timeout(10):
                await client.list()
        assert caught.value.code is Code.UNAVAILABLE
        with pytest.raises(TightshipError):
            async with asyncio.timeout(10), client.launch(["true"]):
                pass


async def test_a_service_that_comes_back_is_waited_for(fake: Fake, client: AsyncClient) -> None:
    async def listing(request: Any, context: Any) -> Any:
        return pb.ListResponse()

    fake.on("List", listing)
    assert await client.list() == []
    await fake.stop()
    waiting = asyncio.create_task(client.list())
    await asyncio.sleep(0.1)
    await fake.start()
    assert await waiting == []


async def test_a_launch_to_its_end(fake: Fake, client: AsyncClient) -> None:
    fake.on("Launch", answering(STARTED, EXITED, GONE))
    async with client.launch(["sh", "-c", "exit 3"], spec="cpu {}", env={"A": "b"}, timeout=1.5) as launched:
        assert (launched.id, launched.name, launched.pid) == ("1", "/a", 9)
        assert (await launched.exited()).exit_code == 3
        assert (await launched.wait()).exit_code == 3
        assert (await launched.gone()).outcome == pb.Cleanup.CLEAN
    request = fake.calls[0][1]
    assert request.spec.text == "cpu {}"
    assert [*request.env] == ["A=b"]
    assert request.timeout.ToMilliseconds() == 1500
    assert len(request.request_id) == 32
    assert [name for name, _ in fake.calls] == ["Launch"]  # and nothing else on the way


async def test_a_failed_launch_raises_on_entry(fake: Fake, client: AsyncClient) -> None:
    async def launch(request: Any, context: Any) -> AsyncIterator[pb.LaunchResponse]:
        await failing(Code.NOT_FOUND, "EXEC_FAILED", stage="exec", errno="ENOENT")(request, context)
        yield STARTED

    fake.on("Launch", launch)
    with pytest.raises(TightshipError) as caught:
        async with client.launch(["nothing"]):
            pytest.fail("entered")
    assert (caught.value.stage, caught.value.errno) == ("exec", "ENOENT")


class Held:
    """A launch that runs until its call is cancelled, and the container's state for Get."""

    def __init__(self, fake: Fake) -> None:
        self.cancelled = asyncio.Event()
        fake.on("Launch", self.launch)
        fake.on("Get", self.get)

    async def launch(self, request: Any, context: Any) -> AsyncIterator[pb.LaunchResponse]:
        yield STARTED
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def get(self, request: Any, context: Any) -> pb.GetResponse:
        assert request.name == "1"
        state = pb.Container.ENDED if self.cancelled.is_set() else pb.Container.CLOSING
        return pb.GetResponse(container=pb.Container(state=state))


@pytest.mark.parametrize("how", ["return", "exception", "cancel"])
async def test_leaving_cancels_and_waits_until_gone(fake: Fake, client: AsyncClient, how: str) -> None:
    held = Held(fake)
    entered = asyncio.Event()

    async def use() -> None:
        async with client.launch(["sleep", "60"]):
            entered.set()
            if how == "exception":
                raise ZeroDivisionError
            if how == "cancel":
                await asyncio.sleep(60)
        assert held.cancelled.is_set()

    task = asyncio.create_task(use())
    await entered.wait()
    if how == "cancel":
        task.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait([task])
    assert held.cancelled.is_set()
    assert fake.count("Get") >= 1
    if how == "exception":
        assert isinstance(task.exception(), ZeroDivisionError)
    assert task.cancelled() == (how == "cancel")


async def test_a_waiter_that_is_cancelled_leaves_the_launch_alone(fake: Fake, client: AsyncClient) -> None:
    held = Held(fake)
    async with client.launch(["sleep", "60"]) as launched:
        for waiting in (launched.wait, launched.exited, launched.gone):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await waiting()
        assert not held.cancelled.is_set()
    assert held.cancelled.is_set()


async def test_a_pending_cleanup_is_told(fake: Fake, client: AsyncClient) -> None:
    Held(fake)

    async def get(request: Any, context: Any) -> pb.GetResponse:
        return pb.GetResponse(container=pb.Container(state=pb.Container.CLEANUP_PENDING, pending_reason="rmdir: EBUSY"))

    fake.on("Get", get)
    with pytest.raises(TightshipError, match="EBUSY"):
        async with client.launch(["sleep", "60"]):
            pass
    with pytest.raises(ZeroDivisionError):  # what the block raised is not hidden
        async with client.launch(["sleep", "60"]):
            raise ZeroDivisionError


async def test_a_new_containerizer_is_joined_by_request_id(fake: Fake, client: AsyncClient) -> None:
    async def launch(request: Any, context: Any) -> AsyncIterator[pb.LaunchResponse]:
        yield STARTED
        if fake.count("Launch") == 1:
            await context.abort(Code.UNAVAILABLE, "shutting down")
        yield EXITED
        yield GONE

    fake.on("Launch", launch)
    async with client.launch(["x"]) as launched:
        assert (await launched.wait()).exit_code == 3
    first, second = (request for name, request in fake.calls if name == "Launch")
    assert first == second
    assert first.request_id


@pytest.mark.parametrize("name", ["", "A=B"])
async def test_a_variable_without_a_name_is_refused(client: AsyncClient, name: str) -> None:
    with pytest.raises(ValueError, match="env"):
        client.launch(["x"], env={name: "c"})


async def test_a_launch_without_standard_input_takes_no_byte(fake: Fake, client: AsyncClient) -> None:
    async def launch(request: Any, context: Any) -> AsyncIterator[pb.LaunchResponse]:
        yield STARTED
        yield EXITED
        yield GONE

    fake.on("Launch", launch)
    async with client.launch(["x"]) as launched:
        with pytest.raises(RuntimeError, match="stdin=True"):
            await launched.write(b"x")
        await launched.wait()


async def test_a_cancel_ends_a_launch_that_is_on_its_way_to_join_again(fake: Fake, client: AsyncClient) -> None:
    lost = asyncio.Event()

    async def launch(request: Any, context: Any) -> AsyncIterator[pb.LaunchResponse]:
        yield STARTED
        if fake.count("Launch") < 3:
            lost.set()
            await failing(Code.UNAVAILABLE, "RECOVERING", 0.3)(request, context)
        await asyncio.sleep(600)

    async def get(request: Any, context: Any) -> pb.GetResponse:
        return pb.GetResponse(container=pb.Container(state=pb.Container.ENDED, record=EXITED.exited.record))

    fake.on("Launch", launch)
    fake.on("Get", get)
    launched = await client.launch(["x"]).start()
    await lost.wait()
    async with asyncio.timeout(20):
        while fake.count("Launch") < 2:  # then it waits for its next try
            await asyncio.sleep(0.01)
        await launched.cancel()


async def test_another_launch_in_its_place_is_not_taken_for_it(fake: Fake, client: AsyncClient) -> None:
    other = pb.LaunchResponse(started=pb.LaunchResponse.Started(id="2", name="/a"))

    async def launch(request: Any, context: Any) -> AsyncIterator[pb.LaunchResponse]:
        if fake.count("Launch") == 1:
            yield STARTED
            await context.abort(Code.UNAVAILABLE, "killed")
        yield other
        yield EXITED
        yield GONE

    fake.on("Launch", launch)
    async with client.launch(["x"]) as launched:
        with pytest.raises(TightshipError, match="DATA_LOSS"):
            await launched.wait()
        assert launched.id == "1"


async def test_a_refused_launch_is_repeated_as_the_same(fake: Fake, client: AsyncClient) -> None:
    async def launch(request: Any, context: Any) -> AsyncIterator[pb.LaunchResponse]:
        if fake.count("Launch") == 1:
            await failing(Code.UNAVAILABLE, "RECOVERING", 0.01)(request, context)
        yield STARTED
        yield EXITED
        yield GONE

    fake.on("Launch", launch)
    async with client.launch(["x"]) as launched:
        await launched.wait()
    first, second = (request for name, request in fake.calls if name == "Launch")
    assert first == second


async def test_a_failure_that_was_told_is_not_told_again(fake: Fake, client: AsyncClient) -> None:
    async def launch(request: Any, context: Any) -> AsyncIterator[pb.LaunchResponse]:
        yield STARTED
        yield EXITED
        await failing(Code.DEADLINE_EXCEEDED, "CLEANUP_PENDING")(request, context)

    fake.on("Launch", launch)
    async with client.launch(["x"]) as launched:
        with pytest.raises(DeadlineExceeded):
            await launched.wait()
        assert (await launched.exited()).exit_code == 3
    with pytest.raises(DeadlineExceeded):
        async with client.launch(["x"]) as launched:
            await launched.exited()


async def test_waits_take_time_outs(fake: Fake, client: AsyncClient) -> None:
    held = Held(fake)
    async with client.launch(["sleep", "60"]) as launched:
        for waiting in (launched.wait, launched.exited, launched.gone):
            with pytest.raises(TimeoutError):
                await waiting(0.05)
        assert not held.cancelled.is_set()


async def test_detached(fake: Fake, client: AsyncClient) -> None:
    async def wait(request: Any, context: Any) -> pb.WaitResponse:
        return pb.WaitResponse(record=pb.Record(id=request.name, exit_code=5))

    fake.on("Launch", answering(STARTED))
    fake.on("Wait", wait)
    async with client.launch(["x"], detach=True) as launched:
        assert (await launched.wait()).exit_code == 5
        with pytest.raises(RuntimeError, match="detached"):
            await launched.gone()
    assert [name for name, _ in fake.calls] == ["Launch", "Wait"]


def data(offset: int, content: bytes, stream: Any = switchboard_pb2.STREAM_STDOUT) -> Any:
    return switchboard_pb2.AttachOutputResponse(
        data=switchboard_pb2.AttachOutputResponse.Data(stream=stream, offset=offset, data=content)
    )


END = switchboard_pb2.AttachOutputResponse(
    end=switchboard_pb2.AttachOutputResponse.AttachEnd(exit=switchboard_pb2.Exit(code=3))
)


async def test_output_goes_on_by_offset(fake: Fake, client: AsyncClient) -> None:
    everything = b"0123456789"

    async def attach(request: Any, context: Any) -> AsyncIterator[Any]:
        at = request.stdout_offset
        yield data(at, everything[at : at + 3])
        if at + 3 < len(everything):
            await failing(Code.UNAVAILABLE, "RESUME")(request, context)
        yield switchboard_pb2.AttachOutputResponse(
            gap=switchboard_pb2.AttachOutputResponse.Gap(
                stream=switchboard_pb2.STREAM_STDERR, offset=0, size=7, reason="cap"
            )
        )
        yield END

    fake.on("Launch", answering(STARTED, EXITED, GONE))
    fake.on("AttachOutput", attach)
    async with client.launch(["x"]) as launched:
        chunks = [chunk async for chunk in launched.output()]
        assert b"".join(chunk.data for chunk in chunks) == everything
        assert (chunks[-1].stream, chunks[-1].lost, chunks[-1].reason) == ("stderr", 7, "cap")
        assert launched.output_end is not None
        assert launched.output_end.exit.code == 3
    assert fake.count("AttachOutput") == 4


async def test_an_output_that_is_left_early_ends_its_call(fake: Fake, client: AsyncClient) -> None:
    ended = asyncio.Event()

    async def attach(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            for offset in range(1_000_000):
                yield data(offset, b"x")
                await asyncio.sleep(0.001)
        finally:
            ended.set()

    async def get(request: Any, context: Any) -> pb.GetResponse:
        return pb.GetResponse(container=pb.Container(lease_id="l"))

    fake.on("Get", get)
    fake.on("AttachOutput", attach)
    async for _ in client.logs("/a", follow=True):
        break
    async with asyncio.timeout(10):
        await ended.wait()


async def test_output_that_breaks_off_is_not_taken_for_whole(fake: Fake, client: AsyncClient) -> None:
    async def attach(request: Any, context: Any) -> AsyncIterator[Any]:
        yield data(0, b"half")

    fake.on("Launch", answering(STARTED, EXITED, GONE))
    fake.on("AttachOutput", attach)
    async with client.launch(["x"]) as launched:
        with pytest.raises(TightshipError, match="DATA_LOSS"):
            async for _ in launched.output():
                pass
        assert [chunk.next_offset async for chunk in launched.output(follow=False)] == [4]


async def test_input_after_a_write_that_was_cancelled(fake: Fake, client: AsyncClient) -> None:
    async def attach(requests: Any, context: Any) -> Any:
        await asyncio.sleep(60)

    fake.on("Launch", answering(STARTED, EXITED, GONE))
    fake.on("AttachInput", attach)
    async with client.launch(["cat"], stdin=True) as launched:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                while True:  # nobody reads: flow control holds it
                    await launched.write(b"x" * 1_000_000)
        with pytest.raises(Cancelled):
            await launched.write(b"more")


async def test_input_to_its_end(fake: Fake, client: AsyncClient) -> None:
    got: list[Any] = []

    async def attach(requests: Any, context: Any) -> Any:
        async for request in requests:
            got.append(request)
            if request.eof:
                break
        return switchboard_pb2.AttachInputResponse(written=sum(len(request.data) for request in got))

    fake.on("Launch", answering(STARTED, EXITED, GONE))
    fake.on("AttachInput", attach)
    async with client.launch(["cat"], stdin=True) as launched:
        await launched.write(b"x" * 1_000_000)
        assert await launched.close_stdin() == 1_000_000
    assert [request.lease_id for request in got] == ["l", *[""] * (len(got) - 1)]
    assert b"".join(request.data for request in got) == b"x" * 1_000_000
    assert [request.eof for request in got] == [False] * (len(got) - 1) + [True]


async def test_input_that_nobody_reads(fake: Fake, client: AsyncClient) -> None:
    async def attach(requests: Any, context: Any) -> Any:
        return switchboard_pb2.AttachInputResponse(reader_gone=True)

    fake.on("Launch", answering(STARTED, EXITED, GONE))
    fake.on("AttachInput", attach)
    async with client.launch(["true"], stdin=True) as launched:
        with pytest.raises(BrokenPipeError):
            for _ in range(1000):
                await launched.write(b"x" * 100_000)


async def test_run_collects(fake: Fake, client: AsyncClient) -> None:
    async def attach(request: Any, context: Any) -> AsyncIterator[Any]:
        yield data(0, b"out")
        yield data(0, b"err", switchboard_pb2.STREAM_STDERR)
        yield END

    fake.on("Launch", answering(STARTED, EXITED, GONE))
    fake.on("AttachOutput", attach)
    done = await client.run(["x"])
    assert (done.stdout, done.stderr, done.record.exit_code) == (b"out", b"err", 3)


def test_requests_from_values() -> None:
    made = requests.launch(
        ["a", "b"], {"spec": spec_pb2.ContainerSpec(owner=3), "env": ["X=y"], "umask": 0, "stdin": True}
    )
    assert made.spec.spec.owner == 3
    assert [*made.env] == ["X=y"]
    assert made.HasField("umask")
    assert not made.HasField("timeout")
    assert made.stdin == pb.STDIN_MODE_PIPE
    with pytest.raises(TypeError, match="list of words"):
        requests.launch("true", {})
    with pytest.raises(TypeError, match="nonsense"):
        requests.launch(["true"], {"nonsense": 1})  # type: ignore[typeddict-unknown-key]


class Threaded:
    """The fake in a thread with a loop of its own, for the blocking client."""

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.fake = Fake(directory)
        self.run(self.fake.start())

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def close(self) -> None:
        self.run(self.fake.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def threaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threaded]:
    # Two loops of grpc.aio in one process wake each other for nothing; only this test does that.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    made = Threaded(tmp_path_factory.mktemp("t"))
    yield made
    made.close()
    logging.getLogger("asyncio").setLevel(logging.NOTSET)


def test_the_blocking_client(threaded: Threaded) -> None:
    fake = threaded.fake

    async def attach(request: Any, context: Any) -> AsyncIterator[Any]:
        yield data(0, b"out")
        yield END

    fake.on("Launch", answering(STARTED, EXITED, GONE))
    fake.on("AttachOutput", attach)
    fake.on("Get", failing(Code.NOT_FOUND, "NO_SUCH"))
    before = threading.active_count()
    with Client(str(fake.directory)) as client, client.launch(["x"]) as run:
        assert [chunk.data for chunk in run.output()] == [b"out"]
        record = run.wait()
        assert (record.exit_code, run.name) == (3, "/a")
        with pytest.raises(TightshipError, match="NOT_FOUND"):
            client.get("/a")
    assert threading.active_count() == before


def test_an_interrupt_leaves_nothing(threaded: Threaded) -> None:
    held = threaded.run(_make(lambda: Held(threaded.fake)))
    with Client(str(threaded.fake.directory)) as client:
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt), client.launch(["sleep", "60"]) as run:
            timer.start()
            run.wait()
        assert held.cancelled.is_set()


async def _make(what: Callable[[], Any]) -> Any:
    return what()


async def test_a_call_takes_its_trace_context_along(
    fake: Fake, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.on("Launch", answering(STARTED, EXITED, GONE))
    async with client.launch(["x"]) as launched:
        await launched.wait()
    assert "traceparent" not in fake.metadata[-1]
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("TRACEPARENT", parent)
    async with AsyncClient(str(fake.directory)) as traced, traced.launch(["x"]) as launched:
        await launched.wait()
    sent = fake.metadata[-1]["traceparent"]
    assert sent[3:35] == "a" * 32
    assert sent[36:52] != "b" * 16
