"""Specs as a user gives them: protobuf text as it is, or with --json also JSON, which becomes a message here.

Text never begins with "{", so that the two can't be taken for each other. What is wrong in JSON is told with line and
column, by us or, for what only the service sees, from the field that it names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tightship.cli.failure import INVALID_ARGUMENT, Failure

if TYPE_CHECKING:
    from tightship.v1.spec_pb2 import ContainerSpec

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|\n')
# What json and json_format say of where they were.
_PLACE = re.compile(r"line (\d+) column (\d+)")
_UNKNOWN = re.compile(r'no field named "([^"]+)" at "ContainerSpec(?:\.([^"]*))?"')


def is_json(text: str) -> bool:
    return text.lstrip().startswith("{")


def parse(text: str, *, json: bool) -> str | ContainerSpec:
    """For a request. `json`: whether JSON is taken. Raises Failure."""
    if not is_json(text):
        return text
    if not json:
        raise _failure("this is JSON, which is read with --json; without, write cpu { limit: 1000 }", None)
    from google.protobuf import json_format

    from tightship.v1.spec_pb2 import ContainerSpec

    try:
        return json_format.Parse(text, ContainerSpec())
    except json_format.ParseError as error:
        said = str(error).split("\n", 1)[0]
        if place := _PLACE.search(said):
            raise _failure(_bare(said).split(": line")[0], (int(place[1]), int(place[2]))) from None
        if unknown := _UNKNOWN.search(said):
            path = ".".join(filter(None, [unknown[2], unknown[1]]))
            raise _failure(f"{path}: no such field in this version", locate(text, path), path) from None
        path = _path(said)
        raise _failure(_bare(said), locate(text, path) if path else None, path) from None
    except RecursionError:
        raise _failure("it is nested too deep", None) from None


def place(text: str | None, metadata: dict[str, str]) -> None:
    """Adds line and column to the metadata of a service's error, where it names a field of a spec that was JSON."""
    if text and is_json(text) and "field" in metadata and "line" not in metadata:
        found = locate(text, metadata["field"])
        if found is not None:
            metadata["line"], metadata["column"] = map(str, found)


def locate(text: str, path: str) -> tuple[int, int] | None:
    """Line and column, from 1, of the key that `path` ("cpu.mask", also "cpu.maxLimit") names in JSON, or of the
    deepest part of it there is."""
    wanted = [_plain(word) for word in path.split(".")]
    best: tuple[int, tuple[int, int]] = (0, (0, 0))
    inside: list[str] = []
    key, after_colon = "", False
    line, begin = 1, 0
    for match in _TOKEN.finditer(text):
        word = match.group()
        if word == "\n":
            line, begin = line + 1, match.end()
        elif word == "{":
            inside.append(key)
            key, after_colon = "", False
        elif word == "}":
            key = inside.pop() if inside else ""
        elif word == ":":
            after_colon = True
        elif word == ",":
            after_colon = False
        elif word[0] == '"' and not after_colon:
            key = word[1:-1]
            here = [_plain(each) for each in [*inside[1:], key]]
            if here == wanted[: len(here)] and len(here) > best[0]:
                best = (len(here), (line, match.start() - begin + 1))
    return best[1] if best[0] else None


def _plain(key: str) -> str:
    """JSON takes `max_limit` and `maxLimit`; repeated fields are told with an index."""
    return key.partition("[")[0].replace("_", "").lower()


def _bare(said: str) -> str:
    """Without where it was, which is told by itself."""
    return re.split(r"Failed to (?:parse \w+ field|load JSON): ", said)[-1].split(" at ContainerSpec")[0].rstrip(".")


def _path(said: str) -> str:
    """Of "Failed to parse cpu field: Failed to parse limit field: ..."."""
    return ".".join(re.findall(r"Failed to parse (\w+) field", said))


def _failure(message: str, where: tuple[int, int] | None, field: str = "") -> Failure:
    metadata = {"field": field} if field else {}
    if where is not None:
        metadata["line"], metadata["column"] = map(str, where)
    return Failure(INVALID_ARGUMENT, f"spec: {message}", None, "BAD_SPEC", metadata)
