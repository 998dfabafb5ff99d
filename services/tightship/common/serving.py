"""A grpc.aio server on a Unix socket of the run directory: published after listen, drained at the end.

`Server.stop` of grpc.aio does not wait for the clean-up of handlers that it cancelled, so every handler runs through
`Serving.guard`, which keeps the live ones and turns a ServiceError into its status.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from tightship.common import errors
from tightship.common.rundir import publishing

# Legal requests reach 2 MiB of argv; above, our own check names the field.
MAX_MESSAGE = 16 << 20

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 262144),
    ("grpc.so_reuseport", 0),
)


class Serving:
    """One server and its live handlers."""

    def __init__(self, path: Path, interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()) -> None:
        self.path = path
        self.server = grpc.aio.server(options=OPTIONS, interceptors=interceptors)
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self._handlers: set[asyncio.Task[object]] = set()

    async def start(self, mode: int = 0o660, gid: int | None = None) -> None:
        """Listens, then lets the socket appear at its path."""
        with publishing(self.path, mode, gid) as hidden:
            self.server.add_insecure_port(f"unix:{hidden}")
            await self.server.start()

    @contextlib.asynccontextmanager
    async def guard(self, context: grpc.aio.ServicerContext[object, object]) -> AsyncIterator[None]:
        """Around the whole body of a handler."""
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            yield
        except errors.ServiceError as error:
            try:
                await errors.abort(context, error)
            except grpc.aio.InternalError as gone:
                # The call is over for its caller, who left first: there is nobody to be told, and nothing to be logged.
                raise asyncio.CancelledError from gone
        finally:
            self._handlers.discard(task)

    async def stop(self, grace: float) -> None:
        """Refuses new calls, gives the live ones `grace` seconds, then waits for their clean-up (1 s at most)."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace)
        if self._handlers:
            await asyncio.wait(set(self._handlers), timeout=1.0)
