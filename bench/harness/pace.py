"""A steady rate."""

from __future__ import annotations

import time
from collections.abc import Iterator

# What is due since the last wake-up goes out together: finer sleeps cost more than they give.
TICK_S = 0.001


def paced(rate: float, count: int) -> Iterator[int]:
    """Yields 0 to count - 1, `rate` a second; catches up when it was held up."""
    begin = time.perf_counter()
    for number in range(count):
        while (left_s := begin + number / rate - time.perf_counter()) > 0:
            time.sleep(max(left_s, TICK_S))
        yield number
