"""Who serves which topic, as a client knows it.  Pure; owned by the task that applies updates.

The cache changes only by what a nameserver pushed: with all of them gone, clients work on.

Nameservers forget a broker that is away.  The cache remembers what it served, for `keyed` only: an
ordering key must not move to another queue because a broker restarts.  One that an operator gave up
is away no more: its keys move.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from duemq.protocol.timer_keys import shard_of_queue

STORE_ID = "duemq-store-id"
# Brokers that are away and remembered; of more, the first to go are forgotten.
AWAY_BROKERS_MAX = 256


@dataclass(frozen=True, slots=True, order=True)
class Queue:
    """A queue of a topic on a broker.  The order (broker, queue_id) is that of keyed choice."""

    broker: str
    queue_id: int


@dataclass(frozen=True, slots=True)
class BrokerQueues:
    """What one broker serves of a topic: the queues 0 to `queues` - 1."""

    broker: str
    address: str
    queues: int
    readable: bool = True
    writable: bool = True
    topic_id: int = 0
    """Another one when the topic was deleted and made anew; 0: not told (an older server)."""


@dataclass(frozen=True)
class Route:
    """The brokers of a topic, sorted by name."""

    topic: str
    brokers: tuple[BrokerQueues, ...]

    def __post_init__(self) -> None:
        brokers = tuple(sorted(self.brokers, key=lambda served: served.broker))
        object.__setattr__(self, "brokers", brokers)

    # Made when they are asked for: who follows all topics reads few of them.

    @cached_property
    def writable(self) -> tuple[Queue, ...]:
        """The queues that take messages, sorted."""
        return _queues(b for b in self.brokers if b.writable)

    @cached_property
    def readable(self) -> tuple[Queue, ...]:
        """The queues that give messages, sorted."""
        return _queues(b for b in self.brokers if b.readable)

    @cached_property
    def topic_ids(self) -> dict[str, int]:
        """Of which topic of this name each broker has queues; 0: not told."""
        return {b.broker: b.topic_id for b in self.brokers}


def _queues(brokers: Iterable[BrokerQueues]) -> tuple[Queue, ...]:
    return tuple(Queue(b.broker, queue_id) for b in brokers for queue_id in range(b.queues))


@dataclass(frozen=True, slots=True)
class Broker:
    """A live broker."""

    name: str
    address: str
    epoch: int = 0
    store_id: int = 0
    counter: int = field(default=0, compare=False)
    """With `epoch` the version of its report; no part of what it is."""
    external_address: str = ""

    @property
    def meant(self) -> tuple[tuple[str, str], ...]:
        """Metadata of calls, which another one at its address refuses."""
        return ((STORE_ID, str(self.store_id)),) if self.store_id else ()


@dataclass(frozen=True, slots=True)
class TimerShard:
    """A live timer shard: it serves the %TIMER% queues with queue_id % shards == shard.

    With shard >= shards it leaves: it serves none, and fires what it holds.
    """

    name: str
    address: str
    shard: int
    shards: int
    epoch: int = field(default=0, compare=False)
    counter: int = field(default=0, compare=False)
    store_id: int = 0
    key_shards: int = 0
    """Shards that timer keys and schedules are divided over; 0, of an older release: `shards`."""


@dataclass(frozen=True, slots=True)
class LostBroker:
    """A broker that was there lately: what it stores is missing from what the others answer."""

    broker: Broker
    """As it was last."""
    since_ms: int
    """Epoch ms, by a nameserver's clock."""
    stopped: bool
    """It said goodbye.  False: it fell silent."""
    forgotten: bool = False
    """An operator gave it up: it is missing from no answer."""


@dataclass(frozen=True, slots=True)
class LostTimer:
    """A timer shard that was there lately: its timers wait."""

    timer: TimerShard
    since_ms: int
    """Epoch ms, by a nameserver's clock."""
    stopped: bool
    """It said goodbye.  False: it fell silent."""
    forgotten: bool = False
    """An operator gave it up: it is missing from no answer."""


@dataclass(frozen=True, slots=True)
class Update:
    """One push of a nameserver.  `whole`: what it does not name does not exist."""

    whole: bool
    routes: tuple[Route, ...] = ()
    removed_topics: tuple[str, ...] = ()
    brokers: tuple[Broker, ...] = ()
    timers: tuple[TimerShard, ...] = ()
    lost_brokers: tuple[LostBroker, ...] = ()
    lost_timers: tuple[LostTimer, ...] = ()


class RouteCache:
    """The newest routes known."""

    def __init__(self) -> None:
        self.version = 0
        """Counts the updates that changed something; 0: nothing known yet."""
        self._routes: dict[str, Route] = {}
        self._brokers: dict[str, Broker] = {}
        self._timers: tuple[TimerShard, ...] = ()
        self._lost: tuple[tuple[LostBroker, ...], tuple[LostTimer, ...]] = ((), ())
        self.shards = 0
        """How many timer shards there are, or are to be; 0: none was seen yet."""
        self.key_shards = 0
        """How many of them keep timer keys and schedules, which never changes; 0: not known."""
        # Broker that is away → topic → what it served of it.
        self._away: dict[str, dict[str, BrokerQueues]] = {}

    def apply(self, update: Update) -> bool:
        """Takes an update over.  True if anything changed, or if it is the first."""
        before = (self._routes, self._brokers, self._timers, self._lost)
        routes = {} if update.whole else dict(self._routes)
        for topic in update.removed_topics:
            routes.pop(topic, None)
        routes.update((route.topic, route) for route in update.routes)
        brokers = {broker.name: broker for broker in update.brokers}
        lost = (update.lost_brokers, update.lost_timers)
        after = (routes, brokers, update.timers, lost)
        if self.version and before == after:
            return False
        self._remember(routes, brokers)
        seen = (*update.timers, *(each.timer for each in update.lost_timers))
        self.shards = max((each.shards for each in seen), default=self.shards)
        divided = (each.key_shards or each.shards for each in seen)
        self.key_shards = max(divided, default=self.key_shards)
        for each in update.lost_brokers:
            if each.forgotten:
                self._away.pop(each.broker.name, None)
        self._routes, self._brokers, self._timers, self._lost = after
        self.version += 1
        return True

    def route(self, topic: str) -> Route | None:
        """The topic's route; None: no broker serves it, as far as is known."""
        return self._routes.get(topic)

    def topic_id(self, topic: str, broker: str) -> int:
        """Of which topic of this name a broker has queues; 0: not known."""
        route = self._routes.get(topic)
        return route.topic_ids.get(broker, 0) if route is not None else 0

    def keyed(self, topic: str) -> tuple[Queue, ...]:
        """All queues of the topic for ordering keys, sorted: also of who is away or read-only."""
        route = self._routes.get(topic)
        there = route.brokers if route is not None else ()
        away = [served[topic] for served in self._away.values() if topic in served]
        return _queues(sorted((*there, *away), key=lambda served: served.broker))

    @property
    def topics(self) -> tuple[str, ...]:
        """All topics with a route, sorted."""
        return tuple(sorted(self._routes))

    @property
    def brokers(self) -> tuple[Broker, ...]:
        """The live brokers, sorted by name."""
        return tuple(self._brokers[name] for name in sorted(self._brokers))

    @property
    def timers(self) -> tuple[TimerShard, ...]:
        """The live timer shards."""
        return self._timers

    @property
    def lost_brokers(self) -> tuple[LostBroker, ...]:
        """Brokers that the nameservers list as lost, sorted by name.

        While there is one, an answer that was put together from the live brokers may be partial.
        """
        return tuple(each for each in self._lost[0] if not each.forgotten)

    @property
    def lost_timers(self) -> tuple[LostTimer, ...]:
        """Timer shards that the nameservers list as lost, sorted by name."""
        return tuple(each for each in self._lost[1] if not each.forgotten)

    @property
    def away(self) -> tuple[str, ...]:
        """Brokers that were there and are not now, sorted by name."""
        return tuple(sorted(self._away))

    def broker(self, name: str) -> Broker | None:
        """The live broker of that name."""
        return self._brokers.get(name)

    def timer_of(self, timer_queue_id: int) -> TimerShard | None:
        """The live shard that serves this queue of %TIMER%.

        While their number changes two may say so: either finds what the other one has.
        """
        for timer in self._timers:
            if timer.shards > 0 and shard_of_queue(timer_queue_id, timer.shards) == timer.shard:
                return timer
        return None

    def timer_shard(self, number: int) -> TimerShard | None:
        """The live shard of this number."""
        for timer in self._timers:
            if timer.shard == number:
                return timer
        return None

    def _remember(self, routes: Mapping[str, Route], brokers: Mapping[str, Broker]) -> None:
        """Keeps the queues of brokers that an update no longer names.

        A topic that vanishes although one of its brokers is there was deleted.
        """
        for name in brokers:
            self._away.pop(name, None)
        for name in self._brokers.keys() - brokers.keys():
            self._away[name] = {}
        for topic, route in self._routes.items():
            for served in route.brokers:
                if served.broker not in brokers and served.broker in self._away:
                    self._away[served.broker][topic] = served
            if topic not in routes and any(each.broker in brokers for each in route.brokers):
                for remembered in self._away.values():
                    remembered.pop(topic, None)
        while len(self._away) > AWAY_BROKERS_MAX:
            del self._away[next(iter(self._away))]
