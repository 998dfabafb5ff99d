"""Update: the limits of a living container changed, all of them or none.

An update is the difference of two plans: the files whose value changes, and those that are limited no more. What they
hold is written into the journal before the first of them is touched, so that whatever ends the update half-way, the
kernel's refusal or a crash, puts the values of before back, in the order backwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tightship.common import logs
from tightship.common.errors import Code, ServiceError
from tightship.containerizer import plan, refusals, spec, steps
from tightship.containerizer.journal import Row
from tightship.containerizer.plan import Step
from tightship.kernel import cgroup
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import spec_pb2

if TYPE_CHECKING:
    from tightship.containerizer.operations import Operation

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0

# What a file holds that nobody has asked anything of. A v1 cpuset has its parent's.
_UNASKED = {
    "cpu.shares": "1024",
    "cpu.cfs_period_us": "100000",
    "cpu.cfs_quota_us": "-1",
    "cpu.weight": "100",
    "cpu.max": "max 100000",
    "cpu.idle": "0",
    "cpuset.cpus": "",
    "memory.limit_in_bytes": "-1",
    "memory.memsw.limit_in_bytes": "-1",
    "memory.soft_limit_in_bytes": "-1",
    "memory.max": "max",
    "memory.high": "max",
    "memory.swap.max": "max",
    "memory.low": "0",
    "pids.max": "max",
    "cgroup.max.descendants": "max",
}
_LIMIT, _WITH_SWAP = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
# What is done when the container is made, or by its processes.
_LASTING = (
    "owner", "owner_group", "filesystem", "virtual_host", "security", "blockio", "device", "monitoring",
    "memory.eviction_priority", "memory.tmpfs", "memory.hugetlbfs_path",
)  # fmt: skip


def asked(old: spec_pb2.ContainerSpec, request: pb.UpdateRequest) -> spec_pb2.ContainerSpec:
    """The spec that it is to have. Raises ServiceError naming the field."""
    given = spec.parse(request.spec)
    if request.mode == pb.UpdateRequest.DIFF:
        merged = spec_pb2.ContainerSpec()
        merged.CopyFrom(old)
        _merge(merged, given)
        given = spec.parse(pb.SpecInput(spec=merged))
    for field in _LASTING:
        if _at(old, field) != _at(given, field):
            raise spec.unimplemented(field, "can't be changed while the container lives")
    return given


def changes(row: Row, wanted: Sequence[Step]) -> list[Step]:
    """The writes that put `wanted` in the place of what is in force, in an order of which the kernel refuses none."""
    before = {step.target: step for step in row.plan if step.kind == "write" and _is_changed(step)}
    after = {step.target: step for step in wanted if _is_changed(step)}
    found = [step for target, step in after.items() if target not in before or before[target].value != step.value]
    for target, step in before.items():
        if target not in after:
            found.append(step._replace(value=_unasked(target)))
    return sorted(found, key=_order(found))


def begin(operation: Operation, new: spec_pb2.ContainerSpec) -> asyncio.Task[list[Step]]:
    """What was written. Raises ServiceError, and then nothing has changed, or what has is put back right now.

    The task is the operation's: a caller that goes leaves it alone. One at a time.
    """
    task = operation.changing = asyncio.create_task(_update(operation, new), name=f"update {operation.row.name}")
    task.add_done_callback(lambda _: _over(operation))
    return task


def _over(operation: Operation) -> None:
    operation.changing = None
    operation.changed()


async def _update(operation: Operation, new: spec_pb2.ContainerSpec) -> list[Step]:
    row, journal = operation.row, operation.parts.journal
    wanted = plan.limits(operation.parts.machine, new, row.name)
    todo = changes(row, wanted)
    late = False

    def interrupted() -> bool:
        return late or operation.closing

    try:
        row.updating = tuple((step.target, cgroup.read(step.target)) for step in todo)
        journal.replan(row)
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(
            operation.parts.pool, lambda: steps.apply(todo, "containerizer.update", interrupted, {})
        )
        done, _ = await asyncio.wait((writing,), timeout=_TIMEOUT_S)
        late = not done
        # One that is stuck in the kernel is waited for: else it would come after what is put back.
        await writing
    except BaseException as error:
        await _put_back(operation)
        if operation.closing:
            raise closing(row.name) from None
        if isinstance(error, steps.Interrupted):
            raise _slow(row.name) from None
        if isinstance(error, OSError | sqlite3.Error):
            raise refusals.of_step("update", error) from error
        raise
    kept = [step for step in row.plan if step.kind != "write"]
    at = next((index for index, step in enumerate(kept) if step.kind in ("lease", "commit")), len(kept))
    before = row.plan, row.spec, row.updating
    row.plan, row.spec, row.updating = (*kept[:at], *wanted, *kept[at:]), new.SerializeToString(), ()
    try:
        journal.replan(row)
    except sqlite3.Error as error:
        row.plan, row.spec, row.updating = before
        await _put_back(operation)
        raise refusals.of_step("update", error) from error
    return todo


async def recover(operation: Operation) -> None:
    """After a start: an update that was cut off is put back."""
    if operation.row.updating:
        log.warning("an update was cut off; the limits of before are put back", extra=_about(operation.row))
        await _put_back(operation)


def _slow(name: str) -> ServiceError:
    return ServiceError(
        Code.UNAVAILABLE, "STEP_TIMED_OUT", f"a limit of {name} took more than {_TIMEOUT_S:g} s; all is as before", 0.5
    )


def closing(name: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "CLOSING", f"{name} is closing", None, name=name)


async def _put_back(operation: Operation) -> None:
    row = operation.row

    def work() -> None:
        for file, value in reversed(row.updating):
            try:
                cgroup.write(file, value)
            except FileNotFoundError:
                pass  # the container is on its way out
            except OSError as error:
                log.error("%s can't get back %r: %s", file, value, error.strerror, extra=_about(row))

    await asyncio.get_running_loop().run_in_executor(operation.parts.pool, work)
    row.updating = ()
    try:
        operation.parts.journal.replan(row)
    except sqlite3.Error as error:  # then a later start puts them back once more
        log.error("the journal can't be written: %s", error, extra=_about(row))


def _is_changed(step: Step) -> bool:
    """Of `_LASTING` nothing does."""
    return not step.field.startswith(("blockio", "device"))


def _unasked(file: str) -> str:
    directory, name = os.path.split(file)
    if name == "cpuset.cpus" and os.path.exists(os.path.join(directory, "tasks")):
        with contextlib.suppress(OSError):
            return cgroup.read(os.path.join(os.path.dirname(directory), name))
    return _UNASKED[name]


def _order(found: Sequence[Step]) -> Callable[[Step], int]:
    """A key for sorting: swap's limit is never to be below memory's, and an idle cgroup takes no shares."""
    values = {os.path.basename(step.target): step for step in found}
    raised = False
    if _LIMIT in values and _WITH_SWAP in values:
        held = cgroup.number(values[_LIMIT].target)
        wanted = int(values[_LIMIT].value)
        raised = held is not None and (wanted < 0 or wanted > held)

    def key(step: Step) -> int:
        name = os.path.basename(step.target)
        if name == "cpu.idle":
            return -1 if step.value == "0" else 1
        if name == _WITH_SWAP:
            return -1 if raised else 1
        return 0

    return key


def _merge(into: Message, given: Message) -> None:
    """MergeFrom, but that a list is replaced."""
    for field, value in given.ListFields():
        if field.is_repeated:
            into.ClearField(field.name)
            getattr(into, field.name).MergeFrom(value)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(into, field.name).SetInParent()
            _merge(getattr(into, field.name), value)
        else:
            setattr(into, field.name, value)


def _at(message: Message, path: str) -> object:
    """The field's value with its presence; None where it is absent."""
    *above, name = path.split(".")
    for each in above:
        message = getattr(message, each)
    if message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name):
        return None
    return getattr(message, name)


def _about(row: Row) -> dict[str, dict[str, str]]:
    return logs.about(row.id, row.name, row.trace)
