"""Fires that are ahead of their time: the clock that says when it has come, and the waiting.

Owned by: SendRequests, on the event loop.
"""

import asyncio
import time
from collections.abc import Callable

from duemq_server.broker.clock import SET_BACK_MS_MIN, DueClock
from duemq_server.broker.store.hidden import AHEAD_MS_MAX
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
        self._due_ms = 0

    def due_ms(self) -> int:
        """What is due by then may be seen."""
        before_ms, self._due_ms = self._due_ms, self._clock.look(self._now_ms(), self._steady_ms())
        if self._due_ms < before_ms - SET_BACK_MS_MIN:
            # The clock as it was counts no more.  What is hidden was about to be due by it.
            self._store.show_due(before_ms + AHEAD_MS_MAX)
        return self._due_ms

    async def hold(self, until_ms: int) -> int:
        """Waits until it may be stored ahead, if that is soon.  Answers what is due by now."""
        until_ms -= AHEAD_MS_MAX
        due_ms = self.due_ms()
        deadline_ms = self._steady_ms() + HOLD_MS_MAX
        while 0 < until_ms - due_ms <= HOLD_MS_MAX and self._steady_ms() < deadline_ms:
            await asyncio.sleep(seconds_left(until_ms - due_ms, time.time_ns()))
            due_ms = self.due_ms()
        return due_ms

    def arm(self) -> None:
        """Something was stored ahead of its time, maybe: it is shown when it comes."""
        next_ms = self._store.hidden.next_ms
        if next_ms is None or 0 < self._set_for_ms <= next_ms:
            return
        self._set_for_ms = next_ms
        self._timer.set(seconds_left(next_ms - self.due_ms(), time.time_ns()))

    def _show(self) -> None:
        self._set_for_ms = 0
        try:
            self._store.show_due(self.due_ms())
        finally:
            self.arm()  # whatever failed, what is hidden is not forgotten

    def close(self) -> None:
        """Nothing is shown any more."""
        self._timer.close()


def seconds_left(ms: int, wall_ns: int) -> float:
    """Until a clock of whole milliseconds has moved on by `ms`: part of its last one is over."""
    return ms / 1_000 - wall_ns % 1_000_000 / 1e9
