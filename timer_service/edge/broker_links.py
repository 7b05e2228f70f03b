"""A link to every broker, as the routes name them.

Owned by the event loop.  A broker that leaves the routes keeps its link (broker_link.py): routes
may be stale, and only it can answer for batches it was sent.  A broker that comes back with another
address or store gets a new link.

While a broker refuses this service its queues, and timers from there are held here, nothing is
fired at all: the service that has the queues may have the timers too.  A service that has been
given nothing yet claims at one broker after the other, and asks no further one while it is refused:
of two that start at once, one gets all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

from duemq.errors import FencedTimer, Unavailable
from duemq.protocol.names import TIMER_TOPIC
from duemq.protocol.route import Broker, Queue, Route, RouteCache
from duemq.v1 import broker_pb2
from duemq_server.serving import process
from duemq_server.serving.clock import now_ms, steady_ms
from duemq_server.timer_service.disk.place import ShardPlace
from duemq_server.timer_service.edge.broker_link import BrokerLink
from duemq_server.timer_service.scheduling.clocks import SLACK_MS, STEP_MS_TO_SAY, ClockSteps
from duemq_server.timer_service.scheduling.dispatch import Queues
from duemq_server.timer_service.settings import Settings
from duemq_server.timer_service.shard import Shard

log = logging.getLogger(__name__)

CLOCK_INTERVAL_S = 1.0
SAY_AGAIN_S = 60.0
GONE_MAX = 4_096
"""Topics that are gone, of which is known how many queues they had."""


class BrokerLinks:
    """A link to every broker of the cluster."""

    def __init__(
        self, shard: Shard, routes: RouteCache, settings: Settings, place: ShardPlace
    ) -> None:
        self.by_name: dict[str, BrokerLink] = {}
        self.place = place
        self.before_leaving: Callable[[], Awaitable[None]] = _nothing
        """Called before a shard that leaves hands queues over; raises as the next one."""
        self.before_first_fetch: Callable[[], Awaitable[None]] = _nothing
        """Called before a queue is fetched that was granted, and before the first message under a
        key is taken; raises DuemqErrors: not yet."""
        self.on_claims: Callable[[], None] = lambda: None
        """Called when a claim was granted or refused."""
        self.epoch = 0
        """In which this replica leads; 0: there are no replicas."""
        self._may_take = False
        self._asking: asyncio.Task[None] | None = None
        self._shard = shard
        self._routes = routes
        self._routes_changed = asyncio.Event()
        self._settings = settings
        self._turn = asyncio.Lock()
        self._said_s: dict[str, float] = {}
        self._behind_ms = 0
        self._watch = ClockSteps(now_ms(), steady_ms())
        self._clocks = process.lasting(self._watch_clocks(), "clocks", shard.log_loop.fail)
        self._stopping: set[asyncio.Task[None]] = set()
        self._seen: dict[str, Route] = {}
        self._queues: dict[str, Queues] = {}  # writable, as they were last; of topics gone, too
        shard.log_loop.on_sendable = self._kick

    def changed(self) -> None:
        """The routes changed."""
        for broker in sorted(self._routes.brokers, key=lambda broker: broker.name):
            known = self.by_name.get(broker.name)
            if known is not None and _same(known.broker, broker):
                continue
            if known is not None:
                self._end(known)
            if broker.store_id:
                log.info("broker %s at %s", broker.name, broker.address)
                self.by_name[broker.name] = BrokerLink(
                    self, self._shard, broker, self._settings.tls
                )
        timer_topic = self._routes.route(TIMER_TOPIC)
        for served in timer_topic.brokers if timer_topic else ():
            link = self.by_name.get(served.broker)
            if link is not None:
                link.serve(served.queues)
        self._set_routes()
        self._routes_changed.set()
        self._routes_changed = asyncio.Event()

    def _set_routes(self) -> None:
        """Looks only into routes that changed: there may be tens of thousands."""
        before, self._seen = self._seen, {}
        queues: dict[str, Queues] = {}
        for topic in self._routes.topics:
            route = self._routes.route(topic)
            if route is not None:
                if before.get(topic) is not route:
                    self._queues[topic] = self._writable(route)
                self._seen[topic] = route
                queues[topic] = self._queues[topic]
        gone = [topic for topic in self._queues if topic not in queues]
        for topic in gone[:-GONE_MAX]:
            del self._queues[topic]
        self._shard.scheduler.dispatcher.set_routes(queues)

    def _writable(self, route: Route) -> Queues:
        """Says where there are fewer queues than there were."""
        before = self._queues.get(route.topic, {})
        queues = {b.broker: b.queues for b in route.brokers if b.writable}
        for broker, count in queues.items():
            if count < before.get(broker, 0):
                log.warning(
                    "topic %s has %d queues at broker %s now, it had %d: delayed messages for"
                    " queue %d and above go to queue %% %d",
                    *(route.topic, count, broker, before[broker], count, count),
                )
        return queues

    @property
    def service(self) -> broker_pb2.TimerService:
        """This shard, as brokers know it."""
        place = self.place
        return broker_pb2.TimerService(
            id=self._shard.directory.producer_id,
            name=self._settings.name,
            shard=place.shard,
            shards=place.shards,
            # As shards say that there are or were lately; -1: nobody knows.
            key_shards=place.key_shards or self._routes.key_shards or -1,
            empty=self.empty,
        )

    @property
    def empty(self) -> bool:
        """Whether this shard holds no timers, durably: not for a cancel that may yet be lost."""
        end = self._shard.directory.log.end_position
        return self._shard.scheduler.ledger.empty and self._shard.log_loop.position >= end

    @property
    def holders(self) -> list[broker_pb2.TimerService] | None:
        """Other services that may hold timers; None: no broker has told yet."""
        told = [link.holders for link in self.by_name.values() if link.holders is not None]
        if not (told or self.refusals):
            return None
        return [each for those in told for each in those]

    def untold(self) -> dict[int, str]:
        """Brokers that have not told yet who may hold timers of theirs, by store.

        Of stores that timers came from.  A broker need not know who holds another one's.
        """
        links = self.by_name.values()
        told = {link.broker.store_id for link in links if link.holders is not None}
        brokers = self._shard.scheduler.numbers.brokers
        return {store_id: brokers[store_id] for store_id in brokers.keys() - told}

    async def learn(self, key_shards: int) -> None:
        """A broker says what timer keys are divided over."""
        if not self.place.key_shards:
            await asyncio.to_thread(self.place.learn, key_shards or self._routes.key_shards)
            self.on_claims()

    @property
    def routes_known(self) -> bool:
        """Some nameserver has answered."""
        return self._routes.version > 0

    @property
    def live(self) -> list[BrokerLink]:
        """To the brokers that nameservers list."""
        listed = (self.by_name.get(each.name) for each in self._routes.brokers)
        return [link for link in listed if link is not None]

    @property
    def lost_brokers(self) -> list[str]:
        """Brokers that were there lately: topics may be missing with them."""
        return [each.broker.name for each in self._routes.lost_brokers]

    def queues_of(self, topic: str) -> tuple[Queue, ...]:
        """Those of the topic, as far as they are known; of brokers that are away, too."""
        return self._routes.keyed(topic)

    async def queues_soon(self, topic: str, timeout_s: float) -> tuple[Queue, ...]:
        """Waits for the route of a topic that may be new; none if it does not come."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.queues_of(topic):
                    await self._routes_changed.wait()
        return self.queues_of(topic)

    # -- claims -----------------------------------------------------------

    @property
    def refusals(self) -> dict[str, FencedTimer]:
        """Brokers where another timer service has queues of this shard."""
        refused = {name: link.refused for name, link in self.by_name.items()}
        return {name: error for name, error in refused.items() if error is not None}

    @property
    def granted(self) -> bool:
        """Whether any broker has given this service its queues."""
        return any(link.granted and link.refused is None for link in self.by_name.values())

    @asynccontextmanager
    async def turn(self, link: BrokerLink) -> AsyncIterator[None]:
        """To be held while a link claims.  Raises Unavailable if it had better not."""
        if self.granted:
            yield
            return
        async with self._turn:
            others = [name for name in self.refusals if name != link.broker.name]
            if others and link.refused is None and not self.granted:
                raise Unavailable(f"refused by broker {others[0]}")
            yield

    def claims_changed(self) -> None:
        """A claim was granted or refused: fires, or not."""
        for name, error in self.refusals.items():
            self.say(name, logging.ERROR, "refused by broker %s: %s", name, error)
        fences = (str(x.refused) for x in self.by_name.values() if x.refused and x.holds_timers())
        fence = next(fences, "")
        dispatcher = self._shard.scheduler.dispatcher
        if dispatcher.set_fence(fence):
            for link in self.by_name.values():
                link.kick()  # what was durable by then waits in its stream
        self.on_claims()

    def check_may_serve(self) -> None:
        """Raises Unavailable if another service has this shard's queues."""
        if fence := self._shard.scheduler.dispatcher.fence:
            raise Unavailable(f"this timer service was refused: {fence}")

    async def check_may_take(self) -> None:
        """Raises DuemqErrors while it is not known what others hold, of a shard that is new."""
        if self._may_take:
            return
        if self._asking is None:  # once for all who come meanwhile
            self._asking = asyncio.create_task(self._ask_others(), name="what others hold")
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._asking)

    async def _ask_others(self) -> None:
        try:
            await self.before_first_fetch()
            self._may_take = True
        finally:
            self._asking = None

    def check_may_answer(self, store_id: int) -> None:
        """Raises Unavailable if another service may know more of a store's timers."""
        for link in self.by_name.values():
            if link.broker.store_id == store_id and link.refused is not None:
                raise Unavailable(f"this timer service was refused: {link.refused}")

    # -- clocks -----------------------------------------------------------

    async def _watch_clocks(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_INTERVAL_S)
            self.look_at_clock()
            self.keep_time()
            for name, problem in self._clock_problems().items():
                self.say(f"clock {name}", logging.WARNING, "%s", problem)

    def look_at_clock(self) -> None:
        """Whenever due times are compared with it: brokers were not set with this machine's.

        What would go too early stands in front of what is due sooner.  If they were, too, their
        answers say so in a moment.
        """
        step_ms = self._watch.look(now_ms(), steady_ms())
        if not step_ms:
            return
        level = logging.WARNING if abs(step_ms) >= STEP_MS_TO_SAY else logging.DEBUG
        log.log(level, "this machine's clock was set by %+.3f s", step_ms / 1000)
        self._shard.scheduler.dispatcher.clock_set(step_ms)
        for link in self.by_name.values():
            link.clock.clock_set(step_ms)
            link.ask_for_time()
        self.keep_time()

    def keep_time(self) -> None:
        """Goes by the brokers' clocks if all of them are behind this machine's.

        Of those that answer; if none does, of all that did.
        """
        known = [link.clock for link in self.by_name.values() if link.clock.known]
        quiet_ms = steady_ms()
        fresh = [clock for clock in known if clock.is_fresh(quiet_ms)]
        behind_ms = min((clock.behind_ms for clock in fresh or known), default=0)
        if abs(behind_ms - self._behind_ms) >= SLACK_MS or not behind_ms:
            self._behind_ms = behind_ms
            self._shard.firing.keep_behind(behind_ms)

    def _clock_problems(self) -> dict[str, str]:
        bound_ms = self._settings.clock_difference_max * 1000
        found = {}
        for name, link in self.by_name.items():
            ahead_ms = link.clock.ahead_ms
            if abs(ahead_ms) > bound_ms:
                side, what = ("ahead of", "wait here") if ahead_ms > 0 else ("behind", "are late")
                found[name] = (
                    f"this machine's clock is {abs(ahead_ms)} ms {side} that of broker {name}:"
                    f" delayed messages {what} for as long"
                )
        return found

    def say(self, about: str, level: int, text: str, *args: object) -> None:
        """Logs, at most once a minute of one thing."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._said_s.get(about, now_s):
            self._said_s[about] = now_s + SAY_AGAIN_S
            log.log(level, text, *args)

    # -- figures ----------------------------------------------------------

    def problems(self) -> list[str]:
        """What is wrong, a sentence each."""
        refused = (f"refused by broker {name}: {error}" for name, error in self.refusals.items())
        waits = (*self._waits(), *self._not_handed_over())
        return [*refused, *waits, *self._clock_problems().values()]

    def _not_handed_over(self) -> Iterator[str]:
        """Of queues of a shard that leaves: once it is gone, nobody hands them over."""
        if not self.place.leaves:
            return
        ours = {each.id.store_id for each in self._shard.scheduler.numbers.sources}
        for each in self._routes.lost_brokers:
            name, link = each.broker.name, self.by_name.get(each.broker.name)
            told = link is not None and link.granted
            if each.broker.store_id in ours and not (told or each.forgotten):
                yield (
                    f"broker {name} is away, and may not have heard that this shard leaves: let it"
                    " run until that broker is back, or is given up (`duemq cluster forget`)"
                )

    @property
    def waiting(self) -> int:
        """Queues of this shard that another one has not handed over."""
        return sum(len(link.waits) for link in self.by_name.values())

    def _waits(self) -> Iterator[str]:
        """Of queues that another shard has not handed over, or that nothing comes from."""
        for name, link in self.by_name.items():
            yield from filter(None, (each.put_back for each in link.fetchers.values()))
            if link.held_up:
                yield f"nothing new is fetched from broker {name} yet: {link.held_up}"
            for queue_id, fetcher in link.fetchers.items():
                if fetcher.problem:
                    yield f"queue {queue_id} of broker {name} stands still: {fetcher.problem}"
            for owner in sorted(set(link.waits.values())):
                queues = [each for each, has in link.waits.items() if has == owner]
                yield (
                    f"queues {', '.join(map(str, queues))} of broker {name} are still those of"
                    f" {owner}: start it anew with --shards {self.place.shards}, or give it up"
                    " (`duemq timer release`)"
                )

    def begin_of(self, store_id: int, queue_id: int) -> int | None:
        """Where in a queue this shard's part begins; None: the queue is not this shard's."""
        for link in self.by_name.values():
            if link.broker.store_id == store_id:
                return link.begin_of(queue_id)
        return None

    def clocks(self) -> dict[str, int]:
        """How far this machine is ahead of each broker, in ms."""
        return {name: link.clock.ahead_ms for name, link in self.by_name.items()}

    def why_not_arrived(self, store_id: int) -> str:
        """Of a message in a broker's store, for who waits for it."""
        if any(link.broker.store_id == store_id for link in self.by_name.values()):
            return "has not arrived from its broker"  # even if that is away just now
        name = self._shard.scheduler.numbers.broker_of(store_id)
        if name not in self.by_name:
            of = f" of broker {name}" if name else ""
            return (
                f"comes from the store {store_id:016x}{of}, which no known broker has: the broker"
                " is away, its data was replaced, or the handle is another cluster's"
            )
        return (
            f"has not arrived: it is in the store {store_id:016x}, and broker {name}, which had"
            f" that, has {self.by_name[name].broker.store_id:016x} now; unless the old data comes"
            " back it is never delivered, and there is nothing to cancel"
        )

    def lag(self) -> int:
        """Delayed messages at brokers that were not fetched at the last look."""
        fetchers = (f for link in self.by_name.values() for f in link.fetchers.values())
        return sum(fetcher.lag for fetcher in fetchers)

    async def stop(self) -> None:
        """Ends all links."""
        self._clocks.cancel()
        if self._asking is not None:
            self._asking.cancel()
        for link in self.by_name.values():
            self._end(link)
        self.by_name = {}
        await asyncio.gather(self._clocks, *self._stopping, return_exceptions=True)

    def _end(self, link: BrokerLink) -> None:
        link.end()  # before another one begins
        task = asyncio.create_task(link.stop(), name=f"end of {link.broker.name}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def _kick(self, broker: str) -> None:
        link = self.by_name.get(broker)
        if link is not None:
            link.kick()


async def _nothing() -> None:
    pass


def _same(one: Broker, other: Broker) -> bool:
    return one.address == other.address and one.store_id == other.store_id
