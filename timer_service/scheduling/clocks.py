"""This machine's clock against those of brokers, and against time that nobody sets.  Pure.

A due time is the broker's: what is sent must not be stored before the broker's own clock says so.
Each answer of a broker carries its clock; what it shows is off by the way of the answer, so the
smallest difference within a while is nearest to the truth.
"""

from __future__ import annotations

WINDOW_MS = 10_000
# Who has not answered for so long is away, or gone: it says nothing of this machine's clock by now.
FRESH_MS = 60_000
# Brokers hold what is so much early; and answers take a while on a busy machine.
SLACK_MS = 20
# A clock that was slewed by so much was set, for waits; by so much, for people.
STEP_MS_MIN = 100
STEP_MS_TO_SAY = 500


class BrokerClock:
    """How far this machine is ahead of one broker."""

    def __init__(self) -> None:
        self.known = False
        self._estimated = False
        self._until_ms = 0
        self._observed_ms = 0
        self._now: float = 0
        self._before: float = 0

    @property
    def ahead_ms(self) -> int:
        """Milliseconds; negative: behind; 0 also while nothing is known."""
        return int(min(self._now, self._before))

    @property
    def behind_ms(self) -> int:
        """By how much this machine had better keep behind its own clock for this broker."""
        return max(self.ahead_ms - SLACK_MS, 0)

    def observe(self, local_ms: int, broker_ms: int, steady_ms: int) -> None:
        """An answer came now, stamped `broker_ms` as it was sent."""
        ahead = local_ms - broker_ms
        self._observed_ms = steady_ms
        if not self.known or self._estimated:
            self._now = self._before = ahead
            self._until_ms = steady_ms + WINDOW_MS
            self.known, self._estimated = True, False
        elif steady_ms >= self._until_ms:
            self._before, self._now = self._now, ahead
            self._until_ms = steady_ms + WINDOW_MS
        else:
            self._now = min(self._now, ahead)

    def is_fresh(self, steady_ms: int) -> bool:
        """Whether the broker, which is known, has answered of late."""
        return steady_ms - self._observed_ms < FRESH_MS

    def clock_set(self, by_ms: int) -> None:
        """This machine's clock was set; the broker's was not, as far as is known before it answers.

        The next answer counts alone.
        """
        if self.known:
            self._now += by_ms
            self._before += by_ms
            self._estimated = True


class ClockSteps:
    """Notices that this machine's clock was set."""

    def __init__(self, wall_ms: int, steady_ms: int) -> None:
        self._offset_ms = wall_ms - steady_ms

    def look(self, wall_ms: int, steady_ms: int) -> int:
        """By how much the clock was set since the last time this was not 0."""
        step_ms = wall_ms - steady_ms - self._offset_ms
        if abs(step_ms) < STEP_MS_MIN:
            return 0
        self._offset_ms += step_ms
        return step_ms
