"""Bytes of standard streams, end to end: nothing lost, nothing waited for that is not the process' own."""

from __future__ import annotations

import hashlib
import time

import grpc
import pytest

from tests.harness.calls import code, fresh_name
from tests.harness.census import anonymous_kib
from tests.harness.pair import Pair
from tightship.v1 import containerizer_pb2 as cpb
from tightship.v1 import switchboard_pb2 as spb


def test_containerd_2823_a_background_grandchild_does_not_hold_the_run(pair: Pair) -> None:
    with pair.unchanged():
        begun = time.monotonic()
        result = pair.calls.run(["/bin/sh", "-c", "sleep 600 & echo hi"])
        took = time.monotonic() - begun
    assert (result.code, result.stdout, result.stderr) == (0, b"hi\n", b"")
    assert result.record.reason == cpb.Record.EXITED
    assert took < 30, "far below the 600 s that end-of-file would take"


def test_nerdctl_5009_the_last_unterminated_line_survives(pair: Pair) -> None:
    with pair.unchanged():
        for _ in range(300):
            result = pair.calls.run(["/usr/bin/printf", "abc"])
            assert (result.code, result.stdout) == (0, b"abc")


def test_mesos_6764_output_is_there_after_the_exit(pair: Pair) -> None:
    launching = pair.calls.launch(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"])
    started = launching.started()
    assert launching.exited().exit_code == 3
    launching.gone()
    streams, gaps, end = pair.calls.attach(started.lease_id)
    assert (streams, gaps) == ({1: b"out\n", 2: b"err\n"}, [])
    assert end is not None
    assert end.exit.code == 3
    assert end.state == spb.Lease.CLOSED


def test_64_mib_are_identical(pair: Pair) -> None:
    program = (
        "import sys,hashlib\nh=hashlib.sha256()\n"
        "for i in range(1024):\n b=hashlib.sha256(str(i).encode()).digest()*2048\n h.update(b)\n"
        " sys.stdout.buffer.write(b)\nsys.stderr.write(h.hexdigest())"
    )
    with pair.unchanged():
        result = pair.calls.run(["/usr/bin/env", "python3", "-c", program], env=["PATH=/usr/local/bin:/usr/bin:/bin"])
    assert len(result.stdout) == 64 << 20
    assert hashlib.sha256(result.stdout).hexdigest() == result.stderr.decode()


def test_a_flood_stops_at_the_cap_with_a_gap_of_exact_size(pair: Pair) -> None:
    cap = 4 << 20
    switchboard = pair.pid("switchboard")
    with pair.unchanged():
        launching = pair.calls.launch(["/usr/bin/yes"], timeout=60, log_cap=cap)
        started = launching.started()
        time.sleep(1)
        early = anonymous_kib(switchboard)
        time.sleep(4)
        late = anonymous_kib(switchboard)
        pair.calls.containerizer.Kill(cpb.KillRequest(name=started.name))
        record = launching.exited()
        launching.gone()
        assert record.signal == 9
    lease = pair.calls.lease(started.lease_id)
    stdout = next(one for one in lease.streams if one.stream == spb.STREAM_STDOUT)
    streams, gaps, _ = pair.calls.attach(started.lease_id)
    assert len(streams[1]) <= cap
    assert len(streams[1]) > cap // 4
    assert stdout.size > cap, "yes writes more than the cap in 5 s"
    assert stdout.size == len(streams[1]) + sum(gap.size for gap in gaps)
    assert stdout.lost == sum(gap.size for gap in gaps)
    assert streams[1] == (b"y\n" * (len(streams[1]) // 2 + 1))[: len(streams[1])]
    assert late - early < 4 << 10, f"{late - early} KiB more after 4 s of output"


def test_1_mib_through_cat_with_eof(pair: Pair) -> None:
    data = b"".join(i.to_bytes(4, "big") for i in range(256 << 10))
    with pair.unchanged():
        result = pair.calls.run(["/bin/cat"], input=data)
    assert result.code == 0
    assert result.stdout == data


def test_containerd_2659_half_close_ends_the_input_alone(pair: Pair) -> None:
    result = pair.calls.run(["/bin/sh", "-c", "cat; sleep 1; echo tail"], input=b"head\n")
    assert (result.code, result.stdout) == (0, b"head\ntail\n")


def test_a_process_that_does_not_read_gives_its_writer_an_end(pair: Pair) -> None:
    launching = pair.calls.launch(["/bin/sh", "-c", "exec <&-; sleep 600"], stdin=True)
    started = launching.started()
    response = pair.calls.write_input(started.lease_id, b"x" * (1 << 20))
    assert response.reader_gone
    assert response.written < 1 << 20
    launching.cancel()
    launching.error()


def test_mesos_9131_a_writer_is_told_of_the_end(pair: Pair) -> None:
    launching = pair.calls.launch(["/bin/sleep", "0.2"], stdin=True)
    started = launching.started()
    response = pair.calls.write_input(started.lease_id, b"x" * (1 << 20))
    assert response.reader_gone
    assert response.written <= 64 << 10, "what a pipe holds"
    launching.exited()
    launching.gone()
    with pytest.raises(grpc.RpcError) as caught:
        pair.calls.write_input(started.lease_id, b"late")
    assert code(caught.value) == grpc.StatusCode.FAILED_PRECONDITION


def test_podman_8154_a_follower_ends_with_the_container(pair: Pair) -> None:
    name = fresh_name()
    started = pair.calls.detach(["/bin/sleep", "600"], name)
    begun = time.monotonic()
    pair.calls.destroy(name)
    streams, _, end = pair.calls.attach(started.lease_id, timeout=30)
    assert streams == {1: b"", 2: b""}
    assert end is not None
    assert end.state == spb.Lease.CLOSED
    assert time.monotonic() - begun < 30


def test_conmon_timeout_output_before_the_kill_is_kept(pair: Pair) -> None:
    result = pair.calls.run(["/bin/sh", "-c", "echo before; sleep 600"], limit_s=1)
    assert result.stdout == b"before\n"
    assert result.record.reason == cpb.Record.TIMEOUT


def test_moby_30063_vanished_followers_leave_nothing(pair: Pair) -> None:
    started = pair.calls.detach(["/bin/sleep", "600"], name := fresh_name())
    with pair.unchanged():
        for _ in range(100):
            call = pair.calls.switchboard.AttachOutput(
                spb.AttachOutputRequest(lease_id=started.lease_id, follow=True), timeout=60
            )
            call.cancel()
    pair.calls.destroy(name)
