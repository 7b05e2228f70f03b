"""The service Timer: from protobuf to one call and back."""

from __future__ import annotations

import asyncio
from typing import Any

from duemq.errors import DuemqError, InvalidArgument, Unavailable
from duemq.rpc import status
from duemq.v1 import message_pb2, timer_pb2
from timer_service import stuck
from timer_service.entries import Cancelled, SourceId
from timer_service.links import Links
from timer_service.scheduler import NOT_YET
from timer_service.settings import Settings
from timer_service.shard import Shard, now_ms

SERVICE = timer_pb2.DESCRIPTOR.services_by_name["Timer"]
HANDLES_MAX = 10_000
ARRIVAL_TIMEOUT_S = 5.0


class TimerServicer:
    """See protos/duemq/v1/timer.proto."""

    def __init__(self, shard: Shard, links: Links, settings: Settings) -> None:
        self._shard = shard
        self._links = links
        self._settings = settings

    async def Cancel(self, request: timer_pb2.CancelRequest, _: Any) -> timer_pb2.CancelResponse:
        """Cancels delayed messages."""
        if len(request.handles) > HANDLES_MAX:
            raise InvalidArgument(
                f"handles: {len(request.handles)} in a request, at most {HANDLES_MAX} are allowed",
                field="handles",
                value=len(request.handles),
                limit=HANDLES_MAX,
            )
        results = await asyncio.gather(*map(self._cancel, request.handles))
        return timer_pb2.CancelResponse(results=results)

    async def _cancel(self, handle: message_pb2.TimerHandle) -> timer_pb2.CancelResult:
        try:
            self._check(handle)
            self._links.check_may_answer(handle.store_id)
            source = SourceId(handle.store_id, handle.queue_id)
            cancelled = Cancelled(source, handle.offset, handle.due_ms)
            live = self._links.knows(handle.store_id)
            outcome = await self._shard.cancel(cancelled, ARRIVAL_TIMEOUT_S, live)
            if outcome.outcome == NOT_YET:
                raise Unavailable(
                    f"offset {handle.offset} of %TIMER%/{handle.queue_id} has not arrived from its"
                    f" broker within {ARRIVAL_TIMEOUT_S} s",
                    field="offset",
                    value=handle.offset,
                )
        except DuemqError as error:
            return timer_pb2.CancelResult(error=status.to_proto(error))
        return timer_pb2.CancelResult(outcome=outcome.outcome)

    def _check(self, handle: message_pb2.TimerHandle) -> None:
        settings = self._settings
        if handle.queue_id < 0 or handle.offset < 0 or handle.due_ms < 0:
            raise InvalidArgument(
                f"handles: queue {handle.queue_id}, offset {handle.offset}, due {handle.due_ms}:"
                " none may be negative",
                field="handles",
            )
        if handle.queue_id % settings.shards != settings.shard:
            raise Unavailable(
                f"queue {handle.queue_id} belongs to shard {handle.queue_id % settings.shards}"
                f" of {settings.shards}, this is shard {settings.shard}",
                field="queue_id",
                value=handle.queue_id,
            )

    async def GetStats(self, _request: timer_pb2.GetStatsRequest, _: Any) -> timer_pb2.TimerStats:
        """The ledger, and how late timers fire."""
        shard, now = self._shard, now_ms()
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
            next_due_ms=scheduler.next_due_ms() or 0,
            near=scheduler.near.pending,
            id=shard.store.producer_id,
            lost=ledger.lost,
            problems=self._links.problems(),
            stuck=[
                timer_pb2.StuckTimers(topic=topic, timers=timers, reason=reason)
                for (topic, reason), timers in stuck.find(scheduler).items()
            ],
        )
