"""Errors as callers see them: a gRPC code, a message that says what to do, and google.rpc details."""

from __future__ import annotations

import asyncio
import errno as errno_names
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "tightship"

Code = grpc.StatusCode


class ServiceError(Exception):
    """A failure with a meaning for the caller.

    `reason` is a constant in upper case; `metadata` names what applies of field, file, value, errno, line, column,
    name, path. `retry_after` (seconds) becomes RetryInfo.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        retry_after: float | None = None,
        **metadata: object,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.details: list[Message] = []
        """Messages that go along in the status."""
        self.metadata = {key: str(value) for key, value in metadata.items() if value is not None}

    def rpc_status(self) -> grpc.Status:
        """As a status with details, for `abort_with_status`."""
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)
        details = [_any(info)]
        if "field" in self.metadata:
            bad = error_details_pb2.BadRequest()
            bad.field_violations.add(field=self.metadata["field"], description=self.message, reason=self.reason)
            details.append(_any(bad))
        if self.retry_after is not None:
            whole = int(self.retry_after)
            delay = duration_pb2.Duration(seconds=whole, nanos=int((self.retry_after - whole) * 1e9))
            details.append(_any(error_details_pb2.RetryInfo(retry_delay=delay)))
        details += [_any(message) for message in self.details]
        number: int = self.code.value[0]
        status = status_pb2.Status(code=number, message=self.message, details=details)
        converted: grpc.Status = rpc_status.to_status(status)
        return converted


def invalid(field: str, message: str, reason: str = "BAD_FIELD", **metadata: object) -> ServiceError:
    """INVALID_ARGUMENT naming `field`."""
    return ServiceError(Code.INVALID_ARGUMENT, reason, f"{field}: {message}", None, field=field, **metadata)


def errno_name(number: int | None) -> str:
    """`EINVAL` for 22; the number itself where it has no name."""
    return errno_names.errorcode.get(number or 0, str(number))


async def abort(context: grpc.aio.ServicerContext[object, object], error: ServiceError) -> NoReturn:
    """Ends the call with the error. Raises AbortError, which no broad except may eat."""
    try:
        await context.abort_with_status(error.rpc_status())
    except grpc.aio.InternalError as gone:
        # The call is over for its caller, who left first: there is nobody to be told, and nothing to be logged.
        raise asyncio.CancelledError from gone
    raise AssertionError("abort_with_status returned")


def _any(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed
