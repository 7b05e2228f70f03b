"""The other timer shards: who of them has a timer that this shard does not have.

Owned by the event loop.  A timer stays with the shard that took it over, and the queue that it
came from may be another shard's by now.  Clients need not know: any shard passes on what it is
asked about another one's timers.  That a timer came to a shard is so for good, so what is passed on
is not passed on again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import grpc.aio

from duemq.errors import DuemqError, Unavailable
from duemq.protocol.route import RouteCache, TimerShard
from duemq.settings import Tls
from duemq.transport import status
from duemq.transport.channel import Channels
from duemq.v1 import stubs, timer_pb2
from duemq.v1.broker_pb2 import TimerService
from duemq.v1.message_pb2 import TimerHandle
from duemq_server.timer_service.disk.place import ShardPlace

T = TypeVar("T")

TIMEOUT_S = 2.0
"""Of a question which timers a shard has."""
PASSED_ON_TIMEOUT_S = 10.0
"""Of a request that is passed on: the other one may wait for a timer to arrive, for 5 s."""


def time_for(at_most_s: float, left_s: float | None) -> float:
    """For other shards' answers, where the caller waits for `left_s` yet (None: for ever).

    So there is time to tell him what is known without them.
    """
    return at_most_s if left_s is None else min(at_most_s, left_s / 2)


class ByShard(NamedTuple):
    """Where timers are, by their places in the caller's list."""

    shards: Mapping[int, TimerShard]
    missing: Mapping[int, Unavailable]
    """Of those that none of the others has: who may have them, and is away."""
    to_come: Collection[int] = ()
    """Of those that nobody has: what may come yet, here or there."""

    def by_shard(self) -> dict[TimerShard, list[int]]:
        """The places of each shard's."""
        found: defaultdict[TimerShard, list[int]] = defaultdict(list)
        for at, shard in self.shards.items():
            found[shard].append(at)
        return found


class Answered(NamedTuple, Generic[T]):
    """By one shard, of the timers at these places."""

    places: list[int]
    answer: T | DuemqError


NOWHERE_ELSE = ByShard({}, {})


class OtherShards:
    """As the routes name them."""

    def __init__(
        self, routes: RouteCache, name: str, place: ShardPlace, tls: Tls | None = None
    ) -> None:
        """`name`, `place`: this shard's."""
        self.holders: Callable[[], Sequence[TimerService] | None] = list
        """Those that may hold timers; None: no broker has told yet."""
        self._routes = routes
        self._name = name
        self._place = place
        self._channels = Channels(tls)

    @property
    def alive(self) -> list[TimerShard]:
        """Those that nameservers hear from."""
        return [each for each in self._routes.timers if each.name != self._name]

    @property
    def there(self) -> bool:
        """Whether there are others, alive or away; also while nobody has said so yet."""
        return bool(self.alive or self._away())

    def lost_beside(self, number: int) -> list[str]:
        """Names of those that are away; not who was the shard of this number before."""
        return [each.name for each in self._lost() if each.shard != number]

    def unheard(self) -> list[TimerService]:
        """Those that may hold timers, as brokers say, and of which no nameserver has heard."""
        # Another data directory may have the number, even the name, of one that is away.
        known = [*self.alive, *self._lost()]
        ids = {each.store_id for each in known}
        nameless = {each.shard for each in known if not each.store_id}  # of an older release
        holders = self.holders() or ()
        return [each for each in holders if each.id not in ids and each.shard not in nameless]

    def _lost(self) -> list[TimerShard]:
        lost = (each.timer for each in self._routes.lost_timers)
        return [each for each in lost if each.name != self._name]

    def _away(self) -> list[str]:
        if not self._routes.version:
            return ["no nameserver has answered yet"]
        lost = self._lost()
        return [*(each.name for each in lost), *self._not_heard_of(lost)]

    def _not_heard_of(self, lost: list[TimerShard]) -> list[str]:
        """There must be such shards, or brokers know of them.

        A nameserver forgets who is away when it starts anew, and in time.
        """
        place = self._place
        if self.holders() is None:
            return ["no broker has told yet which shards there are"]
        count = max(place.shards, place.key_shards)
        known = [*self.alive, *lost]
        wanted = {each: f"shard {each} of {count}" for each in range(count)}
        wanted |= {each.shard: "" for each in known} | {place.shard: ""}
        wanted |= {each.shard: f"{each.name} (shard {each.shard})" for each in self.unheard()}
        return [wanted[each] for each in sorted(wanted) if wanted[each]]

    def channel(self, shard: TimerShard) -> grpc.aio.Channel:
        """To one of them; kept as long as it is there."""
        self._channels.leave(self._channels.addresses - {each.address for each in self.alive})
        return self._channels.to(shard.address)

    async def locate(
        self, handles: Sequence[TimerHandle], places: Sequence[int], timeout_s: float = TIMEOUT_S
    ) -> ByShard:
        """Which of the others have the timers at these places of the list."""
        alive = self.alive
        if not places or not self.there:
            return NOWHERE_ELSE
        request = timer_pb2.LocateTimersRequest(handles=[handles[at] for at in places])
        answers = await asyncio.gather(*(self._ask(each, request, timeout_s) for each in alive))
        found: dict[int, TimerShard] = {}
        away = self._away()
        for shard, answer in zip(alive, answers, strict=True):
            if isinstance(answer, DuemqError):
                away.append(f"{shard.name} ({answer})")
                continue
            found |= {at: shard for at, here in zip(places, answer, strict=True) if here}
        if not away:
            return ByShard(found, {})
        error = Unavailable(
            f"not at this shard, and a timer shard that may have it is away: {', '.join(away)}",
            field="timer_shard",
            value=", ".join(away),
        )
        return ByShard(found, {at: error for at in places if at not in found})

    async def _ask(
        self, shard: TimerShard, request: timer_pb2.LocateTimersRequest, timeout_s: float
    ) -> Sequence[bool] | DuemqError:
        stub = stubs.TimerStub(self.channel(shard))
        try:
            call = stub.LocateTimers(request, timeout=timeout_s)
            answer = await status.answer(call, shard.address)
        except DuemqError as error:
            return error
        here, since = answer.here, self._leads_since(shard)
        if 0 < answer.epoch < since:  # it does not know what the other one took over
            return Unavailable(f"led in epoch {answer.epoch}, another replica does since {since}")
        if len(here) != len(request.handles):
            return Unavailable(f"answered {len(here)} of {len(request.handles)} timers")
        return list(here)

    def _leads_since(self, shard: TimerShard) -> int:
        """The epoch of who leads a shard, as far as brokers know.

        Who handed a queue over had claimed in it: so a shard that got the queue knows.
        """
        epochs = (each.epoch for each in self.holders() or () if each.id == shard.store_id)
        return max(epochs, default=0)

    async def each(
        self, located: ByShard, ask: Callable[[grpc.aio.Channel, list[int]], Awaitable[T]]
    ) -> list[Answered[T]]:
        """What each shard answers about its own; `ask` gets their places."""

        async def answered(shard: TimerShard, places: list[int]) -> Answered[T]:
            try:
                found = await status.answer(ask(self.channel(shard), places), shard.address)
            except DuemqError as error:
                return Answered(places, error)
            return Answered(places, found)

        parts = located.by_shard().items()
        return await asyncio.gather(*(answered(*part) for part in parts))

    async def stop(self) -> None:
        """Closes what is open."""
        await self._channels.close()
