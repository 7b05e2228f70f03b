"""Schedule: from protobuf to one call of the shard, and back.

What is wrong is found here, before the shard is asked: it does all of a request or nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from duemq.errors import InvalidArgument, QueueNotFound, TooLarge
from duemq.protocol import checks, limits, timer_keys
from duemq.protocol.due import DUE_MS_MAX
from duemq.protocol.record_bytes import ENTRY_TAG, property_entry, text_hash, varint
from duemq.protocol.route import Queue
from duemq.protocol.timer_keys import SCHEDULE_RECORDS_MAX
from duemq.v1 import message_pb2, timer_pb2
from duemq_server.serving.tracing import spans
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.cancel_requests import check_request_id
from duemq_server.timer_service.edge.timer_names import proto_of
from duemq_server.timer_service.edge.topic_queues import topic_queues
from duemq_server.timer_service.settings import Settings
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.keyed import KeyedRecords
from duemq_server.timer_service.timers.keyed_entry import RequestKey

SLICE = 250  # records read at once
SPANNED_MAX = 16_384
"""Requests of which it is known that they have their span; a client asks again within seconds."""
_ENTRY = bytes([ENTRY_TAG])


class ScheduleRequests:
    """Of one shard."""

    def __init__(self, shard: Shard, links: BrokerLinks, settings: Settings) -> None:
        self._shard = shard
        self._links = links
        self._settings = settings
        self._spanned: dict[bytes, None] = {}

    async def schedule(self, request: timer_pb2.ScheduleRequest) -> timer_pb2.ScheduleResponse:
        """Raises DuemqErrors, as of the rpc."""
        start_ns = time.time_ns()
        check_request_id(request.request_id)
        self._links.check_may_serve()
        timer_keys.check_keyed_topic(request.topic)
        await self._links.check_may_take()
        decided = self._shard.scheduler.keyed.requests.find(RequestKey(request.request_id))
        if decided is None:  # a repeat is answered though the topic is gone by now
            _check_queue(request, await topic_queues(self._links, request.topic))
        records = await self._records(request)
        results = await self._shard.schedule(
            request.request_id, records, if_absent=request.if_absent
        )
        response = timer_pb2.ScheduleResponse(now_ms=self._shard.now_ms())
        for result in results:
            response.results.add(
                outcome=result.outcome,
                handle=proto_of(result.handle),
                replaced=proto_of(result.replaced) if result.replaced is not None else None,
            )
        if self._to_span(request):
            self._trace(records, response, start_ns)
        return response

    def _to_span(self, request: timer_pb2.ScheduleRequest) -> bool:
        """Once, however often it comes: whose call was broken off had no span."""
        if not (spans.enabled() and spans.traced(request.topic)):
            return False
        if request.request_id in self._spanned:
            return False
        self._spanned[request.request_id] = None
        if len(self._spanned) > SPANNED_MAX:
            del self._spanned[next(iter(self._spanned))]
        return True

    async def _records(self, request: timer_pb2.ScheduleRequest) -> KeyedRecords:
        """Raises InvalidArgument, TooLarge, Unavailable for another shard's key."""
        given = request.records.records
        count = len(given)
        checks.count("records", count, 1, SCHEDULE_RECORDS_MAX, "in a request")
        dues = dues_of(request, count, self._shard.now_ms())
        place = self._links.place
        keys: dict[str, None] = {}
        entries: list[bytes] = []
        tags: list[int] = []
        hashes: list[int] = []
        for at, record in enumerate(given):
            if at and at % SLICE == 0:
                await asyncio.sleep(0)
            encoded = record.SerializeToString()
            _check_record(at, record, len(encoded))
            key = record.timer_key
            timer_keys.check_timer_key(key, f"records[{at}].timer_key")
            place.check_key(request.topic, key)
            keys[key] = None
            entries.append(_ENTRY + varint(len(encoded)) + encoded)
            tags.append(text_hash(record.tag.encode()))
            hashes.append(text_hash(record.key.encode()))
        _check_twice(given, len(keys))
        sizes = list(map(len, entries))
        _check_size("records", sum(sizes), limits.BATCH_BYTES_DEFAULT, "in a request")
        return KeyedRecords(
            topic=request.topic,
            queue_id=request.queue_id,
            broker=request.broker,
            keys=list(keys),
            records=b"".join(entries),
            sizes=sizes,
            tag_hashes=tags,
            key_hashes=hashes,
            due_ms=dues,
        )

    def _trace(
        self, records: KeyedRecords, response: timer_pb2.ScheduleResponse, start_ns: int
    ) -> None:
        first = response.results[0].handle
        spans.record_schedule(
            records.topic,
            self._settings.name,
            first.queue_id,
            first.offset,
            len(records.keys),
            start_ns=start_ns,
            end_ns=time.time_ns(),
            due_ms=min(records.due_ms),
            records=records.records,
        )


