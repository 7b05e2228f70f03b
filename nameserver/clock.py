"""The nameserver's clock."""

import time


class SteadyClock:
    """Epoch milliseconds that never jump: the start by the wall clock, then the monotonic one.

    A wall clock that is set right must not make every broker look silent for an hour.
    """

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ms(self) -> int:
        """Now."""
        return (time.monotonic_ns() + self._offset_ns) // 1_000_000
