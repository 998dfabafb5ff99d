"""Where a field stands in a spec's text: line and column for errors that the parser itself does not find, and the field
for those that it finds. Pure.

The parser of protobuf text tells no positions of what it has read, and no fields where it stops. This reads only as
much of the format as is needed to follow names into their messages, in text that has been parsed without error up to
the place looked for.
"""

from __future__ import annotations

import re

# Comments, strings, numbers, names, and the marks that open and close messages; all else is passed over.
_TOKEN = re.compile(
    r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[+-]?[0-9.][0-9A-Za-z.+-]*|[A-Za-z_][A-Za-z0-9_]*"""
    r"""|[{}<>\[\]:;,]|\n"""
)


def locate(text: str, path: str) -> tuple[int, int] | None:
    """Line and column, from 1, of the field `path` ("cpu.mask") at its first place, or of the deepest part of it there
    is; None where there is none of it."""
    wanted = path.split(".")
    best: tuple[int, tuple[int, int]] = (0, (0, 0))
    open_messages: list[str] = []
    last = ""
    after_colon = False
    line, line_begin = 1, 0
    for match in _TOKEN.finditer(text):
        word = match.group()
        if word == "\n":
            line, line_begin = line + 1, match.end()
        elif word in "{<":
            open_messages.append(last)
            last, after_colon = "", False
        elif word in "}>":
            if open_messages:
                open_messages.pop()
            last, after_colon = "", False
        elif word == ":":
            after_colon = True
        elif word[0].isalpha() or word[0] == "_":
            if after_colon:
                after_colon = False  # a value
                continue
            last = word
            here = [*open_messages, word]
            if here == wanted[: len(here)] and len(here) > best[0]:
                best = (len(here), (line, match.start() - line_begin + 1))
        elif word[0] != "#":
            after_colon = False  # a number, a string, a separator
    return best[1] if best[0] else None


def field_at(text: str, line: int, column: int) -> str:
    """The path ("cpu.limit") of the field that the place, both from 1, is in; "" where it is in none."""
    open_messages: list[str] = []
    last, complete, after_colon, in_list = "", True, False, False
    here, line_begin = 1, 0
    for match in _TOKEN.finditer(text):
        word = match.group()
        place = (here, match.start() - line_begin + 1)
        begins = (word[0].isalpha() or word[0] == "_") and complete and not after_colon and not in_list
        if place > (line, column) or (place == (line, column) and not begins):
            break
        if word == "\n":
            here, line_begin = here + 1, match.end()
        elif begins:
            last, complete = word, False
        elif word in "{<":
            open_messages.append(last)
            last, complete, after_colon, in_list = "", True, False, False
        elif word in "}>":
            last, complete = open_messages.pop() if open_messages else "", True
        elif word == ":":
            after_colon = True
        elif word in "[]":
            in_list = word == "["
            complete, after_colon = not in_list, False
        elif word[0] != "#":
            complete, after_colon = True, False
    return ".".join(filter(None, [*open_messages, last]))
