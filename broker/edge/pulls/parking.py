"""Who waits for records, until an append, a deadline or a cancel.

Owned by: the event loop.  Nobody polls: an append wakes exactly those who wait for the queue, and
one timer stands for the nearest of all deadlines.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from duemq_server.broker.reading.waiters import QueueKey, Waiters
from duemq_server.broker.store.queues import Queue


@dataclass(eq=False, slots=True, kw_only=True)
class Parked:
    """Somebody who waits; `woken` resolves when there is something to do."""

    woken: "asyncio.Future[None] | None" = None
    knows: int = -1
    """Which `changes` it has looked at."""
    peer: str
    """Its connection."""


class _Lingering(NamedTuple):
    """A fetch that waits for more, from an offset on."""

    offset: int
    parked: Parked


class Parking:
    """See the module."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.changes = 0
        """Of queues, other than appends: see `changed`."""
        self.closing = False
        """Nobody waits any more."""
        self.waiters: Waiters[Parked] = Waiters()
        self._lingering: dict[QueueKey, list[_Lingering]] = {}
        self._now_ms = now_ms
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0

    def is_over(self, wait_ms: int, deadline_ms: int) -> bool:
        """Who would wait so long, and until then, waits no longer."""
        return self.closing or not wait_ms or self._now_ms() >= deadline_ms

    async def park(self, parked: Parked, keys: Iterable[QueueKey], deadline_ms: int) -> None:
        """Returns when there is something to do.  Raises Overloaded when too many wait."""
        parked.woken = asyncio.get_running_loop().create_future()
        self.waiters.park(parked, keys, deadline_ms, parked.peer)
        self._set_timer()
        try:
            await parked.woken
        finally:
            self.waiters.cancel(parked)

    @contextmanager
    def linger(self, parked: Parked, key: QueueKey, offset: int) -> Iterator[None]:
        """Meanwhile it is also woken when a record behind `offset` is due at once."""
        mine = _Lingering(offset, parked)
        self._lingering.setdefault(key, []).append(mine)
        try:
            yield
        finally:
            self._lingering[key].remove(mine)
            if not self._lingering[key]:
                del self._lingering[key]

    def appended(self, queue: Queue) -> None:
        """Wakes those who wait for it."""
        for parked in self.waiters.wake(queue.key):
            _resolve(parked)
        for each in self._lingering.get(queue.key, ()):
            if queue.at_once_end > each.offset:
                _resolve(each.parked)

    def changed(self, queues: Iterable[Queue]) -> None:
        """Something else than an append happened to them: those who wait for them look again."""
        self.changes += 1
        for queue in queues:
            self.appended(queue)

    def cancel(self, parked: Parked) -> None:
        """It need not wait."""
        self.waiters.cancel(parked)
        _resolve(parked)

    def close(self) -> None:
        """Wakes everybody who waits."""
        self.closing = True
        for parked in self.waiters.expire(1 << 62):
            _resolve(parked)

    def _set_timer(self) -> None:
        next_ms = self.waiters.next_ms()
        if next_ms is None or (self._timer is not None and self._timer_ms <= next_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = next_ms
        delay_s = max(0, next_ms - self._now_ms()) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for parked in self.waiters.expire(self._now_ms()):
            parked.knows = -1
            _resolve(parked)
        self._set_timer()


def _resolve(parked: Parked) -> None:
    if parked.woken is not None and not parked.woken.done():
        parked.woken.set_result(None)
