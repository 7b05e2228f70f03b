"""The asyncio pull consumer: the application names queues, offsets and the moment.

No membership: nobody else is kept from reading the same queues, and nothing is moved between
consumers.  With a group, offsets are committed under its name, when `commit` is called.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime
from time import monotonic, time_ns
from typing import Literal

from duemq.consumer.fetching.fetcher import Fetcher, Source
from duemq.consumer.fetching.offset_client import (
    Commit,
    OffsetClient,
    QueueOffsets,
    check_filters,
    no_queue,
)
from duemq.consumer.fetching.process_queue import Chunk
from duemq.consumer.fetching.subscription import ALL, Filter
from duemq.consumer.settings import (
    ConsumerSettings,
    StartFrom,
    check_group,
    check_start_from,
    resolved,
)
from duemq.errors import (
    Closed,
    DuemqError,
    Internal,
    InvalidArgument,
    MissingBroker,
    TopicReplaced,
)
from duemq.message import Message
from duemq.protocol import checks
from duemq.protocol.balance import MessageQueue
from duemq.protocol.filters import Sql
from duemq.protocol.limits import OFFSET_MAX, TOPIC_ID_MAX
from duemq.protocol.moments import epoch_ms
from duemq.settings import Addresses
from duemq.transport.closing import AsyncClient
from duemq.transport.cluster_client import Client
from duemq.v1 import view_pb2

log = logging.getLogger(__name__)

Place = int | Literal["earliest", "latest"] | datetime
"""An offset, an end of the queue, or the first message stored at a time or later."""

POLL_S_MAX = 86_400.0
POLL_MESSAGES_MAX = 1_000_000
NOWHERE = -1
"""Of a queue whose broker could not say where it begins."""


class PullConsumer(AsyncClient):
    """Reads queues that the application names, from where it says, when it asks."""

    def __init__(
        self,
        group: str | None = None,
        *,
        nameserver: Addresses | None = None,
        settings: ConsumerSettings | None = None,
    ) -> None:
        """`group`: whose offsets to begin from and to commit to; None: no offsets are kept.

        Raises InvalidArgument.
        """
        if group is not None:
            check_group(group)
        self.group = group
        self.settings = ConsumerSettings() if settings is None else settings
        checks.instance("settings", self.settings, ConsumerSettings)
        self._client = Client(nameserver, self.settings.client)
        # Brokers tell the range of a queue with a group's offset in it; a name of nobody has none.
        self._offsets = OffsetClient(self._client, group or f"nobody-{secrets.token_hex(4)}")
        self._sources: dict[MessageQueue, Source] = {}
        self._paused: set[MessageQueue] = set()
        self._filter = ALL
        self._ready: deque[Chunk[Message]] = deque()
        self._failed: deque[tuple[Source, DuemqError]] = deque()
        self._news = asyncio.Event()
        self._fetchers: dict[str, Fetcher] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._started = False
        self._closed = False
        self._broken: BaseException | None = None

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connects.  Raises Unavailable if no nameserver answers: it may be tried again.

        Raises Closed if it was started before.
        """
        if self._started or self._closed:
            raise Closed("a consumer is started once")
        await self._client.start()
        self._started = True

    async def close(self) -> None:
        """Ends; commits nothing by itself.  Idempotent."""
        self._client.check_loop()
        self._closed = True
        self._news.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._client.close()

    @property
    def missing(self) -> tuple[MissingBroker, ...]:
        """Brokers that are away: what they store is not read, until they are back.

        A topic is read to its end only while there is none.
        """
        return self._client.missing

    # --- what to read -------------------------------------------------------------------------

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Answers the topic's queues, sorted, without those of `missing`.  Raises TopicNotFound."""
        route = await self._client.topic_route(topic)
        for broker in self.missing:
            log.warning("topic %s may have queues on %s: %s", topic, broker.name, broker.error)
        return [MessageQueue(topic, q.broker, q.queue_id) for q in route.readable]

    async def assign(
        self,
        queues: str | Iterable[MessageQueue],
        *,
        filter: str | Sql = "",
        start_from: StartFrom | None = None,
    ) -> None:
        """Reads these queues, or all of a topic, in place of those before.

        Each begins at the group's committed offset; without one, at `start_from` (by default the
        settings'): see StartFrom.  `filter`: tags, as "a || b", or Sql.  Raises InvalidArgument,
        TopicNotFound, QueueNotFound, Unavailable.  A queue whose broker cannot say where it begins
        holds up no other: `poll` raises that, and it is read from a `seek` on.
        """
        begin = self.settings.start_from if start_from is None else start_from
        check_start_from(begin)
        begin = resolved(begin, time_ns() // 1_000_000)
        wanted_messages = Filter.of(filter)
        wanted = await self.queues(queues) if isinstance(queues, str) else dict.fromkeys(queues)
        ranges = await self._ranges(wanted)
        unknown = [q for q in wanted if self.group is None or ranges[q].committed is None]
        starts = await self._offsets.starts(unknown, ranges, begin)
        if isinstance(filter, Sql) and wanted:
            topics = dict.fromkeys((queue.topic for queue in wanted), wanted_messages)
            await check_filters(self._client, self.group or "", topics)
        for source in self._sources.values():
            self._end(source)
        self._sources.clear()
        self._paused.clear()
        self._filter = wanted_messages
        for queue in wanted:
            committed, least, most, topic_id = ranges[queue]
            offset = starts.get(queue, committed or 0)
            if isinstance(offset, DuemqError):
                source = Source(queue, wanted_messages, 0, NOWHERE, topic_id)
                self._sources[queue] = source
                self._fail(source, offset)
            else:
                self._begin(queue, min(max(offset, least), most), topic_id)

    @property
    def assignment(self) -> frozenset[MessageQueue]:
        """The queues that are read."""
        return frozenset(self._sources)

    async def seek(self, queue: MessageQueue, to: Place) -> None:
        """Goes on at an offset, an end of the queue, or a time.

        Raises InvalidArgument.  An offset that the broker does not have is told by `poll`.
        """
        topic_id = self._source(queue).topic_id
        if type(to) is int:
            checks.whole("to", to, 0, OFFSET_MAX)
            offset = to
        elif to in ("earliest", "latest") or isinstance(to, datetime):
            if isinstance(to, datetime):
                epoch_ms(to, 0, "to")
            ranges = await self._ranges([queue])
            found = (await self._offsets.starts([queue], ranges, to))[queue]
            if isinstance(found, DuemqError):
                raise found
            offset, topic_id = found, ranges[queue].topic_id
        else:
            raise checks.wrong("to", to, "an offset, earliest, latest, or an aware datetime")
        self._end(self._source(queue))
        self._begin(queue, offset, topic_id)

    def position(self, queue: MessageQueue) -> int:
        """The offset that `poll` goes on from; -1: not before a `seek`, see `assign`.

        Raises InvalidArgument if it is not assigned.
        """
        return self._source(queue).pending.commit_point

    def pause(self, *queues: MessageQueue) -> None:
        """`poll` leaves these queues out until `resume`.

        Raises InvalidArgument if one is not assigned, and pauses none.
        """
        for source in list(map(self._source, queues)):
            self._fetcher(source.queue.broker).remove(source)
            self._paused.add(source.queue)

    def resume(self, *queues: MessageQueue) -> None:
        """Takes `pause` back; raises as that does."""
        for source in list(map(self._source, queues)):
            if source.pending.commit_point != NOWHERE:
                self._fetcher(source.queue.broker).add(source)
            self._paused.discard(source.queue)
        self._news.set()

    # --- reading ------------------------------------------------------------------------------

    async def poll(self, timeout_s: float = 1.0, messages_max: int = 500) -> list[Message]:
        """Answers what has come, at once if there is any; an empty list after `timeout_s`.

        Messages of one queue come in its order.  Raises what a broker said about a queue, once,
        unless that passes by itself; the queue is not read on before a `seek`.  After TopicReplaced
        its position is 0, that of the new topic.  Raises Closed, InvalidArgument.
        """
        return await self._poll({}, timeout_s, messages_max)

    async def _poll(
        self, took: dict[MessageQueue, int], timeout_s: float = 1.0, messages_max: int = 500
    ) -> list[Message]:
        """`took`: is told the first offset of each queue."""
        self._client.check_loop()
        checks.number("timeout_s", timeout_s, 0, POLL_S_MAX)
        checks.whole("messages_max", messages_max, 1, POLL_MESSAGES_MAX)
        deadline = monotonic() + timeout_s
        while True:
            if self._closed or not self._started:
                raise Closed("the consumer is not started, or closed")
            if self._broken is not None:
                raise Internal(f"pulling has ended: {self._broken}") from self._broken
            while self._failed:
                source, error = self._failed.popleft()
                queue = source.queue
                if self._sources.get(queue) is source:  # else it was left meanwhile
                    if isinstance(error, TopicReplaced):  # commits are of the new one
                        self._sources[queue] = Source(queue, self._filter, 0, 0, _id_now(error))
                    raise error
            if messages := self._taken(messages_max, took):
                return messages
            self._news.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline - monotonic())):
                    await self._news.wait()
            except TimeoutError:
                return []

    async def _give_back(self, took: Mapping[MessageQueue, int]) -> None:
        for queue in took.keys() & self._sources.keys():
            await self.seek(queue, took[queue])

    def _taken(self, messages_max: int, took: dict[MessageQueue, int]) -> list[Message]:
        taken: list[Message] = []
        paused: list[Chunk[Message]] = []
        while self._ready and len(taken) < messages_max:
            chunk = self._ready.popleft()
            if chunk.pending.dropped:
                continue
            first = chunk.messages[0]
            queue = MessageQueue(first.stored_topic, first.broker, first.queue)
            if queue in self._paused:
                paused.append(chunk)
                continue
            begin = chunk.position
            part = chunk.messages[begin : begin + messages_max - len(taken)]
            taken += part
            took.setdefault(queue, part[0].offset)
            chunk.finish_next(len(part))
            if chunk.unfinished:
                self._ready.appendleft(chunk)
            chunk.pending.settle(chunk)
            self._fetcher(queue.broker).refill(self._sources[queue])
        self._ready.extendleft(reversed(paused))
        return taken

    # --- offsets ------------------------------------------------------------------------------

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Stores the positions of all assigned queues, or those given, for the group.

        Nothing fences this consumer out: what it says goes, also after a reset of the offsets.
        Raises InvalidArgument without a group or for what is no offset, and the first error of a
        broker.
        """
        if self.group is None:
            raise InvalidArgument(
                "a consumer without a group commits nothing", field="group", limit="a name"
            )
        if offsets is None:
            known = {queue: self.position(queue) for queue in self._sources}
            offsets = {queue: offset for queue, offset in known.items() if offset != NOWHERE}
        by_broker: dict[str, list[Commit]] = {}
        for queue, offset in offsets.items():
            checks.instance("queue", queue, MessageQueue)
            checks.whole("offset", offset, 0, OFFSET_MAX)
            source = self._sources.get(queue)
            commit = Commit(queue, offset, 0, source.topic_id if source is not None else 0)
            by_broker.setdefault(queue.broker, []).append(commit)
        answers = await asyncio.gather(
            *(self._offsets.commit(broker, each) for broker, each in by_broker.items())
        )
        for refused in answers:
            for error in refused.values():
                raise error

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's offset in a queue; None: it has none."""
        return (await self._ranges([queue]))[queue].committed

    # --- inside -------------------------------------------------------------------------------

    async def _ranges(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, QueueOffsets]:
        wanted = list(queues)
        for queue in wanted:
            checks.instance("queue", queue, MessageQueue)
        places = sorted({(queue.broker, queue.topic) for queue in wanted})
        answers = await asyncio.gather(
            *(self._offsets.ranges(broker, topic) for broker, topic in places)
        )
        known = {queue: each for answer in answers for queue, each in answer.items()}
        for queue in wanted:
            if queue not in known:
                raise no_queue(queue)
        return {queue: known[queue] for queue in wanted}

    def _source(self, queue: MessageQueue) -> Source:
        try:
            return self._sources[queue]
        except KeyError:
            raise InvalidArgument(f"{queue} is not assigned", field="queue", value=queue) from None

    def _begin(self, queue: MessageQueue, offset: int, topic_id: int) -> None:
        source = self._sources[queue] = Source(queue, self._filter, 0, offset, topic_id)
        if queue not in self._paused:
            self._fetcher(queue.broker).add(source)

    def _end(self, source: Source) -> None:
        source.pending.drop()
        self._fetcher(source.queue.broker).remove(source)

    def pulled(
        self, source: Source, messages: list[Message], records: view_pb2.QueueRecordsView
    ) -> None:
        """Keeps what the filter takes for `poll` (fetcher.PulledSink)."""
        if not messages:
            source.pending.skip_to(records.next_offset)
            return
        size_bytes = len(records.records)
        self._ready.append(source.pending.add(messages, records.next_offset, size_bytes))
        self._news.set()

    def refused(self, source: Source, error: DuemqError) -> None:
        """Lets the next `poll` raise what does not pass by itself (fetcher.PulledSink)."""
        fetcher = self._fetcher(source.queue.broker)
        if error.retryable:
            log.warning("%s: %s", source.queue, error)
            fetcher.rest(source)
            return
        fetcher.remove(source)
        if isinstance(error, TopicReplaced):
            source.pending.drop()  # what waits for `poll` is of a topic that is gone
        self._fail(source, error)

    def _fail(self, source: Source, error: DuemqError) -> None:
        self._failed.append((source, error))
        self._news.set()

    def _fetcher(self, broker: str) -> Fetcher:
        if (fetcher := self._fetchers.get(broker)) is None:
            if self._closed:  # meanwhile: nobody would end it
                raise Closed("the consumer is closed")
            fetcher = self._fetchers[broker] = Fetcher(
                self._client, broker, self, self.settings, group=self.group or ""
            )
            task = asyncio.create_task(fetcher.run(), name=f"pull {broker}")
            task.add_done_callback(self._fetcher_ended)
            self._tasks.append(task)
        return fetcher

    def _fetcher_ended(self, task: asyncio.Task[None]) -> None:
        """A bug ended it: every `poll` says so, as its queues stand still."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = error
            self._news.set()


def _id_now(error: TopicReplaced) -> int:
    """Of the topic that is there; 0: the broker does not say."""
    said = error.limit
    known = int(said) if said.isdecimal() and len(said) <= len(str(TOPIC_ID_MAX)) else 0
    return known if known <= TOPIC_ID_MAX else 0
