"""Tables and colours: what fits, what is cut, and that nothing but a terminal gets colours."""

from __future__ import annotations

import os
import pty
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightship.cli import style, tables

HEADER = ("NAME", "STATE", "COMMAND")
ROWS = [("/ci/jobs/a-name-that-is-long", "RUNNING", "sh -c 'while sleep 1; do date; done'"), ("/b", "CREATED", "-")]


def test_whole_where_there_is_no_terminal() -> None:
    lines = tables.lines(HEADER, ROWS, None)
    assert lines[1].split("  ") == list(ROWS[0])
    assert lines[2].startswith("/b ")
    assert not any(line.endswith(" ") for line in lines)


@given(st.lists(st.tuples(*[st.text("abc/", max_size=40)] * 3), max_size=5), st.integers(min_value=6, max_value=120))
def test_lines_fit_the_terminal(rows: list[tuple[str, str, str]], width: int) -> None:
    assert all(len(line) <= width for line in tables.lines(HEADER, rows, width))


def test_names_are_cut_in_the_middle_and_commands_at_the_end() -> None:
    (_, first, _) = tables.lines(HEADER, ROWS, 50)
    name, state, command = re.split(" {2,}", first)
    assert name.startswith("/ci/") and name.endswith("long") and "…" in name
    assert state == "RUNNING"
    assert command.startswith("sh -c") and command.endswith("…")


def test_the_widest_column_gives_first() -> None:
    widths = [30, 7, 40]
    tables.shrink(widths, 57)
    assert widths == [25, 7, 25]
    tables.shrink(widths, 3)
    assert widths == [6, 6, 6]


@pytest.mark.parametrize(
    ("environment", "colours"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
    ],
)
def test_colours_are_a_terminals(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], colours: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    reader, writer = os.pipe()
    try:
        assert style.coloured(theirs) == colours
        assert not style.coloured(writer)
        assert (style.paint("x", "red", theirs) == "x") == (not colours)
    finally:
        for fd in (ours, theirs, reader, writer):
            os.close(fd)
