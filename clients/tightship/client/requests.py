"""Requests from plain Python values: the options of a launch, specs as text or message, durations in seconds."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from google.protobuf import duration_pb2

from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import spec_pb2

Spec = str | spec_pb2.ContainerSpec | None


class LaunchOptions(TypedDict, total=False):
    """The keywords of `launch`. Durations are in seconds, sizes in bytes."""

    name: str
    """Absolute; a generated one when empty."""
    within_existing: bool
    """Where a container of that name exists: run in it, and leave it."""
    exec: bool
    """Run in the container `name`, whose main process must run: in its namespaces, with its root and confinement."""
    spec: Spec
    """Protobuf text (`cpu { limit: 1000 }`) or a ContainerSpec."""
    env: Mapping[str, str] | Iterable[str]
    """All of the environment: a mapping, or "NAME=VALUE" strings. Nothing is inherited."""
    cwd: str
    """Absolute; "/" when empty."""
    stdin: bool
    """A pipe, for `write` and `close_stdin`; else /dev/null."""
    timeout: float | None
    """The run's limit, from its start; the record then says TIMEOUT. None: as long as it takes."""
    labels: Mapping[str, str]
    """For people: at most 64."""
    detach: bool
    """The container stays when the call ends."""
    max_lifetime: float | None
    """Bound on a detached container's life."""
    umask: int | None
    """Of the process; 0o022 when absent."""
    log_cap: int | None
    """Bytes of output kept, both streams; the switchboard's default (1 GiB) when absent."""
    report_in_force: bool
    """Read back the limits that the kernel holds: `in_force` of the launch."""
    request_id: str
    """A new one when absent. A second call with the same one joins the first one's launch."""


def launch(command: Sequence[str], options: LaunchOptions) -> pb.LaunchRequest:
    """Raises TypeError and ValueError for what a message can't hold."""
    if isinstance(command, str | bytes):
        raise TypeError("command is a list of words, for example ['sh', '-c', 'echo hi']")
    unknown = set(options) - set(LaunchOptions.__annotations__)
    if unknown:
        raise TypeError(f"launch has no option {sorted(unknown)[0]!r}")
    env = options.get("env") or ()
    return pb.LaunchRequest(
        request_id=options.get("request_id") or new_request_id(),
        name=options.get("name", ""),
        within_existing=options.get("within_existing", False),
        exec=options.get("exec", False),
        spec=spec_input(options.get("spec")),
        command=command,
        env=[_variable(*each) for each in env.items()] if isinstance(env, Mapping) else env,
        cwd=options.get("cwd", ""),
        stdin=pb.STDIN_MODE_PIPE if options.get("stdin") else pb.STDIN_MODE_NULL,
        labels=options.get("labels") or {},
        detach=options.get("detach", False),
        timeout=seconds(options.get("timeout")),
        max_lifetime=seconds(options.get("max_lifetime")),
        umask=options.get("umask"),
        log_cap=options.get("log_cap"),
        report_in_force=options.get("report_in_force", False),
    )


def _variable(name: str, value: str) -> str:
    if not name or "=" in name:
        raise ValueError(f"env: {name!r} is no name of a variable")
    return f"{name}={value}"


def new_request_id() -> str:
    return uuid.uuid4().hex


def spec_input(spec: Spec) -> pb.SpecInput | None:
    if spec is None:
        return None
    return pb.SpecInput(text=spec) if isinstance(spec, str) else pb.SpecInput(spec=spec)


def seconds(value: float | None) -> duration_pb2.Duration | None:
    """A Duration; None stays absent."""
    if value is None:
        return None
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(value * 1e9))
    return duration
