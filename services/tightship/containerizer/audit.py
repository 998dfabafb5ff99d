"""Looking for residue: what no living container or lease explains, on the machine and in both other services.

It looks twice, 200 ms apart, with the journal, the spawner and the switchboard asked before and after each pass over
the cgroup trees and /proc; only what is seen both times is a finding, so that launches on their way are none.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tightship.common.errors import Code, ServiceError
from tightship.common.packets import Packet
from tightship.common.telemetry import CallTrace
from tightship.containerizer import admission, steps
from tightship.containerizer.operations import Parts
from tightship.containerizer.spawner_link import OrderFailed
from tightship.kernel import cgroup
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import switchboard_pb2 as sb

_PAUSE_S = 0.2
_ANSWER_TIMEOUT_S = 5.0
_FIX_BUDGET_S = 5.0

_KINDS = {"descriptor": pb.Finding.OPEN_FILE, "segment": pb.Finding.SEGMENT, "lease": pb.Finding.LEASE}


@dataclass(slots=True)
class _Look:
    """What the services knew around one pass, before and after together: what comes or goes is explained."""

    living: dict[str, str] = field(default_factory=dict)
    """Ids of containers by name."""
    leases: set[str] = field(default_factory=set)
    """Ids of leases that a container or an operation of ours has."""
    inside: set[int] = field(default_factory=set)
    """Processes in a directory of a living container, in any hierarchy."""
    pipes: dict[str, str] = field(default_factory=dict)
    """Lease ids by "pipe:[N]"."""
    findings: dict[tuple[int, str], pb.Finding] = field(default_factory=dict)
    examined: collections.Counter[str] = field(default_factory=collections.Counter)

    def find(self, kind: pb.Finding.Kind.ValueType, what: str, origin: str, ours: bool) -> None:
        self.findings[kind, what] = pb.Finding(kind=kind, what=what, origin=origin, ours=ours)


class Audits:
    """One audit at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._one = asyncio.Lock()

    async def run(self, *, fix: bool) -> pb.AuditResponse:
        """Raises UNAVAILABLE where a service that should know does not answer."""
        async with self._one:
            first = await self._look()
            await asyncio.sleep(_PAUSE_S)
            second = await self._look()
            found = [finding for key, finding in sorted(second.findings.items()) if key in first.findings]
            for finding in found:
                self._parts.counts.residue[finding.kind] += 1
            if fix and found:
                await self._fix(found)
            return pb.AuditResponse(findings=found, examined=dict(second.examined))

    async def _look(self) -> _Look:
        look = _Look()
        before = await self._ask(look)
        await asyncio.get_running_loop().run_in_executor(self._parts.pool, self._walk, look)
        after = await self._ask(look)
        for key in before & after:
            kind, what, origin, ours = key
            look.find(kind, what, origin, ours)
        self._drop_explained(look)
        return look

    async def _ask(self, look: _Look) -> set[tuple[pb.Finding.Kind.ValueType, str, str, bool]]:
        """What the journal, the switchboard and the spawner say; their own findings."""
        parts = self._parts
        said: set[tuple[pb.Finding.Kind.ValueType, str, str, bool]] = set()
        # A container told first and gone by the time the leases are listed is still an explanation.
        self._note_living(look)
        streams = await parts.switchboard.audit_streams(False, _ANSWER_TIMEOUT_S)
        look.pipes.update(streams.pipes)
        for stream in streams.findings:
            said.add((_KINDS.get(stream.kind, pb.Finding.OPEN_FILE), stream.what, stream.origin, stream.ours))
        try:
            listed = await parts.switchboard.everybodys_leases(_ANSWER_TIMEOUT_S)
            order = parts.spawner.order("AUDIT")
            spawner: Packet = await asyncio.wait_for(order, _ANSWER_TIMEOUT_S)
        except (TimeoutError, OrderFailed, ConnectionError) as error:
            raise ServiceError(
                Code.UNAVAILABLE, "AUDIT_INCOMPLETE", f"a service does not answer: {error}", 1.0
            ) from error
        self._note_living(look)
        owner = admission.owner(parts.machine.instance)
        for lease in listed.leases:
            ours = lease.owner == owner
            if lease.state != sb.Lease.CLOSED and not (ours and lease.lease_id in look.leases):
                at = lease.acquired.ToDatetime().isoformat(timespec="seconds")
                said.add((pb.Finding.LEASE, lease.lease_id, f"acquired by owner {lease.owner} at {at}Z", ours))
        for each in spawner.get("findings") or ():
            kind = pb.Finding.PROCESS if each.get("kind") == "process" else pb.Finding.OPEN_FILE
            said.add((kind, str(each.get("what")), str(each.get("origin")), bool(each.get("ours"))))
        examined = {**dict(streams.examined), **(spawner.get("examined") or {}), "leases": len(listed.leases)}
        look.examined.update({key: int(value) for key, value in examined.items() if key not in look.examined})
        return said

    def _note_living(self, look: _Look) -> None:
        for row in (operation.row for operation in self._parts.registry.by_id.values()):
            look.living[row.name] = row.id
            look.leases.update(step.target for step in row.plan if step.kind == "lease")

    # One pass, in a worker thread.

    def _walk(self, look: _Look) -> None:
        for hierarchy in self._parts.machine.trees:
            for path in cgroup.tree(hierarchy.base):
                look.examined["cgroups"] += 1
                name = path[len(hierarchy.base) :]
                self._look_at_cgroup(look, path, name)
        self._look_at_memberships(look)
        self._look_at_descriptors(look)
        self._look_at_mounts(look)

    def _look_at_cgroup(self, look: _Look, path: str, name: str) -> None:
        identity = steps.identity_of(path)
        explained = name and self._explains(look, name, identity)
        instance = self._parts.machine.instance
        with contextlib.suppress(OSError):
            mark = cgroup.mark_of(path) or ""
            ours = mark.startswith(instance + " ") or cgroup.is_unfinished(path)
            if identity is not None:
                origin = f"container {identity} ({name}) of this instance"
            else:
                origin = "a launch or create that was cut off" if ours else "not made by us"
            for pid in cgroup.processes(path):
                look.examined["processes"] += 1
                if name and explained:
                    look.inside.add(pid)
                else:
                    look.find(pb.Finding.PROCESS, _process(pid), f"in cgroup {path}, {origin}", ours and bool(name))
            if name and not explained:
                look.find(pb.Finding.CGROUP, path, origin, ours)

    def _explains(self, look: _Look, name: str, identity: str | None) -> bool:
        """A living container has this name with this mark, or the directory was made inside one."""
        known = look.living.get(name)
        if known is not None:
            return identity in (None, known)
        return identity is None and _container_of(look, name) != ""

    def _look_at_memberships(self, look: _Look) -> None:
        """Processes that are in a container by one hierarchy and not by another: they escape its limits, or its end."""
        for pid in look.inside:
            places = self._containers_of(look, pid)
            for container in sorted(set(places.values()) - {""}):
                within = [each for each, where in places.items() if where == container]
                if len(within) == len(places):
                    continue
                others = " ".join(each for each in places if each not in within)
                identity = look.living[container]
                origin = (
                    f"somebody moved it: in container {identity} ({container}) by {' '.join(within)}, not by {others}"
                )
                look.findings.setdefault(
                    (pb.Finding.PROCESS, what := _process(pid)),
                    pb.Finding(kind=pb.Finding.PROCESS, what=what, origin=origin, ours=False),
                )

    def _containers_of(self, look: _Look, pid: int) -> dict[str, str]:
        """By hierarchy, the living container that the process is in, or ""; of one moment, as lists are not."""
        base = f"/tightship/{self._parts.machine.instance}/"
        places = {}
        for line in _cgroups_of(pid).splitlines():
            _, controllers, path = line.split(":", 2)
            for hierarchy in self._parts.machine.hierarchies:
                if hierarchy.version == 2 if not controllers else hierarchy.name in controllers.split(","):
                    _, found, name = path.partition(base)
                    places[hierarchy.name] = _container_of(look, f"/{name}") if found else ""
        return places

    def _look_at_descriptors(self, look: _Look) -> None:
        """Pipes of leases in the hands of anybody but the services and the container's own processes."""
        names = {identity: name for name, identity in look.living.items()}
        services = self._services()
        for pid in _pids():
            look.examined["processes"] += 1
            if pid in services:
                continue
            place: str | None = None
            for fd, target in _descriptors(pid):
                look.examined["descriptors"] += 1
                lease = look.pipes.get(target)
                if lease is None:
                    continue
                if place is None:
                    place = _cgroups_of(pid)
                inside = f"/tightship/{self._parts.machine.instance}{names.get(lease, '/?')}"
                if not any(line.endswith(inside) or f"{inside}/" in line for line in place.splitlines()):
                    what = f"fd {fd} of {_process(pid)}"
                    look.find(pb.Finding.OPEN_FILE, what, f"{target} of lease {lease}", False)

    def _services(self) -> set[int]:
        """This process, its spawner, and whoever holds the switchboard's lock: they audit themselves."""
        services = {os.getpid(), os.getppid()}
        with contextlib.suppress(OSError, ValueError):
            pid = int((self._parts.run_dir.path / "lock.switchboard").read_text())
            # In another pid namespace that number is somebody else here.
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"tightship.switchboard" in file.read().split(b"\0"):
                    services.add(pid)
        return services

    def _look_at_mounts(self, look: _Look) -> None:
        ours = f"/tightship/{self._parts.machine.instance}"
        with open("/proc/self/mountinfo") as file:
            for line in file:
                look.examined["mounts"] += 1
                words = line.split()
                if ours in words[3] or ours in words[4]:
                    look.find(pb.Finding.MOUNT, words[4], f"mount of {words[3]}", False)

    def _drop_explained(self, look: _Look) -> None:
        """What began or ended during the pass is explained by what was asked after it."""
        for key, finding in list(look.findings.items()):
            if finding.kind == pb.Finding.LEASE and finding.ours and finding.what in look.leases:
                del look.findings[key]
            if finding.kind == pb.Finding.CGROUP:
                for hierarchy in self._parts.machine.trees:
                    name = finding.what.removeprefix(hierarchy.base)
                    if name != finding.what and self._explains(look, name, steps.identity_of(finding.what)):
                        look.findings.pop(key, None)

    # Removing what is ours.

    async def _fix(self, found: list[pb.Finding]) -> None:
        fixed_by_switchboard = await self._parts.switchboard.audit_streams(True, _ANSWER_TIMEOUT_S)
        fixed = {each.what for each in fixed_by_switchboard.findings if each.fixed}
        for finding in found:
            if not finding.ours:
                continue
            if finding.kind == pb.Finding.CGROUP:
                finding.error = await self._fix_cgroup(finding.what)
            elif finding.kind == pb.Finding.LEASE:
                finding.error = await self._fix_lease(finding.what)
            elif finding.kind == pb.Finding.PROCESS:
                continue  # ends with its cgroup; looked at below
            else:
                finding.error = "" if finding.what in fixed else "the switchboard could not remove it"
            finding.fixed = not finding.error
        for finding in found:
            if finding.ours and finding.kind == pb.Finding.PROCESS:
                pid = int(finding.what.split()[1])
                finding.fixed = not os.path.exists(f"/proc/{pid}")
                finding.error = "" if finding.fixed else "it is still there"

    async def _fix_cgroup(self, path: str) -> str:
        """Cleans up the name of the directory; why it is still there, or empty."""
        parts = self._parts
        for hierarchy in parts.machine.trees:
            name = path.removeprefix(hierarchy.base)
            if name == path or not os.path.isdir(path):
                continue
            if parts.registry.named(name) is not None:
                return f"{name} is a living container"
            with contextlib.suppress(ServiceError):
                walk = admission.cleanup(parts, name, CallTrace())
                if walk is not None:
                    walk.start()
                    await walk.until(lambda walk=walk: walk.over, _FIX_BUDGET_S)  # type: ignore[misc]
        return "it is still there" if os.path.isdir(path) else ""

    async def _fix_lease(self, lease: str) -> str:
        deadline = time.monotonic() + _FIX_BUDGET_S
        while time.monotonic() < deadline:
            try:
                answer = await asyncio.wait_for(self._parts.switchboard.revoke(lease), _ANSWER_TIMEOUT_S)
            except (ServiceError, TimeoutError) as error:
                return str(error) or "the switchboard does not answer"
            if not answer.HasField("lease") or answer.lease.state == sb.Lease.CLOSED:
                return ""
            await asyncio.sleep(0.05)
        return "it is not closed yet"


def _container_of(look: _Look, name: str) -> str:
    """The living container that has the directory: of this name, or the nearest above; "" where none has."""
    while name and name not in look.living:
        name = name[: name.rfind("/")]
    return name


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def _descriptors(pid: int) -> Iterator[tuple[str, str]]:
    """Numbers and targets; nothing for a process that is gone or that we may not look into."""
    directory = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for fd in os.listdir(directory):
            with contextlib.suppress(OSError):
                yield fd, os.readlink(f"{directory}/{fd}")


def _cgroups_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            return file.read()
    except OSError:
        return ""


def _process(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return f"pid {pid} ({file.read().strip()})"
    except OSError:
        return f"pid {pid} (?)"
