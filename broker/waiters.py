"""Parked pulls: who waits for which queues until when.  Pure.

Owned by: PullService.  Mutated by: the event loop.

A parked pull is an entry in a dict per queue and in one heap of deadlines; it costs nothing until
an append wakes it or its deadline comes.  `next_ms` tells the shell when to call `expire`.
"""

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from duemq.errors import Overloaded

WAITERS_MAX = 20_000

W = TypeVar("W", bound=Hashable)
QueueKey = tuple[str, int]


class Waiters(Generic[W]):
    """Waiters are any hashable things, parked once at a time."""

    def __init__(self, waiters_max: int = WAITERS_MAX) -> None:
        self._waiters_max = waiters_max
        self._queues: dict[QueueKey, dict[W, None]] = {}
        self._parked: dict[W, tuple[int, tuple[QueueKey, ...]]] = {}
        self._deadlines: list[tuple[int, int, W]] = []
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, waiter: W) -> bool:
        return waiter in self._parked

    def park(self, waiter: W, queues: Iterable[QueueKey], deadline_ms: int) -> None:
        """Raises Overloaded when too many wait."""
        if len(self._parked) >= self._waiters_max:
            raise Overloaded(
                f"wait_ms: {len(self._parked)} pulls wait here, the most allowed",
                field="wait_ms",
                value=len(self._parked),
                limit=self._waiters_max,
            )
        keys = tuple(dict.fromkeys(queues))  # a pull may name a queue twice
        self._ticket += 1
        self._parked[waiter] = (deadline_ms, keys)
        for key in keys:
            self._queues.setdefault(key, {})[waiter] = None
        heapq.heappush(self._deadlines, (deadline_ms, self._ticket, waiter))
        self._compact()

    def wake(self, key: QueueKey) -> list[W]:
        """Takes out and gives everyone who waits for this queue, longest waiting first."""
        waiting = self._queues.get(key)
        if not waiting:
            return []
        woken = list(waiting)
        for waiter in woken:
            self.cancel(waiter)
        return woken

    def cancel(self, waiter: W) -> bool:
        """Takes the waiter out; False: it was not parked."""
        parked = self._parked.pop(waiter, None)
        if parked is None:
            return False
        for key in parked[1]:
            waiting = self._queues[key]
            del waiting[waiter]
            if not waiting:
                del self._queues[key]
        return True

    def expire(self, now_ms: int) -> list[W]:
        """Takes out and gives those whose deadline has come."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            deadline_ms, _, waiter = heapq.heappop(self._deadlines)
            if self._is_live(deadline_ms, waiter):
                self.cancel(waiter)
                expired.append(waiter)
        return expired

    def next_ms(self) -> int | None:
        """The earliest deadline; None: nobody waits."""
        while self._deadlines and not self._is_live(self._deadlines[0][0], self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _is_live(self, deadline_ms: int, waiter: W) -> bool:
        parked = self._parked.get(waiter)
        return parked is not None and parked[0] == deadline_ms

    def _compact(self) -> None:
        """Bounds the heap: the deadlines of those woken long before are dropped."""
        if len(self._deadlines) > 2 * len(self._parked) + 64:
            self._deadlines = [
                entry for entry in self._deadlines if self._is_live(entry[0], entry[2])
            ]
            heapq.heapify(self._deadlines)
