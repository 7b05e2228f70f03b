"""The service Timer: from protobuf to one call and back."""

from __future__ import annotations

import asyncio
from typing import Any

from duemq.errors import DuemqError, InvalidArgument, Unavailable
from duemq.protocol import checks
from duemq.protocol.limits import HANDLES_MAX
from duemq.transport import status
from duemq.v1 import timer_pb2
from duemq_server.serving.clock import now_ms
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.scheduling import stuck
from duemq_server.timer_service.scheduling.cancelling import CANCELLED, FIRED, NOT_YET, UNKNOWN
from duemq_server.timer_service.settings import Settings
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId

SERVICE = timer_pb2.DESCRIPTOR.services_by_name["Timer"]
ARRIVAL_TIMEOUT_S = 5.0
SLICE = 500  # handles read or answered at once
_RESULTS = {
    outcome: timer_pb2.CancelResult(outcome=outcome) for outcome in (CANCELLED, FIRED, UNKNOWN)
}


class TimerServicer:
    """See protos/duemq/v1/timer.proto."""

    def __init__(self, shard: Shard, links: BrokerLinks, settings: Settings) -> None:
        self._shard = shard
        self._links = links
        self._settings = settings

    async def Cancel(self, request: timer_pb2.CancelRequest, _: Any) -> timer_pb2.CancelResponse:
        """Cancels delayed messages."""
        checks.count("handles", len(request.handles), 0, HANDLES_MAX, "in a request")
        handles: list[Cancelled] = []
        refused: dict[int, DuemqError] = {}
        sources: dict[tuple[int, int], SourceId | DuemqError] = {}
        for at, handle in enumerate(request.handles):
            if at and at % SLICE == 0:
                await asyncio.sleep(0)
            pair = handle.store_id, handle.queue_id
            source = sources.get(pair)
            if source is None:
                source = sources[pair] = self.source(*pair)
            offset, due_ms = handle.offset, handle.due_ms
            if isinstance(source, DuemqError):
                refused[at] = source
            elif offset < 0 or due_ms < 0:
                refused[at] = _negative(pair[1], offset, due_ms)
            else:
                handles.append(Cancelled(source, offset, due_ms))
        wait_s = 0.0 if request.do_not_wait else ARRIVAL_TIMEOUT_S
        outcomes = await self._shard.cancel(handles, wait_s)
        told = zip(handles, outcomes, strict=True)
        response = timer_pb2.CancelResponse()
        results: list[timer_pb2.CancelResult] = []
        for at in range(len(request.handles)):
            if at and at % SLICE == 0:
                response.results.extend(results)
                results.clear()
                await asyncio.sleep(0)
            outcome = refused.get(at) or self.told(*next(told), wait_s)
            if isinstance(outcome, DuemqError):
                results.append(timer_pb2.CancelResult(error=status.to_proto(outcome)))
            else:
                results.append(_RESULTS[outcome])
        response.results.extend(results)
        return response

    def told(self, handle: Cancelled, outcome: str | DuemqError, wait_s: float) -> str | DuemqError:
        """The outcome as it is answered."""
        if outcome != NOT_YET:
            return outcome
        what = f"offset {handle.offset} of %TIMER%/{handle.source.queue_id}"
        reason = self._links.why_not_arrived(handle.source.store_id)
        return Unavailable(
            f"{what} {reason} (waited {wait_s:g} s)", field="offset", value=handle.offset
        )

    def source(self, store_id: int, queue_id: int) -> SourceId | DuemqError:
        """Whose timers this shard may answer for, or why not."""
        settings = self._settings
        if queue_id < 0:
            return _negative(queue_id, 0, 0)
        if queue_id % settings.shards != settings.shard:
            return Unavailable(
                f"queue {queue_id} belongs to shard {queue_id % settings.shards}"
                f" of {settings.shards}, this is shard {settings.shard}",
                field="queue_id",
                value=queue_id,
            )
        try:
            self._links.check_may_answer(store_id)
        except DuemqError as error:
            return error
        return SourceId(store_id, queue_id)

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
            id=shard.directory.producer_id,
            lost=ledger.lost,
            problems=self._links.problems(),
            stuck=[
                timer_pb2.StuckTimers(topic=topic, timers=timers, reason=reason)
                for (topic, reason), timers in stuck.find(scheduler).items()
            ],
        )


def _negative(queue_id: int, offset: int, due_ms: int) -> InvalidArgument:
    return InvalidArgument(
        f"handles: queue {queue_id}, offset {offset}, due {due_ms}: none may be negative",
        field="handles",
    )
