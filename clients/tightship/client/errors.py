"""A failed call as one exception: the gRPC code, a message that says what to do, and what google.rpc details name."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

_DETAILS = "grpc-status-details-bin"


class TightshipError(Exception):
    """A call that failed.

    `code` is the gRPC code, `reason` a constant in upper case ("" where the failure is the transport's). `metadata`
    has what applies of field, file, value, errno, line, column, stage, name, path; the properties give the usual ones,
    None where absent. `retry_after` (seconds) is set where the service refused before doing anything and asks to
    try again.
    """

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

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"

    @property
    def number(self) -> int:
        """The code's number, for example 5 for NOT_FOUND."""
        number: int = self.code.value[0]
        return number

    @property
    def field(self) -> str | None:
        return self.metadata.get("field")

    @property
    def file(self) -> str | None:
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
        return _number(self.metadata.get("line"))

    @property
    def column(self) -> int | None:
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
            if detail.Unpack(info):
                self.reason = info.reason
                self.metadata.update(info.metadata)
            elif detail.Unpack(retry):
                self.retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
