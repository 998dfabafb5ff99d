"""`Trace`, from the services' own rows: without a collector, over a restart, for what lives or has ended."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import grpc
import pytest

from tests.harness.calls import code, fresh_name
from tests.harness.pair import Pair
from tests.harness.waiting import until
from tightship.v1 import containerizer_pb2 as cpb


@pytest.fixture(scope="module")
def untraced() -> Iterator[Pair]:
    with Pair() as pair:
        yield pair


def _trace(pair: Pair, name: str) -> cpb.TraceResponse:
    return pair.calls.containerizer.Trace(cpb.TraceRequest(name=name), timeout=10)


def _spans(told: cpb.TraceResponse) -> dict[str, cpb.TraceSpan]:
    assert len({one.span_id for one in told.spans}) == len(told.spans)
    return {one.name: one for one in told.spans}


def test_what_ended_what_lives_and_what_was_last(untraced: Pair) -> None:
    ran = untraced.calls.run(["/bin/true"])
    told = _trace(untraced, "last")
    assert (told.id, told.name, told.trace_id, told.sampled) == (ran.started.id, ran.started.name, "", False)
    assert list(_trace(untraced, ran.started.id).spans) == list(told.spans)
    spans = _spans(told)
    assert spans["launch"].span_id == spans["spawn"].parent_span_id == spans["cleanup"].parent_span_id
    assert spans["cleanup"].attributes["tightship.cancel.reason"] == "exit"
    assert spans["cleanup"].span_id == spans["undo.lease"].parent_span_id
    living = untraced.calls.detach(["/bin/sleep", "600"])
    told = _trace(untraced, "last")
    assert told.id == living.id
    assert "cleanup" not in _spans(told)
    untraced.calls.run(["/bin/true"])
    untraced.calls.destroy(living.name)
    assert _trace(untraced, "last").id == living.id


def test_a_create_leaves_its_trace_without_a_record(untraced: Pair) -> None:
    name = fresh_name("made")
    untraced.calls.create(name)
    assert _spans(_trace(untraced, name)).keys() >= {"create", "mkdir.memory", "commit"}
    untraced.calls.destroy(name)
    spans = _spans(_trace(untraced, name))
    assert spans["create"].error == ""
    assert spans["cleanup"].attributes["tightship.cancel.reason"] == "destroy"
    with pytest.raises(grpc.RpcError) as failed:
        untraced.calls.get(name)
    assert code(failed.value) is grpc.StatusCode.NOT_FOUND


def test_a_forgotten_and_an_unknown_one_are_not_found(untraced: Pair) -> None:
    ran = untraced.calls.run(["/bin/true"])
    untraced.calls.containerizer.Remove(cpb.RemoveRequest(name=ran.started.id), timeout=10)
    for name in (ran.started.id, ran.started.name, "/nobody"):
        with pytest.raises(grpc.RpcError) as failed:
            _trace(untraced, name)
        assert code(failed.value) is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as failed:
        _trace(untraced, "no name")
    assert code(failed.value) is grpc.StatusCode.INVALID_ARGUMENT


def test_the_times_of_what_lives_on_are_on_disk_and_outlive_the_containerizer(untraced: Pair) -> None:
    name = fresh_name("long")
    started = untraced.calls.detach(["/bin/sleep", "600"], name)
    first = _trace(untraced, name)
    (journal,) = untraced.run_dir.glob("journal-*.db")

    def on_disk() -> bool:
        with closing(sqlite3.connect(journal)) as db:
            ((live,),) = db.execute("SELECT live FROM containers WHERE id = ?", (started.id,))
        return "open" in json.loads(live)["times"]

    until(on_disk, "the times are in the journal", 10)
    assert _trace(untraced, name) == first
    untraced.kill("containerizer")
    untraced.await_service("containerizer")
    untraced.await_ready()
    assert _trace(untraced, name) == first
    untraced.calls.destroy(name)
    ended = _trace(untraced, name)
    assert list(ended.spans)[: len(first.spans)] == list(first.spans)
    assert ended.spans[len(first.spans)].name == "cleanup"


def test_the_command_draws_and_tells_json(untraced: Pair) -> None:
    name = fresh_name("drawn")
    ran = untraced.command("run", name, "--", "/bin/sh", "-c", "echo out; exit 3")
    assert ran.returncode == 3
    drawn = untraced.command("trace", name).stdout
    assert drawn.splitlines()[0].startswith(f"{name} (")
    assert drawn.splitlines()[0].endswith("): exited 3")
    assert "└─ undo.lease" in drawn
    assert "exit; exit code 3; 4 + 0 bytes" in drawn
    assert "\x1b" not in drawn
    told = json.loads(untraced.command("trace", "last", "--json").stdout)
    assert told["name"] == name
    assert {one["name"] for one in told["spans"]} >= {"launch", "lease", "spawn", "open", "cleanup"}
    missing = untraced.command("trace", "/nobody")
    assert missing.returncode == 5
    assert "no container /nobody" in missing.stderr
