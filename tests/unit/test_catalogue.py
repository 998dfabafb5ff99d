"""The catalogue of closed leases: what it remembers, for how long, and how it starts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tightship.switchboard import catalogue as catalogues
from tightship.switchboard.catalogue import Catalogue, Ended, Retention, stream_info
from tightship.switchboard.segments import Gap, Store
from tightship.v1 import switchboard_pb2 as pb


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "logs")


def ended(store: Store, lease_id: str, age_s: float = 0.0, owner: str = "me") -> Ended:
    logs = store.logs(lease_id)
    logs[0].grow(10)
    logs[0].lose(5, "ENOSPC")
    for log in logs:
        log.ended = True
    lease = pb.Lease(lease_id=lease_id, owner=owner, state=pb.Lease.CLOSED, exit=pb.Exit(code=3))
    lease.closed.FromNanoseconds(time.time_ns() - int(age_s * 1e9))
    lease.streams.extend(stream_info(log) for log in logs)
    return Ended(lease, logs)


def test_a_row_is_seen_before_and_after_it_is_written_and_by_the_next_service(store: Store) -> None:
    first = Catalogue(store, Retention())
    row = ended(store, "one")
    first.add(row)
    assert first.get("one") is not None
    first.close()
    second = Catalogue(store, Retention())
    found = second.get("one")
    assert found is not None
    assert found.lease == row.lease
    assert found.logs == row.logs
    assert found.logs[0].gaps == [Gap(10, 15, "ENOSPC")]
    assert second.known("one")
    assert not second.known("two")
    assert second.get("two") is None
    second.close()


def test_a_forgotten_lease_is_not_found_and_still_known_for_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Catalogue(store, Retention())
    one.add(ended(store, "gone"))
    assert one.forget(["gone", "never"]) == 1
    assert one.forget(["gone"]) == 0
    assert one.get("gone") is None
    assert one.all("") == []
    assert one.known("gone")
    assert one.overdue(10) == []
    monkeypatch.setattr(catalogues, "TOMBSTONE_S", -1.0)
    assert one.overdue(10) == []
    assert not one.known("gone")
    one.close()


def test_what_is_old_or_too_many_is_overdue_oldest_first(store: Store) -> None:
    one = Catalogue(store, Retention(age=60.0, number=3))
    for lease_id, age in (("a", 100.0), ("b", 50.0), ("c", 40.0), ("d", 30.0), ("e", 20.0)):
        one.add(ended(store, lease_id, age))
    assert one.overdue(10) == ["a", "b"]
    assert one.overdue(1) == ["a"]
    one.forget(["a", "b"])
    assert one.overdue(10) == []
    assert [lease.lease_id for lease in one.all("me")] == ["c", "d", "e"]
    assert one.all("another") == []
    one.close()


def test_directories_without_a_row_are_of_a_switchboard_that_died(store: Store) -> None:
    for lease_id in ("orphan", "forgotten"):
        (store.root / lease_id).mkdir()
        (store.root / lease_id / "stdout").write_text("bytes")
    one = Catalogue(store, Retention())
    one.add(ended(store, "forgotten"))
    one.forget(["forgotten"])
    one.adopt_directories()
    found = one.get("orphan")
    assert found is not None
    assert (found.lease.end_reason, found.lease.state) == ("switchboard died", pb.Lease.CLOSED)
    assert [log.size for log in found.logs] == [5, 0]
    assert not found.lease.exit.HasField("code")
    assert not (store.root / "forgotten").exists()
    one.close()


def test_an_unreadable_database_is_set_aside(store: Store) -> None:
    (store.root / "leases.db").write_bytes(b"no database" * 1000)
    one = Catalogue(store, Retention())
    one.add(ended(store, "one"))
    one.close()
    assert len(list(store.root.glob("leases.db.unreadable-*"))) == 1
