"""The client library over services that are killed, restarted or silent: output to its last byte, one launch and not
two, an answer in bounded time."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.harness.pair import Pair, Service
from tightship.client import AsyncClient, Client, DeadlineExceeded, TightshipError, Unavailable
from tightship.client.channel import OPTIONS as CLIENT
from tightship.common.serving import OPTIONS as SERVER
from tightship.v1 import containerizer_pb2 as cpb

LINES = 4000
# Numbered lines, in bursts over a second or two, not ending when nobody reads.
COUNTING = (
    f"trap '' PIPE; i=0; while [ $i -lt {LINES} ]; do echo line $i; i=$((i+1)); [ $((i%400)) = 0 ] && sleep 0.1; done"
)


@pytest.fixture
async def client(own_pair: Pair) -> AsyncIterator[AsyncClient]:
    """A client of a pair that afterwards is as it was before."""
    with own_pair.unchanged(timeout_s=20):
        async with AsyncClient(str(own_pair.run_dir), patience_s=10.0) as made:
            yield made
        for _ in range(10):
            gc.collect()  # a failed call of grpc.aio is a cycle, and keeps its connection until then
            await asyncio.sleep(0.05)


def _whole(lines: list[bytes], upto: int) -> bool:
    return lines == [b"line %d" % number for number in range(upto)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_output_over_a_new_switchboard(own_pair: Pair, client: AsyncClient, number: signal.Signals) -> None:
    """What was written before it ended is read once, from a reader that is never told of it."""
    async with client.launch(["sh", "-c", COUNTING]) as launch:
        got = bytearray()
        at = 0
        stopping = None
        async for chunk in launch.output("stdout"):
            assert not chunk.lost
            assert chunk.offset == at
            at = chunk.next_offset
            got += chunk.data
            if stopping is None and len(got) > 10_000:
                stopping = asyncio.create_task(asyncio.to_thread(own_pair.kill, "switchboard", number))
        assert stopping is not None
        await stopping
        await asyncio.to_thread(own_pair.await_ready)
        lines = bytes(got).splitlines()
        assert _whole(lines[:-1], len(lines) - 1)
        assert launch.output_end is not None
        assert launch.output_end.end_reason == ("shutdown" if number == signal.SIGTERM else "switchboard died")
        # The same bytes again, from the middle, by whoever asks later.
        middle = len(got) // 2
        rest = [chunk.data async for chunk in client.logs(launch.id, "stdout", stdout_offset=middle)]
        assert b"".join(rest) == got[middle:]


async def test_a_run_whose_output_was_cut_is_no_success(own_pair: Pair, client: AsyncClient, tmp_path: Path) -> None:
    script = f"trap '' PIPE; echo one; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo two; exit 0"
    running = asyncio.create_task(client.run(["sh", "-c", script]))
    async with asyncio.timeout(20):
        while not any(lease.streams[0].size for lease in own_pair.calls.leases().values() if lease.streams):
            await asyncio.sleep(0.01)
    await asyncio.to_thread(own_pair.kill, "switchboard")
    await asyncio.to_thread(own_pair.await_ready)
    (tmp_path / "go").touch()
    with pytest.raises(TightshipError) as cut:
        await running
    assert (cut.value.code.name, cut.value.reason) == ("DATA_LOSS", "OUTPUT_CUT")


async def test_a_run_counts_what_its_log_cap_cut_off(client: AsyncClient) -> None:
    done = await client.run(["sh", "-c", "printf 0123456789abcdef"], log_cap=10)
    assert (done.stdout, done.lost) == (b"0123456789", 6)


async def test_output_of_the_ended_over_a_new_switchboard(own_pair: Pair, client: AsyncClient) -> None:
    done = await client.run(["sh", "-c", COUNTING])
    assert _whole(done.stdout.splitlines(), LINES)
    got = bytearray()
    async for chunk in client.logs(done.record.id, "stdout"):
        got += chunk.data
        if len(got) == len(chunk.data):
            await asyncio.to_thread(own_pair.kill, "switchboard")
    assert got == done.stdout


@pytest.mark.parametrize("service", ["containerizer", "spawner"])
async def test_a_launch_over_a_new_containerizer_runs_once(
    own_pair: Pair, client: AsyncClient, service: Service, tmp_path: Path
) -> None:
    marks = tmp_path / "ran"
    async with client.launch(["sh", "-c", f"echo ran >> {marks}; sleep 3; echo out; exit 5"]) as launch:
        waiting = asyncio.create_task(launch.wait())
        while not marks.exists():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(own_pair.kill, service)
        record = await waiting
        assert record.id == launch.id
        assert record.reason == cpb.Record.EXITED
        out = [chunk.data async for chunk in launch.output()]
    assert marks.read_text() == "ran\n"
    # When the spawner ends with its children's statuses, the switchboard's pidfd or nobody knows them.
    assert (record.exit_code == 5 and b"".join(out) == b"out\n") or service == "spawner"


async def test_what_can_be_repeated_is_over_a_restart(own_pair: Pair, client: AsyncClient) -> None:
    """Calls of many kinds, without a pause, while the containerizer is killed: none fails, nothing is made twice."""
    await client.ready(20.0)
    stop = asyncio.Event()
    numbers = itertools.count()

    async def create() -> int:
        made = 0
        while not stop.is_set():
            name = f"/made-{next(numbers)}"
            assert (await client.create(name)).container.name == name
            await client.get(name)
            made += 1
        return made

    async def read() -> int:
        count = 0
        while not stop.is_set():
            await client.list()
            await client.leases()
            count += 1
        return count

    working = [asyncio.create_task(work()) for work in (create, create, read)]
    await asyncio.sleep(0.5)
    await asyncio.to_thread(own_pair.kill, "containerizer")
    await asyncio.sleep(3)
    stop.set()
    created = await asyncio.gather(*working)
    names = [each.name for each in await client.list()]
    assert len(names) == len(set(names)) == created[0] + created[1]
    for name in names:
        await client.destroy(name)


async def test_a_service_that_is_silent_is_noticed(own_pair: Pair) -> None:
    """A stopped process keeps its connections: only deadlines and pings tell."""
    stopped = {service: own_pair.pid(service) for service in ("containerizer", "switchboard")}
    async with AsyncClient(str(own_pair.run_dir), timeout_s=1.0) as client:
        async with client.launch(["sleep", "600"]) as launch:

            async def follow() -> None:
                async for _ in launch.output():
                    pass

            async def ask() -> None:
                begun = time.monotonic()
                with pytest.raises(DeadlineExceeded):
                    await client.list()
                assert time.monotonic() - begun < 15

            for pid in stopped.values():
                os.kill(pid, signal.SIGSTOP)
            try:
                asking = asyncio.create_task(ask())
                waits = [asyncio.create_task(wait) for wait in (launch.wait(), follow())]
                done, _ = await asyncio.wait(waits, timeout=80)
                assert done == set(waits)
                for each in waits:
                    assert isinstance(each.exception(), Unavailable), each
                await asking
            finally:
                for pid in stopped.values():
                    os.kill(pid, signal.SIGCONT)
    # It came to, found its client gone, and cleaned up.
    await asyncio.to_thread(own_pair.await_ready)
    for _ in range(500):
        if not own_pair.calls.living():
            break
        await asyncio.sleep(0.02)
    assert not own_pair.calls.living()


def test_the_client_pings_no_faster_than_the_service_takes() -> None:
    """Else it would end the connection, with all the calls on it."""
    assert dict(CLIENT)["grpc.keepalive_time_ms"] > dict(SERVER)["grpc.http2.min_recv_ping_interval_without_data_ms"]


async def test_a_create_that_is_told_twice_is_one(own_pair: Pair, client: AsyncClient) -> None:
    """By the caller's own request id, from either client, also over a restart between the two."""
    first = await client.create("/told", request_id="told-twice")

    def again() -> object:
        with Client(str(own_pair.run_dir), patience_s=10.0) as blocking:
            return blocking.create("/told", request_id="told-twice")

    assert await asyncio.to_thread(again) == first
    await asyncio.to_thread(own_pair.kill, "containerizer", signal.SIGKILL)
    await asyncio.to_thread(own_pair.await_ready)
    assert await client.create("/told", request_id="told-twice") == first
    with pytest.raises(TightshipError) as refused:
        await client.create("/other", request_id="told-twice")
    assert refused.value.reason == "REQUEST_ID_REUSED"
    await client.destroy("/told")
