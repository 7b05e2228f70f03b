"""Pulls from one broker over one stream; several queues ride in one request.

A queue is in one waiting request at most.  Whenever queues have room, those that are in no
request go out together in a new one; so a busy queue is asked for again at once, alone or with
others that became ready with it, while quiet ones stay parked at the broker, all in one request,
for up to `pull_wait_s`. An answer frees every queue of its request.  When the stream breaks, all
queues are asked for again from where they were: nothing is taken over but by an answer, so
nothing is skipped or taken twice.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any, Protocol, cast

import grpc.aio

from duemq import tracing
from duemq.balance import MessageQueue
from duemq.client import Client
from duemq.consumer.settings import ConsumerSettings
from duemq.consumer.subscription import Filter
from duemq.errors import Corrupt, DuemqError, Timeout
from duemq.message import Message
from duemq.process_queue import ProcessQueue
from duemq.rpc import status, streams
from duemq.rpc.backoff import Backoff
from duemq.v1 import broker_pb2, view_pb2

log = logging.getLogger(__name__)

RECONNECT_WAIT_S_MIN = 0.05
RECONNECT_WAIT_S_MAX = 2.0
QUEUES_PER_REQUEST_MAX = 256
# A queue is asked for again when this much of its window is free, so that pulls are large.
REFILL = 0.5
# An answer later than this after its wait means that the stream is dead.
ANSWER_GRACE_S = 15.0

Stream = grpc.aio.StreamStreamCall[broker_pb2.PullRequest, view_pb2.PullResponseView]


class Source:
    """One queue that is being pulled."""

    __slots__ = ("asked", "filter", "generation", "not_before_s", "pending", "queue")

    def __init__(self, queue: MessageQueue, wanted: Filter, generation: int, start: int) -> None:
        self.queue = queue
        self.filter = wanted
        self.generation = generation
        """That it was acquired under; stamps pulls and commits."""
        self.pending: ProcessQueue[Message] = ProcessQueue(start)
        self.asked = False
        """It is in a waiting request."""
        self.not_before_s = 0.0
        """Loop time before which it rests, after an error."""


class Sink(Protocol):
    """Takes what was pulled.  Called in the event loop; may drop the source."""

    def pulled(self, source: Source, records: view_pb2.QueueRecordsView) -> None:
        """Records, or at least a new `next_offset`.  Raises Corrupt."""
        ...

    def refused(self, source: Source, error: DuemqError) -> None:
        """This queue cannot be read on from where it is."""
        ...


class Fetcher:
    """The pull stream to one broker."""

    def __init__(
        self,
        client: Client,
        broker: str,
        sink: Sink,
        settings: ConsumerSettings,
        *,
        group: str,
        member_id: str = "",
    ) -> None:
        self._broker = broker
        self._client = client
        self._sink = sink
        self._settings = settings
        self._window = settings.window  # made anew by each look at it
        self._group = group
        self._member_id = member_id
        self._sources: set[Source] = set()
        self._waiting: dict[int, tuple[float, list[Source]]] = {}  # request id → sent at, queues
        self._last_request_id = 0
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def add(self, source: Source) -> None:
        """Begins to pull a queue."""
        self._sources.add(source)
        self._wake.set()

    def remove(self, source: Source) -> None:
        """Ends it; an answer that is on its way is ignored."""
        self._sources.discard(source)

    def refill(self, source: Source) -> None:
        """Room may have become free, or a rest is over."""
        if not source.asked:
            self._wake.set()

    def rest(self, source: Source, seconds: float) -> None:
        """Does not pull this queue for a while."""
        source.not_before_s = self._loop.time() + seconds
        self._loop.call_later(seconds, self._wake.set)

    async def run(self) -> None:
        """Pulls until cancelled, through every failure of the broker."""
        backoff = Backoff(RECONNECT_WAIT_S_MIN, RECONNECT_WAIT_S_MAX)
        while True:
            try:
                await self._connected(backoff)
            except DuemqError as error:
                level = logging.WARNING if backoff.attempts == 0 else logging.DEBUG
                log.log(level, "pulling from %s interrupted: %s", self._broker, error)
            await asyncio.sleep(backoff.next_s())

    async def _connected(self, backoff: Backoff) -> None:
        channel = self._client.channel(self._client.broker(self._broker).address)
        call: grpc.aio.StreamStreamMultiCallable[Any, Any] = channel.stream_stream(
            "/duemq.v1.Broker/PullStream",
            request_serializer=broker_pb2.PullRequest.SerializeToString,
            response_deserializer=view_pb2.PullResponseView.FromString,
        )
        stream: Stream = call()
        self._wake.set()
        try:
            await streams.first_of(self._ask(stream), self._take(stream, backoff), self._watch())
        finally:
            stream.cancel()
            for _, sources in self._waiting.values():
                for source in sources:
                    source.asked = False
            self._waiting.clear()

    async def _ask(self, stream: Stream) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            ready = [source for source in self._sources if self._ready(source)]
            for first in range(0, len(ready), QUEUES_PER_REQUEST_MAX):
                request = self._request(ready[first : first + QUEUES_PER_REQUEST_MAX])
                await streams.write(stream, request, self._broker)

    def _ready(self, source: Source) -> bool:
        return (
            not source.asked
            and source.not_before_s <= self._loop.time()
            and source.pending.has_room(self._window, REFILL)
        )

    def _request(self, sources: list[Source]) -> broker_pb2.PullRequest:
        self._last_request_id += 1
        self._waiting[self._last_request_id] = (self._loop.time(), sources)
        for source in sources:
            source.asked = True
        window = self._window
        return broker_pb2.PullRequest(
            request_id=self._last_request_id,
            group=self._group,
            member_id=self._member_id,
            queues=[
                broker_pb2.QueuePull(
                    topic=source.queue.topic,
                    queue_id=source.queue.queue_id,
                    offset=source.pending.pull_offset,
                    generation=source.generation,
                    filter=source.filter.text,
                    filter_type=cast(broker_pb2.FilterType, source.filter.filter_type),
                )
                for source in sources
            ],
            max_records=min(window.messages - source.pending.unfinished for source in sources),
            max_bytes=min(self._settings.pull_bytes_max, window.bytes),
            wait_ms=round(self._settings.pull_wait_s * 1000),
        )

    async def _take(self, stream: Stream, backoff: Backoff) -> None:
        while True:
            response = await streams.read(stream, self._broker)
            backoff.reset()
            sent_s, sources = self._waiting.pop(response.request_id, (self._loop.time(), []))
            self._free(sources)
            if tracing.enabled():
                self._trace(response.queues, self._loop.time() - sent_s)
            self._hand_over(response.queues, sources)
            self._wake.set()

    def _trace(self, answers: Iterable[view_pb2.QueueRecordsView], asked_s: float) -> None:
        """Spans the way here: from the request or, if that waited, from the first storing."""
        end_ns = time.time_ns()
        for records in answers:
            if not records.records:
                continue
            asked_ns = end_ns - round(asked_s * 1e9)
            tracing.record_receive(
                records.topic,
                self._broker,
                records.queue_id,
                records.run_offsets[0],
                sum(records.run_counts),
                start_ns=min(max(asked_ns, records.run_store_ms[0] * 1_000_000), end_ns),
                end_ns=end_ns,
                group=self._group,
                client_id=self._member_id,
                records=records.records,
            )

    def _free(self, sources: Iterable[Source]) -> None:
        for source in sources:
            source.asked = False

    def _hand_over(
        self, answers: Iterable[view_pb2.QueueRecordsView], sources: Iterable[Source]
    ) -> None:
        by_place = {(s.queue.topic, s.queue.queue_id): s for s in sources if s in self._sources}
        for records in answers:
            source = by_place.get((records.topic, records.queue_id))
            if source is None:
                continue  # removed meanwhile
            if records.HasField("error"):
                self._sink.refused(source, status.from_proto(records.error))
                continue
            try:
                self._sink.pulled(source, records)
            except Corrupt as error:
                self._sink.refused(source, error)

    async def _watch(self) -> None:
        """Raises Timeout when an answer is overdue."""
        limit_s = self._settings.pull_wait_s + ANSWER_GRACE_S
        while True:
            await asyncio.sleep(ANSWER_GRACE_S / 3)
            oldest = min((sent for sent, _ in self._waiting.values()), default=None)
            if oldest is not None and self._loop.time() - oldest > limit_s:
                raise Timeout(f"{self._broker} did not answer a pull within {limit_s:g} s")
