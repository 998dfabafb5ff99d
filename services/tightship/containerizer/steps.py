"""Applying and undoing the steps that touch the cgroup file system. Runs in worker threads; everything may block.

Undo is idempotent and right whether a step ran fully, partly or not at all: it looks at what is there, and takes only
what is ours by its mark. The remote steps (lease, spawn, open) are the operation's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tightship.common import failpoints
from tightship.containerizer import refusals
from tightship.containerizer.machine import LEAF
from tightship.containerizer.plan import Step
from tightship.kernel import cgroup

Times = dict[str, tuple[int, int]]


# Lines of what was removed that are kept for the answer.
_LINES_MAX = 1000


class Interrupted(Exception):
    """The operation was asked to cancel; the steps begun are over."""


def mark(instance: str, identity: str, name: str) -> str:
    """The mark on a container's directories."""
    return f"{instance} {identity} {name}"


def identity_of(path: str) -> str | None:
    """The container id in the directory's mark; None where there is none, or no directory."""
    try:
        words = (cgroup.mark_of(path) or "").split(" ", 2)
    except FileNotFoundError:
        return None
    return words[1] if len(words) == 3 and words[1] != "-" else None


def apply(steps: Iterable[Step], prefix: str, interrupted: Callable[[], bool], times: Times) -> None:
    """Applies cgroup steps in order. Raises ServiceError naming the step's file, or Interrupted between two."""
    for step in steps:
        if interrupted():
            raise Interrupted
        point = f"{prefix}.{step.name}"
        begun = time.time_ns()
        try:
            failpoints.block(point + ".before", interrupted)
            _apply(step)
            failpoints.block(point + ".after", interrupted)
        except OSError as error:
            raise refusals.of_cgroup(step, error) from error
        finally:
            times[step.name] = (begun, time.time_ns())


def _apply(step: Step) -> None:
    match step.kind:
        case "mkdir":
            cgroup.make(step.target, step.value)
        case "leaf":
            os.mkdir(step.target)
        case "chown":
            uid, gid = map(int, step.value.split(":"))
            for name in ("", "cgroup.procs", "tasks", "cgroup.threads", "cgroup.subtree_control"):
                path = os.path.join(step.target, name)
                if os.path.exists(path):
                    os.chown(path, uid, gid)
        case "enable" if not step.field:
            with contextlib.suppress(OSError):  # for figures alone: nothing that was asked for needs it
                cgroup.write(step.target, step.value)
        case "enable" | "write":
            try:
                cgroup.write(step.target, step.value)
            except OSError as error:
                # "Not limited" on a file the kernel keeps switched off is the same as not writing it.
                if step.value not in ("-1", "max") or error.errno not in (errno.EOPNOTSUPP, errno.ENOENT):
                    raise
        case _:
            raise AssertionError(step.kind)


@dataclass(slots=True)
class Undone:
    """What a walk did: lines for people, counts, and what is left with why, by step name."""

    removed: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    """Pids: killed twice, a process counts once, as a lease does that is found closed again."""
    cgroups: int = 0
    leases: set[str] = field(default_factory=set)

    def add(self, other: Undone) -> None:
        """Counts and lines of another one; `left` is of one walk alone."""
        self.removed += other.removed[: max(0, _LINES_MAX - len(self.removed))]
        self.killed |= other.killed
        self.cgroups += other.cgroups
        self.leases |= other.leases


def remove_empty(steps: Iterable[Step], mine: Callable[[str], bool], times: Times) -> tuple[Undone, list[Step]]:
    """Undoes the `mkdir` steps whose directory goes by one rmdir, without waiting; and the steps that are left."""
    done = Undone()
    rest = []
    for step in steps:
        begun = time.time_ns()
        try:
            if _is_mine(step.target, mine):
                _rmdir(step.target)
                done.removed.append(f"cgroup {step.target}")
                done.cgroups += 1
        except OSError:
            rest.append(step)
            continue
        times[f"undo.{step.name}"] = (begun, time.time_ns())
    return done, rest


def _rmdir(path: str) -> None:
    """With its leaf, where it has one. Raises OSError."""
    try:
        os.rmdir(path)
    except OSError:
        os.rmdir(os.path.join(path, LEAF))
        os.rmdir(path)


def undo(
    steps: Iterable[Step],
    *,
    mine: Callable[[str], bool],
    living: Callable[[str], bool],
    deadline: float,
    impatient: Callable[[], bool],
    times: Times,
) -> Undone:
    """Undoes `mkdir` steps, given in the order of undoing. `deadline` is of time.monotonic(). Never raises OSError.

    `mine` says whether a directory with this id in its mark is the operation's; `living` whether another living
    container has it, whose tree a walk never enters.
    """
    done = Undone()

    def spare(path: str) -> bool:
        identity = identity_of(path)
        return identity is not None and not mine(identity) and living(identity)

    for step in steps:
        point = f"containerizer.undo.{step.name}"
        begun = time.time_ns()
        try:
            failpoints.block(point + ".before", impatient)
            if _is_mine(step.target, mine):
                removal = cgroup.remove(step.target, deadline, spare)
                done.removed += [f"cgroup {path}" for path in removal.removed]
                done.cgroups += len(removal.removed)
                done.killed |= removal.killed
                if removal.left:
                    done.left[step.name] = "; ".join(f"{path}: {why}" for path, why in removal.left.items())
            failpoints.block(point + ".after", impatient)
        except OSError as error:
            done.left[step.name] = f"{step.target}: {error.strerror}"
        times[f"undo.{step.name}"] = (begun, time.time_ns())
    return done


def _is_mine(path: str, mine: Callable[[str], bool]) -> bool:
    try:
        if cgroup.mark_of(path) is None:
            return cgroup.is_unfinished(path)
    except FileNotFoundError:
        return False
    identity = identity_of(path)
    return identity is not None and mine(identity)
