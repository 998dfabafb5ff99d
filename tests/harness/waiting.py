"""Bounded waits of tests: for a condition, for a call's return, for the end of a process."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from tests.harness.patience import PATIENCE

T = TypeVar("T")


def until(done: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Raises AssertionError, naming `what`, where it is not so in time."""
    limit = time.monotonic() + timeout_s * PATIENCE
    while not done():
        assert time.monotonic() < limit, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)


def await_end(pidfd: int, timeout_s: float) -> None:
    """Until the process has ended, reaped or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(timeout_s * 1000), f"the process did not end within {timeout_s:g} s"


class Answer(Generic[T]):
    """A call in a thread of its own: its result or its gRPC error."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def arrived(self, timeout_s: float = 30.0) -> bool:
        """Whether it returned, in either way, in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self, timeout_s: float = 30.0) -> T:
        """Raises what the call raised."""
        assert self.arrived(timeout_s), f"no answer within {timeout_s:g} s"
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def error(self, timeout_s: float = 30.0) -> grpc.RpcError:
        """The gRPC error that the call must have ended with."""
        assert self.arrived(timeout_s), f"no answer within {timeout_s:g} s"
        assert isinstance(self._error, grpc.RpcError), f"no gRPC error but {self._error or self._result!r}"
        return self._error
