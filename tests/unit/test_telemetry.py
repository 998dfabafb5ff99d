"""The tracer: off and free by default; over real OTLP when on; never in its caller's way."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tightship.telemetry import Tracer


@dataclass
class Collector:
    """An OTLP HTTP receiver on a local port."""

    port: int = 0
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)

    def spans(self) -> dict[str, Span]:
        return {
            span.name: span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    def resource(self) -> dict[str, str]:
        first = self.requests[0].resource_spans[0].resource
        return {attribute.key: attribute.value.string_value for attribute in first.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    received = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield received
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    import os

    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    return monkeypatch


def on(env: pytest.MonkeyPatch, collector: Collector, **more: str) -> Tracer:
    env.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
    for name, value in more.items():
        env.setenv(name, value)
    tracer = Tracer.from_environment("tightship-test")
    assert tracer.enabled
    return tracer


def test_off_imports_and_starts_nothing() -> None:
    code = (
        "import sys, threading\n"
        "from tightship.common.telemetry import Tracer\n"
        "tracer = Tracer.from_environment('x')\n"
        "assert not tracer.enabled and tracer.context() == ''\n"
        "tracer.emit('', None, 'n', 1, 2, attributes={'a': 1})\n"
        "assert tracer.traceparent_of([('traceparent', '00-' + '1' * 32 + '-' + '2' * 16 + '-01')]) == ''\n"
        "tracer.shutdown(1)\n"
        "print([m for m in sys.modules if m.startswith('opentelemetry')], threading.active_count())\n"
    )
    out = subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True, timeout=30)
    assert out.stdout.strip() == "[] 1"


@pytest.mark.parametrize(
    "setting",
    [
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
        {"OTEL_SDK_DISABLED": "TRUE", "OTEL_TRACES_EXPORTER": "otlp"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_switched_off_or_unknown_is_off(env: pytest.MonkeyPatch, setting: dict[str, str]) -> None:
    for name, value in setting.items():
        env.setenv(name, value)
    assert not Tracer.from_environment("x").enabled


def test_a_span_arrives_whole(env: pytest.MonkeyPatch, collector: Collector) -> None:
    tracer = on(env, collector, OTEL_RESOURCE_ATTRIBUTES="deployment.environment=rig")
    root = tracer.context(None)
    child = tracer.context(root)
    other = tracer.context()
    now = time.time_ns()
    tracer.emit(root, None, "root", now, now + 5, kind="client")
    tracer.emit(
        child,
        root,
        "child",
        now + 1,
        now + 3,
        kind="server",
        attributes={"tightship.name": "/a", "n": 3, "absent": None, "list": ["a", "b"]},
        error="no",
        events=[("begun", now + 2, {"step": "spawn"})],
        links=[other, "nonsense"],
    )
    tracer.shutdown(10)
    spans = collector.spans()
    assert collector.resource()["service.name"] == "tightship-test"
    assert collector.resource()["deployment.environment"] == "rig"
    got, parent = spans["child"], spans["root"]
    assert got.trace_id.hex() == root[3:35] == parent.trace_id.hex()
    assert got.span_id.hex() == child[36:52]
    assert got.parent_span_id == parent.span_id
    assert parent.parent_span_id == b""
    assert (got.start_time_unix_nano, got.end_time_unix_nano) == (now + 1, now + 3)
    assert (got.kind, parent.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    assert (got.status.code, got.status.message) == (Status.STATUS_CODE_ERROR, "no")
    assert parent.status.code == Status.STATUS_CODE_UNSET
    assert {attribute.key for attribute in got.attributes} == {"tightship.name", "n", "list", "error.type"}
    assert [(event.name, event.time_unix_nano) for event in got.events] == [("begun", now + 2)]
    assert [link.span_id.hex() for link in got.links] == [other[36:52]]


def test_the_environment_names_the_service(env: pytest.MonkeyPatch, collector: Collector) -> None:
    tracer = on(env, collector, OTEL_SERVICE_NAME="rig")
    tracer.emit(tracer.context(), None, "n", 1, 2)
    tracer.shutdown(10)
    assert collector.resource()["service.name"] == "rig"


def test_samplers(env: pytest.MonkeyPatch, collector: Collector) -> None:
    never = on(env, collector, OTEL_TRACES_SAMPLER="parentbased_always_off")
    root = never.context()
    assert root.endswith("-00")
    assert never.context(root).endswith("-00")
    sampled_by_caller = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    assert never.context(sampled_by_caller).endswith("-01")
    never.emit(root, None, "unsampled", 1, 2)
    never.emit(never.context(sampled_by_caller), sampled_by_caller, "sampled", 1, 2)
    never.shutdown(10)
    assert set(collector.spans()) == {"sampled"}
    ratio = on(env, collector, OTEL_TRACES_SAMPLER="traceidratio", OTEL_TRACES_SAMPLER_ARG="0.5")
    flags = [ratio.context()[53:] for _ in range(400)]
    assert 100 < flags.count("01") < 300
    always = on(env, collector, OTEL_TRACES_SAMPLER="always_on")
    assert always.context(root).endswith("-01")


@pytest.mark.parametrize(
    "parent",
    [None, "", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "01-" + "1" * 32 + "-" + "1" * 16 + "-01", "x" * 55],
)
def test_a_bad_parent_begins_a_new_trace(env: pytest.MonkeyPatch, collector: Collector, parent: str | None) -> None:
    tracer = on(env, collector)
    made = tracer.context(parent)
    assert len(made) == 55
    assert parent is None or made[3:35] not in parent
    assert tracer.traceparent_of([("traceparent", parent or "")]) == ""
    assert tracer.traceparent_of([("a", "b"), ("traceparent", made)]) == made
    assert tracer.traceparent_of(None) == ""


def test_who_is_not_patient_tries_a_dead_collector_once(env: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: refused
        env.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        tracer = Tracer.from_environment("x")
        tracer.emit(tracer.context(), None, "n", 1, 2)
        begun = time.monotonic()
        tracer.shutdown(30, patient=False)
        # A second try would come after a second, and go on for as long as it may.
        assert time.monotonic() - begun < 15
        assert tracer.dropped == 1


def test_a_dead_collector_holds_nobody(env: pytest.MonkeyPatch) -> None:
    # Listens and never answers: worse than a refused connection.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        env.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracer = Tracer.from_environment("x")
        begun = time.monotonic()
        for _ in range(5000):  # over the queue's bound
            tracer.emit(tracer.context(), None, "n", 1, 2)
        emitted = time.monotonic() - begun
        tracer.shutdown(0.3)
        assert emitted < 5
        assert time.monotonic() - begun < emitted + 5


def test_what_is_lost_is_counted_and_told_twice(
    env: pytest.MonkeyPatch, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        env.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        env.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
        env.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        env.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
        env.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
        tracer = Tracer.from_environment("x")
        for _ in range(500):
            tracer.emit(tracer.context(), None, "n", 1, 2)
        assert tracer.dropped  # what the queue had no place for
        end = time.monotonic() + 30
        while tracer.dropped < 500:
            assert time.monotonic() < end
            time.sleep(0.02)
    tracer.shutdown(5)
    told = [record.message for record in caplog.records if record.name == "tightship.telemetry"]
    assert told == ["spans can't be exported, and are dropped until the collector answers"]
