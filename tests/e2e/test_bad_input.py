"""Input that is wrong, and input that is unusual and legal: the code, the field, line and column; nothing made."""

from __future__ import annotations

import datetime
from typing import Any

import grpc
import pytest
from grpc import StatusCode

from tests.harness.calls import code, fresh_name, info
from tests.harness.pair import Pair
from tightship.v1 import containerizer_pb2 as cpb
from tightship.v1 import spec_pb2

BAD_NAMES = [
    "", "<", "+", "/.bad", "/_bad", "_bad", "relative", "./relative", "..", "/a b", "/ü", "/a\n", "/a\x00b",
    "/tasks", "/a/cgroup.procs", "/memory.limit_in_bytes", "/notify_on_release", "/release_agent", "/cpu.shares",
    "/" + "x" * 256, "/a" * 65,
]  # fmt: skip

BAD_SPECS = [
    ("cpu { limit: -1 }", None),
    ("cpu { max_limit: 9 }", "cpu.max_limit"),
    ("cpu { scheduling_latency: 9 }", "cpu.scheduling_latency"),
    ("cpu { mask { data: 0 } }", "cpu.mask"),
    ("memory { limit: -2 }", "memory.limit"),
    ("memory { limit: 99999999999999999999 }", None),
    ("memory { eviction_priority: 10001 }", "memory.eviction_priority"),
    ("tasks { limit: -2 }", "tasks.limit"),
    ("memory { nonsense: 1 }", None),
    ("nonsense { }", None),
    ("cpu { limit: 'one' }", None),
    ("cpu { limit: 1", None),
    ("\x00\x01", None),
    ("lifecycle { stop_signal: 'NOSUCH' }", "lifecycle.stop_signal"),
    ("lifecycle { grace { seconds: -1 } }", "lifecycle.grace"),
]

NOT_HERE = [
    ("memory { max_limit: 1048576 }", "memory.max_limit"),
    ("memory { dirty { ratio: 10 } }", "memory.dirty"),
    ("memory { hugetlbfs_path: '/x' }", "memory.hugetlbfs_path"),
    ("memory { tmpfs { path: '/x' size: 1 } }", "memory.tmpfs"),
    ("memory { compression_sampling_ratio: 1 }", "memory.compression_sampling_ratio"),
    ("memory { kmem_charge_usage: true }", "memory.kmem_charge_usage"),
]


def _launch_error(pair: Pair, **fields: Any) -> grpc.RpcError:
    fields.setdefault("command", ["/bin/true"])
    with pair.unchanged():
        return pair.calls.launch(timeout=30, **fields).error()


def _create_error(pair: Pair, name: str, spec: str) -> grpc.RpcError:
    with pair.unchanged():
        with pytest.raises(grpc.RpcError) as caught:
            pair.calls.create(name, spec)
        return caught.value


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names(pair: Pair, name: str) -> None:
    error = _create_error(pair, name, "")
    assert code(error) == StatusCode.INVALID_ARGUMENT
    assert info(error).metadata["field"] == "name"
    if name:  # a launch without a name gets one
        assert code(_launch_error(pair, name=name)) == StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("spec", "field"), BAD_SPECS)
def test_bad_specs(pair: Pair, spec: str, field: str | None) -> None:
    """A field of None: the text does not parse, and the error says where."""
    for error in (_create_error(pair, fresh_name(), spec), _launch_error(pair, spec=spec)):
        assert code(error) == StatusCode.INVALID_ARGUMENT, error
        metadata = info(error).metadata
        if field is None:
            assert int(metadata["line"]) == 1
            assert int(metadata["column"]) >= 1
        else:
            assert metadata["field"].startswith(field)


def test_line_and_column_of_a_later_line(pair: Pair) -> None:
    metadata = info(_create_error(pair, fresh_name(), "cpu { limit: 1000 }\nmemory {\n  bogus: 3\n}\n")).metadata
    assert (metadata["line"], metadata["column"]) == ("3", "3")


@pytest.mark.parametrize(("spec", "field"), NOT_HERE)
def test_lmctfy_what_is_not_honoured_is_refused_by_name(pair: Pair, spec: str, field: str) -> None:
    error = _create_error(pair, fresh_name(), spec)
    assert code(error) == StatusCode.UNIMPLEMENTED
    assert info(error).metadata["field"].startswith(field)


