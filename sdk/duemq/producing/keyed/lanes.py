"""Requests to timer shards until they are sent: what gathers, what waits for what.  Pure.

A shard gets up to IN_FLIGHT requests at a time; what is asked for meanwhile gathers in the next
ones.  Requests with a timer in common go one after the other, in the order of asking, so that the
last word about a key is the last one said.

Called with the owner's lock held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from duemq.protocol.timer_keys import SCHEDULE_RECORDS_MAX

if TYPE_CHECKING:
    from duemq.errors import DuemqError

IN_FLIGHT = 4
"""Requests on their way to one shard."""
# One that cannot be sent gathers no longer than this, so that its deadline fits all it holds.
AGE_S_MAX = 1.0
# So many of those that wait are looked at for one that may pass those in front of it.
LOOK_AHEAD = 64


class ShardCall(ABC):
    """A request to a shard.  It gathers what callers ask for until it is sent."""

    method: ClassVar[str]
    """Of the service Timer."""
    way: Hashable = None
    """As of `Lanes.gather`."""
    done = False
    """Answered, or given up."""

    def __init__(self, shard: int, now: float, deadline: float) -> None:
        """Times are of a monotonic clock, in seconds."""
        self.shard = shard
        self.begun = now
        self.deadline = deadline
        self.timers: set[Hashable] = set()
        """Which it is about: keys with their topics, or handles."""

    @property
    def full(self) -> bool:
        """It takes no more."""
        return len(self.timers) >= SCHEDULE_RECORDS_MAX

    async def prepare(self, left_s: float) -> None:  # noqa: B027 (few have anything to do)
        """Before each time that it is sent.  Raises DuemqErrors."""

    @abstractmethod
    def request(self, request_id: bytes) -> Any:
        """As it is sent."""

    @abstractmethod
    def answered(self, shard_name: str, answer: Any) -> None:
        """Tells who waits.

        Raises Internal if the answer does not fit; what says to ask again if it is not whole.
        """

    @abstractmethod
    def failed(self, error: DuemqError, *, asked: bool) -> None:
        """Tells who waits.  `asked`: it was sent, and may have been heard."""


C = TypeVar("C", bound=ShardCall)


class Lanes:
    """The requests to all shards."""

    def __init__(self) -> None:
        self._waiting: defaultdict[int, list[ShardCall]] = defaultdict(list)
        self._in_flight: defaultdict[int, list[ShardCall]] = defaultdict(list)
        self._growing: dict[Hashable, ShardCall] = {}
        self._waiting_for: dict[Hashable, int] = {}  # timer → requests that wait and are about it

    def gather(
        self, way: Hashable, timer: Hashable, now: float, begin: Callable[[], C]
    ) -> tuple[C, bool]:
        """The request that is to ask about the timer too; whether it was begun for that.

        `way`: only what has the same goes into one request; a shard is part of it.
        """
        call: Any = self._growing.get(way)
        begun = (
            call is None or call.full or timer in self._waiting_for or now - call.begun > AGE_S_MAX
        )
        if begun:
            call = begin()
            call.way = way
            self._waiting[call.shard].append(call)
            self._growing[way] = call  # last: a signal's handler may raise at any line
        call.timers.add(timer)
        self._waiting_for[timer] = self._waiting_for.get(timer, 0) + 1
        return call, begun

    def take(self) -> list[ShardCall]:
        """Those that can be sent now: they gather nothing more."""
        return [call for shard in list(self._waiting) for call in self._take(shard)]

    def _take(self, shard: int) -> list[ShardCall]:
        waiting, in_flight = self._waiting[shard], self._in_flight[shard]
        if not waiting or len(in_flight) >= IN_FLIGHT:
            return []
        busy = {timer for call in in_flight for timer in call.timers}
        taken = []
        for call in waiting[:LOOK_AHEAD]:
            if len(in_flight) >= IN_FLIGHT:
                break
            if busy.isdisjoint(call.timers):
                self._seal(call)
                in_flight.append(call)
                taken.append(call)
            busy |= call.timers
        self._waiting[shard] = [call for call in waiting if call not in in_flight]
        return taken

    def _seal(self, call: ShardCall) -> None:
        if self._growing.get(call.way) is call:
            del self._growing[call.way]
        for timer in call.timers:
            left = self._waiting_for.pop(timer, 1) - 1  # 1: `gather` was interrupted
            if left:
                self._waiting_for[timer] = left

    def ended(self, call: ShardCall) -> None:
        """One that was taken is answered, or given up."""
        self._in_flight[call.shard].remove(call)

    def open(self) -> list[ShardCall]:
        """All that are not ended."""
        lanes = (*self._in_flight.values(), *self._waiting.values())
        return [call for lane in lanes for call in lane]

    def give_up(self) -> list[ShardCall]:
        """Those that wait, which are ended by that."""
        given_up = [call for waiting in self._waiting.values() for call in waiting]
        self._waiting.clear()
        self._growing.clear()
        self._waiting_for.clear()
        return given_up
