"""The journal: what was intended, durable before it is done, and the records of what has ended.

What leaves no record (a create, a cleanup) leaves its story in a table of its own, for as long.

One SQLite file in WAL mode without fsync: it must outlive a SIGKILL, not a power cut, which cgroups and pipes don't
outlive either. A row holds the whole plan of a container and goes through its phases; deleting it and writing the
record is one transaction.

A damaged file is set aside, at start or when a query meets the damage, and a new one gets the living rows; the records
are lost with it. At start only those rows are known that can still be read, and `lost` says that some may be missing.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from tightship.containerizer import plan as plans
from tightship.containerizer.plan import Step
from tightship.kernel import process

log = logging.getLogger(__name__)

T = TypeVar("T")

_VERSION = 1

# Errors of the moment or the disk: the file may be good.
_NOT_THE_FILE = frozenset(
    {
        sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM,
    }
)  # fmt: skip


_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class Phase(StrEnum):
    INTENDED = "intended"
    COMMITTED = "committed"
    UNDOING = "undoing"


class Kind(StrEnum):
    LAUNCH = "launch"
    CREATE = "create"
    CLEANUP = "cleanup"
    """A plan made up for a name, only to be undone."""


@dataclass(slots=True)
class Live:
    """What becomes known of a container while it lives."""

    pid: int = 0
    start: int = 0
    """Clock ticks since boot, of the main process."""
    started: int = 0
    """Wall clock, ns."""
    started_monotonic: int = 0
    deadline: float | None = None
    """Of the run, on CLOCK_BOOTTIME; `lifetime` is that of the container."""
    lifetime: float | None = None
    opened: bool = False
    spawner: str = ""
    """The process that has it, so that a later one is told apart."""
    times: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Steps' begin and end, wall clock in ns."""


@dataclass(slots=True)
class Row:
    """A living container, as the journal has it. The first group goes to the spawner as `meta`; of it only an update
    changes something, which is written by `replan`."""

    id: str
    name: str
    kind: Kind
    plan: tuple[Step, ...]
    spec: bytes = b""
    labels: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    request_id: str = ""
    request_hash: str = ""
    trace: str = ""
    parent_trace: str = ""
    """The span of the call that began it; `caller_trace` is the parent of that."""
    caller_trace: str = ""
    detach: bool = False
    timeout: float | None = None
    max_lifetime: float | None = None
    client: str = ""
    """Who made it; empty for the main door."""
    created: int = field(default_factory=time.time_ns)
    updating: tuple[tuple[str, str], ...] = ()
    """While its limits are changed: files with what they held before, in the order in which they are written."""

    phase: Phase = Phase.INTENDED
    reason: str = ""
    live: Live = field(default_factory=Live)
    record: bytes = b""
    """The Record, once the main process has ended."""

    def meta(self) -> str:
        """The first group, as JSON."""
        fixed = {name: getattr(self, name) for name in _FIXED}
        fixed["plan"] = plans.to_json(self.plan)
        fixed["spec"] = base64.b64encode(self.spec).decode()
        if self.updating:
            fixed["updating"] = self.updating
        return json.dumps(fixed, separators=(",", ":"))

    @classmethod
    def from_meta(cls, text: str) -> Row:
        """Raises ValueError, KeyError or TypeError for what is no meta of ours."""
        fixed: dict[str, Any] = json.loads(text)
        fixed["plan"] = plans.from_json(fixed["plan"])
        fixed["spec"] = base64.b64decode(fixed["spec"])
        fixed["kind"] = Kind(fixed["kind"])
        fixed["command"] = tuple(fixed["command"])
        fixed["updating"] = tuple((str(file), str(value)) for file, value in fixed.get("updating", ()))
        return cls(**fixed)


