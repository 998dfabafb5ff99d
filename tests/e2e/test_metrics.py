"""Metrics as who runs tightship sees them: figures of a real scrape, and of a real OTLP receiver, are what was done."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.harness.calls import fresh_name
from tests.harness.collector import Collector
from tests.harness.meters import Figures, MetricsCollector, change, scrape, two_ports
from tests.harness.pair import Pair
from tests.harness.waiting import until
from tightship.v1 import containerizer_pb2 as cpb

COUNT = "tightship_cleanup_duration_seconds_count"
SUM = "tightship_cleanup_duration_seconds_sum"


@pytest.fixture(scope="module")
def port() -> int:
    return two_ports()


@pytest.fixture(scope="module")
def measured(port: int) -> Iterator[Pair]:
    """A pair that serves metrics at `port` (the containerizer) and the one after."""
    with Pair({"TIGHTSHIP_METRICS": f"127.0.0.1:{port}"}, failpoints=True) as pair:
        yield pair


def launches(reason: str) -> str:
    return f'tightship_launches_total{{reason="{reason}"}}'


def changed(before: Figures, after: Figures) -> Figures:
    """Without how long it took."""
    return {key: value for key, value in change(before, after).items() if key != SUM}


def test_launches_are_counted_by_how_they_ended(measured: Pair, port: int) -> None:
    calls = measured.calls
    until(lambda: not calls.living(), "the first launch is gone")
    before = scrape(port)
    for _ in range(3):
        calls.run(["/bin/true"])
    calls.run(["/bin/sh", "-c", "kill -9 $$"])
    calls.run(["/bin/sleep", "600"], limit_s=0.05)
    with pytest.raises(grpc.RpcError):
        calls.run(["/nonexistent"])
    cancelled = calls.launch(["/bin/sleep", "600"])
    cancelled.started()
    cancelled.cancel()
    until(lambda: not calls.living(), "all are gone")
    after = scrape(port)
    assert changed(before, after) == {
        launches("exited"): 3,
        launches("signalled"): 1,
        launches("timeout"): 1,
        launches("failed"): 1,
        launches("cancelled"): 1,
        COUNT: 7,
    }
    assert after[SUM] > before[SUM]


def test_what_there_is(measured: Pair, port: int) -> None:
    calls = measured.calls
    until(lambda: not calls.living(), "others' launches are gone")
    before, before_leases = scrape(port), scrape(port + 1)
    names = [fresh_name() for _ in range(3)]
    calls.detach(["/bin/sleep", "600"], names[0])
    calls.detach(["/bin/sleep", "600"], names[1])
    calls.create(names[2])
    assert changed(before, scrape(port)) == {
        'tightship_containers{state="running"}': 2,
        'tightship_containers{state="created"}': 1,
    }
    assert changed(before_leases, scrape(port + 1)) == {'tightship_leases{state="bound"}': 2}
    for name in names:
        calls.destroy(name)
    assert changed(before, scrape(port)) == {launches("cancelled"): 2, COUNT: 3}
    assert changed(before_leases, scrape(port + 1)) == {}


def test_bytes_of_streams(measured: Pair, port: int) -> None:
    calls = measured.calls
    until(lambda: not calls.leases(), "others' leases are closed")
    before = scrape(port + 1)
    fed = calls.detach(["/bin/sh", "-c", "cat; echo err >&2; sleep 600"], name := fresh_name(), stdin=True, log_cap=100)
    calls.write_input(fed.lease_id, b"x" * 250)
    moved = {
        'tightship_stream_bytes_total{stream="stdin"}': 250,
        'tightship_stream_bytes_total{stream="stdout"}': 250,
        'tightship_stream_bytes_total{stream="stderr"}': 4,
    }
    now: Figures = {}

    def all_moved() -> bool:
        now.update(changed(before, scrape(port + 1)))
        return moved.items() <= now.items()

    until(all_moved, "the living lease's bytes are told")
    lost = {key: value for key, value in now.items() if "lost" in key}
    assert sum(lost.values()) == 250 + 4 - 100  # the cap is the lease's, whichever of the streams met it
    calls.destroy(name)
    until(lambda: not calls.leases(), "the lease is closed")
    assert changed(before, scrape(port + 1)) == moved | lost


def test_a_cleanup_that_is_pending(measured: Pair, port: int) -> None:
    calls = measured.calls
    before = scrape(port)
    calls.create(name := fresh_name())
    with measured.points.armed("containerizer.undo.mkdir.memory.before", "errno EIO"):
        with pytest.raises(grpc.RpcError):
            calls.destroy(name)
        assert changed(before, scrape(port)) == {
            'tightship_containers{state="cleanup_pending"}': 1,
            "tightship_cleanups_pending": 1,
        }
    until(lambda: not calls.living(), "it is retried")
    assert changed(before, scrape(port)) == {COUNT: 1}


def test_findings_of_an_audit(measured: Pair, port: int) -> None:
    before = scrape(port)
    base = next(path for path in Path("/sys/fs/cgroup").glob(f"**/tightship/{measured.instance}") if path.is_dir())
    (base / "residue").mkdir()
    try:
        assert len(measured.calls.containerizer.Audit(cpb.AuditRequest(), timeout=30).findings) == 1
    finally:
        (base / "residue").rmdir()
    assert changed(before, scrape(port)) == {'tightship_residue_found_total{kind="cgroup"}': 1}


def test_a_peer_that_dawdles_holds_nothing(measured: Pair, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as dawdling:
        dawdling.sendall(b"GET /metr")
        measured.calls.run(["/bin/true"])
        assert scrape(port)[COUNT] >= 1
        assert dawdling.recv(100) == b""  # cut off


def test_a_peer_that_dawdles_holds_no_end() -> None:
    port = two_ports()
    with Pair({"TIGHTSHIP_METRICS": f"127.0.0.1:{port}"}) as pair:
        with socket.create_connection(("127.0.0.1", port + 1)), socket.create_connection(("127.0.0.1", port)):
            pair.stop("spawner")
            pair.stop("switchboard")
        log = pair.log_tail()
    assert "Traceback" not in log
    assert "killed" not in log


def test_otlp_gets_the_same_and_the_last_at_the_end() -> None:
    with MetricsCollector() as collector:
        asked = {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": collector.endpoint, "OTEL_METRIC_EXPORT_INTERVAL": "3600000"}
        with Pair(asked) as pair:
            count = 1 + sum(one.name.startswith("/run-") for one in _records(pair))
            pair.calls.run(["/bin/echo", "12345"])
            pair.calls.detach(["/bin/sleep", "600"], fresh_name())
            assert collector.latest("tightship-containerizer") == {}
            pair.stop("spawner")
            pair.stop("switchboard")
        told = collector.latest("tightship-containerizer")
        assert told["tightship.launches", "exited"] == count
        assert told["tightship.containers", "running"] == 1  # detached, it stays
        assert told["tightship.cleanup.duration", ""] == count
        told = collector.latest("tightship-switchboard")
        assert told["tightship.stream.bytes", "stdout"] == 6
        assert told["tightship.leases", "bound"] == 0  # its own end closed it


def _records(pair: Pair) -> list[Any]:
    until(lambda: not pair.calls.living(), "the first launch is gone")
    return [*pair.calls.containerizer.List(cpb.ListRequest(records=True), timeout=10).containers]


def test_an_address_that_is_taken_keeps_no_service_from_working() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        with Pair({"TIGHTSHIP_METRICS": at}) as pair:
            pair.calls.run(["/bin/true"])
            assert "metrics are off" in (pair.run_dir / "spawner.log").read_text()


@pytest.mark.parametrize("text", ["9464", "localhost:", "localhost:x", "localhost:0", "localhost:65536"])
def test_an_address_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    for service in ("containerizer", "switchboard"):
        command = [sys.executable, "-m", f"tightship.{service}", "--run-dir", str(tmp_path), "--metrics", text]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert ended.returncode == 78
        assert f"{text!r} is not HOST:PORT" in ended.stderr


def test_off_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, tightship.containerizer.__main__, tightship.switchboard.__main__\n"
        "found = [name for name in sys.modules if name.startswith(('opentelemetry', 'prometheus', 'http.server'))]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_json_lines_of_a_container_have_its_trace() -> None:
    with Collector() as collector:
        asked = collector.environment | {"TIGHTSHIP_LOG_FORMAT": "json"}
        with Pair(asked, failpoints=True) as pair:
            trace = os.urandom(16).hex()
            launching = pair.calls.launch(
                ["/bin/sleep", "600"], name := fresh_name(), detach=True,
                metadata=(("traceparent", f"00-{trace}-{os.urandom(8).hex()}-01"),),
            )  # fmt: skip
            identity = launching.started().id
            with pair.points.armed("containerizer.undo.mkdir.memory.before", "errno EIO"):
                with pytest.raises(grpc.RpcError):
                    pair.calls.destroy(name)
            until(lambda: not pair.calls.living(), "it is retried")
            pair.kill("containerizer")
            pair.await_ready()
            lines = [json.loads(line) for line in (pair.run_dir / "spawner.log").read_text().splitlines()]
    assert {line["service"] for line in lines} == {"containerizer", "spawner"}
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    (pending,) = [line for line in lines if "the cleanup is pending" in line["message"]]
    assert (pending["level"], pending["container"], pending["id"], pending["trace_id"]) == (
        "WARNING", name, identity, trace,
    )  # fmt: skip
