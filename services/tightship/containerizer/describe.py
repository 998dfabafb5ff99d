"""Containers as callers see them: the messages of Get, List and STARTED, and the values the kernel holds."""

from __future__ import annotations

import contextlib
import os

from tightship.containerizer import privileges, records, statistics
from tightship.containerizer.journal import Ended, Kind, Row
from tightship.containerizer.machine import Machine
from tightship.containerizer.operations import Operation
from tightship.kernel import cgroup
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1.spec_pb2 import ContainerSpec


def in_force(row: Row) -> list[pb.InForce]:
    """What the kernel holds for each limit that was asked for; some µs a file. Absent files are left out."""
    found = []
    read = set()
    for step in row.plan:
        if step.kind == "write":
            # What is allowed and denied is told in one list, whichever file it was written to.
            file = step.target if not step.name.startswith("write.devices.") else _device_list(step.target)
            if (step.field, file) not in read:
                read.add((step.field, file))
                with contextlib.suppress(OSError):
                    found.append(pb.InForce(field=step.field, file=file, value=cgroup.read(file)))
    if row.live.pid:
        spec = ContainerSpec.FromString(row.spec)
        with contextlib.suppress(OSError):
            if spec.memory.HasField("eviction_priority"):
                file = f"/proc/{row.live.pid}/oom_score_adj"
                found.append(pb.InForce(field="memory.eviction_priority", file=file, value=cgroup.read(file)))
            found += privileges.in_force(spec, row.live.pid)
    return found


def _device_list(file: str) -> str:
    return os.path.join(os.path.dirname(file), "devices.list")


def started(operation: Operation, *, joined: bool, with_limits: bool) -> pb.LaunchResponse.Started:
    row = operation.row
    told = pb.LaunchResponse.Started(
        id=row.id,
        name=row.name,
        lease_id=row.id,
        pid=row.live.pid,
        joined=joined,
        node=operation.parts.settings.node,
    )
    told.time.FromNanoseconds(row.live.started)
    if with_limits:
        told.in_force.extend(operation.in_force or in_force(row))
    return told


def note_in_force(operation: Operation) -> None:
    """Keeps the values for STARTED: a short command and its cgroups may be gone by then."""
    operation.in_force = in_force(operation.row)


def living(operation: Operation, *, with_limits: bool) -> pb.Container:
    row = operation.row
    told = pb.Container(
        id=row.id,
        name=row.name,
        state=operation.state,
        spec=operation.spec,
        in_force=in_force(row) if with_limits else (),
        pid=row.live.pid if operation.exit is None else 0,
        lease_id=row.id if row.kind is Kind.LAUNCH else "",
        labels=row.labels,
        command=row.command,
        record=operation.record,
        node=operation.parts.settings.node,
        pending_reason="; ".join(f"{name}: {why}" for name, why in operation.left.items())[:4096],
    )
    told.created.FromNanoseconds(row.created)
    return told


def usage(machine: Machine, name: str) -> pb.Usage:
    """What its cgroups count now; never raises."""
    told = pb.Usage()
    if (cpu_us := records.read_cpu_us(machine, name)) is not None:
        told.cpu_time.FromMicroseconds(cpu_us)
    used, limit = statistics.charged(machine, name)
    if used is not None:
        told.memory = used
    if limit is not None:
        told.memory_limit = limit
    if (pids := machine.limits("pids")) is not None:
        tasks = cgroup.number(os.path.join(pids.path(name), "pids.current"))
        if tasks is not None:
            told.tasks = tasks
    return told


def ended(record: Ended) -> pb.Container:
    return pb.Container.FromString(record.container)
