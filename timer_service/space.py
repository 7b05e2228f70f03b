"""Whether the disk has room for more timers.

Owned by the event loop.  While it has not, nothing is taken over; what is here fires, and so makes
room.
"""

from __future__ import annotations

import asyncio
import logging

from duemq.errors import ReadOnly
from duemq_server.timer_service.disk.housekeeping import Housekeeper

log = logging.getLogger(__name__)

INTERVAL_S = 0.1  # between two looks for requests: one costs as much as a small request


class Space:
    """Of one data directory."""

    def __init__(self, housekeeper: Housekeeper, free_bytes_min: int) -> None:
        self._housekeeper = housekeeper
        self._free_bytes_min = free_bytes_min
        self._short = False  # at the last look
        self._look_at_s = 0.0  # when `check` is to look again

    def is_short(self) -> bool:
        """Looks; says in the log when it is another answer than before."""
        short = self._housekeeper.short_of_space()
        if short != self._short:
            self._short = short
            log.log(
                logging.ERROR if short else logging.WARNING,
                "less than %d bytes are free: nothing is taken over"
                if short
                else "%d bytes are free again: taking over",
                self._free_bytes_min,
            )
        return short

    def check(self) -> None:
        """Raises ReadOnly if it is short; looks now and then."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + INTERVAL_S
            self.is_short()
        if self._short:
            raise ReadOnly(
                f"less than {self._free_bytes_min} bytes are free: this timer service takes nothing"
                " over",
                field="free_bytes_min",
                limit=self._free_bytes_min,
            )
