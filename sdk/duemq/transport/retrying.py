"""How requests are repeated: tenacity, with jitter, until a deadline.

Only for what may be repeated: a request that is idempotent, and an error that says that the same
request can succeed later (`DuemqError.retryable`).
"""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential
from tenacity.stop import stop_base

from duemq.errors import DuemqError

# The first wait is drawn from [0, WAIT_S_MIN), each further one from twice that, up to WAIT_S_MAX.
WAIT_S_MIN = 0.05
WAIT_S_MAX = 1.0

T = TypeVar("T")


class _BeforeDeadline(stop_base):
    """Stops when the next attempt would start after `deadline` (time.monotonic)."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def __call__(self, retry_state: RetryCallState) -> bool:
        return time.monotonic() + retry_state.upcoming_sleep >= self._deadline


def is_retryable(error: BaseException) -> bool:
    """Whether the same request can succeed later."""
    return isinstance(error, DuemqError) and error.retryable


def backoff(wait_s_max: float = WAIT_S_MAX) -> wait_random_exponential:
    """The waits between attempts: exponential, full jitter."""
    return wait_random_exponential(multiplier=WAIT_S_MIN, max=wait_s_max)


async def until(deadline: float, attempt: Callable[[float], Awaitable[T]]) -> T:
    """Calls `attempt(seconds left)` until it succeeds, fails for good or `deadline` is near.

    `deadline` is in time.monotonic's seconds.  Raises the last attempt's error.
    """
    async for trial in AsyncRetrying(
        retry=retry_if_exception(is_retryable),
        wait=backoff(),
        stop=_BeforeDeadline(deadline),
        reraise=True,
    ):
        with trial:
            return await attempt(max(0.001, deadline - time.monotonic()))
    raise AssertionError("tenacity neither returned nor raised")  # pragma: no cover
