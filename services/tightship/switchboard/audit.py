"""Residue inside the switchboard: descriptors and segments that no lease explains.

Looks twice, a moment apart, since pumps and readers open and close files meanwhile; what is there both times counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tightship.switchboard import requests
from tightship.switchboard.leases import Leases
from tightship.switchboard.segments import NAMES
from tightship.v1 import switchboard_pb2 as pb

_BETWEEN_S = 0.1
_DATABASE = "leases.db"


@dataclass(frozen=True, slots=True)
class _Descriptor:
    fd: int
    kind: str
    target: str


class Audit:
    """`baseline` is what the service itself holds, by number and target: taken when it is up and has no lease."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._baseline = {(one.fd, one.target) for one in _descriptors(leases.store.root)}

    async def run(self, fix: bool) -> pb.AuditStreamsResponse:
        response = pb.AuditStreamsResponse()
        first, _ = await self._look()
        await asyncio.sleep(_BETWEEN_S)
        second, examined = await self._look()
        for key in sorted(first.keys() & second.keys()):
            finding = second[key]
            if fix and finding.ours:
                finding.fixed = self._fix(finding, key)
            response.findings.append(finding)
        response.examined.update(examined)
        for live in self._leases.living():
            for fd in (*live.far.values(), live.stdin, *(source.fd for source in live.sources)):
                if fd >= 0:
                    with contextlib.suppress(OSError):  # a pump closed it
                        response.pipes[f"pipe:[{os.fstat(fd).st_ino}]"] = live.lease.id
        return response

    async def _look(self) -> tuple[dict[tuple[str, str], pb.StreamFinding], Counter[str]]:
        root = self._leases.store.root
        held = await asyncio.to_thread(_descriptors, root)
        entries = await asyncio.to_thread(_entries, root)
        explained = self._explained()
        findings: dict[tuple[str, str], pb.StreamFinding] = {}
        examined: Counter[str] = Counter(one.kind for one in held)
        examined["directory"] = len(entries)
        for one in held:
            known = one.fd in explained or (one.fd, one.target) in self._baseline
            if one.kind in ("pipe", "pidfd", "segment") and not known:
                findings[str(one.fd), one.target] = pb.StreamFinding(
                    kind="descriptor",
                    what=f"fd {one.fd} of pid {os.getpid()} ({one.target})",
                    origin=f"a {one.kind} of a lease that the switchboard has forgotten",
                    ours=True,
                )
        known_ids = self._leases.catalogue.ids() | {live.lease.id for live in self._leases.living()}
        for name in entries:
            if name not in known_ids and not self._leases.catalogue.known(name):
                ours = _could_be_a_lease(root / name)
                findings["segment", name] = pb.StreamFinding(
                    kind="segment",
                    what=str(root / name),
                    origin="a lease that no switchboard has a row of" if ours else "not made by us: no lease's logs",
                    ours=ours,
                )
        late = time.monotonic() - 1.0
        for live in self._leases.living():
            examined["lease"] += 1
            if live.lease.state.deadline < late:
                findings["lease", live.lease.id] = pb.StreamFinding(
                    kind="lease", what=live.lease.id, origin=f"owner {live.lease.terms.owner}", ours=True
                )
        return findings, examined

    def _explained(self) -> set[int]:
        """Numbers that living leases hold now."""
        return {
            fd
            for live in self._leases.living()
            for fd in (
                *live.far.values(),
                live.stdin,
                live.pidfd,
                *(source.fd for source in live.sources),
                *(source.file for source in live.sources),
            )
        }

    def _fix(self, finding: pb.StreamFinding, key: tuple[str, str]) -> bool:
        """Whether it is gone."""
        first, second = key
        match finding.kind:
            case "descriptor":
                fd = int(first)
                # It must still be the same, and nobody's.
                if fd in self._explained() or _target(fd) != second:
                    return False
                os.close(fd)
                return True
            case "segment":
                path = self._leases.store.root / second
                if _could_be_a_lease(path):
                    self._leases.store.remove(second)
                return not os.path.lexists(path)
            case _:
                self._leases.revoke(pb.RevokeRequest(lease_id=second))
                return self._leases.find(second) is None


def _descriptors(root: Path) -> list[_Descriptor]:
    """Every open descriptor of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        target = _target(fd)
        if target is not None:
            found.append(_Descriptor(fd, _kind(fd, target, root), target))
    return found


def _target(fd: int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None


def _kind(fd: int, target: str, root: Path) -> str:
    if target.startswith("pipe:"):
        return "pipe"
    if target == "anon_inode:[pidfd]" or target.startswith("pidfd:"):
        return "pidfd"
    if target.startswith("socket:"):
        return "socket"
    inside = target.removeprefix(f"{root}/")
    with contextlib.suppress(OSError):
        if inside != target and not inside.startswith(_DATABASE) and stat.S_ISREG(os.fstat(fd).st_mode):
            return "segment"
    return "other"


def _could_be_a_lease(path: Path) -> bool:
    """Whether it is a lease's directory by its name, and has nothing in it but segments."""
    try:
        with os.scandir(path) as entries:
            return (
                requests.is_id(path.name)
                and not path.is_symlink()
                and all(each.name in NAMES.values() and each.is_file(follow_symlinks=False) for each in entries)
            )
    except OSError:
        return False


def _entries(root: Path) -> list[str]:
    """What is in the log directory, but for the database and its companions."""
    return [name for name in os.listdir(root) if not name.startswith(_DATABASE)]
