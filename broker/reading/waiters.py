"""Parked pulls: who waits for which queues until when.  Pure.

Owned by: `Parking`, which alone calls it, on the event loop; the thread
that serves the metrics reads how many wait.

A parked pull is an entry in a dict, in one more for each queue it waits for, and in one heap of
deadlines, and counts for its connection.  Beyond that it costs nothing until an append wakes it or
its deadline comes.  `next_ms` tells the shell when to call `expire`.
"""

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

from duemq.errors import Overloaded

WAITERS_MAX = 20_000
# Queues that all of them together wait for, each counted as often as somebody waits for it.
PLACES_MAX = 400_000
# A connection may have this part of both.  More than one connection is for permissions to refuse.
CONNECTION_PART = 4

W = TypeVar("W", bound=Hashable)
QueueKey = tuple[str, int]


class _Wait(NamedTuple):
    deadline_ms: int
    keys: tuple[QueueKey, ...]
    connection: str


class Waiters(Generic[W]):
    """Waiters are any hashable things, parked once at a time."""

    def __init__(self, waiters_max: int = WAITERS_MAX, places_max: int = PLACES_MAX) -> None:
        self._most = waiters_max, places_max
        self.places = 0
        """Queues that are waited for, each counted as often as somebody waits for it."""
        self._queues: dict[QueueKey, dict[W, None]] = {}
        self._parked: dict[W, _Wait] = {}
        self._connections: dict[str, tuple[int, int]] = {}  # waiters and places of each
        self._deadlines: list[tuple[int, int, W]] = []
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, waiter: W) -> bool:
        return waiter in self._parked

    def park(
        self, waiter: W, queues: Iterable[QueueKey], deadline_ms: int, connection: str = ""
    ) -> None:
        """Raises Overloaded when too many wait, here or for a named connection."""
        keys = tuple(dict.fromkeys(queues))  # a pull may name a queue twice
        mine = self._connections.get(connection, (0, 0))
        self._check_room((len(self._parked), self.places), len(keys), 1, "here")
        if connection:
            self._check_room(mine, len(keys), CONNECTION_PART, "for this connection")
        self._connections[connection] = mine[0] + 1, mine[1] + len(keys)
        self.places += len(keys)
        self._ticket += 1
        self._parked[waiter] = _Wait(deadline_ms, keys, connection)
        for key in keys:
            self._queues.setdefault(key, {})[waiter] = None
        heapq.heappush(self._deadlines, (deadline_ms, self._ticket, waiter))
        self._compact()

    def _check_room(self, there: tuple[int, int], places: int, part: int, where: str) -> None:
        waiters_max, places_max = (most // part for most in self._most)
        for count, more, limit, what in (
            (there[0], 1, waiters_max, "pulls wait"),
            (there[1], places, places_max, "queues are waited for"),
        ):
            if count and count + more > limit:  # one alone always may
                raise Overloaded(
                    f"wait_ms: {count} {what} {where}, {limit} are allowed",
                    field="wait_ms",
                    value=count,
                    limit=limit,
                )

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
        self.places -= len(parked.keys)
        waiters, places = self._connections[parked.connection]
        if waiters == 1:
            del self._connections[parked.connection]
        else:
            self._connections[parked.connection] = waiters - 1, places - len(parked.keys)
        for key in parked.keys:
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
        return parked is not None and parked.deadline_ms == deadline_ms

    def _compact(self) -> None:
        """Bounds the heap: the deadlines of those woken long before are dropped."""
        if len(self._deadlines) > 2 * len(self._parked) + 64:
            self._deadlines = [
                entry for entry in self._deadlines if self._is_live(entry[0], entry[2])
            ]
            heapq.heapify(self._deadlines)
