"""One launch is one trace, over real OTLP: from the client's call to its cleanup, cancelled or recovered."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.calls import fresh_name
from tests.harness.collector import Collector, ReceivedSpan
from tests.harness.pair import Pair
from tests.harness.waiting import until
from tightship.v1 import containerizer_pb2 as cpb

CLIENT, CONTAINERIZER, SWITCHBOARD = "tightship-client", "tightship-containerizer", "tightship-switchboard"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as one:
        yield one


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Pair]:
    with Pair(collector.environment, failpoints=True) as pair:
        yield pair


def _run(pair: Pair, name: str, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [Path(sys.executable).with_name("tightship"), "run", name, "--", *command],
        env=pair.environment | {"TIGHTSHIP_RUN_DIR": str(pair.run_dir)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def _trace_of(collector: Collector, name: str, cleanups: int = 1) -> list[ReceivedSpan]:
    """The spans of the one trace that the container `name` is in, when its cleanup and all services are there."""
    found: list[ReceivedSpan] = []

    def complete() -> bool:
        spans = collector.spans()
        traces = {one.trace for one in spans if one.attributes.get("tightship.container.name") == name}
        assert len(traces) <= 1, f"{len(traces)} traces of {name}"
        found[:] = [one for one in spans if one.trace in traces]
        services = {one.service for one in found}
        whole = {one.parent for one in found if one.parent} <= {one.span for one in found}
        return whole and services == {CLIENT, CONTAINERIZER, SWITCHBOARD} and len(_named(found, "cleanup")) >= cleanups

    try:
        until(complete, "the whole trace", 20)
    except AssertionError as error:
        raise AssertionError(f"{error}; there is {found}") from None
    return found


def _named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [one for one in spans if one.name == name]


def _assert_one_tree(spans: list[ReceivedSpan]) -> None:
    ids = {one.span for one in spans}
    roots = [one for one in spans if not one.parent]
    assert len(roots) == 1, roots
    assert roots[0].service == CLIENT
    assert all(one.parent in ids for one in spans if one.parent), "a parent that nobody sent"
    assert all(one.start_ns <= one.end_ns for one in spans)


def test_a_launch(traced: Pair, collector: Collector) -> None:
    name = fresh_name("traced")
    assert _run(traced, name, "/bin/true").wait(30) == 0
    spans = _trace_of(collector, name)
    _assert_one_tree(spans)
    (launch,) = _named(spans, "launch")
    steps = {one.name for one in spans if one.parent == launch.span}
    assert steps >= {"mkdir.memory", "lease", "spawn", "commit", "open", "cleanup"}
    (cleanup,) = _named(spans, "cleanup")
    assert cleanup.attributes["tightship.cleanup.outcome"] == "clean"
    assert [one for one in spans if one.error] == []


def test_containerd_4048_a_cancelled_launch(traced: Pair, collector: Collector) -> None:
    name = fresh_name("traced")
    traced.points.clear()
    with traced.points.armed("containerizer.launch.spawn.after", "wait"):
        client = _run(traced, name, "/bin/sleep", "600")
        traced.points.await_hit("containerizer.launch.spawn.after", 20)
        client.send_signal(signal.SIGINT)
        assert client.wait(30) != 0
    spans = _trace_of(collector, name)
    _assert_one_tree(spans)
    (cleanup,) = _named(spans, "cleanup")
    assert cleanup.attributes["tightship.cancel.reason"] == "client_cancelled"
    assert cleanup.attributes["tightship.cancel.step"] == "spawn"
    assert int(cleanup.attributes["tightship.cleanup.budget_ms"]) > 0
    assert cleanup.attributes["tightship.cleanup.outcome"] == "clean"
    assert int(cleanup.attributes["tightship.cleanup.cgroups_removed"]) >= 1
    assert cleanup.attributes["tightship.cleanup.leases_closed"] == 1


def test_moby_50040_a_launch_killed_half_way_and_recovered(traced: Pair, collector: Collector) -> None:
    name = fresh_name("traced")
    traced.points.clear()
    traced.points.arm("containerizer.launch.spawn.after", "kill")
    client = _run(traced, name, "/bin/true")
    traced.points.await_hit("containerizer.launch.spawn.after", 20)
    traced.points.disarm("containerizer.launch.spawn.after")
    client.wait(60)
    traced.await_ready()
    spans = _trace_of(collector, name)
    recovered = [one for one in _named(spans, "cleanup") if one.attributes["tightship.cancel.reason"] == "recovered"]
    assert len(recovered) == 1
    attributes = recovered[0].attributes
    assert attributes["tightship.cleanup.outcome"] == "clean"
    assert int(attributes["tightship.cleanup.budget_ms"]) > 0
    assert attributes["tightship.cancel.step"] == "intended"
    _assert_one_tree(spans)


def test_a_deadline_is_told_from_a_cancel(traced: Pair, collector: Collector) -> None:
    name = fresh_name("traced")
    launching = traced.calls.launch(["/bin/sleep", "600"], name, timeout=1.0)
    launching.started()
    launching.error()
    until(lambda: any(one.attributes.get("tightship.container.name") == name and one.name == "cleanup"
                      for one in collector.spans()), "the cleanup's span")  # fmt: skip
    (cleanup,) = [one for one in collector.spans()
                  if one.attributes.get("tightship.container.name") == name and one.name == "cleanup"]  # fmt: skip
    assert cleanup.attributes["tightship.cancel.reason"] == "deadline_exceeded"


def test_a_collector_that_is_gone_holds_nothing_up() -> None:
    with Pair({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}) as pair:
        for _ in range(5):
            assert pair.calls.run(["/bin/echo", "hi"]).stdout == b"hi\n"
        assert pair.stop("switchboard") < 8
        assert pair.stop("spawner") < 20


def test_nothing_is_lost_at_sigterm() -> None:
    """What the queue holds is sent at the end: nothing else sends it within the minute, but for full batches."""
    with Collector() as collector, Pair(collector.environment | {"OTEL_BSP_SCHEDULE_DELAY": "60000"}) as pair:
        names = [fresh_name("term") for _ in range(40)]
        for name in names[:-1]:
            pair.calls.run(["/bin/true"], name, output=False)
        running = pair.calls.launch(["/bin/sleep", "600"], names[-1])
        running.started()
        pair.stop("spawner")
        pair.stop("switchboard")
        assert running.exited().cancel_reason == "shutdown"
        spans = collector.spans()
    for service, span in ((CONTAINERIZER, "launch"), (CONTAINERIZER, "cleanup"), (SWITCHBOARD, "lease")):
        own = [one for one in _named(spans, span) if one.service == service]
        assert len({one.trace for one in own}) == len(own) == len(names) + 1, (
            service,
            span,
        )  # and one of `await_ready`
    (ended,) = [one for one in _named(spans, "cleanup") if one.attributes["tightship.container.name"] == names[-1]]
    assert ended.attributes["tightship.cancel.reason"] == "shutdown"
    assert {one.parent for one in spans if one.parent} <= {one.span for one in spans}


def test_the_environment_names_resources_and_samples() -> None:
    with Collector() as collector:
        environment = collector.environment | {
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=rig,service.namespace=checks",
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        }
        with Pair(environment) as pair:
            unsampled = pair.calls.run(["/bin/true"])
            trace, parent = "a" * 32, "b" * 16
            launching = pair.calls.launch(["/bin/true"], metadata=[("traceparent", f"00-{trace}-{parent}-01")])
            launching.started()
            launching.exited()
            launching.gone()
            told = pair.calls.containerizer.Trace(cpb.TraceRequest(name=unsampled.started.id))
            assert (len(told.trace_id), told.sampled) == (32, False)
            assert told.spans[0].name == "launch"
            pair.stop("spawner")
            pair.stop("switchboard")
        spans = collector.spans()
        assert {one.trace for one in spans} == {trace}
        assert {one.service for one in spans} == {CONTAINERIZER, SWITCHBOARD}
        (served,) = [one for one in spans if one.kind == "server"]
        assert served.parent == parent
        for resource in collector.resources():
            assert resource["deployment.environment.name"] == "rig"
            assert resource["service.namespace"] == "checks"
            assert resource["telemetry.sdk.language"] == "python"
