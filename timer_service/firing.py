"""The firing loop: one timer of the event loop, set to when the core wants to be called next.

The core itself says when that becomes sooner (`Scheduler.on_sooner`), whoever called it: a frame
came, housekeeping moved a timer into memory, a broker answered, connected, or left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from duemq_server.serving.clock import now_ms
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.log_loop import LogLoop
from duemq_server.timer_service.scheduling.dispatch import NEVER
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.limits import AHEAD_MS

# At most so many ticks: below it, each costs more (log entry, sync, gRPC) than its timers.
TICK_SPACING_S = 0.001
RETRY_S = 0.25  # after a full disk
# The longest sleep: how late it notices that the clock was set.
SLEEP_S_MAX = 1.0


class Firing:
    """Calls the core when it is time, by the clock that the shard goes by."""

    def __init__(self, scheduler: Scheduler, log_loop: LogLoop) -> None:
        self._scheduler = scheduler
        self._log_loop = log_loop
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._timer_ms = NEVER  # what it is set for; 0: at once
        self._ticked_s = 0.0
        self._held = False  # the log takes nothing just now
        self._stopping = False
        self._behind_ms = 0
        self.check_clock: Callable[[], None] = lambda: None
        """Called before anybody is told what time it is, which it may correct (`keep_behind`)."""
        self.may_fire: Callable[[], bool] = lambda: True
        """Asked before each tick; False: not now, ask again when the log made progress."""
        log_loop.on_progress = self._release

    def now_ms(self) -> int:
        """What due times are compared with: this machine's clock, or brokers' that are behind."""
        self.check_clock()
        return self.corrected_ms()

    def corrected_ms(self) -> int:
        """The same as it was last corrected; also for other threads, which may not do that."""
        return now_ms() - self._behind_ms

    def ahead_ms(self) -> int:
        """The same, as far ahead as timers are dispatched before they are due."""
        return self.now_ms() + AHEAD_MS

    def keep_behind(self, behind_ms: int) -> None:
        """All brokers' clocks are so much behind this machine's."""
        if behind_ms != self._behind_ms:
            self._scheduler.dispatcher.clock_set(self._behind_ms - behind_ms)
            self._behind_ms = behind_ms
            self._arm(0)

    def start(self) -> None:
        """Begins to fire."""
        self._scheduler.on_sooner(self._sooner)
        self._arm(0)

    def stop(self) -> None:
        """Fires nothing any more."""
        self._stopping = True

    def _sooner(self, at_ms: int) -> None:
        """The core wants to be called at `at_ms`, which may be sooner than it said; 0: at once."""
        at_ms = max(at_ms - AHEAD_MS, 0)
        if at_ms < self._timer_ms and not self._held:
            self._arm(at_ms)

    def _arm(self, at_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = at_ms
        delay_s = (at_ms + self._behind_ms) / 1000 - time.time()
        if at_ms:
            delay_s = max(delay_s, self._ticked_s + TICK_SPACING_S - self._loop.time())
        if delay_s <= 0:
            self._timer_ms = 0
            self._timer = self._loop.call_soon(self._tick)
        else:
            self._timer = self._loop.call_later(min(delay_s, SLEEP_S_MAX), self._tick)

    def _tick(self) -> None:
        if self._stopping or self._log_loop.failed.done():
            return
        self._ticked_s = self._loop.time()
        self._held = False
        if not self.may_fire():
            self._hold()
            return
        now = self.ahead_ms()
        try:
            self._scheduler.tick(now)
        except (LogFull, DiskFull):
            self._hold()
            return
        except Exception as error:
            self._log_loop.fail(error)
            return
        next_ms = self._scheduler.next_tick_ms()
        self._arm(next_ms - AHEAD_MS if next_ms > now else 0)

    def _hold(self) -> None:
        """Ticks again after a while, or sooner, when the log made progress."""
        self._held = True
        self._timer_ms = NEVER
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(RETRY_S, self._tick)

    def _release(self) -> None:
        if self._held:
            self._held = False
            self._arm(0)
