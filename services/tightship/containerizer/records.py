"""How a container ended: the exit's report, what its cgroups counted, and the Record made of both."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from tightship.common.errors import ServiceError
from tightship.containerizer.journal import Row
from tightship.containerizer.machine import Machine
from tightship.kernel import cgroup
from tightship.v1 import containerizer_pb2 as pb

# Reasons of a cancel that mean that time was over.
_TIMEOUTS = frozenset({"timeout", "deadline_exceeded", "max_lifetime"})


@dataclass(frozen=True, slots=True)
class Exit:
    """The kernel's report on a main process, as the spawner has it. `value` is an exit code or a signal."""

    kind: str
    value: int = 0
    cpu_us: int = 0
    monotonic_ns: int = 0

    @classmethod
    def from_packet(cls, packet: dict[str, Any]) -> Exit:
        """From an event, or from a launch in the answer to HELLO or ADOPT. What is not told is unknown."""
        status = packet.get("status") or {}
        kind = str(status.get("kind", "unknown"))
        return cls(
            kind if kind in ("exited", "signalled") else "unknown",
            int(status.get("value") or 0),
            int((packet.get("rusage") or {}).get("cpu_us") or 0),
            int(packet.get("time") or time.monotonic_ns()),
        )


@dataclass(frozen=True, slots=True)
class Counters:
    """What the cgroups counted; None where the kernel does not tell."""

    peak_memory: int | None = None
    oom_kills: int = 0
    cpu_us: int | None = None

    def joined(self, earlier: Counters) -> Counters:
        """With what an earlier look saw: none of them ever falls, but for a directory that is gone."""
        return Counters(
            _larger(self.peak_memory, earlier.peak_memory),
            max(self.oom_kills, earlier.oom_kills),
            _larger(self.cpu_us, earlier.cpu_us),
        )


def _larger(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)


def read_counters(machine: Machine, name: str) -> Counters:
    """Must come after the exit and before the directories go. Some tens of µs; never raises."""
    peak: int | None = None
    kills = 0
    memory = machine.limits("memory")
    if memory is not None and memory.version == 2:
        directory = memory.path(name)
        peak = cgroup.number(os.path.join(directory, "memory.peak"))  # from Linux 5.19 on
        # Its own, as v1 tells them: without those of containers below. They are the leaf's where it has such below.
        for each in (directory, memory.inside(name)):
            kills += cgroup.keyed(os.path.join(each, "memory.events.local"), "oom_kill") or 0
    elif memory is not None:
        directory = memory.path(name)
        peak = cgroup.number(os.path.join(directory, "memory.max_usage_in_bytes"))
        kills = cgroup.keyed(os.path.join(directory, "memory.oom_control"), "oom_kill") or 0
    return Counters(peak, kills, read_cpu_us(machine, name))


def read_cpu_us(machine: Machine, name: str) -> int | None:
    """CPU time of all that ever ran in it, in µs; None where the kernel does not tell. Never raises."""
    told = cgroup.keyed(os.path.join(machine.tracker.path(name), "cpu.stat"), "usage_usec")
    if told is None and (accounting := machine.limits("cpuacct")) is not None:
        used = cgroup.number(os.path.join(accounting.path(name), "cpuacct.usage"))
        told = used // 1000 if used is not None else None
    return told


def of_exit(row: Row, ended: Exit, cancel_reason: str, counters: Counters) -> pb.Record:
    """The record of a main process that ran. `cancel_reason` is empty where it ended by itself."""
    record = _base(row)
    if ended.kind == "exited":
        record.exit_code = ended.value
        record.reason = pb.Record.EXITED
    elif ended.kind == "signalled":
        record.signal = ended.value
        oom = counters.oom_kills > 0 and ended.value == signal.SIGKILL
        record.reason = pb.Record.OOM if oom else pb.Record.SIGNALLED
    else:
        record.reason = pb.Record.UNKNOWN
    if cancel_reason:
        record.cancel_reason = cancel_reason
        record.reason = pb.Record.TIMEOUT if cancel_reason in _TIMEOUTS else pb.Record.CANCELLED
    ended_ns = time.time_ns() - max(0, time.monotonic_ns() - ended.monotonic_ns)
    record.started.FromNanoseconds(row.live.started)
    record.ended.FromNanoseconds(ended_ns)
    wall = (
        ended.monotonic_ns - row.live.started_monotonic if row.live.started_monotonic else ended_ns - row.live.started
    )
    record.wall_time.FromNanoseconds(max(0, wall))
    cpu_us = counters.cpu_us if counters.cpu_us is not None else ended.cpu_us
    record.cpu_time.FromMicroseconds(cpu_us)
    if counters.peak_memory is not None:
        record.peak_memory = counters.peak_memory
    record.oom_kills = counters.oom_kills
    return record


def of_failure(row: Row, error: ServiceError | None, cancel_reason: str) -> pb.Record:
    """The record of a launch that never ran."""
    record = _base(row)
    record.reason = pb.Record.FAILED
    record.ended.FromNanoseconds(time.time_ns())
    record.cancel_reason = cancel_reason
    if error is not None:
        record.error = error.message[:4096]
        record.error_stage = error.metadata.get("stage", "")
        record.error_errno = _number(error.metadata.get("errno", ""))
    return record


def _base(row: Row) -> pb.Record:
    return pb.Record(id=row.id, name=row.name, lease_id=row.id, labels=row.labels, request_id=row.request_id)


def _number(name: str) -> int:
    return int(name) if name.isdigit() else int(getattr(errno, name, 0))
