"""Pulls from one broker over one stream; several queues ride in one request.

Queues with room that are in no open request go out together in a new one: a standing pull, which
the broker answers again and again until its credit is used up.  The credit is the room of the
fullest of the queues, and is raised again while all have room; so a consumer that keeps up asks
once in hundreds of messages, and none is sent more than it has room for.  When the stream breaks,
all are asked for again from where they were: nothing is skipped or taken twice.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, cast

import grpc.aio

from duemq.consumer.fetching.process_queue import ProcessQueue
from duemq.consumer.fetching.receiving import received
from duemq.consumer.fetching.subscription import Filter
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import Corrupt, DuemqError, Internal, PermissionDenied, Timeout
from duemq.message import Message, note_traceparents
from duemq.protocol.balance import MessageQueue
from duemq.tracing import meters, spans
from duemq.transport import status, streams
from duemq.transport.cluster_client import Client
from duemq.transport.retrying import Backoff
from duemq.v1 import broker_pb2, view_pb2

log = logging.getLogger(__name__)

REFUSED_WAIT_S = 1.0
QUEUES_PER_REQUEST_MAX = 256
# Requests beyond those that all queues together need: with so many, all end and become one again.
REQUESTS_TO_MERGE = 4
# A queue is asked for again when this much of its window is free, so that pulls are large.
REFILL = 0.5
# An answer later than this after its wait means that the stream is dead.
ANSWER_GRACE_S = 15.0

Stream = grpc.aio.StreamStreamCall[broker_pb2.PullRequest, view_pb2.PullResponseView]


class Source:
    """One queue that is being pulled."""

    def __init__(
        self, queue: MessageQueue, wanted: Filter, generation: int, start: int, topic_id: int = 0
    ) -> None:
        self.queue = queue
        self.topic_id = topic_id
        """Of which topic of this name its offsets are; 0: not known (an older broker)."""
        self.filter = wanted
        self.generation = generation
        """That it was acquired under; stamps pulls and commits."""
        self.pending: ProcessQueue[Message] = ProcessQueue(start)
        self.asked = False
        """It is in an open request."""
        self.not_before_s = 0.0
        """Loop time before which it rests, after an error."""


@dataclass(slots=True)
class _Open:
    """A standing pull: what it reads, and what the broker may still give to it."""

    sources: list[Source]
    """All that cannot be asked for otherwise as long as it is open."""
    wanted: dict[tuple[str, int], Source]
    """Whose records are taken.  Who leaves while it is open does not come back to it: what it
    brings meanwhile is lost to them."""
    heard_s: float
    messages: int
    bytes: int
    cancelled: bool = False


class PulledSink(Protocol):
    """Takes what was pulled.  Called in the event loop; may drop the source."""

    def pulled(
        self, source: Source, messages: list[Message], records: view_pb2.QueueRecordsView
    ) -> None:
        """Those of these records that the subscription takes, or at least a new `next_offset`."""
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
        sink: PulledSink,
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
        self._open: dict[int, _Open] = {}  # by request id
        self._to_cancel: list[int] = []
        self._to_extend: list[int] = []
        self._merging = False
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
        if source.asked:
            self._take_out(source)

    def refill(self, source: Source) -> None:
        """Room may have become free, or a rest is over."""
        if not source.asked:
            self._wake.set()

    def rest(self, source: Source) -> None:
        """Does not pull this queue for a while: its broker refused."""
        until_s = source.not_before_s = self._loop.time() + REFUSED_WAIT_S
        self._loop.call_later(REFUSED_WAIT_S, self._rested, source, until_s)

    def _rested(self, source: Source, until_s: float) -> None:
        if source.not_before_s == until_s:
            source.not_before_s = 0.0
            self._wake.set()

    async def run(self) -> None:
        """Pulls until cancelled, through every failure of the broker."""
        backoff = Backoff()
        while True:
            try:
                await self._connected(backoff)
            except DuemqError as error:
                level = logging.WARNING if backoff.attempts == 0 else logging.DEBUG
                log.log(level, "pulling from %s interrupted: %s", self._broker, error)
                if isinstance(error, PermissionDenied) and not self._member_id:
                    for source in tuple(self._sources):
                        self._sink.refused(source, error)
            await self._client.pause(self._broker, backoff)

    async def _connected(self, backoff: Backoff) -> None:
        broker = self._client.broker(self._broker)
        call: Any = self._client.channel(broker.address).stream_stream(
            "/duemq.v1.Broker/PullStream",
            request_serializer=broker_pb2.PullRequest.SerializeToString,
            response_deserializer=view_pb2.PullResponseView.FromString,
        )
        stream: Stream = call(metadata=broker.meant)
        self._wake.set()
        try:
            await streams.first_of(self._take(stream, backoff), self._ask(stream), self._watch())
        finally:
            stream.cancel()
            for request in self._open.values():
                _free(request)
            self._open.clear()
            self._merging = False
            self._to_cancel.clear()
            self._to_extend.clear()

    async def _ask(self, stream: Stream) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            merges = self._merges()
            for note in self._notes():
                await streams.write(stream, note, self._broker)
            # Looked for anew after each write: sources may leave meanwhile.
            while not merges and (ready := self._ready_sources()):
                await streams.write(stream, self._request(ready), self._broker)

    def _ready_sources(self) -> list[Source]:
        """What one request may ask for; more of them wait for the next one."""
        ready = filter(self._ready, self._sources)
        return list(islice(ready, QUEUES_PER_REQUEST_MAX))

    def _merges(self) -> bool:
        """Queues that were asked for one by one are asked for together, once they all are free."""
        if not any(map(self._ready, self._sources)):
            return False
        needed = len(self._sources) // QUEUES_PER_REQUEST_MAX
        if not self._merging and len(self._open) >= needed + REQUESTS_TO_MERGE:
            for request_id in self._open:
                self._cancel(request_id)
            self._merging = True
        self._merging = self._merging and bool(self._open)
        return self._merging

    def _notes(self) -> Iterator[broker_pb2.PullRequest]:
        """To open requests: which are to end, and which may go on for longer."""
        while self._to_cancel:
            yield broker_pb2.PullRequest(cancel_request_id=self._to_cancel.pop())
        while self._to_extend:
            request_id = self._to_extend.pop()
            request = self._open.get(request_id)
            if request is not None and (credit := self._more_credit(request)):
                request.messages += credit[0]
                request.bytes += credit[1]
                yield broker_pb2.PullRequest(
                    credit_request_id=request_id, credit_records=credit[0], credit_bytes=credit[1]
                )

    def _ready(self, source: Source) -> bool:
        return (
            not source.asked
            and source.not_before_s <= self._loop.time()
            and source.pending.has_room(self._window, REFILL)
        )

    def _request(self, sources: list[Source]) -> broker_pb2.PullRequest:
        self._last_request_id += 1
        messages, size = self._room(sources)
        wanted = {(each.queue.topic, each.queue.queue_id): each for each in sources}
        self._open[self._last_request_id] = _Open(
            sources, wanted, self._loop.time(), messages, size
        )
        for source in sources:
            source.asked = True
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
                    topic_id=source.topic_id,
                )
                for source in sources
            ],
            max_records=messages,
            max_bytes=min(self._settings.pull_bytes_max, size),
            wait_ms=round(self._settings.pull_wait_s * 1000),
            credit_records=messages,
            credit_bytes=size,
        )

    def _room(self, sources: Iterable[Source]) -> tuple[int, int]:
        """Messages and bytes that every one of the queues has room for."""
        window = self._window
        return (
            min(window.messages - source.pending.unfinished for source in sources),
            min(window.bytes - source.pending.unfinished_bytes for source in sources),
        )

    def _more_credit(self, request: _Open) -> tuple[int, int] | None:
        """What may be added to a request; None: it is worth nothing, or a queue is to pause."""
        sources = request.wanted.values()
        if request.cancelled or not all(each.pending.has_room(self._window) for each in sources):
            return None
        messages, size = self._room(sources)
        more = messages - request.messages, max(0, size - request.bytes)
        return more if more[0] >= self._window.messages * (1 - REFILL) / 2 else None

    async def _take(self, stream: Stream, backoff: Backoff) -> None:
        while True:
            response = await streams.read(stream, self._broker)
            backoff.reset()
            request = self._open.get(response.request_id)
            if request is None:
                raise Internal(f"{self._broker} answered pull {response.request_id}, which is over")
            now_s = self._loop.time()
            asked_s, request.heard_s = now_s - request.heard_s, now_s
            if not response.open:
                del self._open[response.request_id]
                _free(request)
                self._wake.set()
            self._hand_over(response.queues, request, asked_s)
            if response.open and self._is_short(request):
                self._to_extend.append(response.request_id)
                self._wake.set()

    def _is_short(self, request: _Open) -> bool:
        """Its credit is half used up."""
        window = self._window
        return request.messages < window.messages * REFILL or request.bytes < window.bytes * REFILL

    def _watched(
        self,
        records: view_pb2.QueueRecordsView,
        messages: list[Message],
        *,
        asked_s: float,
        end_ns: int,
        server: str,
    ) -> None:
        """Spans and measures the way here: from the request, or the storing if that waited."""
        asked_ns = end_ns - round(asked_s * 1e9)
        count = sum(records.run_counts)
        start_ns = min(max(asked_ns, records.run_store_ms[0] * 1_000_000), end_ns)
        seconds = (end_ns - start_ns) / 1e9
        meters.received(records.topic, self._group, count, seconds, server)
        if records.untraced or not spans.enabled():
            return
        spans.record_receive(
            records.topic,
            self._broker,
            records.queue_id,
            records.run_offsets[0],
            count,
            last_offset=records.run_offsets[-1] + records.run_counts[-1] - 1,
            start_ns=start_ns,
            end_ns=end_ns,
            group=self._group,
            client_id=self._member_id,
            server=server,
            carried=note_traceparents(messages),
        )

    def _hand_over(
        self, answers: Iterable[view_pb2.QueueRecordsView], request: _Open, asked_s: float
    ) -> None:
        watch = None
        if spans.enabled() or meters.enabled():
            server = self._client.address_of(self._broker)
            watch = partial(self._watched, asked_s=asked_s, end_ns=time.time_ns(), server=server)
        for records in answers:
            request.messages -= sum(records.run_counts)
            request.bytes -= len(records.records)
            source = request.wanted.get((records.topic, records.queue_id))
            if source is None:
                continue  # removed meanwhile
            if records.HasField("error"):
                self._refused(source, status.from_proto(records.error))
                continue
            try:
                messages = received(records, self._broker, source.filter)
            except Corrupt as error:
                self._refused(source, error)
                continue
            if watch is not None and messages:
                watch(records, messages)
            self._sink.pulled(source, messages, records)

    def _refused(self, source: Source, error: DuemqError) -> None:
        """What the request brings from now on would leave a gap."""
        if source.asked:
            self._take_out(source)
        self._sink.refused(source, error)

    def _take_out(self, source: Source) -> None:
        """The open request that a source is in brings it nothing more, and is to end."""
        place = source.queue.topic, source.queue.queue_id
        for request_id, request in self._open.items():
            if request.wanted.get(place) is source:
                del request.wanted[place]
                self._cancel(request_id)

    def _cancel(self, request_id: int) -> None:
        request = self._open[request_id]
        if not request.cancelled:
            request.cancelled = True
            self._to_cancel.append(request_id)
            self._wake.set()

    async def _watch(self) -> None:
        """Raises Timeout when an answer is overdue."""
        limit_s = self._settings.pull_wait_s + ANSWER_GRACE_S
        while True:
            await asyncio.sleep(ANSWER_GRACE_S / 3)
            oldest = min((each.heard_s for each in self._open.values()), default=None)
            if oldest is not None and self._loop.time() - oldest > limit_s:
                raise Timeout(f"{self._broker} did not answer a pull within {limit_s:g} s")


def _free(request: _Open) -> None:
    """Its queues may be asked for again."""
    for source in request.sources:
        source.asked = False
