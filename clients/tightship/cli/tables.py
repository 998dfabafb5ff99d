"""Tables: columns as wide as what is in them, made to fit where they are printed on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from tightship.cli import style

_GAP = "  "
# No column is made narrower.
_NARROWEST = 6


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints it; to a file or a pipe whole, to a terminal within its width."""
    for line in lines(header, [*rows], style.width()):
        click.echo(line)


def lines(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """The header and the rows as lines. Names are cut in the middle, the last column at its end.

    On the narrowest of terminals columns are left out, the last ones first.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    if width is not None:
        while len(widths) > 1 and sum(min(each, _NARROWEST) for each in widths) > _room(widths, width):
            widths.pop()
        shrink(widths, _room(widths, width))
    made = []
    last = len(header) - 1
    for row in (header, *rows):
        drawn = []
        for column, width_now in enumerate(widths):
            text = cut(row[column], width_now, middle=column < last)
            blanks = " " * (width_now - len(text)) if column < last else ""
            if row is header:
                text = style.paint(text, "bold")
            elif 0 < column < last:  # names and commands are users' words
                text = style.by_word(text)
            drawn.append(text + blanks)
        made.append(_GAP.join(drawn).rstrip())
    return made


def _room(widths: Sequence[int], width: int) -> int:
    """Without the gaps."""
    return width - len(_GAP) * (len(widths) - 1)


def shrink(widths: list[int], room: int) -> None:
    """Takes from the widest columns first, until all have room or none can give."""
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda column: widths[column])
        if widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1


def cut(text: str, width: int, *, middle: bool) -> str:
    if len(text) <= width:
        return text
    tail = (width - 1) // 2 if middle else 0
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]
