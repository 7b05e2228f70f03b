"""Broadcast: every member gets all messages; nobody shares queues, and offsets stay at home.

Where a queue begins: README.md, "Broadcast".  Everything happens in one event loop; only callbacks
and the file's reads and writes run in threads.
"""

import asyncio
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

from duemq.consumer.broadcast.offset_file import OffsetFile
from duemq.consumer.delivery.in_place import InPlaceDispatcher
from duemq.consumer.delivery.lease import Lease
from duemq.consumer.delivery.seams import Spawn
from duemq.consumer.delivery.workers import Callback
from duemq.consumer.fetching.fetcher import REFUSED_WAIT_S, Fetcher, Source
from duemq.consumer.fetching.offset_client import OffsetClient
from duemq.consumer.fetching.subscription import Filter
from duemq.consumer.settings import ConsumerSettings, Order, StartFrom, resolved
from duemq.errors import (
    DuemqError,
    OffsetOutOfRange,
    PermissionDenied,
    QueueNotFound,
    TopicNotFound,
    TopicReplaced,
)
from duemq.message import Message
from duemq.outcomes import Outcome
from duemq.protocol.balance import MessageQueue
from duemq.tracing.attributes import BroadcastId
from duemq.transport.cluster_client import Client
from duemq.transport.retrying import Backoff
from duemq.v1 import view_pb2

log = logging.getLogger(__name__)

RECHECK_S = 5.0  # for queues that are not read although there is a route
STOP_TIMEOUT_S = 5.0
BEGIN_REQUESTS_MAX = 16  # at a time, of a start or of queues that come


