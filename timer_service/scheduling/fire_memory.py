"""What a cancel must know of timers that fired and are held nowhere any more.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

A timer that arrived, is not pending and was not cancelled has fired.  Since cancels are forgotten
`keep_ms` after they were due, this holds for younger ones only; what fired late (a second or more)
is therefore remembered for itself, by the time at which it fired.  What an owner fires by hand is
replaced by a timer that is due at once; its own handle is that of one that fired, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from duemq_server.timer_service.timers.offset_pages import OffsetPages, SavedPage
from duemq_server.timer_service.timers.rows import Rows, keys_of

LATE_MS = 1_000


class FireMemory:
    """Which timers fired late, and up to which due time any fired."""

    def __init__(self) -> None:
        self.until_ms = 0
        """The latest due time that was ever fired: it does not go back with the clock."""
        self._late = OffsetPages()

    def note(self, rows: Rows, now_ms: int | npt.NDArray[np.int64]) -> None:
        """Timers fire; `now_ms`: when, all or each."""
        due_ms = rows.due_ms
        self.until_ms = max(self.until_ms, int(due_ms.max()))
        late = due_ms + LATE_MS < now_ms
        if late.any():
            at_ms = now_ms if isinstance(now_ms, int) else now_ms[late]
            self._late.mark(keys_of(rows.source[late], rows.offset[late]), at_ms)

    def note_by_hand(self, source: int, offset: int, since_ms: int) -> None:
        """A timer is fired before it is due; known until `keep_ms` after `since_ms`."""
        self._late.mark_one(source, offset, since_ms)

    def fired_late(self, source: int, offset: int) -> bool:
        """Whether the timer fired late, or by hand, and is remembered."""
        return self._late.has(source, offset)

    def expire(self, before_ms: int) -> None:
        """Forgets what fired before."""
        self._late.expire(before_ms)

    def pages(self) -> list[SavedPage]:
        """A copy, for a checkpoint."""
        return self._late.saved()

    def restore(self, until_ms: int, pages: Iterable[SavedPage]) -> None:
        """Takes over what a checkpoint has."""
        self.until_ms = until_ms
        self._late.restore(pages)
