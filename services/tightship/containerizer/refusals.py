"""What a refused step means to the caller: the gRPC code, and stage, file, value, errno and field as metadata."""

from __future__ import annotations

import errno
import os
import sqlite3

import grpc

from tightship.common.errors import Code, ServiceError, errno_name
from tightship.containerizer.plan import Step
from tightship.containerizer.spawner_link import OrderFailed
from tightship.kernel import cgroup


def of_cgroup(step: Step, error: OSError) -> ServiceError:
    """What a refused step means to the caller: code, and file, value, errno and field in the metadata."""
    number = error.errno
    if step.kind in ("mkdir", "leaf"):
        code, reason = _MKDIR_CODES.get(number or 0, (Code.INTERNAL, "CGROUP_FAILED"))
        text = f"failed to make cgroup {step.target}: {error.strerror}"
    elif step.kind in ("write", "enable"):
        code, reason = _WRITE_CODES.get(number or 0, (Code.INTERNAL, "CGROUP_FAILED"))
        text = f"failed to write {step.value!r} to {step.target}: {error.strerror} ({errno_name(number)})"
        if step.field == "cpu.mask":
            text += _cpus_above(step.target)
    else:
        code, reason = Code.INTERNAL, "CGROUP_FAILED"
        text = f"failed to chown {step.target} to {step.value}: {error.strerror}"
    return ServiceError(
        code,
        reason,
        text,
        None,
        file=step.target,
        value=step.value if step.kind not in ("mkdir", "leaf") else None,
        errno=errno_name(number),
        field=step.field or None,
        stage=step.name,
    )


def _cpus_above(file: str) -> str:
    """What a v1 cpuset may choose from: those of the one above it."""
    directory, name = os.path.split(file)
    try:
        return f"; the CPUs to choose from are {cgroup.read(os.path.join(os.path.dirname(directory), name))}"
    except OSError:
        return ""


_WRITE_CODES = {
    errno.EINVAL: (Code.INVALID_ARGUMENT, "VALUE_REFUSED"),
    errno.ERANGE: (Code.INVALID_ARGUMENT, "VALUE_REFUSED"),
    errno.E2BIG: (Code.INVALID_ARGUMENT, "VALUE_REFUSED"),
    errno.EOVERFLOW: (Code.INVALID_ARGUMENT, "VALUE_REFUSED"),
    # A v1 cpuset that is not within its parent's.
    errno.EACCES: (Code.INVALID_ARGUMENT, "VALUE_REFUSED"),
    errno.ENODEV: (Code.INVALID_ARGUMENT, "VALUE_REFUSED"),
    errno.EBUSY: (Code.FAILED_PRECONDITION, "VALUE_REFUSED"),
    errno.ENOSPC: (Code.FAILED_PRECONDITION, "VALUE_REFUSED"),
    errno.EPERM: (Code.PERMISSION_DENIED, "VALUE_REFUSED"),
    errno.ENOMEM: (Code.RESOURCE_EXHAUSTED, "VALUE_REFUSED"),
    errno.EOPNOTSUPP: (Code.UNIMPLEMENTED, "FIELD_NOT_SUPPORTED"),
    errno.ENOENT: (Code.UNIMPLEMENTED, "FIELD_NOT_SUPPORTED"),
}
_MKDIR_CODES = {
    errno.EEXIST: (Code.ALREADY_EXISTS, "DIRECTORY_EXISTS"),
    errno.ENOENT: (Code.FAILED_PRECONDITION, "PARENT_DIRECTORY_GONE"),
    errno.EACCES: (Code.PERMISSION_DENIED, "CGROUP_FAILED"),
    errno.EPERM: (Code.PERMISSION_DENIED, "CGROUP_FAILED"),
    errno.ENOSPC: (Code.RESOURCE_EXHAUSTED, "CGROUP_FAILED"),
    errno.ENOMEM: (Code.RESOURCE_EXHAUSTED, "CGROUP_FAILED"),
    errno.EAGAIN: (Code.RESOURCE_EXHAUSTED, "CGROUP_FAILED"),
}


