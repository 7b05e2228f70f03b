"""The loop that moves schedules on: one timer of the event loop, and none where there are none.

The core says when it wants to be called (`Schedules.next_ms`), and when that becomes sooner
(`on_sooner`): a message of a schedule was dispatched, mostly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from duemq.errors import Overloaded
from duemq_recurring.steps import NEVER
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.firing import RETRY_S, Firing
from duemq_server.timer_service.log_loop import LogLoop
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.scheduling.schedules import changes as schedule_changes

log = logging.getLogger(__name__)

# The longest sleep while something is due: how late it notices that the clock was set.
SLEEP_S_MAX = 10.0


class ScheduleLoop:
    """Calls the core when it is time, by the clock that the shard goes by."""

    def __init__(
        self,
        scheduler: Scheduler,
        firing: Firing,
        log_loop: LogLoop,
        short_of_space: Callable[[], bool],
    ) -> None:
        self._scheduler = scheduler
        self._firing = firing
        self._log_loop = log_loop
        self._short_of_space = short_of_space
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._soon = False  # it is called as soon as what runs now has ended
        self._held = False  # nothing is taken over just now
        self._stopping = False
        self._judged = False  # what was missed, and what is too late, since it started

    def start(self) -> None:
        """What was missed, and what is too late, is decided on: nothing fires before."""
        self._scheduler.schedules.on_sooner = self._sooner
        self._firing.may_fire = self._is_judged
        self._turn()

    def _is_judged(self) -> bool:
        if not self._judged:  # the log was full, and may have room now
            self._turn()
        return self._judged

    def stop(self) -> None:
        """Moves nothing on any more."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()

    def _sooner(self) -> None:
        if not self._soon and not self._held and not self._stopping:
            self._soon = True
            self._set(self._loop.call_soon(self._turn))

    def _set(self, timer: asyncio.TimerHandle | asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _turn(self) -> None:
        self._soon = self._held = False
        if self._stopping or self._log_loop.failed.done():
            return
        schedules, now_ms = self._scheduler.schedules, self._firing.now_ms()
        if schedules.next_ms() <= now_ms:
            try:
                short = self._short_of_space()
                if short and self._judged:
                    self._hold()
                    return
                # At a start what is too late goes all the same: it would fire next.
                while schedule_changes.advance(self._scheduler, now_ms, short=short):
                    if self._judged:
                        break
            except (LogFull, DiskFull, Overloaded) as error:
                log.debug("schedules wait: %s", error)
                self._hold()
                return
            except Exception as error:
                self._log_loop.fail(error)
                return
        self._judged = True
        self._arm(now_ms)

    def _arm(self, now_ms: int) -> None:
        next_ms = self._scheduler.schedules.next_ms()
        self._soon = next_ms <= now_ms
        if self._soon:
            self._set(self._loop.call_soon(self._turn))
        elif next_ms < NEVER:
            delay_s = min((next_ms - now_ms) / 1000, SLEEP_S_MAX)
            self._set(self._loop.call_later(delay_s, self._turn))
        else:
            self._set(None)

    def _hold(self) -> None:
        self._held = True
        self._set(self._loop.call_later(RETRY_S, self._turn))