class BroadcastShare:
    """All queues of the topics (fetcher.PulledSink); has GroupShare's face for push.py."""

    def __init__(
        self,
        client: Client,
        callback: Callback,
        settings: ConsumerSettings,
        spawn: Spawn,
        *,
        group: str,
        filters: Mapping[str, Filter],
        batch: bool,
        order: Order | None = None,
        member_name: str | None = None,
    ) -> None:
        """`member_name`: the host's name if None.  Raises InvalidArgument."""
        self.joined = asyncio.Event()
        """The offsets are known, and all queues that are there now are read."""
        self._client = client
        self._settings = settings
        self._start_from = resolved(settings.start_from, time.time_ns() // 1_000_000)
        self._spawn = spawn
        self._group = group
        self._filters = filters
        member = member_name or socket.gethostname()
        self._asking = asyncio.Semaphore(BEGIN_REQUESTS_MAX)
        self._file = OffsetFile(settings.offsets_dir, group, member)
        self._saving = asyncio.Lock()
        # Offsets and topic ids.
        self._saved: tuple[dict[MessageQueue, int], dict[MessageQueue, int]] | None = None
        self._offset_client = OffsetClient(client, group, member)
        self._dispatcher = InPlaceDispatcher(
            callback,
            lanes=order or "message",
            batch=batch,
            settings=settings,
            settler=Skipping(group),
            lease=Lease.forever(),
            progressed=self._progressed,
            spawn=spawn,
            group=group,
            client_id=BroadcastId(member),
        )
        self._member = member
        self._sources: dict[MessageQueue, Source] = {}
        # Of queues that are not read now; those of `_sources` know theirs.
        self._offsets: dict[MessageQueue, int] = {}
        # Of all queues whose offset is known: which topic of its name that is of.
        self._topic_ids: dict[MessageQueue, int] = {}
        self._known_topics: frozenset[str] = frozenset()  # the file's
        self._unreadable: set[MessageQueue] = set()  # whose broker could not say where it begins
        self._fetchers: dict[str, Fetcher] = {}
        self._routes_changed = asyncio.Event()
        self._closing = False
        self._hanging = False  # callbacks that did not end before the close
        self._left = False

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are read now.  From any thread."""
        return frozenset(tuple(self._sources))

    @property
    def trouble(self) -> str:
        """As GroupShare's; there is no group that would answer."""
        return ""

    def in_callback(self) -> bool:
        """Tells whether the caller is the callback.  From any thread."""
        return self._dispatcher.in_callback()

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts what works beside `run`."""
        self._dispatcher.start()

    async def run(self) -> None:
        """Reads all queues, also those that come, until `leave` or cancelled.

        Raises InvalidArgument if another process is this member or the offset file is another's,
        Corrupt if it is damaged, OSError if it cannot be written.
        """
        self._client.on_routes_changed(self._routes_changed.set)
        try:
            async with self._saving:
                kept = await asyncio.to_thread(self._file.open)
            if kept is not None:
                self._known_topics, self._offsets = kept.topics, dict(kept.offsets)
                self._topic_ids = dict(kept.topic_ids)
            await self._begin_all()
            await self._save()
            self._known_topics |= self._filters.keys()
            self._read()
            self.joined.set()
            self._spawn(self._save_often())
            while not self._left:
                self._routes_changed.clear()
                await self._begin_new()
                try:
                    async with asyncio.timeout(RECHECK_S):
                        await self._routes_changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._client.off_routes_changed(self._routes_changed.set)

    def drop_all(self) -> None:
        """Stops reading at once."""
        for source in list(self._sources.values()):
            self._end(source)

    async def close(self) -> None:
        """Stops, waits for running callbacks, saves."""
        self._closing = True
        sources = list(self._sources.values())
        for source in sources:
            source.pending.drop()
            self._fetcher(source.queue.broker).remove(source)
        limit_s = self._settings.close_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*map(self._dispatcher.quiet, sources))
        except TimeoutError:
            self._hanging = True
            log.warning("group %s: a callback still runs after %g s", self._group, limit_s)
        if self.joined.is_set():
            await self._save_or_log()

    async def leave(self) -> None:
        """Nobody is to be told; the name is free for another process."""
        self._left = True
        self._routes_changed.set()
        async with self._saving:
            self._file.close()

    async def stop(self) -> None:
        """Ends the workers; `close` has waited for what they do."""
        await self._dispatcher.stop(0.0 if self._hanging else STOP_TIMEOUT_S)

    # --- where queues begin -------------------------------------------------------------------

    async def _begin_all(self) -> None:
        """Finds where all queues begin; repeats until brokers answer."""
        backoff = Backoff()
        while True:
            if await self._find_offsets(self._missing()):
                return
            await asyncio.sleep(backoff.next_s())

    async def _begin_new(self) -> None:
        """Reads the queues that have come."""
        missing = self._missing()
        if missing:
            await self._find_offsets(missing)
        self._read()

    def _there(self) -> set[MessageQueue]:
        """All queues of the topics that have a route now."""
        routes = {topic: self._client.routes.route(topic) for topic in self._filters}
        return {
            MessageQueue(topic, queue.broker, queue.queue_id)
            for topic, route in routes.items()
            if route is not None
            for queue in route.readable
        }

    def _missing(self) -> set[MessageQueue]:
        return self._there() - self._sources.keys() - self._offsets.keys()

    def _read(self) -> None:
        if self._closing:
            return
        for queue in (self._there() & self._offsets.keys()) - self._sources.keys():
            self._begin(queue, self._offsets.pop(queue))

    def _begin(self, queue: MessageQueue, offset: int) -> None:
        topic_id = self._topic_ids.get(queue, 0)
        source = Source(queue, self._filters[queue.topic], 0, offset, topic_id)
        self._sources[queue] = source
        self._fetcher(queue.broker).add(source)

    async def _find_offsets(self, queues: Iterable[MessageQueue]) -> bool:
        """Where queues begin that were never read; False if a broker did not say."""
        places: defaultdict[tuple[str, str, StartFrom], set[MessageQueue]] = defaultdict(set)
        for queue in queues:
            new = queue.topic in self._known_topics and queue not in self._unreadable
            start_from = "earliest" if new else self._start_from
            places[queue.broker, queue.topic, start_from].add(queue)
        found = await asyncio.gather(
            *(self._find_offsets_at(*place, each) for place, each in places.items())
        )
        return all(found)

    async def _find_offsets_at(
        self, broker: str, topic: str, start_from: StartFrom, queues: Iterable[MessageQueue]
    ) -> bool:
        try:
            async with self._asking:
                starts = await self._starts(broker, topic, start_from)
        except DuemqError as error:
            if isinstance(error, PermissionDenied) and not self.joined.is_set():
                raise  # as `start` does
            log.warning("group %s: topic %s at %s: %s", self._group, topic, broker, error)
            return False
        for queue in starts.keys() & set(queues):
            start, topic_id = starts[queue]
            if isinstance(start, DuemqError):  # it is asked for again, and holds up no other
                self._unreadable.add(queue)
                log.warning("group %s: %s", self._group, start)
            else:
                self._unreadable.discard(queue)
                self._offsets[queue], self._topic_ids[queue] = start, topic_id
        return True

    async def _starts(
        self, broker: str, topic: str, start_from: StartFrom
    ) -> dict[MessageQueue, tuple[int | DuemqError, int]]:
        """Offsets, or why there is none, and the id of the topic that they are of."""
        ranges = await self._offset_client.ranges(broker, topic)
        offsets = await self._offset_client.starts(ranges, ranges, start_from)
        return {queue: (offsets[queue], ranges[queue].topic_id) for queue in offsets}

    # --- the file -----------------------------------------------------------------------------

    async def _save_often(self) -> None:
        while True:
            await asyncio.sleep(self._settings.commit_interval_s)
            await self._save_or_log()

    async def _save_or_log(self) -> None:
        try:
            await self._save()
        except OSError as error:
            log.error("group %s: offsets not saved: %s", self._group, error)

    async def _save(self) -> None:
        async with self._saving:
            if self._left:
                return  # the file may be another process's by now
            offsets = self._offsets | {
                queue: source.pending.commit_point for queue, source in self._sources.items()
            }
            ids = {queue: self._topic_ids[queue] for queue in offsets if queue in self._topic_ids}
            if (offsets, ids) != self._saved:
                content = self._known_topics | self._filters.keys(), offsets, ids
                try:
                    await asyncio.to_thread(self._file.save, *content)
                except RuntimeError:  # at interpreter exit no thread begins
                    self._file.save(*content)
                self._saved = offsets, ids

    # --- pulled (fetcher.PulledSink) -----------------------------------------------------------

    def pulled(
        self, source: Source, messages: list[Message], records: view_pb2.QueueRecordsView
    ) -> None:
        """Hands the messages that the subscription takes to the workers."""
        if messages:
            size_bytes = len(records.records)
            self._dispatcher.dispatch(source, messages, records.next_offset, size_bytes)
        else:
            source.pending.skip_to(records.next_offset)

    def refused(self, source: Source, error: DuemqError) -> None:
        """Out of range: goes on at the earliest message.  Deleted: forgets where it was.

        Made anew: both.
        """
        log.warning("group %s: %s: %s", self._group, source.queue, error)
        if isinstance(error, OffsetOutOfRange | TopicNotFound | QueueNotFound | TopicReplaced):
            self._end(source)
            del self._offsets[source.queue]
            self._topic_ids.pop(source.queue, None)
            if isinstance(error, OffsetOutOfRange | TopicReplaced):
                log.warning(
                    "group %s: %s goes on at its earliest message", self._group, source.queue
                )
                loop = asyncio.get_running_loop()
                loop.call_later(REFUSED_WAIT_S, self._routes_changed.set)
        else:
            self._fetcher(source.queue.broker).rest(source)

    def _end(self, source: Source) -> None:
        source.pending.drop()
        self._fetcher(source.queue.broker).remove(source)
        del self._sources[source.queue]
        self._offsets[source.queue] = source.pending.commit_point

    def _progressed(self, source: Source) -> None:
        if not source.pending.dropped:
            self._fetcher(source.queue.broker).refill(source)

    def _fetcher(self, broker: str) -> Fetcher:
        fetcher = self._fetchers.get(broker)
        if fetcher is None:
            fetcher = self._fetchers[broker] = Fetcher(
                self._client,
                broker,
                self,
                self._settings,
                group=self._group,
                member_id=self._member,
            )
            self._spawn(fetcher.run())
        return fetcher


class Skipping:
    """dispatching.Settler of a consumer that sends nothing back: what keeps failing is left out."""

    def __init__(self, group: str) -> None:
        self._group = group

    async def send_back(
        self, source: Source, message: Message, outcome: Outcome, deliveries: int
    ) -> bool:
        """Leaves it out, which an error line tells."""
        log.error(
            "group %s: message %s at %s offset %d is skipped after %d attempts: %s",
            self._group,
            message.message_id,
            source.queue,
            message.offset,
            deliveries,
            outcome.error,
        )
        return True
