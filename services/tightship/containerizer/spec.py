"""Specs as callers give them: text or message in, a checked ContainerSpec out. Pure.

A field that this version can't honour is refused by name, never ignored; so is one that the schema doesn't know. What
only the kernel can judge (memory.swap_limit below memory.limit) is left to the kernel.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tightship.common.errors import Code, ServiceError, invalid
from tightship.containerizer import devices, isolation, spec_text
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import spec_pb2

# Everything that is honoured; what is set and not here is refused.
_HONOURED = frozenset(
    {
        "owner",
        "owner_group",
        "children_limit",
        "cpu.limit",
        "cpu.max_limit",
        "cpu.scheduling_latency",
        "cpu.mask.data",
        "memory.limit",
        "memory.max_limit",
        "memory.swap_limit",
        "memory.swap_only",
        "memory.reservation",
        "memory.eviction_priority",
        "tasks.limit",
        "monitoring.enable_perf_counters",
        "virtual_host.virtual_hostname",
        "virtual_host.network",
        "virtual_host.init.init_argv",
        "lifecycle.stop_signal",
        "lifecycle.grace",
        "lifecycle.cleanup_budget",
    }
    | devices.HONOURED
    | isolation.HONOURED
)

# sched_group_set_shares clamps to 2^18 silently; in milli-CPU.
_CPU_LIMIT_MAX = 256_000
_CPU_MAX_LIMIT_MIN = 10
# kernel/sched/core.c: MAX_BW, 44 bits of µs, is the most that a quota may be; in milli-CPU of a period of 100 ms.
_CPU_MAX_LIMIT_MAX = (2**44 - 1) // 100
_MASK_WORDS_MAX = 128
_ID_MAX = 2**32 - 2
_INT64_MAX = 2**63 - 1
# HOST_NAME_MAX, sethostname(2).
_HOSTNAME_MAX = 64
# Of an init's command: far below what the kernel takes, so that the launch's own has room.
_INIT_MAX = 16 << 10
_SIGNAL_MAX = 64
_KNOWN_TEXT_MAX = 4096
_SAID_MAX = 1000


def parse(given: pb.SpecInput) -> spec_pb2.ContainerSpec:
    """The spec, checked. Raises INVALID_ARGUMENT (field; line and column for text) or UNIMPLEMENTED (field)."""
    _refuse_unknown(given, "")
    if given.WhichOneof("form") == "text":
        return _known_text(given.text) if len(given.text) <= _KNOWN_TEXT_MAX else _parse_text(given.text)
    spec = spec_pb2.ContainerSpec()
    spec.CopyFrom(given.spec)
    _refuse_unhonoured(spec)
    _check(spec)
    return spec


def refuse_process(spec: spec_pb2.ContainerSpec, where: str) -> None:
    """For the places that have no process of their own yet. Raises UNIMPLEMENTED naming what is about one."""
    for field in ("virtual_host", "security", "filesystem"):
        if spec.HasField(field):
            raise unimplemented(field, f"is not supported {where}")


def refuse_no_task(spec: spec_pb2.ContainerSpec) -> None:
    """For a launch, whose process is one task: the kernel counts it and does not refuse it. Raises INVALID_ARGUMENT."""
    if spec.tasks.HasField("limit") and not spec.tasks.limit:
        raise invalid("tasks.limit", "0 allows no process, and a launch has one", "OUT_OF_RANGE", value=0)


def unimplemented(field: str, why: str) -> ServiceError:
    """UNIMPLEMENTED naming the field."""
    return ServiceError(Code.UNIMPLEMENTED, "FIELD_NOT_SUPPORTED", f"{field} {why}", None, field=field)


def signal_number(text: str, field: str) -> int:
    """ "TERM", "SIGTERM" or "15" as a number, 1 to 64. Raises INVALID_ARGUMENT naming `field`."""
    word = text.strip().upper()
    if word.isascii() and word.isdigit():
        if len(word) <= 4 and 1 <= int(word) <= _SIGNAL_MAX:
            return int(word)
    else:
        known = signal.Signals.__members__.get(word if word.startswith("SIG") else "SIG" + word)
        if known is not None:
            return int(known)
    raise invalid(field, f"{text[:40]!r} is no signal: give a name like TERM or a number from 1 to {_SIGNAL_MAX}")


def cpu_bits(words: list[int]) -> int:
    """A bitmap, most significant word first, as one number."""
    bits = 0
    for word in words:
        bits = bits << 64 | word
    return bits


def cpu_list(bits: int) -> str:
    """The kernel's list format ("0-2,5") for a bit each; "" for none."""
    parts = []
    cpu = 0
    while bits >> cpu:
        if bits >> cpu & 1:
            first = cpu
            while bits >> (cpu + 1) & 1:
                cpu += 1
            parts.append(str(first) if first == cpu else f"{first}-{cpu}")
        cpu += 1
    return ",".join(parts)


