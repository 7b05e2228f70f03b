"""The service TimerInspector: from protobuf to one call and back."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from duemq.errors import Corrupt, DuemqError, InvalidArgument
from duemq.protocol import checks
from duemq.protocol.due import DUE_MS_MAX
from duemq.protocol.limits import TIMERS_MAX
from duemq.transport import status
from duemq.v1 import stubs, timer_inspector_pb2
from duemq.v1.message_pb2 import Record, RecordBatch, TimerHandle
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.cancel_requests import told
from duemq_server.timer_service.edge.others.other_shards import (
    PASSED_ON_TIMEOUT_S,
    ByShard,
    OtherShards,
)
from duemq_server.timer_service.edge.timer_names import TimerNames
from duemq_server.timer_service.far.bodies import Bytes
from duemq_server.timer_service.inspecting import Fate
from duemq_server.timer_service.scheduling.cancelling import (
    CANCELLED,
    FIRED,
    PENDING,
    UNKNOWN,
)
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.log_entries import Cancelled
from duemq_server.timer_service.views.listing import BYTES_MAX, PageItem, PageQuery, Position

SERVICE = timer_inspector_pb2.DESCRIPTOR.services_by_name["TimerInspector"]
_STATES = {
    PENDING: timer_inspector_pb2.TIMER_PENDING,
    FIRED: timer_inspector_pb2.TIMER_FIRED,
    CANCELLED: timer_inspector_pb2.TIMER_CANCELLED,
    UNKNOWN: timer_inspector_pb2.TIMER_UNKNOWN,
}
_TOKEN = struct.Struct("<qQqq")  # a Position


class TimerInspectorServicer:
    """See protos/duemq/v1/timer_inspector.proto."""

    def __init__(self, shard: Shard, links: BrokerLinks, others: OtherShards) -> None:
        self._shard = shard
        self._inspector = shard.inspector
        self._links = links
        self._others = others

    async def CountTimers(
        self, request: timer_inspector_pb2.CountTimersRequest, _: Any
    ) -> timer_inspector_pb2.CountTimersResponse:
        """The ledger by topic."""
        found = await self._inspector.counts(request.topic)
        return timer_inspector_pb2.CountTimersResponse(
            topics=[
                timer_inspector_pb2.TopicTimers(
                    topic=topic,
                    pending=each.pending,
                    accepted=each.accepted,
                    fired=each.fired,
                    cancelled=each.cancelled,
                    lost=each.lost,
                    replaced=each.replaced,
                    held=held,
                    dropped=each.dropped,
                )
                for topic, (each, held) in found.items()
            ]
        )

    async def GetHistogram(
        self, request: timer_inspector_pb2.GetHistogramRequest, _: Any
    ) -> timer_inspector_pb2.TimerHistogram:
        """What falls due when."""
        now_ms, found = await self._inspector.histogram(request.topic, request.at_ms)
        buckets = [timer_inspector_pb2.TimerBucket(**each._asdict()) for each in found]
        return timer_inspector_pb2.TimerHistogram(now_ms=now_ms, buckets=buckets)

    async def GetTimers(
        self, request: timer_inspector_pb2.GetTimersRequest, _: Any
    ) -> timer_inspector_pb2.GetTimersResponse:
        """What became of timers, and what the pending ones are."""
        checks.count("handles", len(request.handles), 1, TIMERS_MAX, "in a request")
        names = TimerNames(self._shard.scheduler, self._links, self._others)
        told = await self._pass_on(request, await names.elsewhere(request.handles))
        here = await self._find_here(request, names, told.keys())
        gone = timer_inspector_pb2.TIMER_UNKNOWN
        unknown = [at for at, each in here.items() if each is not None and each.state == gone]
        moved = await self._pass_on(request, await names.moved(request.handles, unknown))
        infos = told | here | moved
        response = timer_inspector_pb2.GetTimersResponse()
        size = 0
        for at in range(len(request.handles)):
            info = infos[at]
            if info is None or size > BYTES_MAX:  # as many as fit, of all shards together
                break
            size += info.ByteSize()
            response.timers.append(info)
        return response

    async def _find_here(
        self,
        request: timer_inspector_pb2.GetTimersRequest,
        names: TimerNames,
        elsewhere: Collection[int],
    ) -> dict[int, timer_inspector_pb2.TimerInfo | None]:
        """What this shard says of the others, by place; None: it did not fit."""
        told: dict[int, timer_inspector_pb2.TimerInfo | None] = {}
        asked: dict[int, Cancelled] = {}
        for at, handle in enumerate(request.handles):
            if at in elsewhere:
                continue
            named = names.handle(handle)
            if isinstance(named, DuemqError):
                told[at] = _error(handle, named)
            else:
                asked[at] = named
        found = await self._inspector.find(list(asked.values())) if asked else []
        for (at, each), answer in itertools.zip_longest(asked.items(), found):
            told[at] = None if answer is None else self._info(request.handles[at], each, answer)
        return told

    async def _pass_on(
        self, request: timer_inspector_pb2.GetTimersRequest, elsewhere: ByShard
    ) -> dict[int, timer_inspector_pb2.TimerInfo | None]:
        """What other shards say of their timers, by place; None: it did not fit."""
        handles = request.handles

        def ask(
            to: grpc.aio.Channel, places: list[int]
        ) -> Awaitable[timer_inspector_pb2.GetTimersResponse]:
            passed = timer_inspector_pb2.GetTimersRequest(handles=[handles[at] for at in places])
            stub = stubs.TimerInspectorStub(to)
            return stub.GetTimers(passed, timeout=PASSED_ON_TIMEOUT_S)

        told: dict[int, timer_inspector_pb2.TimerInfo | None] = {
            at: _error(handles[at], error) for at, error in elsewhere.missing.items()
        }
        for each in await self._others.each(elsewhere, ask):
            if isinstance(each.answer, DuemqError):
                told |= {at: _error(handles[at], each.answer) for at in each.places}
            else:
                told |= dict(itertools.zip_longest(each.places, each.answer.timers))
        return told

    def _info(
        self, handle: TimerHandle, asked: Cancelled, found: Fate
    ) -> timer_inspector_pb2.TimerInfo:
        outcome = told(self._links, asked, found.outcome, 0.0)
        if isinstance(outcome, DuemqError):
            return _error(handle, outcome)
        info = timer_inspector_pb2.TimerInfo(handle=handle, state=_STATES[outcome])
        if found.target is not None:
            info.topic, info.queue_id = found.target.topic, found.target.queue_id
            info.record.CopyFrom(_record(found.body))
            info.held = self._is_held(info)
        return info

    def _is_held(self, info: timer_inspector_pb2.TimerInfo) -> bool:
        return self._inspector.is_held(info.topic, info.record.timer_key, info.handle.due_ms)

    async def ListTimers(
        self, request: timer_inspector_pb2.ListTimersRequest, _: Any
    ) -> timer_inspector_pb2.ListTimersResponse:
        """A page of a topic's pending timers."""
        make = _reader(request.key_prefix, request.with_bodies)
        page = await self._inspector.page(_wanted(request), make, wants_all=not request.key_prefix)
        listed, after = page
        timers = list(map(_listed, listed))
        for each in timers:
            each.held = self._is_held(each)
        return timer_inspector_pb2.ListTimersResponse(
            timers=timers, token=_TOKEN.pack(*after) if after else b""
        )


