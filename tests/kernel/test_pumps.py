"""Pumps on real pipes and files: every byte kept in order or counted, and nothing that a container could feel."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tightship.kernel.fdframes import Stream
from tightship.switchboard import pumps
from tightship.switchboard.pumps import Budget, Pump, Source
from tightship.switchboard.segments import Gap, Log


@dataclass
class Piped:
    source: Source
    writer: int

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.writer, data) :]

    def close(self) -> None:
        os.close(self.writer)

    @property
    def log(self) -> Log:
        return self.source.log


class Bench:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.told: list[Source] = []
        self.pump = Pump("pump-test", self.told.extend)
        self.count = 0

    def pipe(self, budget: Budget | None = None, path: Path | None = None) -> Piped:
        self.count += 1
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        log = Log(Stream.STDOUT, str(path or self.root / str(self.count) / "stdout"))
        source = Source(reader, log, budget or Budget(1 << 30), None)
        self.pump.add(source)
        return Piped(source, writer)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    before = len(os.listdir("/proc/self/fd"))
    one = Bench(tmp_path)
    yield one
    one.pump.stop(5.0)
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors are left"


def read(piped: Piped) -> bytes:
    return Path(piped.log.path).read_bytes()


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.002)


def test_bytes_come_whole_and_in_order_and_the_end_is_told(bench: Bench) -> None:
    piped = bench.pipe()
    data = os.urandom(1 << 20) * 16
    piped.write(data)
    piped.close()
    until(lambda: piped.log.ended)
    assert piped.log.size == len(data)
    assert read(piped) == data
    assert piped.log.gaps == []
    until(lambda: bench.told.count(piped.source) == 1)


def test_a_stream_without_a_byte_makes_no_file(bench: Bench) -> None:
    piped = bench.pipe()
    piped.close()
    until(lambda: piped.log.ended)
    assert not os.path.exists(os.path.dirname(piped.log.path))


def test_two_streams_share_one_cap_and_the_rest_is_a_gap_of_exact_size(bench: Bench) -> None:
    budget = Budget(100_000)
    one, two = bench.pipe(budget), bench.pipe(budget)
    one.write(b"a" * 60_000)
    until(lambda: one.log.size == 60_000)
    two.write(b"b" * 50_000)
    until(lambda: two.log.size == 50_000)
    one.write(b"c" * 1000)
    for piped in (one, two):
        piped.close()
        until(lambda piped=piped: piped.log.ended)  # type: ignore[misc]
    assert two.log.gaps == [Gap(40_000, 50_000, pumps.CAP_REASON)]
    assert one.log.gaps == [Gap(60_000, 61_000, pumps.CAP_REASON)]
    assert read(two) == b"b" * 40_000
    assert read(one) == b"a" * 60_000


def test_a_cap_of_zero_keeps_nothing_and_makes_no_file(bench: Bench) -> None:
    piped = bench.pipe(Budget(0))
    piped.write(b"x" * 300_000)
    piped.close()
    until(lambda: piped.log.ended)
    assert piped.log.gaps == [Gap(0, 300_000, pumps.CAP_REASON)]
    assert not os.path.exists(piped.log.path)


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", ctypes.c_ulong(0), b"size=%d" % size) != 0:
        pytest.skip("needs to mount a file system")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(path), 2)


def test_a_full_disk_is_a_counted_gap_and_writing_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256 << 10):
        bench = Bench(tmp_path / "disk")
        try:
            ballast = tmp_path / "disk" / "ballast"
            ballast.write_bytes(bytes(128 << 10))
            piped = bench.pipe()
            data = bytes(range(256)) * 4096  # 1 MiB
            piped.write(data)
            until(lambda: piped.log.size == len(data))
            (gap,) = piped.log.gaps
            assert (gap.reason, gap.end) == ("ENOSPC", len(data))
            ballast.unlink()
            time.sleep(pumps.RETRY_S * 1.5)
            piped.write(b"after")
            piped.close()
            until(lambda: piped.log.ended)
            assert piped.log.size == len(data) + 5
            assert piped.log.lost == gap.end - gap.start
            kept = read(piped)
            assert kept[: gap.start] == data[: gap.start]
            assert kept[len(data) :] == b"after"
        finally:
            bench.pump.stop(5.0)


def test_a_directory_that_refuses_is_a_gap_too(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    piped = bench.pipe(path=tmp_path / "file" / "one" / "stdout")
    piped.write(b"lost")
    piped.close()
    until(lambda: piped.log.ended)
    assert piped.log.gaps == [Gap(0, 4, "ENOTDIR")]


def test_a_flood_on_one_pipe_does_not_starve_another(bench: Bench) -> None:
    flood = bench.pipe(Budget(0))
    stop = threading.Event()

    def write() -> None:
        block = bytes(1 << 16)
        while not stop.is_set():
            os.write(flood.writer, block)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        until(lambda: flood.log.size > 0)
        others = [bench.pipe() for _ in range(20)]
        for other in others:
            other.write(b"heard")
            other.close()
        until(lambda: all(other.log.ended for other in others))
        assert all(read(other) == b"heard" for other in others)
    finally:
        stop.set()
        thread.join()
    flood.close()
    until(lambda: flood.log.ended)


def test_the_last_copy_takes_what_is_there_and_ends_the_stream(bench: Bench) -> None:
    piped = bench.pipe()
    piped.write(b"there")
    bench.pump.last_copy(piped.source)
    until(lambda: piped.log.ended)
    assert read(piped) == b"there"
    with pytest.raises(BrokenPipeError):
        os.write(piped.writer, b"later")
    piped.close()


def test_the_last_copy_of_an_endless_writer_ends(bench: Bench) -> None:
    piped = bench.pipe(Budget(0))

    def write() -> None:
        with contextlib.suppress(BrokenPipeError):
            while True:
                os.write(piped.writer, bytes(4096))

    thread = threading.Thread(target=write)
    thread.start()
    bench.pump.last_copy(piped.source)
    thread.join(20)
    assert not thread.is_alive()
    until(lambda: piped.log.ended)
    piped.close()


def test_a_severed_stream_counts_what_was_unread(tmp_path: Path) -> None:
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    source = Source(reader, Log(Stream.STDERR, str(tmp_path / "stderr")), Budget(10), None)
    os.write(writer, b"unread")
    source.sever(-1)
    assert source.log.gaps == [Gap(0, 6, pumps.UNDRAINED_REASON)]
    assert source.log.ended
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"more")
    os.close(writer)
    source.sever(-1)


def test_a_pump_that_is_stuck_in_the_disk_holds_up_neither_the_close_nor_the_number(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    real = os.splice

    def stuck(*arguments: object, **named: object) -> int:
        inside.set()
        assert go_on.wait(20)
        return real(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "splice", stuck)
    piped = bench.pipe()
    piped.write(b"never counted")
    assert inside.wait(20)
    number = piped.source.fd
    begun = time.monotonic()
    bench.pump.sever(piped.source)
    assert time.monotonic() - begun < 5.0
    assert piped.log.ended
    with pytest.raises(BrokenPipeError):
        os.write(piped.writer, b"more")
    # Nobody else can get the number while the pump may still use it.
    other = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    assert other != number
    os.close(other)
    go_on.set()
    until(lambda: piped.source.fd < 0)
    assert piped.log.size == 0
    piped.close()


def test_severing_and_pumping_at_once_leaves_no_descriptor(bench: Bench) -> None:
    for _ in range(300):
        piped = bench.pipe(Budget(0))
        thread = threading.Thread(target=piped.close)
        os.write(piped.writer, bytes(60_000))
        thread.start()
        bench.pump.sever(piped.source)
        thread.join()
        until(lambda piped=piped: piped.source.fd < 0)  # type: ignore[misc]
        assert piped.log.size <= 60_000


def test_a_number_that_is_used_again_does_not_inherit_the_end_of_the_one_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.splice
    at: queue.SimpleQueue[int] = queue.SimpleQueue()
    go_on = threading.Semaphore(0)

    def held(fd: int, *arguments: object, **named: object) -> int:
        at.put(fd)
        assert go_on.acquire(timeout=20)
        return real(fd, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "splice", held)
    busy, ended, first = bench.pipe(), bench.pipe(), bench.pipe()
    number = ended.source.fd
    busy.write(b"keeps the pump here")
    assert at.get(timeout=20) == busy.source.fd
    # The next batch has both: one that holds the pump, and behind it one that has hung up.
    first.write(b"and here")
    ended.close()
    go_on.release()
    while at.get(timeout=20) != first.source.fd:
        go_on.release()
    bench.pump.sever(ended.source)
    again = bench.pipe()
    assert again.source.fd == number
    for _ in range(1000):
        go_on.release()
    again.write(b"all of it")
    again.close()
    until(lambda: again.log.ended)
    assert again.log.size == len(b"all of it")
    for piped in (busy, first):
        piped.close()
    until(lambda: busy.log.ended and first.log.ended)


def test_an_idle_pump_uses_no_cpu(bench: Bench) -> None:
    piped = bench.pipe()
    piped.write(b"x")
    until(lambda: piped.log.size == 1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    piped.close()
    until(lambda: piped.log.ended)