def seconds(duration: Any) -> float:
    """A google.protobuf.Duration in seconds."""
    return float(duration.seconds) + float(duration.nanos) / 1e9


def duration(message: Message, field: str, path: str, *, positive: bool) -> float | None:
    """A Duration field in seconds, None where absent. Raises INVALID_ARGUMENT when negative, malformed or zero."""
    if not message.HasField(field):
        return None
    given = getattr(message, field)
    if abs(given.nanos) > 999_999_999 or abs(given.seconds) > 315_576_000_000:
        raise invalid(path, "is out of the range of a Duration")
    value = seconds(given)
    if given.seconds * given.nanos < 0:
        raise invalid(path, "seconds and nanos must have the same sign")
    if given.nanos < 0 or given.seconds < 0:
        raise invalid(path, f"{value:g} s is negative")
    if positive and not value:
        raise invalid(path, "must be more than zero")
    return value


def unknown_field(message: Message, path: str = "") -> str | None:
    """The path of the first field in the message, at any depth, that the schema doesn't have."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return f"{path}{unknown[0].field_number}"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for each in value if field.is_repeated else (value,):
            found = unknown_field(each, f"{path}{field.name}.")
            if found is not None:
                return found
    return None


def _parse_text(text: str) -> spec_pb2.ContainerSpec:
    spec = _from_text(text)
    try:
        _refuse_unhonoured(spec)
        _check(spec)
    except ServiceError as error:
        place = spec_text.locate(text, error.metadata["field"])
        if place is not None:
            error.metadata["line"], error.metadata["column"] = map(str, place)
        raise
    return spec


# Callers send the same few specs again and again, and parsing one costs as much as the journal. Never changed by us.
_known_text = functools.lru_cache(maxsize=64)(_parse_text)


def _from_text(text: str) -> spec_pb2.ContainerSpec:
    spec = spec_pb2.ContainerSpec()
    try:
        text_format.Parse(text, spec)
    except text_format.ParseError as error:
        line, column = error.GetLine() or 1, error.GetColumn() or 1
        raise invalid(
            spec_text.field_at(text, line, column) or "spec",
            f"line {line}, column {column}: {_said(error, text)}",
            "BAD_SPEC",
            line=line,
            column=column,
        ) from None
    except (DecodeError, ValueError, RecursionError) as error:
        raise invalid("spec", str(error), "BAD_SPEC") from None
    return spec


def _said(error: text_format.ParseError, text: str) -> str:
    """What the parser says, without the place and the line that it puts before."""
    said = str(error).removeprefix(f"{error.GetLine()}:{error.GetColumn()} : ")
    for line in text.splitlines()[(error.GetLine() or 1) - 1 :][:1]:
        said = said.removeprefix(f"'{line}': ")
    return said[:_SAID_MAX]


def _refuse_unknown(message: Message, path: str) -> None:
    found = unknown_field(message, path)
    if found is not None:
        raise invalid(found, "no such field in this version", "UNKNOWN_FIELD")


def _set_fields(message: Message, path: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """Every field that is set, down to the honoured ones, and to what has nothing honoured in it."""
    for field, value in message.ListFields():
        here = path + field.name
        if here in _HONOURED or not any(each.startswith(here + ".") for each in _HONOURED):
            yield here, field
        else:
            yield from _set_fields(value, here + ".")


def _refuse_unhonoured(spec: spec_pb2.ContainerSpec) -> None:
    for path, _ in _set_fields(spec):
        if path not in _HONOURED:
            raise unimplemented(path, "is not supported by this version")


def _check(spec: spec_pb2.ContainerSpec) -> None:
    for name in ("owner", "owner_group"):
        if spec.HasField(name):
            _within(name, getattr(spec, name), 0, _ID_MAX)
    if spec.HasField("children_limit"):
        _within("children_limit", spec.children_limit, 0, _INT64_MAX)
    _check_cpu(spec.cpu)
    _check_memory(spec.memory)
    if spec.tasks.HasField("limit"):
        _within("tasks.limit", spec.tasks.limit, -1, _INT64_MAX)
    hostname = spec.virtual_host.virtual_hostname
    if len(hostname.encode()) > _HOSTNAME_MAX or "\0" in hostname:
        raise invalid("virtual_host.virtual_hostname", f"is over {_HOSTNAME_MAX} bytes, or has a NUL byte")
    devices.check(spec)
    if spec.virtual_host.HasField("init"):
        _check_init(spec.virtual_host.init)
    isolation.check(spec)
    if spec.lifecycle.HasField("stop_signal"):
        signal_number(spec.lifecycle.stop_signal, "lifecycle.stop_signal")
    duration(spec.lifecycle, "grace", "lifecycle.grace", positive=False)
    duration(spec.lifecycle, "cleanup_budget", "lifecycle.cleanup_budget", positive=True)


def _check_init(init: spec_pb2.VirtualHostSpec.InitSpec) -> None:
    field = "virtual_host.init.init_argv"
    if not init.init_argv or not init.init_argv[0]:
        raise invalid(field, "an init's command is needed", "MISSING")
    if any("\0" in word for word in init.init_argv):
        raise invalid(field, "has a NUL byte")
    if sum(len(word.encode()) + 1 for word in init.init_argv) > _INIT_MAX:
        raise invalid(field, f"has more than {_INIT_MAX} bytes", "TOO_LONG")


def _check_cpu(cpu: spec_pb2.CpuSpec) -> None:
    if cpu.HasField("limit"):
        _within("cpu.limit", cpu.limit, 0, _CPU_LIMIT_MAX)
    if cpu.HasField("max_limit"):
        _within("cpu.max_limit", cpu.max_limit, _CPU_MAX_LIMIT_MIN, _CPU_MAX_LIMIT_MAX)
    if cpu.HasField("scheduling_latency"):
        given = cpu.scheduling_latency
        if given not in spec_pb2.SchedulingLatency.values() or not given:
            raise invalid("cpu.scheduling_latency", f"{given} is none of its values")
        if given in (spec_pb2.PRIORITY, spec_pb2.PREMIER):
            raise unimplemented(
                "cpu.scheduling_latency", f"{spec_pb2.SchedulingLatency.Name(given)} can't be honoured by this kernel"
            )
    if cpu.HasField("mask"):
        if len(cpu.mask.data) > _MASK_WORDS_MAX:
            raise invalid("cpu.mask", f"has more than {_MASK_WORDS_MAX} words")
        if not any(cpu.mask.data):
            raise invalid("cpu.mask", "names no CPU")


def _check_memory(memory: spec_pb2.MemorySpec) -> None:
    for name, low in (("limit", -1), ("max_limit", -1), ("swap_limit", -1), ("swap_only", 0), ("reservation", 0)):
        if memory.HasField(name):  # type: ignore[arg-type]
            _within(f"memory.{name}", getattr(memory, name), low, _INT64_MAX)
    if memory.HasField("eviction_priority"):
        _within("memory.eviction_priority", memory.eviction_priority, 0, 10_000)
    if memory.HasField("max_limit") and 0 <= memory.max_limit < memory.limit:
        raise invalid("memory.max_limit", "is below memory.limit", "OUT_OF_RANGE", value=memory.max_limit)
    if memory.HasField("swap_only"):
        if memory.HasField("swap_limit"):
            raise invalid("memory.swap_only", "excludes memory.swap_limit")
        if not memory.HasField("limit") or memory.limit < 0:
            raise invalid("memory.swap_only", "needs a memory.limit")
        _within("memory.swap_only", memory.swap_only, 0, _INT64_MAX - memory.limit)


def _within(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise invalid(field, f"{value} is not within {low} to {high}", "OUT_OF_RANGE", value=value)
