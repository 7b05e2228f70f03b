"""Takes events to the coordinator, one after the other, and rebalances after them.

    events ──► queue ──► all that wait are applied ──► each group that they changed, in pieces ──►
    told

So the joins, releases and goodbyes that come while one rebalance is under way share the next one.
Everything long is done in slices, and the rest of the broker has the loop for as long as each took.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from duemq_server.broker.groups.coordinator import Assignment, Coordinator
from duemq_server.broker.slices import Slices

log = logging.getLogger(__name__)

Event = Callable[[Slices], Awaitable[None]]


class _Waiting(NamedTuple):
    group: str
    event: Event
    done: asyncio.Future[None]


class Rebalancer:
    """The one task that changes groups."""

    def __init__(
        self,
        coordinator: Coordinator,
        clock: Callable[[], int],
        publish: Callable[[list[Assignment]], None],
    ) -> None:
        """`publish` tells members."""
        self._coordinator = coordinator
        self._clock = clock
        self._publish = publish
        self._waiting: list[_Waiting] = []
        self._any = asyncio.Event()
        self.idle = asyncio.Event()
        """Set while no event waits or is worked on."""
        self.idle.set()

    async def done(self, event: Event, group: str = "") -> None:
        """Applies an event and waits for the rebalance of its group.

        One whose caller is cancelled before its turn is dropped.  Raises what either raises.
        """
        await self._put(event, group)

    async def done_for_sure(self, event: Event, group: str = "") -> None:
        """As `done`; the event has its turn also if the caller is cancelled."""
        await asyncio.shield(self._put(event, group))

    def post(self, event: Event) -> None:
        """Applies an event in its turn; what it raises is logged."""
        self._put(event, "").add_done_callback(_log_failure)

    def _put(self, event: Event, group: str) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(group, event, done))
        self.idle.clear()
        self._any.set()
        return done

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._any.wait()
            self._any.clear()
            waiting, self._waiting = self._waiting, []
            slices = Slices()
            applied = await _apply(waiting, slices)
            while (name := self._coordinator.touched()) is not None:
                await self._rebalance(name, applied[name], slices)
                await slices.pause()
            for each in waiting:
                if not each.done.done():
                    each.done.set_result(None)
            if not self._waiting:
                self.idle.set()

    async def _rebalance(
        self, name: str, callers: list[asyncio.Future[None]], slices: Slices
    ) -> None:
        """An allocation strategy may be anybody's: what it raises concerns its group only."""
        try:
            told = await slices.work(self._coordinator.rebalancing(name, self._clock()))
        except Exception as error:
            log.exception("group %r could not be rebalanced", name)
            for done in callers:
                if not done.done():
                    done.set_exception(error)
        else:
            self._publish(told)


async def _apply(
    waiting: list[_Waiting], slices: Slices
) -> defaultdict[str, list[asyncio.Future[None]]]:
    """Answers whose events were applied, by group."""
    applied: defaultdict[str, list[asyncio.Future[None]]] = defaultdict(list)
    for group, event, done in waiting:
        if done.done():
            continue
        try:
            await event(slices)
        except Exception as error:
            if not done.done():
                done.set_exception(error)
        else:
            applied[group].append(done)
        await slices.pause()
    return applied


def _log_failure(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("an event of the groups could not be applied", exc_info=error)
