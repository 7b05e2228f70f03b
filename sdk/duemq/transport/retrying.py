"""How calls are repeated: exponential waits with full jitter, so that clients do not come in step.

A call with a deadline is repeated by tenacity (`until`, `until_blocking`): an idempotent request,
after an error that says that it can succeed later (`DuemqError.retryable`).  A loop without one
waits as its `Backoff` says.
"""

import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from copy import copy
from typing import Any, NoReturn, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_before_delay,
    wait_random_exponential,
)

from duemq.errors import DuemqError, Timeout

# The first wait is drawn from [0, WAIT_S_MIN), each further one from twice that, up to WAIT_S_MAX.
WAIT_S_MIN = 0.05
WAIT_S_MAX = 1.0
# An attempt with less time than this would be cut off, and its error say only that.
ATTEMPT_S_MIN = 0.05
# More would leave the range of floats.
_DOUBLINGS_MAX = 64

T = TypeVar("T")


def is_retryable(error: BaseException) -> bool:
    """Whether the same request can succeed later."""
    return isinstance(error, DuemqError) and error.retryable


def raise_one_of(failures: Iterable[BaseException | None]) -> None:
    """Raises one, if there is any: better one that is not retryable."""
    for failure in sorted(filter(None, failures), key=is_retryable):
        raise failure


class _Tries:
    """The rules of one wait, and the error that says most so far."""

    def __init__(self, deadline: float, away_s: float = math.inf) -> None:
        self._began = time.monotonic()
        self._deadline = deadline
        self._away_deadline = self._began + away_s
        self._cause: DuemqError | None = None

    def rules(self) -> dict[str, Any]:
        """No attempt but the first starts with less than ATTEMPT_S_MIN left."""
        return {
            "retry": retry_if_exception(self._again),
            "wait": wait_random_exponential(multiplier=WAIT_S_MIN, max=WAIT_S_MAX),
            "stop": stop_before_delay(self._deadline - ATTEMPT_S_MIN - time.monotonic()),
            "retry_error_callback": self._end,
        }

    def _again(self, error: Any) -> bool:
        if not is_retryable(error):
            return False
        if not isinstance(error, Timeout):
            self._cause = error
        is_away = error.field in ("timer_queue", "timer_shard")
        return not (is_away and time.monotonic() >= self._away_deadline)

    def _end(self, state: RetryCallState) -> NoReturn:
        last: Any = state.outcome and state.outcome.exception()
        if self._cause is None or not isinstance(last, Timeout):
            raise last
        tried_s = time.monotonic() - self._began
        why = self._cause
        told = copy(last)  # still a Timeout: the last attempt may have done it
        told.message = f"{why.message} (tried for {tried_s:.3g} s; at last: {last.message})"
        told.field, told.value, told.limit = why.field, why.value, why.limit
        raise told from why


async def until(
    deadline: float, attempt: Callable[[float], Awaitable[T]], away_s: float = math.inf
) -> T:
    """Calls `attempt(seconds left)` until it succeeds, fails for good or `deadline` is near.

    `deadline` is in time.monotonic's seconds.  After `away_s` a timer shard that is away ends it.
    Raises the last attempt's error; a Timeout says, too, what was wrong before, if anything.
    """
    tries = _Tries(deadline, away_s)
    failed: Exception | None = None
    try:
        return await attempt(max(0.001, deadline - time.monotonic()))
    except Exception as error:
        if not is_retryable(error):
            raise
        failed = error
    async for trial in AsyncRetrying(**tries.rules()):  # costs more than many an attempt
        with trial:
            if failed is not None:  # the first one was made
                first, failed = failed, None
                raise first
            return await attempt(max(0.001, deadline - time.monotonic()))
    raise AssertionError("tenacity neither returned nor raised")  # pragma: no cover


def until_blocking(deadline: float, attempt: Callable[[], T]) -> T:
    """As `until`, of a function that blocks."""
    return Retrying(**_Tries(deadline).rules())(attempt)


class Backoff:
    """The waits of one loop: between `shortest_s` and `longest_s`, which they reach by doubling."""

    def __init__(self, shortest_s: float = 0.05, longest_s: float = 2.0) -> None:
        self.attempts = 0
        """Failed attempts since the last success."""
        self._shortest_s = shortest_s
        self._longest_s = longest_s

    def next_s(self) -> float:
        """Counts a failed attempt; how long to wait before the next, in seconds."""
        highest_s = self._shortest_s * 2.0 ** min(self.attempts, _DOUBLINGS_MAX)
        self.attempts += 1
        return max(self._shortest_s, random.uniform(0, min(highest_s, self._longest_s)))

    def reset(self) -> None:
        """An attempt succeeded."""
        self.attempts = 0
