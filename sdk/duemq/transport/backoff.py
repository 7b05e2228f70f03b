"""Waits between attempts that go on until they succeed: exponential, with full jitter, bounded.

For loops without a deadline (reconnecting to a nameserver, joining a group).  A call that has a
deadline is retried with tenacity directly.
"""

from tenacity import RetryCallState
from tenacity.wait import wait_random_exponential


class Backoff:
    """The attempts of one loop."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self.attempts = 0
        """Failed attempts since the last success."""
        self._shortest_s = shortest_s
        self._wait = wait_random_exponential(multiplier=shortest_s, max=longest_s)

    def next_s(self) -> float:
        """Counts a failed attempt; how long to wait before the next, in seconds."""
        self.attempts += 1
        state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
        state.attempt_number = self.attempts
        return max(self._shortest_s, self._wait(state))

    def reset(self) -> None:
        """An attempt succeeded."""
        self.attempts = 0
