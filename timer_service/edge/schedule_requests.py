"""Schedule and Reschedule: from protobuf to one call of the shard, and back.

What is wrong is found here, before the shard is asked: it does all of a request or nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence

import grpc.aio

from duemq.errors import (
    DuemqError,
    InvalidArgument,
    QueueNotFound,
    TooLarge,
    Unavailable,
)
from duemq.protocol import checks, limits, timer_keys
from duemq.protocol.due import DUE_MS_MAX
from duemq.protocol.record_bytes import ENTRY_TAG, property_entry, text_hash, varint
from duemq.protocol.route import Queue
from duemq.protocol.timer_keys import SCHEDULE_RECORDS_MAX
from duemq.transport import status
from duemq.v1 import message_pb2, timer_pb2, timer_pb2_grpc
from duemq_server.serving import spans
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.cancel_requests import check_request_id
from duemq_server.timer_service.edge.others.other_shards import (
    PASSED_ON_TIMEOUT_S,
    Located,
    OtherShards,
)
from duemq_server.timer_service.edge.timer_names import TimerNames, handle_of, proto_of
from duemq_server.timer_service.edge.topic_queues import topic_queues
from duemq_server.timer_service.settings import Settings
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.keyed import (
    UNKNOWN,
    Handle,
    KeyedRecords,
    RescheduleResult,
    TimerKey,
)
from duemq_server.timer_service.timers.keyed_entry import RequestKey

SLICE = 250  # records read at once
_ENTRY = bytes([ENTRY_TAG])


class ScheduleRequests:
    """Of one shard."""

    def __init__(
        self, shard: Shard, links: BrokerLinks, others: OtherShards, settings: Settings
    ) -> None:
        self._shard = shard
        self._links = links
        self._others = others
        self._settings = settings

    async def schedule(self, request: timer_pb2.ScheduleRequest) -> timer_pb2.ScheduleResponse:
        """Raises DuemqErrors, as of the rpc."""
        start_ns = time.time_ns()
        check_request_id(request.request_id)
        self._links.check_may_serve()
        timer_keys.check_keyed_topic(request.topic)
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
        self._trace(records, response, start_ns)
        return response

    async def reschedule(
        self, request: timer_pb2.RescheduleRequest
    ) -> timer_pb2.RescheduleResponse:
        """Raises DuemqErrors, as of the rpc.

        What other shards have is passed on once this one has written down, with its own part, that
        it is theirs.  So a repeat passes on the same, whatever arrived at them meanwhile; and each
        of them gets its part in one piece, by the request's id.
        """
        check_request_id(request.request_id)
        self._links.check_may_serve()
        count = len(request.timers)
        checks.count("timers", count, 1, SCHEDULE_RECORDS_MAX, "in a request")
        dues = self._new_dues(request, count)
        names = TimerNames(self._shard.scheduler, self._links, self._others)
        elsewhere = await self._elsewhere(request, names)
        named = [
            handle_of(timer.handle) if at in elsewhere.shards else _named(names, timer)
            for at, timer in enumerate(request.timers)
        ]
        for each in named:
            if isinstance(each, Unavailable):
                raise each  # it may be allowed later: the request stands for all or none
        decided = await self._rescheduled(request, named, dues, elsewhere)
        passed = await self._pass_on(request, dues, _theirs(elsewhere, decided))
        response = timer_pb2.RescheduleResponse()
        for at, each in enumerate(named):
            if isinstance(each, DuemqError):
                response.results.add(error=status.to_proto(each))
            else:
                response.results.append(passed[at] if at in passed else _result(decided[at]))
        return response

    async def _elsewhere(self, request: timer_pb2.RescheduleRequest, names: TimerNames) -> Located:
        """Which of the timers other shards have.  Raises Unavailable if one of them is away."""
        given = [each.handle for each in request.timers]
        places = [at for at, handle in enumerate(given) if handle.store_id]
        elsewhere = await names.elsewhere(given, places)
        for error in elsewhere.missing.values():
            raise error
        return elsewhere

    async def _rescheduled(
        self,
        request: timer_pb2.RescheduleRequest,
        named: Sequence[Handle | TimerKey | DuemqError],
        dues: Sequence[int],
        elsewhere: Located,
    ) -> Mapping[int, RescheduleResult]:
        """This shard's decision, by place; none if all of the timers are others'.

        What nobody had may have come to another shard since, and this one have got the queue behind
        it: so it has not arrived, and is not UNKNOWN.
        """
        asked = {at: each for at, each in enumerate(named) if not isinstance(each, DuemqError)}
        before = self._shard.scheduler.keyed.requests.find(RequestKey(request.request_id))
        if before is None and not asked.keys() - elsewhere.shards.keys():
            return {}
        results = await self._shard.reschedule(
            request.request_id,
            list(asked.values()),
            [dues[at] for at in asked],
            fire=request.fire_now,
            elsewhere={asked[at] for at in elsewhere.shards},
            not_yet={asked[at] for at in elsewhere.to_come if at in asked},
        )
        return dict(zip(asked, results, strict=True))

    async def _pass_on(
        self, request: timer_pb2.RescheduleRequest, dues: Sequence[int], theirs: Located
    ) -> dict[int, timer_pb2.RescheduleResult]:
        """Results of timers that other shards have, by place; each does its part once.

        Raises of one that may do it later: a repeat is answered by all.  What is refused for good
        is told of its timers, for others are done.
        """

        def ask(to: grpc.aio.Channel, its: list[int]) -> Awaitable[timer_pb2.RescheduleResponse]:
            passed = timer_pb2.RescheduleRequest(
                request_id=request.request_id,
                timers=[request.timers[at] for at in its],
                due_ms=() if request.fire_now else [dues[at] for at in its],
                fire_now=request.fire_now,
            )
            return timer_pb2_grpc.TimerStub(to).Reschedule(passed, timeout=PASSED_ON_TIMEOUT_S)

        found: dict[int, timer_pb2.RescheduleResult] = {}
        for each in await self._others.each(theirs, ask):
            if not isinstance(each.answer, DuemqError):
                found |= dict(zip(each.places, each.answer.results, strict=True))
            elif each.answer.retryable:
                raise each.answer
            else:
                refused = timer_pb2.RescheduleResult(error=status.to_proto(each.answer))
                found |= dict.fromkeys(each.places, refused)
        return found

    def _new_dues(self, request: timer_pb2.RescheduleRequest, count: int) -> list[int]:
        if not request.fire_now:
            return _dues_of(request, count, self._shard.now_ms())
        if request.delays_ms or request.due_ms:
            raise checks.wrong("fire_now", "true", "no delays_ms or due_ms beside it")
        return [self._shard.now_ms()] * count

    async def _records(self, request: timer_pb2.ScheduleRequest) -> KeyedRecords:
        """Raises InvalidArgument, TooLarge, Unavailable for another shard's key."""
        given = request.records.records
        count = len(given)
        checks.count("records", count, 1, SCHEDULE_RECORDS_MAX, "in a request")
        dues = _dues_of(request, count, self._shard.now_ms())
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
        if not (spans.enabled() and spans.traced(records.topic)):
            return
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


