"""How long nothing happened.  Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

NS_PER_MS = 1e6


def longest_gap_ms(times_ns: Sequence[int], begin_ns: int, end_ns: int) -> float:
    """The longest time without an event that touches the window; `times_ns` is sorted.

    The last event before the window and the first after it bound the gaps that reach out of it.
    Without any event there, the window itself is the gap.
    """
    first = max(0, bisect_right(times_ns, begin_ns) - 1)
    after = bisect_left(times_ns, end_ns) + 1
    gaps = [later - earlier for earlier, later in pairwise(times_ns[first:after])]
    return max(gaps, default=end_ns - begin_ns) / NS_PER_MS
