"""A grpc.aio server on a Unix socket of the run directory: published after listen, drained at the end.

`Server.stop` of grpc.aio does not wait for the clean-up of handlers that it cancelled, so every handler runs through
`Serving.guard`, which keeps the live ones and turns a ServiceError into its status.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tightship.common import errors
from tightship.common.health import Health
from tightship.common.reflection import Reflection
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


class Undecodable:
    """Stands for bytes that are no request: `guard` refuses it, where grpc would log it as a bug of ours."""


class _Registrar:
    """What generated code registers a service's methods with; requests that can't be decoded reach the handlers."""

    def __init__(self, server: grpc.aio.Server, names: list[str]) -> None:
        self._server = server
        self._names = names

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """The same methods as below, which are enough."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        lenient = {
            name: each if each.request_streaming else each._replace(request_deserializer=_lenient(each))
            for name, each in handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, lenient),))
        self._names.append(service)


def _lenient(handler: Any) -> Callable[[bytes], object]:
    decode: Callable[[bytes], object] = handler.request_deserializer

    def decode_or_stand_in(data: bytes) -> object:
        try:
            return decode(data)
        except DecodeError:
            return Undecodable()

    return decode_or_stand_in


class Serving:
    """One server and its live handlers."""

    def __init__(self, path: Path, interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()) -> None:
        self.path = path
        self.server = grpc.aio.server(options=OPTIONS, interceptors=interceptors)
        self.names: list[str] = []
        """Full names of the services added."""
        self.health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self._handlers: set[asyncio.Task[object]] = set()

    def add(self, register: Callable[[Any, Any], None], servicer: object) -> None:
        """Adds a service whose handlers give their request to `guard`; `register` is of the generated code."""
        register(servicer, _Registrar(self.server, self.names))

    async def start(self, mode: int = 0o660, gid: int | None = None) -> None:
        """Listens, then lets the socket appear at its path. Health says NOT_SERVING until `ready`."""
        await self._tell(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.server.add_generic_rpc_handlers((Reflection([*self.names, health.SERVICE_NAME]),))
        with publishing(self.path, mode, gid) as hidden:
            self.server.add_insecure_port(f"unix:{hidden}")
            await self.server.start()

    async def ready(self) -> None:
        """Health says SERVING from now on, of the server ("") and of each service."""
        await self._tell(health_pb2.HealthCheckResponse.SERVING)

    async def _tell(self, status: Any) -> None:
        for name in ("", *self.names):
            await self.health.set(name, status)

    @contextlib.asynccontextmanager
    async def guard(
        self, context: grpc.aio.ServicerContext[object, object], request: object = None
    ) -> AsyncIterator[None]:
        """Around the whole body of a handler."""
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            if isinstance(request, Undecodable):
                raise errors.ServiceError(
                    errors.Code.INVALID_ARGUMENT,
                    "UNDECODABLE",
                    "the request is cut short, or has text that is no UTF-8",
                )
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