def of_order(stage: str, failed: OrderFailed, program: str) -> ServiceError:
    """A launch that the spawner could not bring to READY, or whose first program, of that field, can't be executed."""
    number = failed.errno
    name = errno_name(number)
    said = failed.message or _strerror(number)
    if failed.stage == "exec":
        code = _EXEC_CODES.get(number, Code.FAILED_PRECONDITION)
        return ServiceError(
            code,
            "EXEC_FAILED",
            f"the command can't be executed: {said}",
            None,
            stage="exec",
            errno=name,
            field=program,
        )
    by_stage, field = _STAGE_CODES.get(failed.stage, (None, None))
    if failed.stage.startswith(_FIELDS):
        field = failed.stage
    code = by_stage or _ERRNO_CODES.get(number, Code.INTERNAL)
    retry = 0.5 if code is Code.UNAVAILABLE else None
    text = f"the launch failed at {stage} ({failed.stage}): {said}"
    return ServiceError(code, "SPAWN_FAILED", text, retry, stage=failed.stage, errno=name, field=field)


# How it shows that the kernel ended a child for want of memory, or refused it some.
STARVED = frozenset({"ECHILD", "ENOMEM"})


def of_memory(limit: Step | None, error: ServiceError) -> ServiceError:
    """A launch that had too little memory to start: `limit` is its own step, None where one above it is meant."""
    if limit is None:
        text, file, value = "the memory.limit of a container above leaves too little to start a process in", None, None
    else:
        text = f"memory.limit: {limit.value} bytes are too few to start a process in"
        file, value = limit.target, limit.value
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "MEMORY_TOO_SMALL",
        text,
        None,
        field="memory.limit",
        file=file,
        value=value,
        stage=error.metadata.get("stage"),
        errno=error.metadata.get("errno"),
    )


def of_step(stage: str, error: OSError | sqlite3.Error) -> ServiceError:
    """A step that failed in this process."""
    if isinstance(error, sqlite3.Error):
        return ServiceError(
            Code.RESOURCE_EXHAUSTED, "JOURNAL_FAILED", f"the journal can't be written: {error}", stage=stage
        )
    code = Code.UNAVAILABLE if isinstance(error, ConnectionError) else _ERRNO_CODES.get(error.errno or 0, Code.INTERNAL)
    return ServiceError(
        code, "STEP_FAILED", f"{stage} failed: {error}", None, stage=stage, errno=errno_name(error.errno)
    )


_EXEC_CODES = {
    errno.ENOENT: Code.NOT_FOUND,
    errno.ENOTDIR: Code.NOT_FOUND,
    errno.EACCES: Code.PERMISSION_DENIED,
    errno.EPERM: Code.PERMISSION_DENIED,
    errno.E2BIG: Code.INVALID_ARGUMENT,
}
# Stages of the child that are called as the field they honour.
_FIELDS = ("filesystem.", "security.")
_STAGE_CODES: dict[str, tuple[grpc.StatusCode | None, str | None]] = {
    "claim": (Code.UNAVAILABLE, None),
    "bind": (Code.UNAVAILABLE, None),
    "gate": (Code.UNAVAILABLE, None),
    "aborted": (Code.CANCELLED, None),
    "enter": (Code.FAILED_PRECONDITION, "name"),
    "cwd": (None, "cwd"),
    "hostname": (None, "virtual_host.virtual_hostname"),
    "oom_score_adj": (None, "memory.eviction_priority"),
}
_ERRNO_CODES = {
    errno.ENOENT: Code.NOT_FOUND,
    errno.ENOTDIR: Code.NOT_FOUND,
    errno.EACCES: Code.PERMISSION_DENIED,
    errno.EPERM: Code.PERMISSION_DENIED,
    errno.EAGAIN: Code.RESOURCE_EXHAUSTED,
    errno.ENOMEM: Code.RESOURCE_EXHAUSTED,
    errno.EMFILE: Code.RESOURCE_EXHAUSTED,
    errno.ENFILE: Code.RESOURCE_EXHAUSTED,
    errno.ENOSPC: Code.RESOURCE_EXHAUSTED,
    errno.EINVAL: Code.INTERNAL,
    errno.ENOSYS: Code.UNIMPLEMENTED,
    errno.ETIMEDOUT: Code.UNAVAILABLE,
    errno.ECONNRESET: Code.UNAVAILABLE,
}


def _strerror(number: int) -> str:
    return os.strerror(number) if number else "unknown error"