def test_binary_specs_with_unknown_fields_are_refused(pair: Pair) -> None:
    unknown = spec_pb2.ContainerSpec.FromString(b"\xc2\x3e\x01x")  # field 1000, a string
    with pytest.raises(grpc.RpcError) as caught:
        pair.calls.containerizer.Create(
            cpb.CreateRequest(name=fresh_name(), spec=cpb.SpecInput(spec=unknown)), timeout=10
        )
    assert code(caught.value) == StatusCode.INVALID_ARGUMENT


def test_virtual_host_belongs_to_a_launch(pair: Pair) -> None:
    error = _create_error(pair, fresh_name(), "virtual_host { }")
    assert code(error) == StatusCode.UNIMPLEMENTED
    assert info(error).metadata["field"] == "virtual_host"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("command", {"command": []}),
        ("command", {"command": [""]}),
        ("command", {"command": ["/bin/echo", "a\x00b"]}),
        ("env", {"env": ["NOEQUALS"]}),
        ("env", {"env": ["=x"]}),
        ("env", {"env": ["A=\x00"]}),
        ("cwd", {"cwd": "relative"}),
        ("cwd", {"cwd": "/a\x00b"}),
        ("umask", {"umask": 0o1000}),
        ("log_cap", {"log_cap": -1}),
        ("timeout", {"limit_s": -1}),
        ("max_lifetime", {"max_lifetime": datetime.timedelta(seconds=-1), "detach": True}),
    ],
)
def test_bad_fields_of_a_launch(pair: Pair, field: str, fields: dict[str, Any]) -> None:
    error = _launch_error(pair, **fields)
    assert code(error) == StatusCode.INVALID_ARGUMENT
    assert info(error).metadata["field"].split("[")[0] == field


