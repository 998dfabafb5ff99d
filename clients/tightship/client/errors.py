"""A failed call as an exception by its code, with a message that says what to do, and what google.rpc details name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from tightship.v1 import containerizer_pb2 as pb

_DETAILS = "grpc-status-details-bin"


class TightshipError(Exception):
    """A call that failed. What is raised is the subclass of its code, where there is one.

    `code` is the gRPC code, `reason` a constant in upper case ("" where the failure is the transport's). `metadata`
    has what applies of field, file, value, errno, line, column, stage, name, path; the properties give the usual ones,
    None where absent. `retry_after` (seconds) is set where the service refused before doing anything and asks to
    try again. `cleanup` tells what is left, where a cleanup is pending.
    """

    def __new__(cls, code: grpc.StatusCode, *_rest: object, **_named: object) -> TightshipError:
        return super().__new__(_BY_CODE.get(code, cls) if cls is TightshipError else cls)

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = metadata or {}
        self.retry_after = retry_after
        self.cleanup: pb.Cleanup | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        made = (self.code, self.message, self.reason, self.metadata, self.retry_after)
        return type(self), made, {"cleanup": self.cleanup}

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"

    @property
    def number(self) -> int:
        """The code's number, for example 5 for NOT_FOUND."""
        number: int = self.code.value[0]
        return number

    @property
    def field(self) -> str | None:
        """The field of the request or the spec that is meant, for example "memory.limit"."""
        return self.metadata.get("field")

    @property
    def file(self) -> str | None:
        """The file of the kernel that refused."""
        return self.metadata.get("file")

    @property
    def errno(self) -> str | None:
        """The errno's name, for example "ENOENT"."""
        return self.metadata.get("errno")

    @property
    def stage(self) -> str | None:
        """Where in a launch it failed, for example "exec"."""
        return self.metadata.get("stage")

    @property
    def line(self) -> int | None:
        """Of a text spec, from 1."""
        return _number(self.metadata.get("line"))

    @property
    def column(self) -> int | None:
        """Of a text spec, from 1."""
        return _number(self.metadata.get("column"))

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> TightshipError:
        """What the failed call says."""
        made = cls(error.code(), error.details() or error.code().name)
        for key, value in error.trailing_metadata() or ():
            if key == _DETAILS and isinstance(value, bytes):
                made._read(status_pb2.Status.FromString(value))
        return made

    def _read(self, status: Any) -> None:
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            retry = error_details_pb2.RetryInfo()
            cleanup = pb.Cleanup()
            if detail.Unpack(info):
                self.reason = info.reason
                self.metadata.update(info.metadata)
            elif detail.Unpack(retry):
                self.retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
            elif detail.Unpack(cleanup):
                self.cleanup = cleanup


class Cancelled(TightshipError):
    """The call was cancelled, by its caller or on the way."""


class InvalidArgument(TightshipError):
    """The request is wrong whatever the state: `field`, and `line` and `column` in a text spec."""


class DeadlineExceeded(TightshipError):
    """No answer in time; or (reason CLEANUP_PENDING) a cleanup is over its budget and goes on."""


class NotFound(TightshipError):
    """No such container, lease, or command (reason EXEC_FAILED)."""


class AlreadyExists(TightshipError):
    """The name is taken, or the request id was used for something else."""


class PermissionDenied(TightshipError):
    """This client may not do that; or (reason EXEC_FAILED) the command may not be executed."""


class ResourceExhausted(TightshipError):
    """A limit is reached: of containers, leases, readers, or of this client."""


class FailedPrecondition(TightshipError):
    """Not in this state: in use, closing, ended."""


class Unimplemented(TightshipError):
    """A field that this machine or version can't honour: `field`."""


class Unavailable(TightshipError):
    """A service is away, or (with `retry_after`) asks to try again."""


class Unauthenticated(TightshipError):
    """The service does not know who this client is."""


_BY_CODE: dict[grpc.StatusCode, type[TightshipError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Around an await of a call: its failure as TightshipError. So is a cancel of the call that is not its task's."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        failed = TightshipError.of(error)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        failed = TightshipError(grpc.StatusCode.CANCELLED, "the call was ended by this client")
    else:
        return
    # Raised here, it has no context: that would keep the call, and the call its connection, as long as the error lives.
    raise failed


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
