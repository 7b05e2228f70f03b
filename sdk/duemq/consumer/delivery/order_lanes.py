"""Which messages of a queue may be processed next, in order.  Pure.

Messages of one ordering key (order by queue: all of the queue) wait in a *lane*, first in, first
out.  A lane is in one hand at a time:

            ┌──────────────── more wait ◄── done ─────┐
    READY ──┴─ take ─► in a run ── the first one failed ─► judged by the caller
      ▲                                                   │            │
      └──── its time has come ◄── SUSPENDED ◄── suspend ──┘            │
      └──── more wait ◄──────────────────────────────── pass_first ◄───┘

A *run* is what one worker does in one go: messages of one or several lanes, each lane's in order.
When one fails, the rest of its lane goes back to the front, untried.  *Free* messages (without a
key) wait for nobody; what failed of them gets a lane of its own, without a key too.

Finished messages are finished in their chunk (process_queue.py), from which the queue's commit
point follows.
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Hashable
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from duemq.consumer.fetching.process_queue import Chunk, Offered
from duemq.errors import InvariantError
from duemq.outcomes import Failed

M = TypeVar("M", bound=Offered)

KeyOf = Callable[[M], Hashable | None]
"""A message's lane; None: it is free."""


class LaneEntry(NamedTuple, Generic[M]):
    """A message and where it is finished."""

    chunk: Chunk[M]
    place: int
    message: M

    def finish(self) -> None:
        """It is done.  By the worker that has it, or by the loop when no worker has it."""
        self.chunk.finish_aside(self.place)


class OrderLane(Generic[M]):
    """Messages that wait for one another."""

    def __init__(self, key: Hashable | None) -> None:
        self.key = key
        """None: of free messages that failed."""
        self.waiting: deque[LaneEntry[M]] = deque()
        self.failures = 0
        """Of what is in front, one after the other."""
        self.together = 1
        """So many in front failed as one list."""

    @property
    def first(self) -> list[LaneEntry[M]]:
        """What failed last: a message, or a list of them."""
        return [self.waiting[index] for index in range(min(self.together, len(self.waiting)))]


class Segment(Generic[M]):
    """Messages of one lane in a run, or free ones.  Written by the run's worker."""

    def __init__(self, lane: OrderLane[M] | None, entries: list[LaneEntry[M]]) -> None:
        self.lane = lane
        """None: free messages."""
        self.entries = entries
        self.done = 0
        """How many of them, from the front, are finished; of free ones, finished or failed."""
        self.failures: list[Failed] = []
        """In messages that wait for one another one at most: nothing behind it counts as tried."""

    @property
    def free(self) -> bool:
        """These messages do not wait for one another."""
        return self.lane is None or self.lane.key is None


class LaneFailure(NamedTuple, Generic[M]):
    """A lane whose first message (or list) failed: suspend it, or pass it."""

    lane: OrderLane[M]
    error: BaseException


