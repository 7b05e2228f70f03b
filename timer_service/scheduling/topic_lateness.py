"""How late each topic's timers fire, in few buckets: see lateness.py for what counts.  Pure.

The first `SHOWN_MAX` topics that fire are told apart; all others count together, under no name.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SHOWN_MAX = 100
BUCKETS_MS = (1, 2, 3, 5, 8, 10, 16, 32, 64, 128, 256, 512, 1024, 8192, 65536)
_BOUNDS_MS = np.array(BUCKETS_MS, dtype=np.int64)
OTHERS = ""


class TopicLateness:
    """Lateness of all fires, by topic."""

    def __init__(self) -> None:
        self._counts: dict[str, npt.NDArray[np.int64]] = {}
        self._sums_ms: dict[str, int] = {}

    def record(
        self,
        topic: str,
        due_ms: npt.NDArray[np.int64],
        now_ms: int,
        past_due: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Fires of a topic that were answered now."""
        if past_due is not None and past_due.any():
            due_ms = due_ms[~past_due]
        if not len(due_ms):
            return
        if topic not in self._counts and len(self._counts) >= SHOWN_MAX:
            topic = OTHERS
        late_ms = np.maximum(now_ms - due_ms, 0)
        buckets = np.searchsorted(_BOUNDS_MS, late_ms, side="left")
        counts = np.bincount(buckets, minlength=len(BUCKETS_MS) + 1)
        if topic in self._counts:
            counts += self._counts[topic]
        self._counts[topic] = counts
        self._sums_ms[topic] = self._sums_ms.get(topic, 0) + int(late_ms.sum())

    def topics(self) -> list[str]:
        """Those that fired."""
        return list(self._counts)

    def buckets(self, topic: str) -> list[int]:
        """How many were at most so late, for each of `BUCKETS_MS` and, last, all."""
        return np.cumsum(self._counts[topic]).tolist()

    def sum_ms(self, topic: str) -> int:
        """Of all."""
        return self._sums_ms[topic]

    def total_buckets(self) -> list[int]:
        """As `buckets`, of all topics together."""
        none = np.zeros(len(BUCKETS_MS) + 1, dtype=np.int64)
        # As they are now: a topic may fire for the first time while another thread counts.
        return np.cumsum(sum(list(self._counts.values()), none)).tolist()

    def total_sum_ms(self) -> int:
        """As `sum_ms`, of all topics together."""
        return sum(list(self._sums_ms.values()))
