"""The services' tracer, under the name they use, and the span of a call as its server tells it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from tightship.common.errors import ServiceError
from tightship.telemetry import Tracer
from tightship.telemetry import conventions as names

__all__ = ["CallTrace", "Tracer", "called", "why_ended"]

# A call with so little time left has met its deadline, not a cancel.
_EXPIRED_S = 0.05


@dataclass(slots=True)
class CallTrace:
    """Traceparents of a call of ours and of its caller; empty where tracing is off."""

    own: str = ""
    caller: str = ""
    answered: bool = False
    """The last message is on its way: an end by the client is none of an error."""
    links: list[str] = field(default_factory=list)

    def link(self, trace: str) -> bool:
        """This call is about what is in that trace; whether it is another one, which may link back."""
        other = bool(self.own and trace) and trace[3:35] != self.own[3:35]
        if other:
            self.links.append(trace)
        return other


@contextlib.asynccontextmanager
async def called(
    tracer: Tracer, context: grpc.aio.ServicerContext[Any, Any], method: str, parent: str
) -> AsyncIterator[CallTrace]:
    """Around a handler's body, within its guard: the server's span, sent at the end. `method` is "Service/Method"."""
    call = CallTrace(tracer.context(parent), parent)
    begun = time.time_ns()
    status, message = "OK", ""
    try:
        yield call
    except ServiceError as failed:
        status, message = failed.code.name, failed.message
        raise
    except (asyncio.CancelledError, GeneratorExit):
        if not call.answered:
            status = "DEADLINE_EXCEEDED" if why_ended(context) == "deadline_exceeded" else "CANCELLED"
        raise
    except Exception as failed:
        status, message = "UNKNOWN", repr(failed)
        raise
    finally:
        name = f"tightship.v1.{method}"
        tracer.emit(
            call.own,
            parent or None,
            name,
            begun,
            time.time_ns(),
            kind="server",
            attributes={names.RPC_SYSTEM: "grpc", names.RPC_METHOD: name, names.RPC_STATUS: status},
            error=(message or status) if status in names.SERVER_ERRORS else None,
            error_type=status,
            links=call.links,
        )


def why_ended(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Whether a call that was ended by its caller met its deadline: "deadline_exceeded" or "client_cancelled"."""
    remaining = context.time_remaining()
    return "deadline_exceeded" if remaining is not None and remaining <= _EXPIRED_S else "client_cancelled"
