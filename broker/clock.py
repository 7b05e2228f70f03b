"""Whether the clock may be believed when something is to be removed for its age.  Pure.

The clock that everybody reads may be set: wrongly for a while, or right after it was wrong.  What
it says is compared with a clock that nobody sets.  A jump by itself removes nothing: ages count
again when the clock has gone on evenly for an hour, time enough for somebody to see the warning.
"""

JUMP_MS = 60_000
SETTLED_MS = 3_600_000


class ClockWatch:
    """Looks at both clocks now and then."""

    def __init__(self, last_ms: int, now_ms: int, steady_ms: int) -> None:
        """`last_ms`: what the clock said last before this process, as far as is known."""
        self._ahead_ms = now_ms - steady_ms
        self._settles_ms = steady_ms
        if abs(now_ms - last_ms) > SETTLED_MS:  # it was off for long, or the clock is wrong
            self._settles_ms += SETTLED_MS

    def look(self, now_ms: int, steady_ms: int) -> int:
        """How far the clock has jumped since the last look; 0: it has not."""
        jump_ms = now_ms - steady_ms - self._ahead_ms
        self._ahead_ms += jump_ms
        if abs(jump_ms) <= JUMP_MS:
            return 0
        self._settles_ms = steady_ms + SETTLED_MS
        return jump_ms

    def is_settled(self, steady_ms: int) -> bool:
        """Whether ages by the clock are ages."""
        return steady_ms >= self._settles_ms