class OrderLanes(Generic[M]):
    """Of one queue.  Owned by the consumer's event loop."""

    def __init__(self, key_of: KeyOf[M], *, lists: bool = False) -> None:
        """`lists`: a run is one list, of one lane or of free messages."""
        self._key_of = key_of
        self._lists = lists
        self._lanes: dict[Hashable, OrderLane[M]] = {}  # with something waiting or under way
        self._ready: deque[OrderLane[M]] = deque()
        self._free: deque[LaneEntry[M]] = deque()
        self._suspended: list[
            tuple[int, int, OrderLane[M]]
        ] = []  # a heap: (until ms, number, lane)
        self._numbers = count()

    def add(self, chunk: Chunk[M]) -> None:
        """Takes pulled messages over, in the order of the queue; finished one by one from now."""
        lanes, key_of = self._lanes, self._key_of
        for place, message in enumerate(chunk.messages, chunk.set_aside(len(chunk.messages))):
            entry = LaneEntry(chunk, place, message)
            key = key_of(message)
            if key is None:
                self._free.append(entry)
                continue
            lane = lanes.get(key)
            if lane is None:
                lane = lanes[key] = OrderLane(key)
                self._ready.append(lane)
            lane.waiting.append(entry)

    def take(self, now_ms: int, limit: int) -> list[Segment[M]]:
        """At most `limit` messages that may be processed now, for one worker; empty: none may."""
        self._wake(now_ms)
        segments: list[Segment[M]] = []
        while limit > 0 and self._ready:
            lane = self._ready.popleft()
            size = lane.together if self._lists and lane.failures else limit
            segments.append(Segment(lane, _taken(lane.waiting, size)))
            if self._lists:
                return segments
            limit -= len(segments[-1].entries)
        if limit > 0 and self._free:
            segments.append(Segment(None, _taken(self._free, limit)))
        return segments

    def ended(self, segments: list[Segment[M]]) -> list[LaneFailure[M]]:
        """A worker is through, or has stopped; answers the lanes to suspend or to pass."""
        failures: list[LaneFailure[M]] = []
        for segment in segments:
            lane, failed = segment.lane, segment.failures
            if lane is None or (lane.key is None and failed):
                failures += self._ended_free(segment)
                continue
            if segment.done:
                lane.failures, lane.together = 0, 1
            lane.waiting.extendleft(reversed(segment.entries[segment.done :]))
            if failed:
                lane.failures += 1
                lane.together = failed[0].count
                failures.append(LaneFailure(lane, failed[0].error))
            else:
                self._go_on(lane)
        return failures

    def take_back(self, segments: list[Segment[M]], current: int) -> list[Segment[M]]:
        """A worker hangs in one message: frees what does not wait for that one.

        The worker has been stopped and is in segment `current`, at the message `done` of it, which
        it has begun or leaves out; answers what was tried before, and last what it keeps, each for
        `ended`.
        """
        self.ended(segments[current + 1 :])
        *tried, segment = segments[: current + 1]
        if segment.lane is None and not self._lists:
            done = segment.done  # before the look at `failures`, which the worker adds to
            self._free.extendleft(reversed(segment.entries[done + 1 :]))
            segment.entries = segment.entries[: done + 1]
            front = Segment(None, segment.entries[:done])
            front.done = done
            front.failures = [each for each in segment.failures if each.index < done]
            del segment.failures[: len(front.failures)]
            tried.append(front)
        return [*tried, segment]

    def suspend(self, lane: OrderLane[M], until_ms: int) -> None:
        """The lane waits: what failed is tried again then."""
        heapq.heappush(self._suspended, (until_ms, next(self._numbers), lane))

    def pass_first(self, lane: OrderLane[M], given_up: Collection[LaneEntry[M]]) -> None:
        """Finishes messages of what failed in a lane; if it was all of it, the lane goes on.

        Otherwise the rest of it stays in front, and the lane is to be suspended.
        """
        first, gone = lane.first, set(map(id, given_up))
        rest = [entry for entry in first if id(entry) not in gone]
        if not gone or len(rest) + len(gone) != len(first):
            raise InvariantError("only what failed is given up")
        for _ in first:
            lane.waiting.popleft()
        for entry in given_up:
            entry.finish()
        lane.waiting.extendleft(reversed(rest))
        lane.together = len(rest)
        if not rest:
            lane.failures, lane.together = 0, 1
            self._go_on(lane)

    @property
    def wake_ms(self) -> int | None:
        """When the next suspended lane may go on; None: none is suspended."""
        return self._suspended[0][0] if self._suspended else None

    def _wake(self, now_ms: int) -> None:
        while self._suspended and self._suspended[0][0] <= now_ms:
            self._ready.append(heapq.heappop(self._suspended)[2])

    def _go_on(self, lane: OrderLane[M]) -> None:
        if lane.waiting:
            self._ready.append(lane)
        elif lane.key is not None:
            del self._lanes[lane.key]

    def _ended_free(self, segment: Segment[M]) -> list[LaneFailure[M]]:
        self._free.extendleft(reversed(segment.entries[segment.done :]))
        before = segment.lane.failures if segment.lane else 0
        failures: list[LaneFailure[M]] = []
        for failed in segment.failures:
            lane: OrderLane[M] = OrderLane(None)
            lane.waiting.extend(segment.entries[failed.index : failed.index + failed.count])
            lane.failures, lane.together = before + 1, failed.count
            failures.append(LaneFailure(lane, failed.error))
        return failures


def _taken(waiting: deque[LaneEntry[M]], limit: int) -> list[LaneEntry[M]]:
    if len(waiting) <= limit:
        taken = list(waiting)
        waiting.clear()
        return taken
    return [waiting.popleft() for _ in range(limit)]
