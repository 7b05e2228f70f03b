"""The clocks that a process reads and hands to its cores."""

import time


def now_ms() -> int:
    """Unix time: what messages are stamped with, and due times are compared with."""
    return time.time_ns() // 1_000_000


def steady_ms() -> int:
    """A clock that nobody sets; for waits."""
    return time.monotonic_ns() // 1_000_000
