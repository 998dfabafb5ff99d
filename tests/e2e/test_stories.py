"""The three stories of docs/operations.md, over real OTLP: the exact tree of spans of each, with what an operator
reads from it; and the same tree in the terminal, from the services' own rows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness.calls import fresh_name
from tests.harness.collector import Collector, ReceivedSpan
from tests.harness.pair import Pair
from tests.harness.waiting import until
from tightship.containerizer import machine
from tightship.v1 import containerizer_pb2 as cpb

CONTAINERIZER = "tightship.v1.ContainerizerService"
SWITCHBOARD = "tightship.v1.SwitchboardService"


class Tree(NamedTuple):
    """A span: its name, service, error ("" for none), and what is below, in no order."""

    name: str
    service: str
    error: str
    below: list[Tree]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as one:
        yield one


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Pair]:
    with Pair(collector.environment, failpoints=True) as pair:
        yield pair


@pytest.fixture(scope="module")
def mkdirs() -> list[str]:
    """The steps that make directories on this machine."""
    found = machine.look("0" * 8)
    machine.leave(found)
    return [f"mkdir.{each.name}" for each in found.hierarchies]


def test_a_cancelled_check(traced: Pair, collector: Collector, mkdirs: list[str]) -> None:
    name = fresh_name("check")
    client = _start(traced, "run", name, "--", "/bin/sleep", "600")
    _await(collector, name, lambda spans: _named(spans, "begun"))
    client.send_signal(signal.SIGINT)
    assert client.wait(30) == 130
    spans = _await(collector, name, _over)
    steps = [_leaf(each) for each in [*mkdirs, "lease", "spawn", "commit", "open", "begun"]]
    undone = [_leaf(f"undo.{each}") for each in [*mkdirs, "lease", "spawn"]]
    lease = Tree("lease", "switchboard", "", [])
    launch = Tree("launch", "containerizer", "", [*steps, lease, Tree("cleanup", "containerizer", "", undone)])
    served = Tree(f"{CONTAINERIZER}/Launch", "containerizer", "", [launch])
    attached = Tree(f"{SWITCHBOARD}/AttachOutput", "switchboard", "", [])
    output = Tree(f"{SWITCHBOARD}/AttachOutput", "client", "", [attached])
    assert _tree(spans) == _sorted(Tree(f"{CONTAINERIZER}/Launch", "client", "CANCELLED", [served, output]))

    (cleanup,) = _named(spans, "cleanup")
    assert _told(cleanup) == {
        "container.name": name,
        "container.id": _id(spans),
        "cancel.reason": "client_cancelled",
        "cleanup.budget_ms": 10_000,
        "cleanup.outcome": "clean",
        "cleanup.processes_killed": 1,
        "cleanup.cgroups_removed": len(mkdirs),
        "cleanup.leases_closed": 1,
        "record.reason": "cancelled",
    }
    calls = {(one.service, one.kind): one.attributes for one in _named(spans, f"{CONTAINERIZER}/Launch")}
    assert calls["tightship-client", "client"]["rpc.response.status_code"] == "CANCELLED"
    assert calls["tightship-client", "client"]["server.address"] == f"{traced.run_dir}/containerizer.sock"
    # Of a server's codes that one is no error: it did what it was asked.
    assert calls["tightship-containerizer", "server"]["rpc.response.status_code"] == "CANCELLED"
    assert {one["rpc.system.name"] for one in calls.values()} == {"grpc"}
    (lease_span,) = [one for one in _named(spans, "lease") if one.service == "tightship-switchboard"]
    assert lease_span.attributes["tightship.exit.signal"] == "SIGTERM"
    drawn = _draw(traced, name, spans, without=("begun",))
    assert "client_cancelled; budget 10.00 s; clean" in drawn
    assert "signalled 15, cancelled (client_cancelled)" in drawn


def test_a_crash_in_the_middle_of_a_create(traced: Pair, collector: Collector, mkdirs: list[str]) -> None:
    name = fresh_name("made")
    traced.points.clear()
    point = f"containerizer.create.{mkdirs[1]}.after"
    traced.points.arm(point, "kill")
    client = _start(traced, "create", name, "memory { limit: 67108864 }")
    traced.points.await_hit(point, 20)
    traced.points.disarm(point)
    client.wait(60)
    traced.await_ready()
    spans = _await(collector, name, _over)
    undone = [_leaf(f"undo.{each}") for each in mkdirs]
    create = Tree("create", "containerizer", "INTERRUPTED", [Tree("cleanup", "containerizer", "", undone)])
    tree = _tree(spans)
    # The call that crashed is never told of by its server; one that the client made again has an answer.
    again = [each for each in tree.below if each.name == f"{CONTAINERIZER}/Create"]
    assert (tree.name, tree.service) == (f"{CONTAINERIZER}/Create", "client")
    assert [each for each in tree.below if each not in again] == [_sorted(create)]
    (cleanup,) = _named(spans, "cleanup")
    assert _told(cleanup) == {
        "container.name": name,
        "container.id": _id(spans),
        "cancel.reason": "recovered",
        "cancel.step": "intended",
        "cleanup.budget_ms": 10_000,
        "cleanup.outcome": "clean",
        "cleanup.processes_killed": 0,
        "cleanup.cgroups_removed": 2,
        "cleanup.leases_closed": 0,
    }
    undone_create = next(one for one in _named(spans, "create") if one.error)
    assert undone_create.message == "the containerizer was restarted during the create"
    if not again:
        drawn = _draw(traced, name, spans)
        assert "recovered at intended; budget 10.00 s; clean: 2 cgroups" in drawn
        assert "INTERRUPTED: the containerizer was restarted" in drawn


def test_a_slow_cleanup(traced: Pair, collector: Collector, mkdirs: list[str]) -> None:
    """A process that does not heed TERM gets its grace and then the kill; meanwhile the cleanup has told that it is
    on."""
    name = fresh_name("deaf")
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    started = traced.calls.detach([sys.executable, "-I", "-S", "-c", deaf], name)
    until(lambda: traced.calls.attach(started.lease_id, follow=False)[0][1] == b"deaf\n", "the process is deaf", 20)
    _await(collector, name, lambda spans: _named(spans, "begun"))
    destroyer = _start(traced, "destroy", "--force", name)
    spans = _await(collector, name, lambda spans: len(_named(spans, "begun")) == 2)
    assert not _named(spans, "cleanup"), "the cleanup told that it had begun when it was over"
    assert destroyer.wait(30) == 0
    spans = _await(collector, name, _over)
    steps = [_leaf(each) for each in [*mkdirs, "lease", "spawn", "commit", "open", "begun"]]
    undone = [_leaf(each) for each in ["begun", *(f"undo.{each}" for each in [*mkdirs, "lease", "spawn"])]]
    cleanup = Tree("cleanup", "containerizer", "", undone)
    lease = Tree("lease", "switchboard", "", [])
    launch = Tree("launch", "containerizer", "", [*steps, lease, cleanup])
    assert _tree(spans) == _sorted(Tree(f"{CONTAINERIZER}/Launch", "containerizer", "", [launch]))

    (whole,) = _named(spans, "cleanup")
    (stopped,) = _named(spans, "undo.spawn")
    assert whole.attributes["tightship.cancel.reason"] == "destroy"
    assert whole.attributes["tightship.cleanup.outcome"] == "clean"
    assert 2.0 <= (stopped.end_ns - stopped.start_ns) / 1e9 <= 10
    # Who destroyed it, in a trace of its own, and the cleanup lead to each other.
    here = (whole.trace, _launch(spans).span)
    destroys = [one for one in collector.spans() if one.name == f"{CONTAINERIZER}/Destroy"]
    (call,) = [one for one in destroys if here in one.links]
    assert (call.trace, call.span) in whole.links
    assert call.trace != whole.trace
    drawn = _draw(traced, name, spans, without=("begun",))
    assert "destroy; budget 10.00 s; clean" in drawn


def test_a_cleanup_that_is_pending_and_done_later(traced: Pair, collector: Collector, mkdirs: list[str]) -> None:
    name = fresh_name("stuck")
    traced.points.clear()
    started = traced.calls.detach(["/bin/sleep", "600"], name)
    stuck = mkdirs[-1]
    with traced.points.armed(f"containerizer.undo.{stuck}.before", "errno EBUSY"):
        assert traced.command("destroy", "--force", name).returncode == 4
    spans = _await(collector, name, _over)
    pending = [one for one in _named(spans, "cleanup") if one.error]
    assert pending
    for one in pending:
        assert one.attributes["tightship.cleanup.outcome"] == "pending"
        assert one.attributes["error.type"] == "CLEANUP_PENDING"
        assert one.message.startswith(f"{stuck}: ")
        failed = [each.name for each in spans if each.parent == one.span and each.error]
        assert failed == [f"undo.{stuck}"]
    (clean,) = _named(spans, "cleanup", clean=True)
    assert clean.attributes["tightship.cleanup.cgroups_removed"] == len(mkdirs)
    assert clean.attributes["tightship.cleanup.leases_closed"] == 1
    assert clean.start_ns >= max(one.end_ns for one in pending)
    drawn = _draw(traced, started.id, spans, without=("begun",))
    assert "pending" in drawn
    assert "CLEANUP_PENDING" in drawn


def test_a_step_that_fails(traced: Pair, collector: Collector, mkdirs: list[str]) -> None:
    name = fresh_name("refused")
    traced.points.clear()
    point = f"containerizer.launch.{mkdirs[-1]}.before"
    with traced.points.armed(point, "errno ENOSPC"):
        assert traced.command("run", name, "--", "/bin/true").returncode == 125
    spans = _await(collector, name, _over)
    launch = _launch(spans)
    (step,) = [one for one in spans if one.parent == launch.span and one.name == mkdirs[-1]]
    (cleanup,) = _named(spans, "cleanup")
    for one in (launch, step):
        assert one.error
        assert one.attributes["error.type"] == "CGROUP_FAILED"
        assert "No space left" in one.message
    assert cleanup.attributes["tightship.cancel.reason"] == "error"
    assert cleanup.attributes["tightship.cancel.step"] == mkdirs[-1]
    (served,) = [one for one in spans if one.kind == "server" and one.name == f"{CONTAINERIZER}/Launch"]
    assert served.attributes["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"
    assert not served.error
    assert {one.name for one in spans if one.error} == {f"{CONTAINERIZER}/Launch", "launch", mkdirs[-1]}
    _draw(traced, name, spans)


def test_who_attaches_and_waits_is_linked_with_the_launch(traced: Pair, collector: Collector) -> None:
    name = fresh_name("linked")
    traced.points.clear()
    started = traced.calls.detach(["/bin/sh", "-c", "echo out; exec sleep 600"], name)
    reading = _start(traced, "attach", name, stdout=subprocess.PIPE)
    assert reading.stdout is not None
    assert reading.stdout.readline() == b"out\n"
    waiting = traced.calls.containerizer.Wait.future(cpb.WaitRequest(name=name), timeout=60)
    traced.calls.get(name)  # on the same channel: that one is there
    assert traced.command("kill", name).returncode == 0
    assert waiting.result().record.signal == signal.SIGKILL
    with reading.stdout:
        assert reading.wait(30) == 0
    assert traced.command("logs", name).stdout == "out\n"
    assert traced.command("wait", name).returncode == 0
    spans = _await(collector, name, _over)
    launch = _launch(spans)
    (lease,) = [one for one in _named(spans, "lease") if one.service == "tightship-switchboard"]
    (cleanup,) = _named(spans, "cleanup")
    here = (launch.trace, launch.span)

    def linked(method: str) -> list[ReceivedSpan]:
        return [one for one in collector.spans() if one.name == method and one.kind == "server" and here in one.links]

    until(lambda: len(linked(f"{SWITCHBOARD}/AttachOutput")) == 2, "a link from each reader", 20)
    until(lambda: len(linked(f"{CONTAINERIZER}/Wait")) == 2, "a link from each waiter", 20)
    assert all(one.trace != launch.trace for one in linked(f"{SWITCHBOARD}/AttachOutput"))
    # And back, from what was sent when they had come: not to those that came after the end.
    readers = [span for _, span in lease.links]
    assert len(readers) == 1
    assert set(readers) < {one.span for one in linked(f"{SWITCHBOARD}/AttachOutput")}
    back = [*launch.links, *cleanup.links]  # whichever was sent first after it came
    (waiter,) = [one for one in linked(f"{CONTAINERIZER}/Wait") if (one.trace, one.span) in back]
    assert waiter.trace != launch.trace
    assert started.id == _id(spans)


# What is there


def _start(pair: Pair, *arguments: str, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [Path(sys.executable).with_name("tightship"), *arguments],
        env=pair.environment | {"TIGHTSHIP_RUN_DIR": str(pair.run_dir)},
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _await(collector: Collector, name: str, enough: Callable[[list[ReceivedSpan]], object]) -> list[ReceivedSpan]:
    """The spans of the one trace that the container is in, when they are `enough`."""
    found: list[ReceivedSpan] = []

    def complete() -> bool:
        spans = collector.spans()
        traces = {one.trace for one in spans if one.attributes.get("tightship.container.name") == name}
        assert len(traces) <= 1, f"{len(traces)} traces of {name}"
        found[:] = [one for one in spans if one.trace in traces]
        return bool(enough(found))

    try:
        until(complete, "the spans of the story", 30)
    except AssertionError as error:
        raise AssertionError(f"{error}; there is {[(one.name, one.service, one.error) for one in found]}") from None
    return found


def _over(spans: list[ReceivedSpan]) -> bool:
    """Nothing more will come: the last cleanup has, the lease's end, and the calls that it hangs below."""
    leases = [one for one in _named(spans, "lease") if one.service == "tightship-switchboard"]
    ended = _named(spans, "cleanup", clean=True) and (leases or not _named(spans, "launch"))
    return bool(ended) and _whole(spans) and len(_roots(spans)) == 1


