"""What the handlers of all calls share: errors to statuses, spans, whether anything may be changed now, and which
container is meant, as far as the caller may see it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from tightship.common import rights
from tightship.common.errors import Code, ServiceError, invalid
from tightship.common.serving import Serving
from tightship.common.telemetry import CallTrace, called
from tightship.containerizer import admission, names, requests
from tightship.containerizer.journal import Kind
from tightship.containerizer.operations import Operation, Parts

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_READY_TIMEOUT_S = 5.0


class Handlers:
    """Base of the servicer."""

    def __init__(self, parts: Parts, serving: Serving) -> None:
        self._parts = parts
        self._serving = serving
        self.ready = asyncio.Event()
        """Set when the spawner is there and recovery has begun."""
        self.stopping = asyncio.Event()

    @contextlib.asynccontextmanager
    async def _call(self, context: Context, method: str, request: Any) -> AsyncIterator[CallTrace]:
        """Around a handler: errors to statuses, and the call's span; gives the latter."""
        tracer = self._parts.tracer
        async with self._serving.guard(context, request):
            if not tracer.enabled:
                requests.known(request)
                yield CallTrace()
                return
            parent = tracer.traceparent_of(context.invocation_metadata())
            async with called(tracer, context, f"ContainerizerService/{method}", parent) as call:
                requests.known(request)
                yield call

    async def _mutating(self) -> None:
        """Raises UNAVAILABLE where nothing may be changed now."""
        self._parts.registry.finish()
        if self.stopping.is_set():
            raise shutting_down()
        if not self.ready.is_set():
            try:
                await asyncio.wait_for(self.ready.wait(), _READY_TIMEOUT_S)
            except TimeoutError:
                raise ServiceError(Code.UNAVAILABLE, "SPAWNER_AWAY", "the spawner can't be reached", 1.0) from None

    def _name_or_id(self, text: str) -> str:
        if text and not text.startswith("/"):
            if len(text) == 16 and all(char in "0123456789abcdef" for char in text):
                return text
            raise invalid("name", f"{text[:80]!r} is neither an absolute name nor an id", "BAD_NAME")
        return names.container(text)

    def _find(self, text: str) -> tuple[str, Operation | None]:
        """The name or id, and what lives of it. Raises NOT_FOUND for what the caller may not see."""
        name = self._name_or_id(text)
        operation = self._parts.registry.find(name)
        seen = operation.row.name if operation is not None else name
        if seen.startswith("/"):
            check_visible(seen, name)
        return name, operation

    def _living(self, text: str) -> Operation:
        """Raises NOT_FOUND, or UNAVAILABLE under recovery."""
        name, operation = self._find(text)
        if operation is None:
            raise not_found(name)
        if operation.recovering:
            raise admission.recovering(operation.row.name)
        return operation

    def _check_made(self, operation: Operation) -> None:
        """Raises PERMISSION_DENIED for a caller of some names who did not make it and all below: limits that others
        have set hold him too, then."""
        caller = rights.current()
        if caller.whole:
            return
        for each in (operation, *self._parts.registry.below(operation.row.name)):
            if each.row.client == caller.client or each.row.kind is Kind.CLEANUP:  # of a residue, which nobody made
                continue
            raise caller.made_by_another(each.row.name, "may not change or end it")


def check_visible(name: str, asked: str) -> None:
    """Raises NOT_FOUND where the container `name` is none of the caller's business; `asked` is what it said."""
    if rights.current().hides(name):
        raise not_found(asked)


def not_found(name: str) -> ServiceError:
    return ServiceError(Code.NOT_FOUND, "NOT_FOUND", f"no container {name}", None, name=name)


def shutting_down() -> ServiceError:
    return ServiceError(Code.UNAVAILABLE, "SHUTTING_DOWN", "the containerizer is shutting down", 1.0)
