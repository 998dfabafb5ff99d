"""The pages of List: what lives in the order of its tree, then the records from the oldest on, in bounded answers.

Of either only what the caller may see.

A page token tells the last one given: its name, or its place among the records. What ends between two pages may be
told twice, first living and then ended, with one id; nothing that stays is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tightship.common import rights
from tightship.common.errors import Code, ServiceError, invalid
from tightship.containerizer import describe, names
from tightship.containerizer.operations import Parts
from tightship.v1 import containerizer_pb2 as pb

# What a gRPC client takes unless told otherwise is 4 MiB; one container is far below the difference.
_BYTES_MAX = 3 << 20
# Tag and length of a container in the answer, at most.
_FRAME = 6
# Containers whose usage is read in one turn of the loop.
_TURN = 8
# A row's number in SQLite has at most 19.
_DIGITS = 19


def page(parts: Parts, request: pb.ListRequest) -> pb.ListResponse:
    """Never waits. Raises INVALID_ARGUMENT, or NOT_FOUND where nothing has the name."""
    if request.page_size < 0:
        raise invalid("page_size", f"{request.page_size} is less than 0")
    top = names.normalize(request.name) if request.name else "/"
    response = pb.ListResponse()
    size = 0
    last = ""
    for token, container in _listed(parts, request, top):
        size += container.ByteSize() + _FRAME
        full = size > _BYTES_MAX or 0 < request.page_size <= len(response.containers)
        if full and response.containers:
            response.next_page_token = last
            break
        response.containers.append(container)
        last = token
    known = response.containers or request.records or request.page_token or top == "/"
    if not known:
        raise ServiceError(Code.NOT_FOUND, "NOT_FOUND", f"no container {top}", None, name=top)
    return response


async def add_usage(parts: Parts, response: pb.ListResponse) -> None:
    """Fills `usage` of the living: some tens of µs each, and others get their turn in between."""
    for number, container in enumerate(response.containers):
        if container.state != pb.Container.ENDED:
            if number % _TURN == 0:
                await asyncio.sleep(0)
            container.usage.CopyFrom(describe.usage(parts.machine, container.name))


def _listed(parts: Parts, request: pb.ListRequest, top: str) -> Iterator[tuple[str, pb.Container]]:
    """What comes after the request's token, each with the token of its place."""
    name, after = _place(request.page_token)
    sees = rights.current().sees
    if after is None:
        registry = parts.registry
        itself = registry.named(top)
        found = registry.below(top) if request.recursive else registry.children(top)
        last = name.split("/") if name else []
        for operation in [itself, *found] if itself is not None else found:
            if operation.row.name.split("/") > last and sees(operation.row.name):
                yield f"living {operation.row.name}", describe.living(operation, with_limits=False)
    if request.records:
        for (ended, number), record in parts.journal.records_after(after or (0.0, 0)):
            if (top in ("/", record.name) or names.is_below(record.name, top)) and sees(record.name):
                yield f"ended {ended!r} {number}", describe.ended(record)


def _place(token: str) -> tuple[str, tuple[float, int] | None]:
    """The last name given, or the place of the last record given. Raises INVALID_ARGUMENT."""
    try:
        match token.split(" "):
            case [""]:
                return "", None
            case ["living", name]:
                return names.container(name, "page_token"), None
            case ["ended", ended, number] if len(number) < _DIGITS:
                return "", (float(ended), int(number))
    except ValueError:
        pass
    raise invalid("page_token", "is none that an answer of List had")
