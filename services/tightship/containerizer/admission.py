"""Letting containers in: request checked, name and parent free, planned, and intended in the journal.

From the look at names and parents to the journal row there is no await: nothing can come between.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
from collections.abc import Sequence
from typing import Any

from tightship.common import rights
from tightship.common.errors import Code, ServiceError, invalid
from tightship.common.telemetry import CallTrace
from tightship.containerizer import isolation, names, plan, refusals, requests, spec, steps
from tightship.containerizer.apply import Apply
from tightship.containerizer.entering import Entered
from tightship.containerizer.journal import Kind, Row
from tightship.containerizer.operations import Operation, Parts
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import spec_pb2
from tightship.v1 import switchboard_pb2 as sb

RETRY_S = 0.2

_NAMESPACES = ["pid", "mount", "ipc", "uts"]
# Of a command, for Get and records: words and characters of each.
_SHOWN_WORDS = 64
_SHOWN_CHARS = 256

STDIN_PIPE = pb.STDIN_MODE_PIPE


def hash_of(request: pb.LaunchRequest | pb.CreateRequest) -> str:
    """What tells whether two requests with one request id are the same; empty without an id."""
    if not request.request_id:
        return ""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()


def launch(parts: Parts, request: pb.LaunchRequest, remaining: float | None, trace: CallTrace) -> Operation:
    """A new launch, intended and not started. Raises ServiceError, and then nothing was made.

    `remaining` are the seconds the caller will wait; `trace` is that of its call.
    """
    requests.check_launch(request)
    given = spec.parse(request.spec)
    spec.refuse_no_task(given)
    identity = secrets.token_hex(8)
    caller = rights.current()
    name = _launch_name(parts, request, identity, caller.home)
    _check_room(parts, name, caller)
    exec_in = names.parent(name) if request.exec else ""
    entered = Entered(parts, name, caller, exec_in=exec_in)
    if entered.confining is None:
        given = isolation.with_user(given, caller)
    entered.check(given)
    isolated = _isolated(parts, given, entered)
    machine = parts.machine
    mark = steps.mark(machine.instance, identity, name)
    made = plan.for_launch(machine, given, name, mark, identity, above=_optional_above(parts, name))
    row = Row(
        id=identity,
        name=name,
        kind=Kind.LAUNCH,
        plan=made,
        spec=given.SerializeToString(),
        labels=dict(request.labels),
        command=shown(request.command),
        request_id=request.request_id,
        request_hash=hash_of(request),
        trace=parts.tracer.context(trace.own),
        parent_trace=trace.own,
        caller_trace=trace.caller,
        detach=request.detach,
        timeout=spec.duration(request, "timeout", "timeout", positive=True),
        max_lifetime=spec.duration(request, "max_lifetime", "max_lifetime", positive=True),
        client=caller.client,
    )
    operation = _intend(parts, row, remaining)
    stdin = request.stdin == STDIN_PIPE
    apply = operation.apply
    assert apply is not None
    apply.acquire = sb.AcquireRequest(
        lease_id=identity,
        owner=owner(machine.instance),
        stdin=stdin,
        log_cap=request.log_cap if request.HasField("log_cap") else None,
        labels={"container": name, "id": identity},
        traceparent=row.trace,
    )
    host = given.virtual_host if given.HasField("virtual_host") else None
    spaces = _NAMESPACES if host is not None or isolation.is_confined(given) else []
    tracker = machine.tracker
    apply.order |= {
        "stdin": stdin,
        "argv": [*given.virtual_host.init.init_argv, *request.command],
        "env": list(request.env),
        "cwd": request.cwd or "/",
        "umask": request.umask if request.HasField("umask") else 0o022,
        "cgroup_v2": tracker.inside(name) if tracker.version == 2 else None,
        "tasks_files": [
            f"{each.path(name)}/tasks"
            for each in (*machine.hierarchies, *plan.optional_of(machine, made))
            if each.version == 1
        ],
        "namespaces": [*spaces, "net"] if host is not None and host.HasField("network") else spaces,
        "hostname": "" if host is None else host.virtual_hostname,
        "oom_score_adj": _oom_score_adj(parts, name, given),
    }
    if entered.launch:
        apply.order["enter"] = entered.launch
    if isolated is not None:
        apply.order["isolation"] = isolated
    return operation


def create(
    parts: Parts, request: pb.CreateRequest, name: str, given: spec_pb2.ContainerSpec, trace: CallTrace
) -> Operation:
    """A new container without a process, intended and not started. Raises ServiceError."""
    caller = rights.current()
    _check_room(parts, name, caller)
    machine = parts.machine
    identity = secrets.token_hex(8)
    whole = name == names.container(request.name)
    row = Row(
        id=identity,
        name=name,
        kind=Kind.CREATE,
        plan=plan.for_create(
            machine, given, name, steps.mark(machine.instance, identity, name), above=_optional_above(parts, name)
        ),
        spec=given.SerializeToString(),
        labels=dict(request.labels) if whole else {},
        request_id=request.request_id if whole else "",
        request_hash=hash_of(request) if whole else "",
        trace=parts.tracer.context(trace.own),
        parent_trace=trace.own,
        caller_trace=trace.caller,
        client=caller.client,
    )
    return _intend(parts, row, None)


def cleanup(parts: Parts, name: str, trace: CallTrace) -> Operation | None:
    """The undo of whatever is left of a name that no container has; None where nothing is. Raises ServiceError."""
    paths = [each.path(name) for each in parts.machine.trees]
    if not any(os.path.isdir(path) for path in paths):
        return None
    found = {identity for path in paths if (identity := steps.identity_of(path)) is not None}
    dead = sorted(identity for identity in found if not parts.registry.is_living(identity))
    row = Row(
        id=secrets.token_hex(8),
        name=name,
        kind=Kind.CLEANUP,
        plan=plan.for_cleanup(parts.machine, name, dead),
        trace=parts.tracer.context(trace.own),
        parent_trace=trace.own,
        caller_trace=trace.caller,
        reason="cleanup",
    )
    operation = _intend(parts, row, None)
    operation.asked = "cleanup"
    return operation


def _optional_above(parts: Parts, name: str) -> frozenset[str]:
    """Names of the optional hierarchies that the parent is in."""
    above = parts.registry.named(name[: name.rindex("/")]) if name.count("/") > 1 else None
    if above is None:
        return frozenset()
    return frozenset(each.name for each in plan.optional_of(parts.machine, above.row.plan))


def owner(instance: str) -> str:
    """The owner of our leases."""
    return f"containerizer-{instance}"


def shown(command: Sequence[str]) -> tuple[str, ...]:
    """The command as it is kept for people: bounded, whatever was asked for."""
    words = [word if len(word) <= _SHOWN_CHARS else word[:_SHOWN_CHARS] + "…" for word in command[:_SHOWN_WORDS]]
    return tuple(words if len(command) <= _SHOWN_WORDS else [*words, "…"])


def check_parent(parts: Parts, name: str) -> None:
    """Raises NOT_FOUND, FAILED_PRECONDITION, UNAVAILABLE or UNIMPLEMENTED where nothing may be made there."""
    for above in names.lineage(name):
        container = parts.registry.named(above)
        if container is None:
            raise ServiceError(
                Code.NOT_FOUND, "PARENT_NOT_FOUND", f"the parent {above} of {name} does not exist", None, name=above
            )
        if container.recovering:
            raise recovering(above)
        if container.closing:
            raise ServiceError(
                Code.FAILED_PRECONDITION, "PARENT_CLOSING", f"the parent {above} of {name} is closing", None, name=above
            )
        if container.paused:
            raise ServiceError(
                Code.FAILED_PRECONDITION, "PARENT_PAUSED", f"{above} is paused: resume it first", None, name=above
            )
        if container.state not in (pb.Container.CREATED, pb.Container.RUNNING):
            raise ServiceError(
                Code.FAILED_PRECONDITION, "PARENT_NOT_READY", f"the parent {above} is still being made", 0.1, name=above
            )
        given = container.spec
        if given.HasField("children_limit") and len(parts.registry.below(above)) >= given.children_limit:
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED,
                "CHILDREN_LIMIT",
                f"{above} may have {given.children_limit} containers below",
                None,
                name=above,
                field="children_limit",
            )


def recovering(name: str) -> ServiceError:
    return ServiceError(
        Code.UNAVAILABLE, "RECOVERING", f"{name} is being recovered after a restart", RETRY_S, name=name
    )


def _launch_name(parts: Parts, request: pb.LaunchRequest, identity: str, home: str) -> str:
    generated = f"run-{identity}"
    if not request.name:
        if request.exec:
            raise invalid("name", "is needed: the container to exec in")
        return f"{home}/{generated}"
    name = names.normalize(request.name)
    if request.exec:
        if name == "/" or parts.registry.named(name) is None:
            raise ServiceError(Code.NOT_FOUND, "NOT_FOUND", f"there is no container {name} to exec in", None, name=name)
        return names.container(f"{name}/{generated}")
    if request.within_existing and (name == "/" or parts.registry.named(name) is not None):
        return names.container(f"{name.rstrip('/')}/{generated}")
    return names.container(name)


def _check_room(parts: Parts, name: str, caller: rights.Rights) -> None:
    """The caller may have one more, the name is free, here and on disk, and the parent takes it."""
    caller.check(name)
    caller.check_launches(parts.registry.made.get(caller.client, 0))
    taken = parts.registry.named(name)
    if taken is not None:
        if taken.recovering:
            raise recovering(name)
        raise ServiceError(Code.ALREADY_EXISTS, "NAME_TAKEN", f"container {name} exists", None, name=name)
    check_parent(parts, name)
    for hierarchy in parts.machine.hierarchies:
        path = hierarchy.path(name)
        if os.path.lexists(path):
            whose = "residue of ours; `cleanup` removes it" if steps.identity_of(path) else "not made by us"
            raise ServiceError(
                Code.ALREADY_EXISTS, "DIRECTORY_EXISTS", f"cgroup {path} exists: {whose}", None, name=name, path=path
            )
    if len(parts.registry) >= parts.settings.containers_max:
        raise ServiceError(
            Code.RESOURCE_EXHAUSTED, "TOO_MANY_CONTAINERS", f"there are {len(parts.registry)} containers", None
        )


def _intend(parts: Parts, row: Row, remaining: float | None) -> Operation:
    meta = row.meta()
    try:
        parts.journal.intend(row, meta)
    except sqlite3.Error as error:
        raise refusals.of_step("journal", error) from error
    operation = Operation(parts, row, remaining=remaining)
    operation.apply = Apply(operation, meta)
    parts.registry.add(operation)
    return operation


def _isolated(parts: Parts, given: spec_pb2.ContainerSpec, entered: Entered) -> dict[str, Any] | None:
    """What confines it, for the order. Raises ServiceError naming the field."""
    asked = entered.isolation(given)
    if asked is not None and not parts.spawner.isolates:
        raise spec.unimplemented(isolation.first_field(given), "needs a newer spawner: the one that runs is older")
    return asked


def _oom_score_adj(parts: Parts, name: str, given: spec_pb2.ContainerSpec) -> int | None:
    """Of the container's own eviction priority, else of the nearest one above that has one; as low as it can be."""
    above = (parts.registry.named(each) for each in names.lineage(name))
    for each in (given, *(container.spec for container in above if container is not None)):
        if each.memory.HasField("eviction_priority"):
            return max(int((5000 - each.memory.eviction_priority) / 5), parts.machine.oom_floor)
    return None
