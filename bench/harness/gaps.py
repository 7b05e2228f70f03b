"""How long nothing happened.  Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

NS_PER_MS = 1e6


def longest_gap_ms(times_ns: Sequence[int], begin_ns: int, end_ns: int) -> float:
    """The longest time without an event between the two moments; `times_ns` is sorted."""
    inside = times_ns[bisect_right(times_ns, begin_ns) : bisect_left(times_ns, end_ns)]
    gaps = (later - earlier for earlier, later in pairwise((begin_ns, *inside, end_ns)))
    return max(gaps) / NS_PER_MS
