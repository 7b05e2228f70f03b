"""What follows when the clock that everybody reads is set.  Pure.

`ClockWatch`: whether it may be believed when something is to be removed for its age.

The clock that everybody reads may be set: wrongly for a while, or right after it was wrong.  What
it says is compared with a clock that nobody sets.  A jump by itself removes nothing: ages count
again when the clock has gone on evenly for an hour, time enough for somebody to see the warning.
"""

JUMP_MS = 60_000
SETTLED_MS = 3_600_000
# What a step back makes early by less is waited for.
SET_BACK_MS_MIN = 1_000
# Long enough for a timer service to try again, or to start again.
SET_BACK_KEPT_MS = 60_000


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


class DueClock:
    """Which clock says of a timer that it is due: this broker's, or that one as it was.

    What was due before the clock was set back is no fault of who sends it.  Its service has sent it
    by then, or is about to, and refused until the clock is there again it would hold up its queue
    for as long.  What is due within a second is not meant: it waits for the clock as it is, so that
    what fires from then on is never early.
    """

    def __init__(self, now_ms: int, steady_ms: int) -> None:
        self.now_ms = now_ms
        """At the last look."""
        self._was_ms = 0  # what the clock would say now; 0: it was not set
        self._ahead_ms = now_ms - steady_ms
        self._was_ahead_ms = 0
        self._until_ms = steady_ms  # when the clock as it was counts no more

    def look(self, now_ms: int, steady_ms: int) -> int:
        """How far the clock was set back since the last look, if that is too far to wait."""
        ahead_ms = now_ms - steady_ms
        back_ms = self._ahead_ms - ahead_ms
        if back_ms > SET_BACK_MS_MIN:
            if steady_ms >= self._until_ms or self._ahead_ms > self._was_ahead_ms:
                self._was_ahead_ms = self._ahead_ms
            self._until_ms = steady_ms + SET_BACK_KEPT_MS
        self.now_ms, self._ahead_ms = now_ms, ahead_ms
        self._was_ms = self._was_ahead_ms + steady_ms if steady_ms < self._until_ms else 0
        return back_ms if back_ms > SET_BACK_MS_MIN else 0

    def of(self, due_ms: int) -> int:
        """What the clock that counts for a timer said at the last look."""
        return self._was_ms if self.was_due(due_ms) else self.now_ms

    def was_due(self, due_ms: int) -> bool:
        """Whether that is the clock as it was."""
        return self._was_ms > self.now_ms and due_ms - self.now_ms > SET_BACK_MS_MIN
