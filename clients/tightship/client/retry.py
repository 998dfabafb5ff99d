"""When a failed call may be made again, and how long: only where that can't do a thing twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc

from tightship.client.errors import TightshipError

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 0.5


def refused(error: TightshipError) -> bool:
    """The service did nothing and asks to try again: safe for every call."""
    return error.code is grpc.StatusCode.UNAVAILABLE and error.retry_after is not None


def away(error: TightshipError) -> bool:
    """The service is away or ended the call: safe where the call can be repeated."""
    return error.code is grpc.StatusCode.UNAVAILABLE


async def again(
    call: Callable[[], Awaitable[T]], first: TightshipError, safe: Callable[[TightshipError], bool], patience_s: float
) -> T:
    """Makes the call that failed with `first` again, with backoff and jitter, for `patience_s` at most.

    Raises the last TightshipError. An error that is not `safe` ends it at once.
    """
    from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

    backoff = wait_random_exponential(_FIRST_WAIT_S, _LONGEST_WAIT_S)
    failed: list[TightshipError] = [first]

    def wait(state: RetryCallState) -> float:
        asked = failed.pop().retry_after if failed else None
        return max(backoff(state), min(asked or 0.0, _LONGEST_WAIT_S))

    async def attempt() -> T:
        if failed and failed[0] is first:
            raise first  # the attempt that was made before
        try:
            return await call()
        except TightshipError as error:
            failed[:] = [error]
            raise

    retrying = AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, TightshipError) and safe(error)),
        stop=stop_after_delay(patience_s),
        wait=wait,
        reraise=True,
    )
    return await retrying(attempt)
