"""Holds that end without some of their timers: one at a time, a page and a slice after the other.

Owned by the event loop.  It goes on after a start where it was; who asks may wait for it, or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from duemq.errors import Corrupt, DuemqError, InvariantError, Overloaded, Unavailable
from duemq.protocol.limits import TIMERS_MAX
from duemq_server.storage.errors import DiskFull, LogFull, StorageError
from duemq_server.timer_service.disk_jobs import RETRY_S
from duemq_server.timer_service.inspecting import Inspector
from duemq_server.timer_service.log_loop import LogLoop
from duemq_server.timer_service.scheduling.holding import changes
from duemq_server.timer_service.scheduling.holding.dropping import Backlogged, Dropping, Sifting
from duemq_server.timer_service.scheduling.holding.holds import HOLDS_MAX
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.hold_entry import Hold
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId
from duemq_server.timer_service.views.listing import PageItem, PageQuery, Position

log = logging.getLogger(__name__)

SLICE = 250  # timers dropped at once, before others have a turn


class Resuming:
    """Ends holds that are to be resumed with a policy."""

    def __init__(
        self,
        scheduler: Scheduler,
        inspector: Inspector,
        log_loop: LogLoop,
        clock: Callable[[], int],
        room: Callable[[], Awaitable[None]],
    ) -> None:
        """`room` is called while the log is full: it returns when there may be some."""
        self.dropped: Counter[int] = Counter()
        """By this process, by number of a hold; of the newest."""
        self._scheduler = scheduler
        self._inspector = inspector
        self._log_loop = log_loop
        self._clock = clock
        self._room = room
        self._task: asyncio.Task[None] | None = None
        self._errors: dict[int, DuemqError] = {}
        """Why some cannot go on, by number of a hold; since they were asked for last."""
        self._halted = False

    def start(self) -> None:
        """Goes on with what is under way, if anything is."""
        if self._halted or self._task is not None:
            return
        self._errors = {}
        if self._scheduler.holds.resuming() is not None:
            self._task = asyncio.create_task(self._run(), name="resuming")

    async def wait(self, hold: Hold, timeout_s: float) -> bool:
        """Whether one has ended, after so long at most.  Raises Corrupt, Overloaded: it stands.

        What a shard that stops leaves has not.
        """
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)
        there = self._scheduler.holds.get(hold.topic, hold.prefix)
        if there is None or there.number != hold.number or not there.policy:
            return True
        if there.number in self._errors:
            raise self._errors[there.number]
        return False

    def halt(self) -> None:
        """Appends nothing any more."""
        self._halted = True
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Nobody may ask any more."""
        self.halt()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while (hold := self._scheduler.holds.resuming(self._errors)) is not None:
                try:
                    await self._finish(hold)
                except (Corrupt, Overloaded) as error:
                    self._errors[hold.number] = error
                    log.error("what is held of %s stays, ask again: %s", hold.topic, error)
                except Unavailable as error:  # too many files are open, say
                    log.debug("what is held of %s waits: %s", hold.topic, error)
                    await asyncio.sleep(RETRY_S)  # that more is logged opens none
        except (StorageError, InvariantError) as error:
            self._log_loop.fail(error)
        except DuemqError as error:  # another replica leads, or the log has failed
            log.debug("resuming: %s", error)
        finally:
            self._task = None

    async def _finish(self, hold: Hold) -> None:
        sifting, after = Sifting(hold), None
        while not sifting.over and self._is_wanted(hold):
            sifting.others = self._scheduler.holds.within(hold)
            wanted = PageQuery(hold.topic, 0, sifting.to_ms, TIMERS_MAX, after)
            listed, after = await self._inspector.page(wanted, sifting.make, wants_all=False)
            gone = sifting.take(list(map(_found, listed)), last=after is None)
            for start in range(0, len(gone), SLICE):
                if not self._is_wanted(hold):
                    return
                await self._drop(hold, gone[start : start + SLICE])
        while self._is_wanted(hold):
            try:
                changes.resume(self._scheduler, self._clock(), hold.topic, hold.prefix)
            except (LogFull, DiskFull):
                await self._room()
        await self._log_loop.durable(self._scheduler.log.end_position)

    def _is_wanted(self, hold: Hold) -> bool:
        """Nobody has held it again meanwhile."""
        return self._scheduler.holds.get(hold.topic, hold.prefix) == hold

    async def _drop(self, hold: Hold, handles: Sequence[Cancelled]) -> None:
        dropping = Dropping(self._scheduler, handles)
        before = self._scheduler.ledger.dropped
        while True:
            try:
                if dropping.advance(self._clock()):
                    break
            except (LogFull, DiskFull):
                await self._room()
                continue
            await self._inspector.look_up(dropping)
        outcomes = dropping.outcomes() or ()
        for outcome in outcomes:
            if isinstance(outcome, DuemqError):  # else it would be sent
                raise outcome
        self.dropped[hold.number] += self._scheduler.ledger.dropped - before
        while len(self.dropped) > HOLDS_MAX:
            del self.dropped[min(self.dropped)]


def _found(each: PageItem[str]) -> Backlogged:
    at: Position = each.position
    return Backlogged(
        Cancelled(SourceId(at.store_id, at.queue_id), at.offset, at.due_ms), each.made
    )
