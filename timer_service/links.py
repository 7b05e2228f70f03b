"""Connections to brokers, as the routes name them.

Owned by the event loop.  A link is a broker's sender, its fetchers and its commits.  A broker that
leaves the routes keeps its link: routes may be stale, and only it can answer for batches it was
sent.  A broker that comes back with another address or store gets a new link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from duemq.errors import DuemqError
from duemq.route import Broker, RouteCache
from duemq.rpc import channel, status
from duemq.v1 import broker_pb2, broker_pb2_grpc
from timer_service.entries import SourceId
from timer_service.fetcher import CALL_TIMEOUT_S, GROUP, TOPIC, Fetcher
from timer_service.sender import Sender
from timer_service.shard import Shard

log = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 1.0


class Link:
    """What a shard has to do with one broker."""

    def __init__(self, shard: Shard, broker: Broker) -> None:
        self.broker = broker
        self._shard = shard
        self._channel = channel.connect(broker.address)
        self._stub = broker_pb2_grpc.BrokerStub(self._channel)
        self.sender = Sender(shard, broker.name, broker.address)
        self.fetchers: dict[int, Fetcher] = {}
        self._committed: dict[int, int] = {}
        self._task = asyncio.create_task(self._commits(), name=f"commits {broker.name}")

    def fetch(self, queue_id: int) -> None:
        """Fetches from a queue of %TIMER%, if it does not yet."""
        if queue_id not in self.fetchers:
            source = SourceId(self.broker.store_id, queue_id)
            self.fetchers[queue_id] = Fetcher(self._shard, self.broker.name, self._stub, source)

    async def stop(self) -> None:
        """Ends everything; commits what was fetched, once it is durable."""
        await asyncio.gather(*(fetcher.stop() for fetcher in self.fetchers.values()))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._shard.durable(self._shard.store.log.end_position)
            await self._commit()
        except DuemqError as error:
            log.info("offsets of %s not committed: %s", self.broker.name, error)
        await self.sender.stop()
        await self._channel.close()

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
            group=GROUP,
            commits=[
                broker_pb2.OffsetCommit(topic=TOPIC, queue_id=queue_id, offset=offset)
                for queue_id, offset in new.items()
            ],
        )
        call = self._stub.CommitOffsets(request, timeout=CALL_TIMEOUT_S)
        answer = await status.answer(call, self.broker.name)
        for result in answer.queues:
            if not result.HasField("error"):
                self._committed[result.queue_id] = new[result.queue_id]


class Links:
    """A link to every broker of the cluster."""

    def __init__(self, shard: Shard, routes: RouteCache, number: int, shards: int) -> None:
        self.by_name: dict[str, Link] = {}
        self._shard = shard
        self._routes = routes
        self._number = number
        self._shards = shards
        self._stopping: set[asyncio.Task[None]] = set()
        shard.on_sendable = self._kick

    def changed(self) -> None:
        """The routes changed."""
        for broker in self._routes.brokers:
            known = self.by_name.get(broker.name)
            if known is not None and _same(known.broker, broker):
                continue
            if known is not None:
                self._end(known)
            if broker.store_id:
                log.info("broker %s at %s", broker.name, broker.address)
                self.by_name[broker.name] = Link(self._shard, broker)
        timer_topic = self._routes.route(TOPIC)
        for served in timer_topic.brokers if timer_topic else ():
            link = self.by_name.get(served.broker)
            for queue_id in range(self._number, served.queues if link else 0, self._shards):
                if link is not None:
                    link.fetch(queue_id)
        self._shard.scheduler.dispatcher.set_routes(_writable(self._routes))

    def knows(self, store_id: int) -> bool:
        """Whether a broker of the cluster owns the store, even if it is away just now."""
        return any(link.broker.store_id == store_id for link in self.by_name.values())

    def lag(self) -> int:
        """Delayed messages at brokers that were not fetched at the last look."""
        fetchers = (f for link in self.by_name.values() for f in link.fetchers.values())
        return sum(fetcher.lag for fetcher in fetchers)

    async def stop(self) -> None:
        """Ends all links."""
        for link in self.by_name.values():
            self._end(link)
        self.by_name = {}
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def _end(self, link: Link) -> None:
        link.sender.end()  # before another one begins
        task = asyncio.create_task(link.stop(), name=f"end of {link.broker.name}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def _kick(self, broker: str) -> None:
        link = self.by_name.get(broker)
        if link is not None:
            link.sender.kick()


def _same(one: Broker, other: Broker) -> bool:
    return one.address == other.address and one.store_id == other.store_id


def _writable(routes: RouteCache) -> Mapping[str, Mapping[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for topic in routes.topics:
        route = routes.route(topic)
        if route is not None:
            table[topic] = {b.broker: b.queues for b in route.brokers if b.writable}
    return table
