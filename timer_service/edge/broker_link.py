"""What a shard has to do with one broker: claims, a fire stream, a fetcher a queue, commits.

Owned by the event loop.

Before anything else a link claims its queues at the broker, which gives each to one data directory
(broker/records/timer_owners.py).  While one of them is another service's of this shard, nothing is
fetched from this broker or sent to it.

With a claim a link hands over what this shard has no more, since there is another number of
shards, and says how far it was taken over: nothing is fetched from there in this process, so that
is final once it is durable.  Queues that another shard has not handed over yet are asked for again
and again; those that were granted are served meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc.aio

from duemq.errors import DuemqError, FencedTimer, TopicNotFound, Unavailable
from duemq.protocol.names import TIMER_GROUP, TIMER_TOPIC
from duemq.protocol.route import Broker
from duemq.settings import Tls
from duemq.transport import status
from duemq.transport.channel import Channels
from duemq.transport.retrying import Backoff
from duemq.v1 import admin_pb2, broker_pb2, stubs
from duemq_server.serving import process
from duemq_server.serving.clock import now_ms, steady_ms
from duemq_server.storage.errors import StorageError
from duemq_server.timer_service.edge.fire_stream import FireStream
from duemq_server.timer_service.edge.timer_fetcher import CALL_TIMEOUT_S, TimerFetcher
from duemq_server.timer_service.scheduling.clocks import BrokerClock
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.log_entries import SourceId

if TYPE_CHECKING:
    from duemq_server.timer_service.edge.broker_links import BrokerLinks

log = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 1.0
NO_OFFSET = -1  # it is not known what is committed
# Of the question for a topic that no route has.
TOPIC_S = 2.0
# Claims are repeated: the broker sees who is alive, and the shard sees the broker's clock.
CLAIM_INTERVAL_S = 5.0
CLAIM_TIMEOUT_S = 2.0
# Of the claim by which a new connection for fires is checked: a broker whose disk is behind takes
# long, and fires all the same.
CHECK_TIMEOUT_S = 15.0
CLAIM_RETRY_S = (0.05, 2.0)
# While another shard has queues of this one.
CLAIM_WAIT_S = 0.5
# A shard that leaves looks so often whether it holds nothing any more.
EMPTY_LOOK_S = 0.05
# So long a stop waits for the disk and for the broker; the next start tells the same.
LAST_WORDS_S = 10.0


class BrokerLink:
    """What a shard has to do with one broker."""

    def __init__(
        self, links: BrokerLinks, shard: Shard, broker: Broker, tls: Tls | None = None
    ) -> None:
        self.broker = broker
        self.clock = BrokerClock()
        self.refused: FencedTimer | None = None
        """Another timer service has queues of this shard."""
        self.granted = False
        """Queues were given to this service."""
        self.fetchers: dict[int, TimerFetcher] = {}
        self.waits: dict[int, str] = {}
        """Queues of this shard that another one has not handed over, and who has them."""
        self.held_up = ""
        """Why nothing is fetched from queues that were granted."""
        self.holders: Sequence[broker_pb2.TimerService] | None = None
        """Other services that may hold timers, as far as the broker knows; None: not told yet."""
        self._told_empty: bool | None = None  # with the last claim; None: it was not answered
        self._links = links
        self._tls = tls
        self._shard = shard
        self._queues: list[int] = []
        self._served = 0  # queues of %TIMER% at the broker; 0: not known yet
        self._look = asyncio.Event()
        self._channels = Channels(tls)
        self._channel: grpc.aio.Channel | None = None
        self._stub: stubs.BrokerStub
        self._fires: FireStream | None = None
        self._committed: dict[int, int] = {}
        self._tasks = [
            process.lasting(self._claims(), f"claims {broker.name}", shard.log_loop.fail),
            process.lasting(self._commits(), f"commits {broker.name}", shard.log_loop.fail),
        ]

    def serve(self, queues: int) -> None:
        """Claims this shard's of so many queues of %TIMER%, and fetches from them."""
        if queues > self._served:
            self._served = queues
            self._queues = [each for each in range(queues) if self._links.place.has(each)]
            self._look.set()

    def ask_for_time(self) -> None:
        """Its clock is wanted: claims at once, whose answer has it."""
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
        sources = self._shard.scheduler.numbers.sources
        return any(each.id.store_id == self.broker.store_id for each in sources)

    async def has_topic(self, topic: str) -> bool:
        """Whether it says so, which routes may not yet.  Raises Unavailable."""
        self._broker_now()
        assert self._channel is not None
        request = admin_pb2.DescribeTopicRequest(name=topic)
        describe = stubs.BrokerAdminStub(self._channel).DescribeTopic
        call = describe(request, timeout=TOPIC_S, metadata=self.broker.meant)
        try:
            await status.answer(call, self.broker.name)
        except TopicNotFound:
            return False
        except DuemqError as error:
            raise Unavailable(
                f"broker {self.broker.name} does not say whether it has topic {topic!r}: {error}",
                field="topic",
                value=topic,
            ) from error
        return True

    def begin_of(self, queue_id: int) -> int | None:
        """Where in a queue this shard's part begins; None: the queue is not this shard's."""
        fetcher = self.fetchers.get(queue_id)
        return fetcher.begin if fetcher is not None else None

    async def stop(self) -> None:
        """Ends everything; commits what was fetched, once it is durable."""
        await asyncio.gather(*(fetcher.stop() for fetcher in self.fetchers.values()))
        self.end()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(LAST_WORDS_S):  # what a full disk has is not durable soon
                await self._last_words()
        except (DuemqError, TimeoutError) as error:
            log.info("offsets of %s not committed: %s", self.broker.name, error or "not in time")
        if self._fires is not None:
            await self._fires.stop()
        await self._channels.close()

    async def _last_words(self) -> None:
        await self._shard.log_loop.durable(self._shard.directory.log.end_position)
        # If it left: it may hold nothing since the last time.
        if self._links.place.leaves and self._shard.scheduler.holds.left:
            with suppress(DuemqError):
                await self._ask(())
        await self._commit()

    def _broker_now(self) -> stubs.BrokerStub:
        """To be asked for before each call: certificates change."""
        found = self._channels.to(self.broker.address)
        if found is not self._channel:
            self._channel, self._stub = found, stubs.BrokerStub(found)
        return self._stub

    # -- claims -----------------------------------------------------------

    async def _claims(self) -> None:
        backoff = Backoff(*CLAIM_RETRY_S)
        while True:
            self._look.clear()
            await self._rest(await self._claim_once(backoff))

    async def _rest(self, quiet_s: float) -> None:
        """Until it is time to claim, or somebody wants it.

        A shard that leaves says at once that it holds nothing any more: it may be killed now, and
        would be missed for good.
        """
        end_s = quiet_s + asyncio.get_running_loop().time()
        tells = self._links.place.leaves and self._told_empty is False
        while not (tells and self._links.empty):
            left_s = end_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, EMPTY_LOOK_S) if tells else left_s):
                    await self._look.wait()
                    return

    async def _claim_once(self, backoff: Backoff) -> float:
        """In how many seconds to claim again."""
        self._told_empty = None
        try:
            async with self._links.turn(self):
                await self._claim()
        except FencedTimer as error:
            self.refused = error
            self._links.claims_changed()
            return backoff.next_s()
        except (DuemqError, StorageError) as error:
            away = isinstance(error, Unavailable) and error.field != "key_shards"
            level = logging.DEBUG if away else logging.WARNING
            text = "broker %s, queues not claimed: %s"
            self._links.say(f"claim {self.broker.name}", level, text, self.broker.name, error)
            return backoff.next_s()
        backoff.reset()
        return CLAIM_WAIT_S if self.waits else CLAIM_INTERVAL_S

    async def _claim(self) -> None:
        if self._links.place.leaves:
            await self._links.before_leaving()
        queues = list(self._queues)
        answer = await self._ask(queues)
        for fetcher in self.fetchers.values():
            fetcher.claims += 1
        self.clock.observe(now_ms(), answer.now_ms, steady_ms())
        self._links.keep_time()
        await self._links.learn(answer.key_shards)
        claims, self.holders = answer.queues, answer.holders
        self.waits = {x.queue_id: _named(x.owner) for x in claims if x.HasField("owner")}
        granted = [each for each in queues if each not in self.waits]
        if self._fires is None:  # what is here waits for no other shard
            name, address = self.broker.name, self.broker.address
            at = self._shard, name, address, self.clock, self._tls
            self._fires = FireStream(*at, self._check, self.broker.meant)
        await self._fetch(granted, {each.queue_id: each.begin_offset for each in claims})
        served = bool(granted) or self._links.place.leaves
        if self.refused is not None or (served and not self.granted):
            self.granted, self.refused = served, None
            log.info("broker %s: %d queues are ours", self.broker.name, len(granted))
            self._links.claims_changed()

    async def _check(self, connection: grpc.aio.Channel) -> None:
        """Raises as `_ask`: whether the broker is at the other end."""
        await self._ask(self._queues, stubs.BrokerStub(connection), CHECK_TIMEOUT_S)

    async def _ask(
        self,
        queues: Iterable[int],
        stub: stubs.BrokerStub | None = None,
        timeout_s: float | None = None,
    ) -> broker_pb2.ClaimTimerQueuesResponse:
        """Raises DuemqErrors, of the broker; Unavailable if it has another store."""
        request = broker_pb2.ClaimTimerQueuesRequest(
            service=self._links.service,
            queue_ids=queues,
            epoch=self._links.epoch,
            ends=[*await self._ends(), *self._taken_over(queues)],
            formers={each.store_id for each in self._shard.scheduler.keyed.formers},
            store_id=self.broker.store_id,
        )
        given_s = CLAIM_TIMEOUT_S if timeout_s is None else timeout_s
        call = (stub or self._broker_now()).ClaimTimerQueues(request, timeout=given_s)
        answer = await status.answer(call, self.broker.name)
        if answer.store_id != self.broker.store_id:
            raise Unavailable(f"{self.broker.name} has another store, {answer.store_id:016x}")
        self._told_empty = request.service.empty
        return answer

    async def _fetch(self, granted: Iterable[int], begins: Mapping[int, int]) -> None:
        """From these queues, too.  Raises what `before_first_fetch` does: not yet."""
        new = [each for each in granted if each not in self.fetchers]
        if new:
            try:
                await self._links.before_first_fetch()
            except DuemqError as error:
                self.held_up = str(error)
                raise
        self.held_up = ""
        for queue_id in new:
            self.fetchers[queue_id] = TimerFetcher(
                self._shard,
                self.broker.name,
                self._broker_now,
                SourceId(self.broker.store_id, queue_id),
                begins.get(queue_id, 0),
                self._look.set,
            )

    async def _ends(self) -> list[broker_pb2.TimerQueueEnd]:
        """How far the queues were taken over that this shard has no more; durably."""
        sources = [
            each
            for each in self._shard.scheduler.numbers.sources
            if each.id.store_id == self.broker.store_id
            and not self._links.place.has(each.id.queue_id)
        ]
        if any(each.durable_offset < each.next_offset for each in sources):
            await self._shard.log_loop.durable(self._shard.directory.log.end_position)
        return [
            broker_pb2.TimerQueueEnd(queue_id=each.id.queue_id, offset=each.next_offset)
            for each in sources
        ]

    def _taken_over(self, queues: Iterable[int]) -> Iterator[broker_pb2.TimerQueueEnd]:
        """How far queues that it has were, durably: also what a broker has lost since.

        A broker whose data is from an older copy would give those offsets to other messages.
        """
        find = self._shard.scheduler.numbers.source
        for queue_id in queues:
            source = find(SourceId(self.broker.store_id, queue_id))
            if source is not None:
                yield broker_pb2.TimerQueueEnd(queue_id=queue_id, offset=source.durable_offset)

    # -- commits ----------------------------------------------------------

    async def _commits(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_INTERVAL_S)
            try:
                await self._commit()
            except DuemqError as error:
                log.debug("offsets of %s not committed: %s", self.broker.name, error)

    async def _commit(self) -> None:
        """Tells the broker what is durable here: it may let go of it.

        A late one of these moves nothing back there: each says what stands, as far as is known, and
        the first says that nothing is.  Only who goes on with a copy of a data directory is behind
        it, and then moves it back; replicas are not, but for one that was deposed.
        """
        new = self._not_committed()
        if not new:
            return
        stands = await self._tell(new, self._committed)
        first = stands.keys() - self._committed.keys() if not self._links.epoch else ()
        back = {each: new[each] for each in first if new[each] < stands[each]}
        if back:
            stands |= await self._tell(back, stands)
        self._committed |= stands

    async def _tell(self, new: Mapping[int, int], known: Mapping[int, int]) -> dict[int, int]:
        """Commits offsets by queue; what stands at the broker of those that it took."""
        request = broker_pb2.CommitOffsetsRequest(
            group=TIMER_GROUP,
            commits=[
                broker_pb2.OffsetCommit(
                    topic=TIMER_TOPIC,
                    queue_id=queue_id,
                    offset=offset,
                    known_offset=known.get(queue_id, NO_OFFSET),
                )
                for queue_id, offset in new.items()
            ],
            timer_id=self._shard.directory.producer_id,
            store_id=self.broker.store_id,
        )
        call = self._broker_now().CommitOffsets(request, timeout=CALL_TIMEOUT_S)
        answer = await status.answer(call, self.broker.name)
        return {
            each.queue_id: each.offset
            for each in answer.queues
            if each.queue_id in new and not each.HasField("error")
        }

    def _not_committed(self) -> dict[int, int]:
        """Durable offsets that the broker does not know, by queue."""
        new: dict[int, int] = {}
        for queue_id, fetcher in self.fetchers.items():
            source = self._shard.scheduler.numbers.source(fetcher.source)
            known = self._committed.get(queue_id, fetcher.begin - 1)
            if fetcher.doubted is not None:  # it would let go of what is not fetched
                continue
            if source is not None and source.durable_offset > known:
                new[queue_id] = source.durable_offset
        return new


def _named(owner: broker_pb2.TimerService) -> str:
    return f"{owner.name} (shard {owner.shard} of {owner.shards})"
