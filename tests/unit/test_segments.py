"""The state of an output stream: sizes, gaps and their bound."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tightship.kernel.fdframes import Stream
from tightship.switchboard import segments
from tightship.switchboard.segments import Gap, Log, Store

PIECES = st.lists(st.tuples(st.integers(0, 100), st.sampled_from(["", "log cap", "ENOSPC"])), max_size=60)


def log() -> Log:
    return Log(Stream.STDOUT, "/nowhere")


@given(PIECES)
def test_every_byte_is_kept_or_in_one_gap(pieces: list[tuple[int, str]]) -> None:
    one = log()
    kept: list[int] = []
    for count, reason in pieces:
        if reason:
            one.lose(count, reason)
        else:
            kept += range(one.size, one.size + count)
            one.grow(count)
    lost = [offset for gap in one.gaps for offset in range(gap.start, gap.end)]
    assert sorted(kept + lost) == list(range(one.size))
    assert one.lost == len(lost)


@given(PIECES)
def test_a_reader_that_goes_by_gaps_and_kept_bytes_meets_every_offset_once(pieces: list[tuple[int, str]]) -> None:
    one = log()
    for count, reason in pieces:
        if reason:
            one.lose(count, reason)
        else:
            one.grow(count)
    offset = 0
    while offset < one.size:
        gap = one.gap_at(offset)
        until = gap.end if gap else one.kept_until(offset, one.size)
        assert until > offset
        assert gap is not None or not any(g.start < until and g.end > offset for g in one.gaps)
        offset = until
    assert offset == one.size


def test_losses_in_a_row_for_one_reason_are_one_gap() -> None:
    one = log()
    one.grow(3)
    one.lose(4, "ENOSPC")
    one.lose(5, "ENOSPC")
    one.lose(1, "log cap")
    assert one.gaps == [Gap(3, 12, "ENOSPC"), Gap(12, 13, "log cap")]


def test_the_list_of_gaps_is_bounded_and_what_is_lost_stays_exact() -> None:
    one = log()
    while not one.full_of_gaps:
        one.grow(1)
        one.lose(1, "ENOSPC")
    for _ in range(1000):
        one.lose(7, "log cap")
    assert len(one.gaps) == segments.GAPS_MAX
    assert one.lost == segments.GAPS_MAX + 7000
    assert one.gaps[-1].end == one.size


def test_what_a_dead_switchboard_left_is_as_long_as_its_files(tmp_path: Path) -> None:
    store = Store(tmp_path / "logs")
    stdout, _ = store.logs("one")
    assert not os.path.exists(os.path.dirname(stdout.path))
    fd = segments.open_for_writing(stdout.path)
    os.write(fd, b"hello")
    os.close(fd)
    assert list(store.lease_ids()) == ["one"]
    found, empty = store.found("one")
    assert (found.size, found.ended, empty.size) == (5, True, 0)
    store.remove("one")
    store.remove("one")
    assert list(store.lease_ids()) == []
