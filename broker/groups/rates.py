"""Rates over the last minute, from samples of counters.  Pure.

Owned by: the event loop, which samples every SAMPLE_INTERVAL_MS (sampler.py).  A message costs
nothing.  A counter that stands still is one dict entry; one that moved within the window has at
most SAMPLES_MAX samples more.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import Generic, TypeVar

WINDOW_MS = 60_000
SAMPLE_INTERVAL_MS = 5_000
SAMPLES_MAX = WINDOW_MS // SAMPLE_INTERVAL_MS + 2

K = TypeVar("K", bound=Hashable)
_Sample = tuple[int, int]


class Rates(Generic[K]):
    """Counters by key.  What goes down (offsets that were reset) counts as standing still."""

    def __init__(self) -> None:
        self._still: dict[K, _Sample] = {}
        """First sampled when, and the value of the last round."""
        self._moves: dict[K, deque[_Sample]] = {}
        self._sampled_ms = 0

    def sample(
        self, now_ms: int, values: Iterable[tuple[K, int]], began_at: int | None = None
    ) -> None:
        """A round: all counters that there are; those that are not named are forgotten.

        `began_at`: what a counter stood at that came since the last round; None: unknown.
        """
        before, self._still = self._still, {}
        for key, value in values:
            known = before.get(key)
            if known is None and began_at is not None and self._sampled_ms:
                known = (self._sampled_ms, began_at)
            if known is None:
                self._still[key] = (now_ms, value)
                continue
            first_ms, last = known
            self._still[key] = (first_ms, value)
            if value != last:
                moves = self._moves.get(key)
                if moves is None:
                    moves = self._moves[key] = deque(maxlen=SAMPLES_MAX)
                if not moves or moves[-1][0] != self._sampled_ms:
                    moves.append((self._sampled_ms, last))
                moves.append((now_ms, value))
        self._sampled_ms = now_ms
        for key in [key for key, moves in self._moves.items() if self._is_past(key, moves)]:
            del self._moves[key]

    def _is_past(self, key: K, moves: deque[_Sample]) -> bool:
        return key not in self._still or moves[-1][0] < self._sampled_ms - WINDOW_MS

    def per_second(self, key: K, value: int, now_ms: int) -> float:
        """Of a counter that stands at `value` now; 0 until it was sampled once."""
        known = self._still.get(key)
        if known is None:
            return 0.0
        first_ms, last = known
        since_ms = max(first_ms, now_ms - WINDOW_MS)
        if now_ms <= since_ms:
            return 0.0
        samples = [*self._moves.get(key, ()), (self._sampled_ms, last), (now_ms, value)]
        grown = sum(
            max(0, after[1] - before[1])
            for before, after in pairwise(samples)
            if after[0] > since_ms
        )
        return grown * 1_000 / (now_ms - since_ms)