_RESCHEDULED = {
    "RESCHEDULED": timer_pb2.RESCHEDULED,
    "FIRED": timer_pb2.RESCHEDULE_FIRED,
    "UNKNOWN": timer_pb2.RESCHEDULE_UNKNOWN,
}


def _theirs(elsewhere: Located, decided: Mapping[int, RescheduleResult]) -> Located:
    """Without what had not arrived anywhere when the request came first: that stays so."""
    shards = {
        at: shard
        for at, shard in elsewhere.shards.items()
        if not decided or decided[at].outcome == UNKNOWN
    }
    return Located(shards, {})


def _result(result: RescheduleResult) -> timer_pb2.RescheduleResult:
    if result.error is not None:
        return timer_pb2.RescheduleResult(error=status.to_proto(result.error))
    return timer_pb2.RescheduleResult(
        outcome=_RESCHEDULED[result.outcome],
        handle=proto_of(result.handle) if result.handle is not None else None,
    )


def _named(names: TimerNames, timer: timer_pb2.TimerRef) -> Handle | TimerKey | DuemqError:
    which = timer.WhichOneof("ref")
    if which == "handle":
        return names.handle(timer.handle)
    if which == "key":
        return names.key(timer.key)
    return checks.wrong("timers", "neither", "a handle or a key")


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


def _dues_of(
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