def _error(handle: TimerHandle, error: DuemqError) -> timer_inspector_pb2.TimerInfo:
    return timer_inspector_pb2.TimerInfo(handle=handle, error=status.to_proto(error))


def _wanted(request: timer_inspector_pb2.ListTimersRequest) -> PageQuery:
    if not request.topic:
        raise InvalidArgument("topic is empty; timers are listed by topic", field="topic")
    checks.whole("limit", request.limit, 1, TIMERS_MAX)
    checks.whole("from_ms", request.from_ms, 0, DUE_MS_MAX)
    checks.whole("to_ms", request.to_ms, 0, DUE_MS_MAX + 1)
    after = None
    if request.token:
        if len(request.token) != _TOKEN.size:
            raise InvalidArgument("token is none of a page before", field="token")
        after = Position(*_TOKEN.unpack(request.token))
    to_ms = request.to_ms or DUE_MS_MAX + 1
    return PageQuery(request.topic, request.from_ms, to_ms, request.limit, after)


def _reader(key_prefix: str, with_bodies: bool) -> Callable[[Bytes], Record | None]:
    def read(entry: Bytes) -> Record | None:
        record = _record(entry)
        if not record.timer_key.startswith(key_prefix):
            return None
        if not with_bodies:
            record.ClearField("body")
        return record

    return read


def _record(entry: Bytes) -> Record:
    try:
        [record] = RecordBatch.FromString(bytes(entry)).records
    except (DecodeError, ValueError) as error:
        raise Corrupt(f"the record of a timer cannot be decoded: {error}") from error
    return record


def _listed(each: PageItem[Record]) -> timer_inspector_pb2.TimerInfo:
    at = each.position
    return timer_inspector_pb2.TimerInfo(
        handle=TimerHandle(
            store_id=at.store_id, queue_id=at.queue_id, offset=at.offset, due_ms=at.due_ms
        ),
        state=timer_inspector_pb2.TIMER_PENDING,
        topic=each.target.topic,
        queue_id=each.target.queue_id,
        record=each.made,
    )
