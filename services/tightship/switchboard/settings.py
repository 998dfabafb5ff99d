"""Settings of the switchboard: what its command line may change."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from pathlib import Path

from tightship.common.doors import DoorSettings
from tightship.common.rundir import RunDir
from tightship.switchboard.catalogue import Retention

LEASES_MAX = 4000
LOG_CAP = 1 << 30

# Of a living lease: three near ends, the pidfd and two segment files; far ends only while none of the last three is
# open.
_FDS_PER_LEASE = 6
# Connections, database, event loop, pumps.
_FDS_RESERVED = 512


@dataclass(frozen=True, slots=True)
class Settings:
    run: RunDir
    log_dir: Path
    log_cap: int = LOG_CAP
    retention: Retention = field(default_factory=Retention)
    leases_max: int = LEASES_MAX
    peer_uids: frozenset[int] = frozenset()
    """Users that fd.sock takes beside our own."""
    doors: DoorSettings = field(default_factory=DoorSettings)


def affordable_leases(wanted: int) -> int:
    """`wanted`, or as many as the limit of open files allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, (soft - _FDS_RESERVED) // _FDS_PER_LEASE))


def raise_file_limit() -> None:
    """The soft limit of open files to the hard one. The switchboard starts no process that could inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
