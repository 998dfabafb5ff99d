"""The journal: rows and records over a crash, retention, and an unreadable file."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tightship.containerizer.journal import Ended, Journal, Kind, Phase, Row
from tightship.containerizer.plan import Step
from tightship.v1 import containerizer_pb2 as pb


def open_journal(path: Path, age: float = 600, count: int = 1000) -> Journal:
    return Journal(path, retention_age=age, retention_count=count)


def a_row(identity: str = "1", name: str = "/a") -> Row:
    plan = (Step("mkdir", "mkdir.memory", "/cg/a", "mark"), Step("lease", "lease", identity))
    return Row(identity, name, Kind.LAUNCH, plan, spec=b"\x00\xff", labels={"k": "ü"}, command=("a", "b"), timeout=1.5)


def intend(journal: Journal, row: Row) -> None:
    journal.intend(row, row.meta())


def ended(identity: str, name: str = "/a", request: str = "") -> Ended:
    container = pb.Container(id=identity, name=name).SerializeToString()
    return Ended(identity, name, request, "hash", container, b"", 7, True)


def test_a_row_is_there_after_a_restart(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    row = a_row()
    intend(journal, row)
    row.phase, row.live.pid, row.live.times = Phase.COMMITTED, 42, {"lease": (1, 2)}
    journal.update(row)
    found = open_journal(tmp_path / "j").rows
    assert len(found) == 1
    assert (found[0].phase, found[0].live.pid, found[0].plan) == (Phase.COMMITTED, 42, row.plan)
    assert (found[0].spec, found[0].labels, found[0].command) == (row.spec, row.labels, row.command)
    assert Row.from_meta(row.meta()).timeout == 1.5


def test_row_and_record_change_places_at_once(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    row = a_row()
    intend(journal, row)
    journal.forget(row, ended("1"), "{}")
    again = open_journal(tmp_path / "j")
    assert again.rows == []
    assert again.records == 1
    found = again.find_record("/a")
    assert found is not None
    assert found == again.find_record("1")


def test_the_newest_record_of_a_name_is_found(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    for identity in "123":
        journal.forget(a_row(identity), ended(identity, request="r"), "{}")
    newest = journal.find_record("/a")
    assert newest is not None
    assert newest.id == "3"
    assert journal.find_request("r") == newest
    assert journal.remove_records("/a") == ["1", "2", "3"]
    assert journal.records == 0


def test_retention_by_number_and_age(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", count=2)
    for identity in "12345":
        journal.forget(a_row(identity), ended(identity), "{}")
    assert sorted(journal.retire()) == ["1", "2", "3"]
    assert journal.retire() == []
    journal.close()
    assert sorted(open_journal(tmp_path / "j", age=-1).retire()) == ["4", "5"]


@pytest.mark.parametrize("damage", [b"not a database" * 100, b""])
def test_an_unreadable_file_is_set_aside(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "j"
    journal = open_journal(path)
    intend(journal, a_row())
    journal.close()
    path.write_bytes(damage)
    again = open_journal(path)
    assert again.rebuilt == bool(damage)  # an empty file is an empty journal
    assert again.lost
    assert again.rows == []
    intend(again, a_row())


def test_a_row_of_nonsense_sets_the_file_aside(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    journal._db.execute("INSERT INTO containers VALUES ('x', 'intended', '', 'no json', '{}', x'')")
    journal.close()
    assert open_journal(tmp_path / "j").rebuilt


def test_a_write_outlives_sigkill(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from tests.unit.test_journal import a_row, ended, intend, open_journal
journal = open_journal(Path({str(tmp_path / "j")!r}))
for number in range(100):
    intend(journal, a_row(str(number), f"/n{{number}}"))
journal.forget(a_row("0", "/n0"), ended("0", "/n0"), "{{}}")
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[2]
    status = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}
    ).returncode
    assert status == -signal.SIGKILL
    journal = open_journal(tmp_path / "j")
    assert len(journal.rows) == 99
    assert journal.find_record("/n0") is not None


def test_a_good_file_that_is_locked_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path / "j")
    intend(journal, a_row())
    journal.close()
    other = sqlite3.connect(tmp_path / "j", isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **fields: connect(*args, **(fields | {"timeout": 0.05})))
    with pytest.raises(sqlite3.OperationalError):
        open_journal(tmp_path / "j")
    other.close()
    assert len(open_journal(tmp_path / "j").rows) == 1


def _damage(path: Path, tree: str) -> None:
    """Overwrites the root page of a table or an index."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (tree,)).fetchone()
    (size,) = db.execute("PRAGMA page_size").fetchone()
    db.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xa5" * size)


@pytest.mark.parametrize("tree", ["records", "records_name", "records_ended", "records_request", "containers"])
def test_a_damaged_tree_costs_records_and_no_readable_row(tmp_path: Path, tree: str) -> None:
    path = tmp_path / "j"
    journal = open_journal(path)
    row = a_row("1")
    intend(journal, row)
    row.phase = Phase.COMMITTED
    journal.update(row)
    journal.forget(a_row("2"), ended("2", "/b", "r"), "{}")
    journal.close()
    _damage(path, tree)
    again = open_journal(path)
    assert again.rebuilt
    assert again.lost
    assert [(each.id, each.phase) for each in again.rows] == ([] if tree == "containers" else [("1", Phase.COMMITTED)])
    again.close()
    assert len(open_journal(path).rows) == (tree != "containers")


@pytest.mark.parametrize("tree", ["records", "records_name", "containers"])
def test_damage_met_while_serving_stops_nothing(tmp_path: Path, tree: str) -> None:
    path = tmp_path / "j"
    journal = open_journal(path)
    rows = [a_row("1", "/a"), a_row("2", "/b")]
    for row in rows:
        intend(journal, row)
    journal.living = lambda: rows
    _damage(path, tree)
    journal._db.execute("PRAGMA shrink_memory")  # so that the page is read again
    rows[0].phase = Phase.UNDOING
    journal.update(rows[0])
    journal.forget(rows[0], ended("1", "/a"), "{}")
    assert journal.find_record("/a") is not None
    assert journal.records == 1
    journal.close()
    assert [row.id for row in open_journal(path).rows] == ["2"]
