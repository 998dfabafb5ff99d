"""Specs: what parses, what is refused and how the refusal names it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightship.common.errors import Code, ServiceError
from tightship.containerizer import spec
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import spec_pb2


def parse(text: str) -> spec_pb2.ContainerSpec:
    return spec.parse(pb.SpecInput(text=text))


def refused(text: str) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        parse(text)
    return caught.value


def test_lmctfy_37_the_spec_of_the_incident_parses() -> None:
    found = parse("cpu { limit: 1000 } memory { limit: -1 }")
    assert (found.cpu.limit, found.memory.limit) == (1000, -1)
    assert not found.memory.HasField("swap_limit")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# comment\n",
        "cpu: < limit: 1 >",
        "virtual_host { }",
        "virtual_host { network { } virtual_hostname: 'h' }",
        # Below the limit: for the kernel to refuse.
        "memory { limit: 67108864 swap_limit: 33554432 }",
        "lifecycle { stop_signal: '9' grace { } cleanup_budget { nanos: 1 } }",
        "children_limit: 0",
    ],
)
def test_accepted(text: str) -> None:
    parse(text)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("cpu { max_limit: 9 }", "cpu.max_limit"),
        ("cpu { limit: 256001 }", "cpu.limit"),
        ("cpu { scheduling_latency: 9 }", "cpu.scheduling_latency"),
        ("cpu { mask { } }", "cpu.mask"),
        ("memory { limit: -2 }", "memory.limit"),
        ("memory { swap_only: 1 }", "memory.swap_only"),
        ("memory { limit: 1 swap_only: 1 swap_limit: 2 }", "memory.swap_only"),
        ("memory { eviction_priority: -1 }", "memory.eviction_priority"),
        ("tasks { limit: -2 }", "tasks.limit"),
        ("children_limit: -1", "children_limit"),
        ("owner: -1", "owner"),
        ("lifecycle { stop_signal: '' }", "lifecycle.stop_signal"),
        ("lifecycle { cleanup_budget { } }", "lifecycle.cleanup_budget"),
    ],
)
def test_values_out_of_range_are_named(text: str, field: str) -> None:
    error = refused(text)
    assert error.code is Code.INVALID_ARGUMENT
    assert error.metadata["field"] == field
    assert error.metadata["line"] == "1"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("memory { dirty { ratio: 1 } }", "memory.dirty"),
        ("memory { tmpfs { path: '/x' } }", "memory.tmpfs"),
        ("cpu { scheduling_latency: PREMIER }", "cpu.scheduling_latency"),
    ],
)
def test_what_is_not_honoured_is_named(text: str, field: str) -> None:
    error = refused(text)
    assert error.code is Code.UNIMPLEMENTED
    assert error.metadata["field"] == field


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("cpu { limit: 1 }\n  nonsense: 1", "2", "3"),
        ("cpu {\n  limit: -1\n}", "2", None),
        ("cpu {", "1", None),
        # Found by our checks, not by the parser.
        ("# memory { limit: 1 }\ncpu { limit: 1 }\nmemory {\n  limit: -2 }", "4", "3"),
        ("cpu { limit: 1 max_limit: 5 }", "1", "16"),
        ("virtual_host { virtual_hostname: 'memory { limit: -2 }' }\nmemory { limit: -2 }", "2", "10"),
        ("tasks { limit: 5 } memory < limit: -2 >", "1", "29"),
    ],
)
def test_errors_in_text_have_line_and_column(text: str, line: str, column: str | None) -> None:
    metadata = refused(text).metadata
    assert metadata["line"] == line
    assert column is None or metadata["column"] == column


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("cpu { limit: -1 }", "cpu.limit"),
        ("# cpu {\ncpu {\n  limit: -1\n}", "cpu.limit"),
        ("memory { limit: 99999999999999999999 }", "memory.limit"),
        ("memory { limit: 1 nonsense: 1 }", "memory.nonsense"),
        ("memory { limit: 1 } nonsense { }", "nonsense"),
        ("cpu { limit: 'one' }", "cpu.limit"),
        ("cpu { limit: }", "cpu.limit"),
        ("cpu { limit: 1 limit: 2 }", "cpu.limit"),
        ("cpu { scheduling_latency: NOPE }", "cpu.scheduling_latency"),
        ("cpu < mask { data: [1, x] } >", "cpu.mask.data"),
        ("cpu { mask { data: 1 } limit: x }", "cpu.limit"),
        ("cpu limit", "cpu"),
        ("\x00\x01", "spec"),
    ],
)
def test_errors_of_the_parser_name_the_field_they_are_in(text: str, field: str) -> None:
    error = refused(text)
    assert error.metadata["field"] == field
    place = f"line {error.metadata['line']}, column {error.metadata['column']}"
    assert error.message.startswith(f"{field}: {place}: ")
    assert " : " not in error.message, "said once"


def test_a_duration_of_two_signs_is_told_so() -> None:
    assert "same sign" in refused("lifecycle { grace { seconds: 1 nanos: -1 } }").message


def test_the_range_of_the_cpu_quota_is_told() -> None:
    parse("cpu { max_limit: 175921860444 }")
    assert "10 to 175921860444" in refused("cpu { max_limit: 175921860445 }").message


def test_unknown_fields_in_a_message_are_refused() -> None:
    unknown = spec_pb2.ContainerSpec.FromString(b"\xc2\x3e\x01x")
    with pytest.raises(ServiceError) as caught:
        spec.parse(pb.SpecInput(spec=unknown))
    assert caught.value.metadata["field"] == "spec.1000"
    nested = spec_pb2.ContainerSpec(cpu=spec_pb2.CpuSpec.FromString(b"\xc2\x3e\x01x"))
    with pytest.raises(ServiceError) as caught:
        spec.parse(pb.SpecInput(spec=nested))
    assert caught.value.metadata["field"] == "spec.cpu.1000"


@given(st.binary(max_size=60))
def test_no_text_breaks_the_parser(data: bytes) -> None:
    try:
        parse(data.decode("latin-1"))
    except ServiceError as error:
        assert error.metadata["field"]


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists_hold_the_bits_of_the_mask(cpus: set[int]) -> None:
    bits = sum(1 << cpu for cpu in cpus)
    words = [bits >> shift & (2**64 - 1) for shift in range(64 * 5, -1, -64)]
    told: set[int] = set()
    for part in spec.cpu_list(spec.cpu_bits(words)).split(","):
        first, _, last = part.partition("-")
        told.update(range(int(first), int(last or first) + 1))
    assert told == cpus


def test_signals() -> None:
    assert [spec.signal_number(text, "f") for text in ("TERM", "SIGTERM", "term", "15", "64")] == [15, 15, 15, 15, 64]
    for text in ("", " ", "\t\n", "\0", "9 9", "00159", "0", "65", "-1", "NOSUCH", "99999999999", "SIG", "²"):
        with pytest.raises(ServiceError):
            spec.signal_number(text, "f")
