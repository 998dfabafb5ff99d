"""The catalogue of closed leases: `leases.db`, so that what has ended takes no memory and survives the service.

A row is the lease as clients see it, with the gaps of its streams. Rows are gathered for some milliseconds and
written in one transaction; lookups see them before that. A forgotten row has no logs any more, and stays for 120 s to
refuse a late Acquire of its id. WAL with synchronous=OFF survives SIGKILL, not a power cut; pipes don't either.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightship.kernel.fdframes import Stream
from tightship.switchboard.ledger import TOMBSTONE_S
from tightship.switchboard.requests import is_id
from tightship.switchboard.segments import Gap, Log, Store
from tightship.v1 import switchboard_pb2 as pb

_SCHEMA = """
CREATE TABLE IF NOT EXISTS leases (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    closed_ns INTEGER NOT NULL,
    forgotten INTEGER NOT NULL DEFAULT 0,
    lease BLOB NOT NULL,
    gaps TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS leases_by_end ON leases (forgotten, closed_ns);
"""
_CACHE_KIB = 256

RETENTION_AGE_S = 600.0
RETENTION_NUMBER = 1000

NUMBERS = {Stream.STDOUT: pb.STREAM_STDOUT, Stream.STDERR: pb.STREAM_STDERR}

_log = logging.getLogger(__name__)

_Row = tuple[str, str, int, bytes, str]


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the logs of ended leases stay: seconds, and how many."""

    age: float = RETENTION_AGE_S
    number: int = RETENTION_NUMBER


@dataclass(frozen=True, slots=True)
class Ended:
    """A closed lease and the state of its streams."""

    lease: pb.Lease
    logs: tuple[Log, ...]


class Catalogue:
    def __init__(self, store: Store, retention: Retention) -> None:
        self._store = store
        self._retention = retention
        self._pending: dict[str, _Row] = {}
        self._db = _open(store.root / "leases.db")

    def close(self) -> None:
        self.flush()
        self._db.close()

    def add(self, ended: Ended) -> None:
        """Notes a lease that was closed; `flush` writes it."""
        lease = ended.lease
        gaps = {str(int(log.stream)): [[g.start, g.end, g.reason] for g in log.gaps] for log in ended.logs if log.gaps}
        row = (lease.lease_id, lease.owner, lease.closed.ToNanoseconds(), lease.SerializeToString(), json.dumps(gaps))
        self._pending[lease.lease_id] = row

    def flush(self) -> None:
        """Writes what is pending. A database that refuses is noted; the rows are lost then, not the service."""
        if not self._pending:
            return
        rows, self._pending = self._pending, {}
        try:
            with self._db:
                self._db.executemany(
                    "INSERT OR REPLACE INTO leases (id, owner, closed_ns, lease, gaps) VALUES (?, ?, ?, ?, ?)",
                    rows.values(),
                )
        except sqlite3.Error as error:
            _log.error("can't write %d closed leases: %s", len(rows), error)

    def known(self, lease_id: str) -> bool:
        """Whether a lease of this id has ended here, forgotten ones included."""
        if lease_id in self._pending:
            return True
        return self._db.execute("SELECT 1 FROM leases WHERE id = ?", (lease_id,)).fetchone() is not None

    def get(self, lease_id: str) -> Ended | None:
        """None where it is unknown or forgotten."""
        row = self._pending.get(lease_id)
        found = row[3:] if row else None
        if found is None:
            query = "SELECT lease, gaps FROM leases WHERE id = ? AND forgotten = 0"
            found = self._db.execute(query, (lease_id,)).fetchone()
        return None if found is None else self._ended(*found)

    def all(self, owner: str) -> list[pb.Lease]:
        """Those of one owner, or of all; not the forgotten. Oldest end first."""
        self.flush()
        query = "SELECT lease FROM leases WHERE forgotten = 0 AND (? = '' OR owner = ?) ORDER BY closed_ns"
        return [pb.Lease.FromString(blob) for (blob,) in self._db.execute(query, (owner, owner))]

    def ids(self) -> set[str]:
        """Of all whose logs are kept."""
        self.flush()
        return {lease_id for (lease_id,) in self._db.execute("SELECT id FROM leases WHERE forgotten = 0")}

    def forget(self, lease_ids: Sequence[str]) -> int:
        """Marks them; how many were known. Their segments are the caller's to remove."""
        self.flush()
        with self._db:
            cursor = self._db.executemany(
                "UPDATE leases SET forgotten = 1 WHERE id = ? AND forgotten = 0", [(one,) for one in lease_ids]
            )
        return cursor.rowcount

    def overdue(self, most: int) -> list[str]:
        """At most `most` ids whose logs go by age or number. Drops rows that need not be remembered any more."""
        self.flush()
        now = time.time_ns()
        with self._db:
            oldest = now - int(TOMBSTONE_S * 1e9)
            self._db.execute("DELETE FROM leases WHERE forgotten = 1 AND closed_ns < ?", (oldest,))
        (count,) = self._db.execute("SELECT count(*) FROM leases WHERE forgotten = 0").fetchone()
        surplus = max(0, count - self._retention.number)
        rows = self._db.execute(
            "SELECT id, closed_ns FROM leases WHERE forgotten = 0 ORDER BY closed_ns LIMIT ?", (most,)
        ).fetchall()
        limit = now - int(self._retention.age * 1e9)
        return [lease_id for index, (lease_id, closed) in enumerate(rows) if index < surplus or closed < limit]

    def adopt_directories(self) -> None:
        """At start: segments that no row explains become CLOSED leases of a switchboard that died.

        Gaps that it knew are lost with it: where it could not write for a time, the hole reads as zeros.
        """
        for lease_id in filter(is_id, self._store.lease_ids()):  # what no lease can have made is not ours
            row = self._db.execute("SELECT forgotten FROM leases WHERE id = ?", (lease_id,)).fetchone()
            if row is not None:
                if row[0]:
                    self._store.remove(lease_id)
                continue
            logs = self._store.found(lease_id)
            lease = pb.Lease(lease_id=lease_id, state=pb.Lease.CLOSED, end_reason="switchboard died", exit=pb.Exit())
            lease.closed.FromNanoseconds(os.stat(self._store.root / lease_id).st_mtime_ns)
            lease.streams.extend(stream_info(log) for log in logs)
            self.add(Ended(lease, logs))
        self.flush()

    def _ended(self, blob: bytes, gaps: str) -> Ended:
        lease = pb.Lease.FromString(blob)
        logs = self._store.logs(lease.lease_id)
        known = json.loads(gaps)
        for log in logs:
            log.ended = True
            log.size = next((info.size for info in lease.streams if info.stream == NUMBERS[log.stream]), 0)
            log.gaps = [Gap(start, end, reason) for start, end, reason in known.get(str(int(log.stream)), ())]
        return Ended(lease, logs)


def stream_info(log: Log) -> pb.StreamInfo:
    return pb.StreamInfo(stream=NUMBERS[log.stream], size=log.size, lost=log.lost, ended=log.ended)


def _open(path: Path) -> sqlite3.Connection:
    """The database; one that can't be read is set aside."""
    try:
        return _connect(path)
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.unreadable-{time.time_ns()}")
        _log.error("%s is unreadable (%s) and set aside as %s", path, error, aside.name)
        os.rename(path, aside)
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{path}{suffix}")
        return _connect(path)


def _connect(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # WAL and SHM get its mode
    db = sqlite3.connect(path, timeout=1.0)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        db.executescript(_SCHEMA)
        db.execute("SELECT count(*) FROM leases WHERE forgotten = 0").fetchone()
    except BaseException:
        db.close()
        raise
    return db
