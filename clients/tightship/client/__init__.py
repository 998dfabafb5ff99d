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
    from tightship.client.errors import (
        AlreadyExists,
        Cancelled,
        DeadlineExceeded,
        FailedPrecondition,
        InvalidArgument,
        NotFound,
        PermissionDenied,
        ResourceExhausted,
        TightshipError,
        Unauthenticated,
        Unavailable,
        Unimplemented,
    )
    from tightship.client.launch import AsyncLaunch
    from tightship.client.requests import LaunchOptions
    from tightship.client.streams import AsyncInput, Chunk
    from tightship.client.sync import Client, Input, Launch

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncInput",
    "AsyncLaunch",
    "Cancelled",
    "Chunk",
    "Client",
    "Completed",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Input",
    "InvalidArgument",
    "Launch",
    "LaunchOptions",
    "NotFound",
    "PermissionDenied",
    "ResourceExhausted",
    "TightshipError",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
]

_MODULES = {
    "AlreadyExists": "errors",
    "AsyncClient": "aio",
    "AsyncInput": "streams",
    "AsyncLaunch": "launch",
    "Cancelled": "errors",
    "Chunk": "streams",
    "Client": "sync",
    "Completed": "aio",
    "DeadlineExceeded": "errors",
    "FailedPrecondition": "errors",
    "Input": "sync",
    "InvalidArgument": "errors",
    "Launch": "sync",
    "LaunchOptions": "requests",
    "NotFound": "errors",
    "PermissionDenied": "errors",
    "ResourceExhausted": "errors",
    "TightshipError": "errors",
    "Unauthenticated": "errors",
    "Unavailable": "errors",
    "Unimplemented": "errors",
}


def __getattr__(name: str) -> object:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
