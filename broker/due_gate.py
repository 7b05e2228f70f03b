"""Fires that are ahead of their time: the clock that says when it has come, and the waiting.

Owned by: SendRequests, on the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Collection

from duemq.protocol.limits import FIRE_AHEAD_MS_MAX
from duemq_server.broker.clock import DueClock
from duemq_server.broker.store.store import Store
from duemq_server.serving.fine_timer import FineTimer

# A batch that is ahead of its time is held for so long, and what follows it on the stream.
HOLD_MS_MAX = 1_000


class DueGate:
    """See the module."""

    def __init__(
        self, store: Store, now_ms: Callable[[], int], steady_ms: Callable[[], int]
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._steady_ms = steady_ms
        self._clock = DueClock(now_ms(), steady_ms())
        self._timer = FineTimer(self._show)
        self._set_for_ms = 0  # 0: it is not

    def due_ms(self, not_before_ms: int) -> int:
        """The clock that decides of such a batch, when it was looked at last (`hold`)."""
        return self._clock.of(not_before_ms)

    def _look(self) -> int:
        now_ms, steady_ms = self._now_ms(), self._steady_ms()
        back_ms = self._clock.look(now_ms, steady_ms)
        if back_ms:
            self._store.clock_was_set(now_ms + back_ms, back_ms)
        return now_ms

    async def hold(self, times_ms: Collection[int]) -> None:
        """Waits until batches of these times may be stored, ahead or not, if that is soon."""
        self._look()
        deadline_ms = self._steady_ms() + HOLD_MS_MAX
        while (left_ms := self._left_ms(times_ms)) and self._steady_ms() < deadline_ms:
            await asyncio.sleep(seconds_left(left_ms, time.time_ns()))
            self._look()

    def _left_ms(self, times_ms: Collection[int]) -> int:
        """0: nothing is to be waited for, or not by this."""
        latest_ms = max(times_ms)
        if latest_ms <= self._clock.now_ms + FIRE_AHEAD_MS_MAX:
            return 0
        left_ms = (self._wait_ms(each) for each in times_ms)
        return max((each for each in left_ms if each <= HOLD_MS_MAX), default=0)

    def _wait_ms(self, until_ms: int) -> int:
        # By the clock as it was nothing is hidden, so it is not stored ahead, either.
        ahead_ms = 0 if self._clock.was_due(until_ms) else FIRE_AHEAD_MS_MAX
        return max(0, until_ms - ahead_ms - self._clock.of(until_ms))

    def arm(self) -> None:
        """Something was stored ahead of its time, maybe: it is shown when it comes."""
        if self._store.hidden.next_ms is None:
            return
        now_ms = self._look()  # which may make it sooner
        next_ms = self._store.hidden.next_ms
        if next_ms is None or 0 < self._set_for_ms <= next_ms:
            return
        self._set_for_ms = next_ms
        self._timer.set(seconds_left(next_ms - now_ms, time.time_ns()))

    def _show(self) -> None:
        self._set_for_ms = 0
        try:
            self._store.show_due(self._look())
        finally:
            self.arm()  # whatever failed, what is hidden is not forgotten

    def close(self) -> None:
        """Nothing is shown any more."""
        self._timer.close()


def seconds_left(ms: int, wall_ns: int) -> float:
    """Until a clock of whole milliseconds has moved on by `ms`: part of its last one is over."""
    return ms / 1_000 - wall_ns % 1_000_000 / 1e9
