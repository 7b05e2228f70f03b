"""The service Timer: from protobuf to one call and back."""

from __future__ import annotations

import asyncio
from typing import Any

from duemq.protocol import checks
from duemq.protocol.limits import HANDLES_MAX
from duemq.v1 import timer_pb2
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.bulk_requests import BulkRequests
from duemq_server.timer_service.edge.cancel_requests import CancelRequests
from duemq_server.timer_service.edge.others.other_shards import OtherShards
from duemq_server.timer_service.edge.others.reschedule_requests import RescheduleRequests
from duemq_server.timer_service.edge.schedule_requests import ScheduleRequests
from duemq_server.timer_service.edge.timer_names import SLICE
from duemq_server.timer_service.far.numbering import Source
from duemq_server.timer_service.scheduling import stuck
from duemq_server.timer_service.settings import Settings
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.log_entries import SourceId

SERVICE = timer_pb2.DESCRIPTOR.services_by_name["Timer"]


class TimerServicer:
    """See protos/duemq/v1/timer.proto."""

    def __init__(
        self, shard: Shard, links: BrokerLinks, others: OtherShards, settings: Settings
    ) -> None:
        self._shard = shard
        self._links = links
        self._settings = settings
        self._cancels = CancelRequests(shard, links, others)
        self._schedules = ScheduleRequests(shard, links, settings)
        self._reschedules = RescheduleRequests(shard, links, others)
        self._bulk = BulkRequests(shard, links)

    async def Cancel(
        self, request: timer_pb2.CancelRequest, context: Any
    ) -> timer_pb2.CancelResponse:
        """Cancels delayed messages."""
        return await self._cancels.cancel(request, context.time_remaining)

    async def Schedule(
        self, request: timer_pb2.ScheduleRequest, _: Any
    ) -> timer_pb2.ScheduleResponse:
        """Keeps messages under keys of their owner."""
        return await self._schedules.schedule(request)

    async def Reschedule(
        self, request: timer_pb2.RescheduleRequest, context: Any
    ) -> timer_pb2.RescheduleResponse:
        """Gives delayed messages other due times."""
        return await self._reschedules.reschedule(request, context.time_remaining)

    async def ChangePending(
        self, request: timer_pb2.ChangePendingRequest, _: Any
    ) -> timer_pb2.ChangePendingResponse:
        """Cancels or shifts what is pending of a topic."""
        return await self._bulk.change(request)

    async def LocateTimers(
        self, request: timer_pb2.LocateTimersRequest, _: Any
    ) -> timer_pb2.LocateTimersResponse:
        """Which of these timers ever came to this shard, durably: whoever asks writes it down."""
        checks.count("handles", len(request.handles), 0, HANDLES_MAX, "in a request")
        self._links.check_may_serve()
        find = self._shard.scheduler.numbers.source
        sources: dict[tuple[int, int], Source | None] = {}
        here: list[bool] = []
        durable = True
        for at, each in enumerate(request.handles):
            if at and at % SLICE == 0:
                await asyncio.sleep(0)
            pair = each.store_id, each.queue_id
            if pair not in sources:
                sources[pair] = find(SourceId(*pair))
            source = sources[pair]
            here.append(source is not None and source.had(each.offset))
            if source is not None and here[-1]:
                durable &= each.offset < source.durable_offset
        if not durable:
            await self._shard.settled()
        return timer_pb2.LocateTimersResponse(here=here, epoch=self._links.epoch)

    async def GetStats(self, _request: timer_pb2.GetStatsRequest, _: Any) -> timer_pb2.TimerStats:
        """The ledger, and how late timers fire."""
        shard, now = self._shard, self._shard.now_ms()
        scheduler = shard.scheduler
        ledger = scheduler.ledger
        p50, p99 = shard.lateness.percentiles(now, 0.5, 0.99)
        return timer_pb2.TimerStats(
            name=self._settings.name,
            shard=self._settings.shard,
            shards=self._settings.shards,
            accepted=ledger.accepted,
            pending=ledger.pending,
            fired=ledger.fired,
            cancelled=ledger.cancelled,
            in_flight=ledger.in_flight,
            lateness_p50_ms=p50,
            lateness_p99_ms=p99,
            lateness_max_ms=shard.lateness.max_ms(now),
            next_due_ms=(scheduler.tiers.next_due_ms() or 0) if ledger.pending else 0,
            near=scheduler.near.pending,
            id=shard.directory.producer_id,
            lost=ledger.lost,
            replaced=ledger.replaced,
            dropped=ledger.dropped,
            problems=self._links.problems(),
            stuck=[
                timer_pb2.StuckTimers(topic=topic, timers=timers, reason=reason)
                for (topic, reason), timers in stuck.find(scheduler).items()
            ],
        )
