"""Percentiles of measured values, by nearest rank: always a value that occurred."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed.

    `ordered` is sorted and not empty.  Of 1..10, the 0.5 percentile is 5 and the 0.99 is 10.
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """`p50_ms`, `p99_ms` and `max_ms` of durations in ms; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "p50_ms": round(percentile(ordered, 0.50), 3),
        "p99_ms": round(percentile(ordered, 0.99), 3),
        "max_ms": round(ordered[-1], 3),
    }
