"""The grpc.aio servers of a service: one on its Unix socket of the run directory, and one for each further door.

They share loop and servicers. A socket is published after listen; at the end all are drained.

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
from tightship.common.reflection import METHODS, Reflection
from tightship.common.rights import Keeper, Rights
from tightship.common.rundir import publishing

# Legal requests reach 2 MiB of argv; above, our own check names the field.
MAX_MESSAGE = 16 << 20

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 262144),
    ("grpc.so_reuseport", 0),
    # What asks every 10 s or slower whether we are there is no flood, though nothing is said in between.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)


class Undecodable:
    """Stands for bytes that are no request: `guard` refuses it, where grpc would log it as a bug of ours."""


class _Registrar:
    """What generated code registers a service's methods with."""

    def __init__(self) -> None:
        self.services: dict[str, dict[str, Any]] = {}

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """The same methods as below, which are enough."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.services[service] = handlers


def _registered(register: Callable[[Any, Any], None], servicer: object) -> dict[str, dict[str, Any]]:
    registrar = _Registrar()
    register(servicer, registrar)
    return registrar.services


def _lenient(handler: Any) -> Callable[[bytes], object]:
    decode: Callable[[bytes], object] = handler.request_deserializer

    def decode_or_stand_in(data: bytes) -> object:
        try:
            return decode(data)
        except DecodeError:
            return Undecodable()

    return decode_or_stand_in


class Serving:
    """The servers and their live handlers. `path` is that of the main door, whose callers have all rights."""

    def __init__(self, path: Path, interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()) -> None:
        self.path = path
        self.server = grpc.aio.server(options=OPTIONS, interceptors=interceptors)
        self.names: list[str] = []
        """Full names of the services added."""
        self.health = Health()
        self._services: dict[str, dict[str, Any]] = {}
        self._shared = set(METHODS)
        self._doors: list[grpc.aio.Server] = []
        self._reflection: Reflection | None = None
        self._handlers: set[asyncio.Task[object]] = set()
        self.add_common(health_pb2_grpc.add_HealthServicer_to_server, self.health)

    def add(self, register: Callable[[Any, Any], None], servicer: object, shared: frozenset[str] = frozenset()) -> None:
        """Adds a service whose handlers give their request to `guard`; `register` is of the generated code.

        `shared`: the methods that look at the caller's rights themselves. The others are for those with all rights.
        """
        for service, handlers in _registered(register, servicer).items():
            lenient = {
                name: each if each.request_streaming else each._replace(request_deserializer=_lenient(each))
                for name, each in handlers.items()
            }
            self._add(service, lenient, shared)
            self.names.append(service)

    def add_common(self, register: Callable[[Any, Any], None], servicer: object) -> None:
        """Adds a service that tells nothing of any container: for whoever may come in at all."""
        for service, handlers in _registered(register, servicer).items():
            self._add(service, handlers, frozenset(handlers))

    def _add(self, service: str, handlers: dict[str, Any], shared: frozenset[str]) -> None:
        self._services[service] = handlers
        self._shared |= {f"/{service}/{method}" for method in shared}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    async def start(self, mode: int = 0o660, gid: int | None = None) -> None:
        """Listens, then lets the socket appear at its path. Health says NOT_SERVING until `ready`."""
        await self._tell(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._reflection = Reflection([*self.names, health.SERVICE_NAME])
        self.server.add_generic_rpc_handlers((self._reflection,))
        with publishing(self.path, mode, gid) as hidden:
            self.server.add_insecure_port(f"unix:{hidden}")
            await self.server.start()

    async def ready(self) -> None:
        """Health says SERVING from now on, of the server ("") and of each service."""
        await self._tell(health_pb2.HealthCheckResponse.SERVING)

    async def _tell(self, status: Any) -> None:
        for name in ("", *self.names):
            await self.health.set(name, status)

    def door(self, rights: Rights, *, stranger: bool = False) -> grpc.aio.Server:
        """One more server with the same services, not started: whoever comes in by it has these rights."""
        assert self._reflection is not None, "doors are opened after the main one"
        keeper = Keeper(rights, frozenset(self._shared), stranger=stranger)
        server = grpc.aio.server(options=OPTIONS, interceptors=(keeper,))
        server.add_generic_rpc_handlers(
            (
                *(grpc.method_handlers_generic_handler(*service) for service in self._services.items()),
                self._reflection,
            )
        )
        self._doors.append(server)
        return server

    async def shut(self, server: grpc.aio.Server, grace: float) -> None:
        """Ends one `door`: refuses new calls, gives the live ones `grace` seconds."""
        self._doors.remove(server)
        await server.stop(grace)

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
            await errors.abort(context, error)
        finally:
            self._handlers.discard(task)

    async def stop(self, grace: float) -> None:
        """Refuses new calls, gives the live ones `grace` seconds, then waits for their clean-up (1 s at most)."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        await self.health.enter_graceful_shutdown()
        await asyncio.gather(*(server.stop(grace) for server in (self.server, *self._doors)))
        if self._handlers:
            await asyncio.wait(set(self._handlers), timeout=1.0)
