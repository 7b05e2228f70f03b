"""Connections to brokers, as the routes name them.

Owned by the event loop.  A link is a broker's fire stream, its fetchers and its commits.  A broker
that leaves the routes keeps its link: routes may be stale, and only it can answer for batches it
was sent.  A broker that comes back with another address or store gets a new link.

Before anything else a link claims its queues at the broker, which gives each to one data directory
for good (broker/records/timer_owners.py).  While one of them is another service's, nothing is
fetched from this broker or sent to it; and nothing is fired at all if timers from there are held
here: the other one may have them too.  A service that has been given nothing yet claims at one
broker after the other, and asks no further one while it is refused: of two that start at once, one
gets all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from duemq.errors import DuemqError, FencedTimer, Unavailable
from duemq.protocol.names import TIMER_GROUP, TIMER_TOPIC
from duemq.protocol.route import Broker, Queue, RouteCache
from duemq.transport import channel, status
from duemq.transport.retrying import Backoff
from duemq.v1 import broker_pb2, broker_pb2_grpc
from duemq_server.serving.clock import now_ms, steady_ms
from duemq_server.timer_service.edge.fire_stream import FireStream
from duemq_server.timer_service.edge.timer_fetcher import CALL_TIMEOUT_S, TimerFetcher
from duemq_server.timer_service.scheduling.clocks import (
    SLACK_MS,
    STEP_MS_TO_SAY,
    BrokerClock,
    ClockSteps,
)
from duemq_server.timer_service.settings import Settings
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.log_entries import SourceId

log = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 1.0
# Claims are repeated: the broker sees who is alive, and the shard sees the broker's clock.
CLAIM_INTERVAL_S = 5.0
CLAIM_TIMEOUT_S = 2.0
CLAIM_RETRY_S = (0.05, 2.0)
CLOCK_INTERVAL_S = 1.0
SAY_AGAIN_S = 60.0


class BrokerLink:
    """What a shard has to do with one broker."""

    def __init__(self, links: BrokerLinks, shard: Shard, broker: Broker) -> None:
        self.broker = broker
        self.clock = BrokerClock()
        self.refused: FencedTimer | None = None
        """Another timer service has queues of this shard."""
        self.granted = False
        """Queues were given to this service."""
        self.fetchers: dict[int, TimerFetcher] = {}
        self._links = links
        self._shard = shard
        self._queues: list[int] = []
        self._look = asyncio.Event()
        self._channel = channel.connect(broker.address)
        self._stub = broker_pb2_grpc.BrokerStub(self._channel)
        self._fires: FireStream | None = None
        self._committed: dict[int, int] = {}
        self._tasks = [
            asyncio.create_task(self._claims(), name=f"claims {broker.name}"),
            asyncio.create_task(self._commits(), name=f"commits {broker.name}"),
        ]

    def serve(self, queue_ids: range) -> None:
        """Claims these queues of %TIMER% and fetches from them, if it does not yet."""
        if len(queue_ids) > len(self._queues):
            self._queues = list(queue_ids)
            self._look.set()

    def kick(self) -> None:
        """There may be something to send."""
        if self._fires is not None:
            self._fires.kick()

    def end(self) -> None:
        """Sends nothing any more."""
        for task in self._tasks:
            task.cancel()
        if self._fires is not None:
            self._fires.end()

    def holds_timers(self) -> bool:
        """Whether anything ever came from this broker's store."""
        numbers, store_id = self._shard.scheduler.numbers, self.broker.store_id
        return any(numbers.source(SourceId(store_id, queue)) for queue in self._queues)

    async def stop(self) -> None:
        """Ends everything; commits what was fetched, once it is durable."""
        await asyncio.gather(*(fetcher.stop() for fetcher in self.fetchers.values()))
        self.end()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._shard.log_loop.durable(self._shard.directory.log.end_position)
            await self._commit()
        except DuemqError as error:
            log.info("offsets of %s not committed: %s", self.broker.name, error)
        if self._fires is not None:
            await self._fires.stop()
        await self._channel.close()

    # -- claims -----------------------------------------------------------

    async def _claims(self) -> None:
        backoff = Backoff(*CLAIM_RETRY_S)
        while True:
            self._look.clear()
            quiet_s = CLAIM_INTERVAL_S
            try:
                async with self._links.turn(self):
                    await self._claim()
            except FencedTimer as error:
                self.refused = error
                self._links.claims_changed()
                quiet_s = backoff.next_s()
            except DuemqError as error:
                quiet_s = backoff.next_s()
                level = logging.DEBUG if isinstance(error, Unavailable) else logging.WARNING
                text = "broker %s, queues not claimed: %s"
                self._links.say(f"claim {self.broker.name}", level, text, self.broker.name, error)
            else:
                backoff.reset()
            try:
                async with asyncio.timeout(quiet_s):
                    await self._look.wait()
            except TimeoutError:
                continue

    async def _claim(self) -> None:
        queues = list(self._queues)
        service = self._links.service
        request = broker_pb2.ClaimTimerQueuesRequest(service=service, queue_ids=queues)
        call = self._stub.ClaimTimerQueues(request, timeout=CLAIM_TIMEOUT_S)
        answer = await status.answer(call, self.broker.name)
        if answer.store_id != self.broker.store_id:
            raise Unavailable(f"{self.broker.name} has another store, {answer.store_id:016x}")
        self.clock.observe(now_ms(), answer.now_ms, steady_ms())
        self._links.keep_time()
        for queue_id in queues:
            if queue_id not in self.fetchers:
                source = SourceId(self.broker.store_id, queue_id)
                self.fetchers[queue_id] = TimerFetcher(
                    self._shard, self.broker.name, self._stub, source, self._look.set
                )
        if self._fires is None:
            name, address = self.broker.name, self.broker.address
            self._fires = FireStream(self._shard, name, address, self.clock)
        if self.refused is not None or (queues and not self.granted):
            self.granted, self.refused = bool(queues), None
            log.info("broker %s: %d queues are ours", self.broker.name, len(queues))
            self._links.claims_changed()

    # -- commits ----------------------------------------------------------

    async def _commits(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_INTERVAL_S)
            try:
                await self._commit()
            except DuemqError as error:
                log.debug("offsets of %s not committed: %s", self.broker.name, error)

    async def _commit(self) -> None:
        """Tells the broker what is durable here: it may let go of it."""
        new: dict[int, int] = {}
        for queue_id in self.fetchers:
            source = self._shard.scheduler.numbers.source(SourceId(self.broker.store_id, queue_id))
            if source is not None and source.durable_offset > self._committed.get(queue_id, -1):
                new[queue_id] = source.durable_offset
        if not new:
            return
        request = broker_pb2.CommitOffsetsRequest(
            group=TIMER_GROUP,
            commits=[
                broker_pb2.OffsetCommit(topic=TIMER_TOPIC, queue_id=queue_id, offset=offset)
                for queue_id, offset in new.items()
            ],
            timer_id=self._links.service.id,
        )
        call = self._stub.CommitOffsets(request, timeout=CALL_TIMEOUT_S)
        answer = await status.answer(call, self.broker.name)
        for result in answer.queues:
            if not result.HasField("error"):
                self._committed[result.queue_id] = new[result.queue_id]