def _check_queue(request: timer_pb2.ScheduleRequest, queues: Sequence[Queue]) -> None:
    """-1 and no broker, or a queue that the topic has."""
    queue_id, broker = request.queue_id, request.broker
    if queue_id == -1:
        if broker:
            raise checks.wrong("broker", broker, "only with a queue_id")
        return
    checks.between("queue_id", queue_id, -1, limits.QUEUE_ID_MAX)
    checks.filled("broker", broker)
    if Queue(broker, queue_id) not in queues:
        raise QueueNotFound(
            f"topic {request.topic!r} has no queue {queue_id} at broker {broker!r}",
            field="queue_id",
            value=queue_id,
        )


def dues_of(
    request: timer_pb2.ScheduleRequest | timer_pb2.RescheduleRequest, count: int, now_ms: int
) -> list[int]:
    """When each is due.  Raises InvalidArgument."""
    delays, dues = request.delays_ms, request.due_ms
    if bool(delays) == bool(dues):
        raise checks.wrong("due_ms", "both" if dues else "neither", "delays_ms or due_ms")
    field, values = ("delays_ms", list(delays)) if delays else ("due_ms", list(dues))
    if len(values) not in (1, count):
        raise checks.wrong(field, f"{len(values)} entries", f"1 or {count}, one for each")
    latest = DUE_MS_MAX - now_ms if delays else DUE_MS_MAX
    checks.between(field, min(values), 0, latest)
    checks.between(field, max(values), 0, latest)
    if delays:
        values = [now_ms + delay for delay in values]
    return values * count if len(values) != count else values


def _check_record(at: int, record: message_pb2.Record, size: int) -> None:
    """Body and properties, of a record large enough to break a limit."""
    if size <= limits.PROPERTIES_BYTES_DEFAULT:
        return
    _check_size(f"records[{at}].body", len(record.body), limits.MESSAGE_BYTES_DEFAULT)
    properties = record.properties.items()
    size = sum(len(property_entry(name.encode(), value.encode())) for name, value in properties)
    _check_size(f"records[{at}].properties", size, limits.PROPERTIES_BYTES_DEFAULT)


def _check_size(field: str, size: int, size_max: int, where: str = "") -> None:
    if size > size_max:
        raise TooLarge(
            f"{field}: {size} bytes, at most {size_max} {where}".rstrip(),
            field=field,
            value=size,
            limit=size_max,
        )


def _check_twice(given: Sequence[message_pb2.Record], distinct: int) -> None:
    if distinct == len(given):
        return
    seen: set[str] = set()
    for at, record in enumerate(given):
        if record.timer_key in seen:
            raise InvalidArgument(
                f"records[{at}].timer_key: {record.timer_key!r} is in this request before",
                field=f"records[{at}].timer_key",
                value=record.timer_key,
                limit="once in a request",
            )
        seen.add(record.timer_key)
