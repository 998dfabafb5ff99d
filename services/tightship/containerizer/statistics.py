"""What a container uses, read from its cgroups' files and from nothing else: some tens of µs, never raises.

Sources: Documentation/admin-guide/cgroup-v2.rst; cgroup-v1/memory.rst, cpuacct.rst, pids.rst; accounting/psi.rst.
"""

from __future__ import annotations

import contextlib
import os
import time

from tightship.containerizer import records
from tightship.containerizer.machine import Machine
from tightship.kernel import cgroup
from tightship.v1 import containerizer_pb2 as pb

# Above any memory: an unlimited v1 cgroup holds LONG_MAX rounded to a page.
_UNLIMITED = 1 << 62


def read(machine: Machine, name: str) -> pb.StatsResponse:
    told = pb.StatsResponse()
    told.time.FromNanoseconds(time.time_ns())
    tracker = machine.tracker.path(name)
    _cpu(machine, name, told.cpu)
    if (memory := machine.limits("memory")) is not None:
        used, limit = charged(machine, name)
        _set(told.memory, "usage", used)
        _set(told.memory, "limit", limit)
        (_memory if memory.version == 1 else _memory_v2)(memory.path(name), told.memory)
    if (pids := machine.limits("pids")) is not None:
        _set(told.tasks, "current", cgroup.number(os.path.join(pids.path(name), "pids.current")))
        limit = cgroup.number(os.path.join(pids.path(name), "pids.max"))
        told.tasks.limit = -1 if limit is None else limit
    _io(tracker, told)
    for resource in ("cpu", "memory", "io"):
        _pressure(os.path.join(tracker, f"{resource}.pressure"), resource, told)
    return told


def charged(machine: Machine, name: str) -> tuple[int | None, int | None]:
    """Memory that its cgroup is charged with, and its limit, in bytes; a limit of -1 is none."""
    memory = machine.limits("memory")
    if memory is None:
        return None, None
    directory = memory.path(name)
    if memory.version == 2:
        limit = cgroup.number(os.path.join(directory, "memory.max"))
        # "max" is no number.
        return cgroup.number(os.path.join(directory, "memory.current")), -1 if limit is None else limit
    limit = cgroup.number(os.path.join(directory, "memory.limit_in_bytes"))
    used = cgroup.number(os.path.join(directory, "memory.usage_in_bytes"))
    return used, -1 if limit is not None and limit >= _UNLIMITED else limit


def _cpu(machine: Machine, name: str, told: pb.StatsResponse.Cpu) -> None:
    if (used := records.read_cpu_us(machine, name)) is not None:
        told.usage.FromMicroseconds(used)
    stat = os.path.join(machine.tracker.path(name), "cpu.stat")
    for key, duration in (("user_usec", "user"), ("system_usec", "system")):
        if (value := cgroup.keyed(stat, key)) is not None:
            getattr(told, duration).FromMicroseconds(value)
    if (cpu := machine.limits("cpu")) is not None:
        stat = os.path.join(cpu.path(name), "cpu.stat")
        _set(told, "periods", cgroup.keyed(stat, "nr_periods"))
        _set(told, "throttled_periods", cgroup.keyed(stat, "nr_throttled"))
        if (throttled := cgroup.keyed(stat, "throttled_time")) is not None:
            told.throttled_time.FromNanoseconds(throttled)
        elif (throttled := cgroup.keyed(stat, "throttled_usec")) is not None:
            told.throttled_time.FromMicroseconds(throttled)


def _memory(directory: str, told: pb.StatsResponse.Memory) -> None:
    def number(file: str) -> int | None:
        return cgroup.number(os.path.join(directory, file))

    stat = os.path.join(directory, "memory.stat")
    _set(told, "peak", number("memory.max_usage_in_bytes"))
    _set(told, "anonymous", cgroup.keyed(stat, "total_rss"))
    _set(told, "file", cgroup.keyed(stat, "total_cache"))
    _set(told, "swap", cgroup.keyed(stat, "total_swap"))
    _set(told, "limit_hits", number("memory.failcnt"))
    _set(told, "oom_kills", cgroup.keyed(os.path.join(directory, "memory.oom_control"), "oom_kill"))


def _memory_v2(directory: str, told: pb.StatsResponse.Memory) -> None:
    def number(file: str) -> int | None:
        return cgroup.number(os.path.join(directory, file))

    stat = os.path.join(directory, "memory.stat")
    events = os.path.join(directory, "memory.events")
    _set(told, "peak", number("memory.peak"))
    _set(told, "anonymous", cgroup.keyed(stat, "anon"))
    _set(told, "file", cgroup.keyed(stat, "file"))
    _set(told, "swap", number("memory.swap.current"))
    _set(told, "limit_hits", cgroup.keyed(events, "max"))
    _set(told, "oom_kills", cgroup.keyed(events, "oom_kill"))


def _io(directory: str, told: pb.StatsResponse) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in cgroup.read(os.path.join(directory, "io.stat")).splitlines():
            device, *words = line.split()
            found = {key: int(value) for key, _, value in (word.partition("=") for word in words)}
            told.io.add(
                device=device,
                read_bytes=found.get("rbytes", 0),
                write_bytes=found.get("wbytes", 0),
                reads=found.get("rios", 0),
                writes=found.get("wios", 0),
            )


def _pressure(file: str, resource: str, told: pb.StatsResponse) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in cgroup.read(file).splitlines():
            kind, *words = line.split()
            found = dict(word.split("=", 1) for word in words)
            pressure = told.pressure[resource]
            setattr(pressure, kind, float(found["avg10"]))
            getattr(pressure, f"{kind}_total").FromMicroseconds(int(found["total"]))


def _set(told: object, field: str, value: int | None) -> None:
    if value is not None:
        setattr(told, field, value)
