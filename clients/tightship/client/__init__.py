"""Client library: `AsyncClient` for asyncio, `Client` for everything else.

    with Client() as client, client.launch(["sh", "-c", "echo hi"], spec="memory { limit: 67108864 }") as run:
        for chunk in run.output():
            print(chunk.stream, chunk.data)
        print(run.wait().exit_code)

Names are loaded when they are used: gRPC takes 0.1 s to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tightship.client.aio import AsyncClient, Completed
    from tightship.client.errors import TightshipError
    from tightship.client.launch import AsyncLaunch
    from tightship.client.streams import AsyncInput, Chunk
    from tightship.client.sync import Client, Input, Launch

__all__ = [
    "AsyncClient",
    "AsyncInput",
    "AsyncLaunch",
    "Chunk",
    "Client",
    "Completed",
    "Input",
    "Launch",
    "TightshipError",
]

_MODULES = {
    "AsyncClient": "aio",
    "Completed": "aio",
    "TightshipError": "errors",
    "AsyncLaunch": "launch",
    "AsyncInput": "streams",
    "Chunk": "streams",
    "Client": "sync",
    "Input": "sync",
    "Launch": "sync",
}


def __getattr__(name: str) -> object:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