_LIVE = tuple(each.name for each in fields(Live))
_FIXED = (
    "id", "name", "kind", "labels", "command", "request_id", "request_hash", "trace", "parent_trace", "caller_trace",
    "detach", "timeout", "max_lifetime", "client", "created",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ended:
    """A record: a Container in state ENDED, and what its last messages were, serialized."""

    id: str
    name: str
    request_id: str
    request_hash: str
    container: bytes
    cleanup: bytes
    pid: int
    ran: bool


class Journal:
    """Synchronous: a write takes some 40 µs. Raises sqlite3.Error on a full or failing disk."""

    def __init__(self, path: Path, *, retention_age: float, retention_count: int) -> None:
        self._path = path
        self._age = retention_age
        self._count = retention_count
        self.rebuilt = False
        """The file was damaged and has been set aside at start."""
        self.rows: list[Row] = []
        self.living: Callable[[], Iterable[Row]] = lambda: self.rows
        """The rows that a new file gets when this one turns out to be damaged."""
        self._open = False
        try:
            self._db = _connect(path)
            self.rows.extend(self._load())
            _check(self._db)
            self.records: int = self._db.execute("SELECT count(*) FROM records").fetchone()[0]
            self._open = True
            self.lost = not self.rows
            """A container may live without a row: it's a new file, or an empty one, or a row can't be read."""
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, sqlite3.DatabaseError) and _code(error) in _NOT_THE_FILE:
                raise
            self.rebuilt = self.lost = True
            self._renew()

    def intend(self, row: Row, meta: str) -> None:
        """Before the first step. `meta` is the row's."""
        self._guarded(lambda: self._insert(row, meta))

    def update(self, row: Row) -> None:
        """Writes phase, reason, what became known, and the record where there is one."""
        self._query(
            "UPDATE containers SET phase = ?, reason = ?, live = ?, record = ? WHERE id = ?",
            (row.phase, row.reason, _live_json(row.live), row.record, row.id),
        )

    def replan(self, row: Row) -> None:
        """Writes the first group anew: plan, spec, and what an update that is on has to put back."""
        self._query("UPDATE containers SET meta = ? WHERE id = ?", (row.meta(), row.id))

    def times(self, identity: str) -> dict[str, tuple[int, int]]:
        """The times of steps that the row of a living container has."""
        found = self._query("SELECT live FROM containers WHERE id = ?", (identity,))
        return {name: (begin, end) for name, (begin, end) in json.loads(found[0][0])["times"].items()} if found else {}

    def forget(self, row: Row, ended: Ended | None, story: str) -> None:
        """The row goes, and its story comes, with the record where there is one, at once."""
        self._guarded(lambda: self._forget(row, ended, story))

    def _forget(self, row: Row, ended: Ended | None, story: str) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM containers WHERE id = ?", (row.id,))
            if ended is None:
                self._db.execute(
                    "INSERT OR REPLACE INTO stories VALUES (?, ?, ?, ?)", (row.id, row.name, _boottime(), story)
                )
            else:
                self._db.execute(
                    "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        ended.id, ended.name, ended.request_id, ended.request_hash, _boottime(), ended.container,
                        ended.cleanup, ended.pid, ended.ran, story,
                    ),
                )  # fmt: skip
        self.records += ended is not None

    def find_record(self, name_or_id: str) -> Ended | None:
        """The newest record of the name, or the one of the id."""
        column = "name" if name_or_id.startswith("/") else "id"
        return self._newest(column, name_or_id)

    def find_story(self, name_or_id: str) -> tuple[str, str, float] | None:
        """Name, story and time of the end (CLOCK_BOOTTIME) of the newest of the name, or the one of the id."""
        column = "name" if name_or_id.startswith("/") else "id"
        return next(self._stories(f"WHERE {column} = ?", name_or_id), None)

    def trace_of(self, identity: str) -> str:
        """The traceparent of what has ended; empty where there is none."""
        found = self._query("SELECT json_extract(times, '$.trace') FROM records WHERE id = ?", (identity,))
        return str(found[0][0] or "") if found else ""

    def stories(self) -> Iterator[tuple[str, str, float]]:
        """The same of all that are kept, newest first."""
        return self._stories("", None)

    def _stories(self, condition: str, value: object) -> Iterator[tuple[str, str, float]]:
        query = f"""
            SELECT name, times, ended FROM records {condition} UNION ALL
            SELECT name, story, ended FROM stories {condition} ORDER BY ended DESC LIMIT 16 OFFSET ?
        """  # noqa: S608 - constants of this module
        values = () if value is None else (value, value)
        offset = 0
        while batch := self._query(query, (*values, offset)):
            yield from batch
            offset += len(batch)

    def find_request(self, request_id: str) -> Ended | None:
        """The newest record of a launch with this request id."""
        return self._newest("request_id", request_id)

    def records_after(self, place: tuple[float, int]) -> Iterator[tuple[tuple[float, int], Ended]]:
        """The records that came after the one at `place`, oldest first, each with its place; a few read at a time."""
        query = "SELECT ended, rowid, * FROM records WHERE (ended, rowid) > (?, ?) ORDER BY ended, rowid LIMIT 16"
        while batch := self._query(query, place):
            for ended, number, *found in batch:
                place = (ended, number)
                yield place, _ended(tuple(found))

    def remove_records(self, name_or_id: str, client: str = "") -> list[str]:
        """Forgets the records of a name or an id, of those only that `client` made where one is given; the ids."""
        column = "name" if name_or_id.startswith("/") else "id"
        made = "(? IN ('', json_extract({}, '$.client')))"
        values = (name_or_id, client)
        self._query(f"DELETE FROM stories WHERE {column} = ? AND {made.format('story')}", values)  # noqa: S608 - ours
        return self._delete(f"{column} = ? AND {made.format('times')}", *values)

    def retire(self) -> list[str]:
        """Forgets the records past retention; the ids, whose logs may go."""
        newest = "SELECT id FROM stories ORDER BY ended DESC LIMIT -1 OFFSET ?"
        old = _boottime() - self._age
        self._query(f"DELETE FROM stories WHERE ended < ? OR id IN ({newest})", (old, self._count))  # noqa: S608 - ours
        gone = self._delete("ended < ?", old)
        surplus = self.records - self._count
        if surplus > 0:
            gone += self._delete("id IN (SELECT id FROM records ORDER BY ended, rowid LIMIT ?)", surplus)
        return gone

    def close(self) -> None:
        self._db.close()

    def _delete(self, condition: str, *values: object) -> list[str]:
        query = f"DELETE FROM records WHERE {condition} RETURNING id"  # noqa: S608 - constants of this module
        gone = [str(found[0]) for found in self._query(query, values)]
        self.records -= len(gone)
        return gone

    def _newest(self, column: str, value: str) -> Ended | None:
        query = f"SELECT * FROM records WHERE {column} = ? ORDER BY ended DESC, rowid DESC LIMIT 1"  # noqa: S608 - ours
        found = self._query(query, (value,))
        return _ended(found[0]) if found else None

    def _query(self, query: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        return self._guarded(lambda: self._db.execute(query, values).fetchall())

    def _guarded(self, work: Callable[[], T]) -> T:
        """Does it, with a new file where this one is damaged."""
        if self._open:
            try:
                return work()
            except sqlite3.DatabaseError as error:
                if _code(error) not in _DAMAGE:
                    raise
                log.error("the journal is damaged (%s) and is set aside; its records are lost", error)
        self._renew()
        return work()

    def _renew(self) -> None:
        """Sets the file aside and begins a new one with the living rows."""
        self._open = False
        if hasattr(self, "_db"):
            with contextlib.suppress(sqlite3.Error):
                self._db.close()  # first: it removes the WAL by its name
        _set_aside(self._path)
        self._db = _connect(self._path)
        with self._transaction():
            for row in self.living():
                self._insert(row, row.meta())
        self.records = 0
        self._open = True

    def _insert(self, row: Row, meta: str) -> None:
        self._db.execute(
            "INSERT INTO containers VALUES (?, ?, ?, ?, ?, ?)",
            (row.id, row.phase, row.reason, meta, _live_json(row.live), row.record),
        )

    def _load(self) -> Iterator[Row]:
        for _, phase, reason, meta, live, record in self._db.execute("SELECT * FROM containers ORDER BY rowid"):
            row = Row.from_meta(meta)
            row.phase = Phase(phase)
            row.reason = reason
            row.live = Live(**json.loads(live))
            row.record = record
            yield row

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def remove_other_boots(directory: Path) -> None:
    """Deletes journals of earlier boots: nothing they tell of can have survived."""
    for file in directory.glob("journal-*.db*"):
        if not file.name.startswith(f"journal-{process.boot_id()}.db"):
            with contextlib.suppress(OSError):
                file.unlink()


def _connect(path: Path) -> sqlite3.Connection:
    # Commands and labels are in it: its mode must not follow the umask. WAL and SHM get the file's.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
    try:
        _prepare(db)
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = OFF")
    db.execute("PRAGMA cache_size = -256")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version not in (0, _VERSION):
        raise sqlite3.DatabaseError(f"journal version {version}")
    db.executescript(
        f"""
        CREATE TABLE IF NOT EXISTS containers (
            id TEXT PRIMARY KEY, phase TEXT NOT NULL, reason TEXT NOT NULL, meta TEXT NOT NULL, live TEXT NOT NULL,
            record BLOB NOT NULL
        );
        CREATE TABLE IF NOT EXISTS records (
            id TEXT PRIMARY KEY, name TEXT NOT NULL, request_id TEXT NOT NULL, request_hash TEXT NOT NULL,
            ended REAL NOT NULL, container BLOB NOT NULL, cleanup BLOB NOT NULL, pid INTEGER NOT NULL,
            ran INTEGER NOT NULL, times TEXT NOT NULL
        );
        CREATE TABLE IF NOT EXISTS stories (
            id TEXT PRIMARY KEY, name TEXT NOT NULL, ended REAL NOT NULL, story TEXT NOT NULL
        );
        CREATE INDEX IF NOT EXISTS stories_name ON stories (name);
        CREATE INDEX IF NOT EXISTS records_name ON records (name);
        CREATE INDEX IF NOT EXISTS records_request ON records (request_id) WHERE request_id != '';
        CREATE INDEX IF NOT EXISTS records_ended ON records (ended);
        PRAGMA user_version = {_VERSION};
        """
    )


def _check(db: sqlite3.Connection) -> None:
    """Raises DatabaseError for a damaged tree, of a table or an index; milliseconds for thousands of records."""
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)


def _code(error: sqlite3.DatabaseError) -> int:
    """SQLite's primary result code."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF


def _set_aside(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{path}.unreadable{suffix}")


def _ended(found: tuple[Any, ...]) -> Ended:
    identity, name, request_id, request_hash, _, container, cleanup, pid, ran, _ = found
    return Ended(identity, name, request_id, request_hash, container, cleanup, pid, bool(ran))


def _live_json(live: Live) -> str:
    # asdict would copy the times, pair by pair.
    return json.dumps({name: getattr(live, name) for name in _LIVE}, separators=(",", ":"))


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