def _named(spans: list[ReceivedSpan], name: str, *, clean: bool = False) -> list[ReceivedSpan]:
    return [one for one in spans if one.name == name and not (clean and one.error)]


def _launch(spans: list[ReceivedSpan]) -> ReceivedSpan:
    (launch,) = _named(spans, "launch")
    return launch


def _id(spans: list[ReceivedSpan]) -> str:
    (identity,) = {one.attributes["tightship.container.id"] for one in spans if one.name in ("launch", "cleanup")}
    return str(identity)


def _roots(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    return [one for one in spans if not one.parent]


def _whole(spans: list[ReceivedSpan]) -> bool:
    return {one.parent for one in spans if one.parent} <= {one.span for one in spans}


def _told(span: ReceivedSpan) -> dict[str, Any]:
    return {key.removeprefix("tightship."): value for key, value in span.attributes.items()}


def _leaf(name: str) -> Tree:
    return Tree(name, "containerizer", "", [])


def _tree(spans: list[ReceivedSpan]) -> Tree:
    """The whole trace; every span once, each within its parent's beginning."""
    assert len({one.span for one in spans}) == len(spans), "a span was told twice"

    def below(one: ReceivedSpan) -> Tree:
        error = str(one.attributes["error.type"]) if one.error else ""
        assert ("error.type" in one.attributes) == one.error
        children = [each for each in spans if each.parent == one.span]
        service = one.service.removeprefix("tightship-")
        return _sorted(Tree(one.name, service, error, [below(each) for each in children]))

    (root,) = _roots(spans)
    return below(root)


def _sorted(tree: Tree) -> Tree:
    return tree._replace(below=sorted(map(_sorted, tree.below)))


def _draw(pair: Pair, name: str, spans: list[ReceivedSpan], without: tuple[str, ...] = ()) -> str:
    """`tightship trace`, which must have the same spans as the collector, but for those of calls and `without`."""
    told = json.loads(pair.command("trace", name, "--json").stdout)
    ours = {(one["name"], one["span_id"], one.get("error", "")) for one in told["spans"]}
    sent = {(one.name, one.span, one.message) for one in spans if one.kind == "internal" and one.name not in without}
    assert ours == sent
    assert told["trace_id"] == spans[0].trace
    assert told["sampled"]
    drawn = pair.command("trace", name).stdout
    lines = drawn.splitlines()[2:]
    assert len(lines) == len(ours)
    return drawn