def test_names_that_do_not_exist(pair: Pair) -> None:
    calls = pair.calls
    name = fresh_name("none")
    for call in (
        lambda: calls.destroy(name),
        lambda: calls.wait(name),
        lambda: calls.get(name),
        lambda: calls.containerizer.Kill(cpb.KillRequest(name=name)),
        lambda: calls.containerizer.Remove(cpb.RemoveRequest(name=name)),
        lambda: calls.create(f"{name}/below"),
        lambda: calls.launch(["/bin/true"], f"{name}/below").started(),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert code(caught.value) == StatusCode.NOT_FOUND, caught.value
        assert name in (caught.value.details() or "")


@pytest.mark.parametrize("limit", [0, 4096, 16384])
def test_a_memory_limit_too_small_to_start_in_is_named(pair: Pair, limit: int) -> None:
    error = _launch_error(pair, spec=f"memory {{ limit: {limit} }}")
    assert code(error) == StatusCode.RESOURCE_EXHAUSTED, error
    metadata = info(error).metadata
    assert (metadata["field"], metadata["value"]) == ("memory.limit", str(limit))
    assert metadata["file"].endswith("/memory.limit_in_bytes")


def test_a_launch_needs_a_task(pair: Pair) -> None:
    error = _launch_error(pair, spec="tasks { limit: 0 }")
    assert code(error) == StatusCode.INVALID_ARGUMENT
    assert info(error).metadata["field"] == "tasks.limit"
    pair.calls.create(name := fresh_name(), "tasks { limit: 0 }")
    pair.calls.destroy(name)


def test_the_largest_cpu_quota_is_taken_and_cpus_that_are_not_there_are_told(pair: Pair) -> None:
    with pair.unchanged():
        assert pair.calls.run(["/bin/true"], spec="cpu { max_limit: 175921860444 }").code == 0
    error = _launch_error(pair, spec="cpu { mask { data: 1 data: 0 } }")
    assert code(error) == StatusCode.INVALID_ARGUMENT
    assert info(error).metadata["field"] == "cpu.mask"
    pair.calls.create(name := fresh_name(), "cpu { mask { data: 1 } }")
    error = _launch_error(pair, name=f"{name}/below", spec="cpu { mask { data: 2 } }")
    assert info(error).metadata["field"] == "cpu.mask"
    assert "choose from are 0" in (error.details() or "") or "no CPU 1" in (error.details() or "")
    pair.calls.destroy(name)


def test_a_bad_signal(pair: Pair) -> None:
    name = fresh_name()
    pair.calls.detach(["/bin/sleep", "600"], name)
    for signal in ("NOSUCH", "0", "65", "-1", " ", "\t", "9 9"):
        with pytest.raises(grpc.RpcError) as caught:
            pair.calls.containerizer.Kill(cpb.KillRequest(name=name, signal=signal))
        assert code(caught.value) == StatusCode.INVALID_ARGUMENT
        assert info(caught.value).metadata["field"] == "signal"
    for signal in ("CONT", "SIGCONT", "18"):
        pair.calls.containerizer.Kill(cpb.KillRequest(name=name, signal=signal))
    pair.calls.destroy(name)


def test_100000_arguments(pair: Pair) -> None:
    result = pair.calls.run(["/bin/sh", "-c", "echo $#", "sh", *map(str, range(100_000))])
    assert result.stdout == b"100000\n", result


def test_an_environment_of_300_kb(pair: Pair) -> None:
    values = [f"V{i}={'x' * 1000}" for i in range(300)]
    result = pair.calls.run(["/usr/bin/env"], env=values)
    assert sorted(result.stdout.decode().split()) == sorted(values)


def test_one_argument_over_the_kernels_limit(pair: Pair) -> None:
    """MAX_ARG_STRLEN is 131,072 bytes with its NUL: execve(2)."""
    assert pair.calls.run(["/bin/sh", "-c", "echo ${#1}", "sh", "x" * 131_071]).stdout == b"131071\n"
    error = _launch_error(pair, command=["/bin/true", "x" * 131_072])
    assert code(error) == StatusCode.INVALID_ARGUMENT


def test_a_request_of_9_mib(pair: Pair) -> None:
    error = _launch_error(pair, command=["/bin/true", *["x" * 1024] * (9 << 10)])
    assert code(error) in (StatusCode.INVALID_ARGUMENT, StatusCode.RESOURCE_EXHAUSTED)
    assert pair.calls.run(["/bin/true"]).code == 0


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("//t1/t2//t3///", "/t1/t2/t3"),
        ("/./t1", "/t1"),
        ("/t1/../t2", "/t2"),
        ("/../../t1", "/t1"),
        ("/A-z_0.9", "/A-z_0.9"),
        ("/" + "x" * 255, "/" + "x" * 255),
    ],
)
def test_legal_names_are_cleaned(pair: Pair, given: str, name: str) -> None:
    with pair.unchanged():
        assert pair.calls.create(given, parents=True).container.name == name
        pair.calls.destroy("/" + name.split("/")[1])


def test_legal_specs(pair: Pair) -> None:
    for spec in (
        "",
        "# a comment\n",
        "cpu { limit: 1 }",
        "cpu { limit: 1000 max_limit: 10 mask { data: 1 } }",
        "cpu: < limit: 1000 >",
        "memory { limit: -1 swap_limit: -1 }",
        "memory { limit: 1048576 reservation: 0 eviction_priority: 0 }",
        "tasks { limit: -1 }",
        "lifecycle { stop_signal: 'SIGUSR1' grace { nanos: 1000000 } }",
    ):
        with pair.unchanged():
            assert pair.calls.run(["/bin/true"], spec=spec).code == 0, spec


def test_a_priority_that_needs_a_capability_is_honoured_or_refused_by_name(pair: Pair) -> None:
    """Lowering oom_score_adj needs CAP_SYS_RESOURCE: proc(5)."""
    launching = pair.calls.launch(["/bin/true"], spec="memory { eviction_priority: 10000 }")
    try:
        launching.started()
    except grpc.RpcError as error:
        assert code(error) == StatusCode.PERMISSION_DENIED
        assert info(error).metadata["field"] == "memory.eviction_priority"
    else:
        launching.exited()
        launching.gone()


def test_a_spec_reads_back_as_it_was_given(pair: Pair) -> None:
    name = fresh_name()
    pair.calls.create(name, "cpu { limit: 1000 } memory { limit: -1 }")
    found = pair.calls.get(name)
    assert found.spec == spec_pb2.ContainerSpec(cpu=spec_pb2.CpuSpec(limit=1000), memory=spec_pb2.MemorySpec(limit=-1))
    assert {one.field: one.value for one in found.in_force}["cpu.limit"] == "1024"
    pair.calls.destroy(name)
