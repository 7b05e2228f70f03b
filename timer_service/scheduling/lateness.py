"""How late timers fire: from the due time to the broker's answer that they are durable.  Pure.

The answer comes after the broker's sync, so its time is the first at which the shard knows that
consumers can have the message, or will when it is due: what is durable before is not late.
Messages that were due when they were accepted say nothing about the shard; they are counted, and
are not among the figures.

Exact milliseconds up to `EXACT_MS`, then buckets that are an eighth of a power of two wide, so that
a percentile is off by at most 12 %.  A ring of one-second histograms gives the last minute.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EXACT_MS = 64
STEPS = 8  # buckets per doubling above EXACT_MS
DOUBLINGS = 26  # up to half a century
BUCKETS = EXACT_MS + STEPS * DOUBLINGS
WINDOW_S = 60
COUNTED_AT = 1_024  # fires counted at once: many small batches cost one NumPy pass


def _bounds() -> npt.NDArray[np.int64]:
    """The least lateness of each bucket."""
    steps = np.arange(STEPS * DOUBLINGS)
    above = np.floor(EXACT_MS * 2.0 ** (steps / STEPS)).astype(np.int64)
    return np.concatenate((np.arange(EXACT_MS, dtype=np.int64), above))


BOUNDS_MS = _bounds()


class Lateness:
    """Lateness of the last minute's fires; of all, see topic_lateness.py."""

    def __init__(self) -> None:
        self.early = 0  # stored before they were due: must stay 0
        self.past_due = 0  # when they were accepted
        self._ring = np.zeros((WINDOW_S, BUCKETS), dtype=np.int32)
        self._max = np.zeros(WINDOW_S, dtype=np.int64)
        self._second = 0
        self._new: list[npt.NDArray[np.int64]] = []  # of this second, not yet counted
        self._new_rows = 0

    def record(
        self,
        due_ms: npt.NDArray[np.int64],
        store_ms: int,
        now_ms: int,
        past_due: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Fires that a broker stored at `store_ms` by its clock, and has answered now."""
        self._turn(now_ms)
        self.early += int((due_ms > store_ms).sum())
        if past_due is not None and past_due.any():
            due_ms = due_ms[~past_due]
            self.past_due += int(past_due.sum())
        self._new.append(now_ms - due_ms)
        self._new_rows += len(due_ms)
        if self._new_rows >= COUNTED_AT:
            self._count()

    def _count(self) -> None:
        if not self._new:
            return
        late_ms = np.concatenate(self._new)
        self._new, self._new_rows = [], 0
        if not len(late_ms):
            return
        late_ms = np.maximum(late_ms, 0)
        buckets = np.searchsorted(BOUNDS_MS, late_ms, side="right") - 1
        counts = np.bincount(buckets, minlength=BUCKETS)
        slot = self._second % WINDOW_S
        self._ring[slot] += counts.astype(np.int32)
        self._max[slot] = max(int(self._max[slot]), int(late_ms.max()))

    def percentiles(self, now_ms: int, *shares: float) -> list[float]:
        """Of the last minute, in milliseconds; 0 if nothing fired."""
        self._turn(now_ms)
        self._count()
        counts = np.cumsum(self._ring.sum(axis=0))
        if not counts[-1]:
            return [0.0 for _ in shares]
        ranks = [min(int(share * counts[-1]), int(counts[-1]) - 1) for share in shares]
        return [float(BOUNDS_MS[np.searchsorted(counts, rank, side="right")]) for rank in ranks]

    def max_ms(self, now_ms: int) -> float:
        """The latest of the last minute."""
        self._turn(now_ms)
        self._count()
        return float(self._max.max())

    def _turn(self, now_ms: int) -> None:
        second = now_ms // 1000
        back = second < self._second - WINDOW_S  # the clock was set
        if second <= self._second and not back:
            return
        self._count()
        if back:
            self._second = second - WINDOW_S
        for passed in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            self._ring[passed % WINDOW_S] = 0
            self._max[passed % WINDOW_S] = 0
        self._second = second
