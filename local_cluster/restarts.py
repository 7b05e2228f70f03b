"""When a child that died is started again.

Pure: takes `now_ms`, answers a time.  Owned and mutated by: the supervisor thread.

A first death is answered almost at once; each further one within `STABLE_MS` of the start before
doubles the pause.  A child that keeps dying (more than `RAPID_DEATHS_MAX` times in a row, never
stable) is given up: it needs a person, for instance because its log is corrupt.  One that cannot be
started counts as one that died: the machine may be short of processes or descriptors for a moment.
One that was killed because somebody asked for it does not: that says nothing of its health.
"""

from __future__ import annotations

PAUSE_FIRST_MS = 100
PAUSE_MAX_MS = 5_000
# A child that lived this long is healthy: its next death counts as a first one.
STABLE_MS = 10_000
RAPID_DEATHS_MAX = 8


class RestartPolicy:
    """Decides about one child."""

    def __init__(self) -> None:
        self._started_ms = 0
        self._rapid_deaths = 0

    def started(self, now_ms: int) -> None:
        """Notes that the child was started."""
        self._started_ms = now_ms

    def died(self, now_ms: int, *, wanted: bool = False) -> int | None:
        """When to start it again, by the same clock; None: it is given up.

        It died, or could not be started.  `wanted`: its death was asked for.
        """
        if now_ms - self._started_ms >= STABLE_MS:
            self._rapid_deaths = 0
        if wanted:
            return now_ms + PAUSE_FIRST_MS
        self._rapid_deaths += 1
        if self._rapid_deaths > RAPID_DEATHS_MAX:
            return None
        return now_ms + min(PAUSE_FIRST_MS << (self._rapid_deaths - 1), PAUSE_MAX_MS)