class BrokerLinks:
    """A link to every broker of the cluster."""

    def __init__(self, shard: Shard, routes: RouteCache, settings: Settings) -> None:
        self.by_name: dict[str, BrokerLink] = {}
        self.service = broker_pb2.TimerService(
            id=shard.directory.producer_id,
            name=settings.name,
            shard=settings.shard,
            shards=settings.shards,
        )
        self.on_claims: Callable[[], None] = lambda: None
        """Called when a claim was granted or refused."""
        self._shard = shard
        self._routes = routes
        self._routes_changed = asyncio.Event()
        self._settings = settings
        self._turn = asyncio.Lock()
        self._said_s: dict[str, float] = {}
        self._behind_ms = 0
        self._watch = ClockSteps(now_ms(), steady_ms())
        self._clocks = asyncio.create_task(self._watch_clocks(), name="clocks")
        self._stopping: set[asyncio.Task[None]] = set()
        self._queues: Mapping[str, Mapping[str, int]] = {}
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
                self.by_name[broker.name] = BrokerLink(self, self._shard, broker)
        timer_topic = self._routes.route(TIMER_TOPIC)
        for served in timer_topic.brokers if timer_topic else ():
            link = self.by_name.get(served.broker)
            if link is not None:
                link.serve(range(self._settings.shard, served.queues, self._settings.shards))
        self._set_routes()
        self._routes_changed.set()
        self._routes_changed = asyncio.Event()

    def _set_routes(self) -> None:
        queues = _writable(self._routes)
        for topic, of_brokers in queues.items():
            for broker, count in of_brokers.items():
                before = self._queues.get(topic, {}).get(broker, 0)
                if count < before:
                    log.warning(
                        "topic %s has %d queues at broker %s now, it had %d: delayed messages for"
                        " queue %d and above go to queue %% %d",
                        *(topic, count, broker, before, count, count),
                    )
        self._queues = {**self._queues, **queues}
        self._shard.scheduler.dispatcher.set_routes(queues)

    @property
    def routes_known(self) -> bool:
        """Some nameserver has answered."""
        return self._routes.version > 0

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
            self._set_routes()
        self.on_claims()

    def check_may_serve(self) -> None:
        """Raises Unavailable if another service has this shard's queues."""
        if fence := self._shard.scheduler.dispatcher.fence:
            raise Unavailable(f"this timer service was refused: {fence}")

    def check_may_answer(self, store_id: int) -> None:
        """Raises Unavailable if another service may know more of a store's timers."""
        for link in self.by_name.values():
            if link.broker.store_id == store_id and link.refused is not None:
                raise Unavailable(f"this timer service was refused: {link.refused}")

    # -- clocks -----------------------------------------------------------

    async def _watch_clocks(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_INTERVAL_S)
            self._look_at_clocks(now_ms(), steady_ms())

    def _look_at_clocks(self, wall_ms: int, quiet_ms: int) -> None:
        step_ms = self._watch.look(wall_ms, quiet_ms)
        if step_ms:
            level = logging.WARNING if abs(step_ms) >= STEP_MS_TO_SAY else logging.DEBUG
            log.log(level, "this machine's clock was set by %+.3f s", step_ms / 1000)
            for link in self.by_name.values():
                link.clock.clock_set()
            self._shard.scheduler.dispatcher.clock_set(step_ms)
        self.keep_time()
        for name, problem in self._clock_problems().items():
            self.say(f"clock {name}", logging.WARNING, "%s", problem)

    def keep_time(self) -> None:
        """Goes by the brokers' clocks if all of them are behind this machine's."""
        known = (link.clock.behind_ms for link in self.by_name.values() if link.clock.known)
        behind_ms = min(known, default=0)
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
        return [*refused, *self._clock_problems().values()]

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


def _same(one: Broker, other: Broker) -> bool:
    return one.address == other.address and one.store_id == other.store_id


def _writable(routes: RouteCache) -> Mapping[str, Mapping[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for topic in routes.topics:
        route = routes.route(topic)
        if route is not None:
            table[topic] = {b.broker: b.queues for b in route.brokers if b.writable}
    return table
