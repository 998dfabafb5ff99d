"""What the caller of a call may do, by the door that it came through. Nothing that it says about itself counts.

`current()` has the rights of the call that this task serves. On the main door these are ALL, the default, which costs a
look at a context variable; on every other door a `Keeper`, an interceptor of its server, puts them there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from tightship.common import errors, refused
from tightship.common.clients import Entry
from tightship.common.errors import Code, ServiceError

# Of a log line about a name that a stranger sent.
_SHOWN = 128


class Rights:
    """Of one client, or of the main door where there is no `entry`. A reload of the clients file changes `entry`."""

    __slots__ = ("calls", "door", "entry")

    def __init__(self, door: str, entry: Entry | None = None) -> None:
        self.door = door
        self.entry = entry
        self.calls = 0
        """Open at this service."""

    @property
    def client(self) -> str:
        """Its name; empty for the main door."""
        return self.entry.name if self.entry is not None else ""

    @property
    def whole(self) -> bool:
        """All names, and the verbs that are of no name."""
        return self.entry is None or "/" in self.entry.prefixes

    @property
    def home(self) -> str:
        """Where names are made up for it: a container's name, or "" for the root."""
        return "" if self.whole or self.entry is None else self.entry.prefixes[0]

    @property
    def run_as(self) -> str | None:
        """The user that its containers run as, where it has no choice."""
        return self.entry.run_as if self.entry is not None else None

    def sees(self, name: str) -> bool:
        """Whether the container name is its business."""
        entry = self.entry
        if entry is None:
            return True
        return any(each in ("/", name) or name.startswith(each + "/") for each in entry.prefixes)

    def hides(self, name: str) -> bool:
        """Whether what has this name must be as if it weren't there: the call is refused then, as one not found."""
        if self.sees(name):
            return False
        self.refuse(Code.NOT_FOUND, f"{name[:_SHOWN]!r} is none of its names")
        return True

    def check(self, name: str) -> None:
        """Raises PERMISSION_DENIED where it may make nothing of this name."""
        if self.sees(name):
            return
        assert self.entry is not None
        own = " ".join(self.entry.prefixes)
        self.refuse(Code.PERMISSION_DENIED, f"{name[:_SHOWN]!r} is none of its names")
        raise ServiceError(
            Code.PERMISSION_DENIED,
            "NAME_NOT_ALLOWED",
            f"{name} is not at or below {own}, where this client's containers are",
            None,
            name=name,
        )

    def check_launches(self, living: int) -> None:
        """Raises RESOURCE_EXHAUSTED where it has `living` containers and may not have one more."""
        if self.entry is None or living < self.entry.launches_max:
            return
        self.refuse(Code.RESOURCE_EXHAUSTED, f"{living} containers of its own live, which is its limit")
        raise ServiceError(
            Code.RESOURCE_EXHAUSTED,
            "LAUNCHES_MAX",
            f"{living} containers of client {self.client} live, which is its limit",
            None,
            client=self.client,
        )

    def made_by_another(self, name: str, may_not: str) -> ServiceError:
        """The refusal, counted, of what only the maker of that container may do."""
        self.refuse(Code.PERMISSION_DENIED, f"{name} was made by another")
        return ServiceError(
            Code.PERMISSION_DENIED,
            "MADE_BY_ANOTHER",
            f"{name} was not made by client {self.client}, who {may_not}",
            None,
            name=name,
        )

    def refuse(self, code: grpc.StatusCode, why: str) -> None:
        """Counts and logs that the call of this task is refused."""
        refused.note(self.door, code.name, why, client=self.client, method=_METHOD.get())


ALL = Rights("unix")

_CURRENT: ContextVar[Rights] = ContextVar("rights", default=ALL)
_METHOD: ContextVar[str] = ContextVar("method", default="")

current = _CURRENT.get


class Keeper(grpc.aio.ServerInterceptor):
    """At a door: gives its calls their rights; refuses methods that aren't for it, and calls over its limit.

    `shared` are the full names of the methods that look at rights themselves. `stranger`: nobody here is known, so
    all is refused.
    """

    def __init__(self, rights: Rights, shared: frozenset[str], *, stranger: bool = False) -> None:
        self._rights = rights
        self._shared = shared
        self._stranger = stranger

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # no such method
        method = handler_call_details.method
        rights = self._rights
        _CURRENT.set(rights)  # of this call's task alone
        _METHOD.set(method)
        error = self._error(method)
        if error is not None:
            rights.refuse(error.code, error.message)
            return _refusing(handler, error)
        task = asyncio.current_task()
        assert task is not None
        rights.calls += 1
        task.add_done_callback(self._over)
        return handler

    def _over(self, _: object) -> None:
        self._rights.calls -= 1

    def _error(self, method: str) -> ServiceError | None:
        rights = self._rights
        if self._stranger:
            return ServiceError(
                Code.UNAUTHENTICATED, "UNKNOWN_CERTIFICATE", "this certificate's name is no client's of this service"
            )
        if not rights.whole and method not in self._shared:
            return ServiceError(
                Code.PERMISSION_DENIED, "METHOD_NOT_ALLOWED", f"{method} is for clients with all rights", method=method
            )
        if rights.entry is not None and rights.calls >= rights.entry.calls_max:
            return ServiceError(
                Code.RESOURCE_EXHAUSTED,
                "CALLS_MAX",
                f"{rights.calls} calls of client {rights.client} are open, which is its limit",
                0.5,
                client=rights.client,
            )
        return None


def _refusing(handler: Any, error: ServiceError) -> Any:
    """A handler of the same kind that only answers with the error."""

    async def refuse(_request: object, context: Any) -> None:
        await errors.abort(context, error)

    kinds: dict[tuple[bool, bool], Callable[[Any], Any]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[handler.request_streaming, handler.response_streaming](refuse)
