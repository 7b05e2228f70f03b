"""What timer shards hold, asked of all of them and joined."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from duemq.administering.asking import SHOWN_WITHOUT_TIMEOUT_S, refuse_missing
from duemq.administering.timer_shards import TimerShards
from duemq.descriptions import TimerBucket, TimerCount, TimerStats
from duemq.errors import Internal, MissingBroker, Unavailable
from duemq.protocol.route import TimerShard
from duemq.transport import retrying, status
from duemq.v1 import timer_inspector_pb2, timer_inspector_pb2_grpc

Stub = timer_inspector_pb2_grpc.TimerInspectorStub
T = TypeVar("T")


class Timers(TimerShards):
    """What the admin client asks timer shards about their timers."""

    async def count_timers(self, topic: str | None = None) -> list[TimerCount]:
        """How many delayed messages each topic has, and what became of the others; exact.

        Sorted by topic; of `topic`, one count, even if there never was any.  Topics beyond the
        first 4,096 of a shard are counted together, as "".  Raises PartialAnswer, whose `partial`
        is the list, if a shard is away; InvalidArgument for a topic that a shard counts with
        others.
        """
        request = timer_inspector_pb2.CountTimersRequest(topic=topic or "")
        answers, missing = await self._each_shard(
            lambda stub, left_s: stub.CountTimers(request, timeout=left_s)
        )
        found = {topic: TimerCount(topic)} if topic else {}
        for answer in answers:
            for each in answer.topics:
                found[each.topic] = _sum(found.get(each.topic, TimerCount(each.topic)), each)
        counts = [found[name] for name in sorted(found)]
        refuse_missing(missing, partial=counts)
        return counts

    async def timer_histogram(self, topic: str | None = None) -> list[TimerBucket]:
        """What falls due when, of one topic or all; exact, without empty buckets, in order.

        A bucket of what is overdue, then a day of minutes, a month of hours, and days (UTC).
        Raises as `count_timers`.
        """
        request = timer_inspector_pb2.GetHistogramRequest(
            topic=topic or "", at_ms=time.time_ns() // 1_000_000
        )
        answers, missing = await self._each_shard(
            lambda stub, left_s: stub.GetHistogram(request, timeout=left_s),
            self._asker.timeout_s,  # the first one reads what there is of each timer
        )
        buckets = _joined(answers)
        refuse_missing(missing, partial=buckets)
        return buckets

    async def _each_shard(
        self,
        method: Callable[[Stub, float], Awaitable[T]],
        timeout_s: float = SHOWN_WITHOUT_TIMEOUT_S,
    ) -> tuple[list[T], Sequence[MissingBroker]]:
        """The answers of the shards that are there, and those that are not."""
        alive = self._client.routes.timers
        lost = await self._missing_shards(alive)
        missing = [MissingBroker(self._shard_name(each), each.error or "") for each in lost]
        answers: list[T] = []

        async def ask(shard: TimerShard) -> None:
            try:
                answers.append(await self._ask_shard(shard.shard, method, timeout_s))
            except (Unavailable, Internal) as error:
                missing.append(MissingBroker(self._shard_name(shard), str(error)))

        await asyncio.gather(*map(ask, alive))
        return answers, sorted(missing, key=lambda each: each.name)

    async def _ask_shard(
        self,
        shard: int,
        method: Callable[[Stub, float], Awaitable[T]],
        timeout_s: float = SHOWN_WITHOUT_TIMEOUT_S,
    ) -> T:
        """Asked again while a shard has no leader, say."""
        timeout_s = min(timeout_s, self._asker.timeout_s)

        async def attempt(left_s: float) -> T:
            address = self._client.timer_of(shard).address
            return await status.answer(method(self._stub(address), left_s), address)

        return await retrying.until(time.monotonic() + timeout_s, attempt)

    def _stub(self, address: str) -> Stub:
        return Stub(self._client.channel(address))

    def _shard_name(self, shard: TimerShard | TimerStats) -> str:
        """As a missing shard is named."""
        number = f"timer shard {shard.shard}"
        return f"{number} ({shard.name})" if shard.name else number


def _joined(answers: Iterable[timer_inspector_pb2.TimerHistogram]) -> list[TimerBucket]:
    """The sums of what shards say; each has begun its first minute a little before or after."""
    overdue, to_ms = 0, 0
    found: dict[int, TimerBucket] = {}
    for answer in answers:
        for each in answer.buckets:
            if not each.from_ms:
                overdue, to_ms = overdue + each.pending, max(to_ms, each.to_ms)
                continue
            same = found.get(each.to_ms, TimerBucket(each.from_ms, each.to_ms, 0))
            from_ms = max(same.from_ms, each.from_ms)
            found[each.to_ms] = TimerBucket(from_ms, each.to_ms, same.pending + each.pending)
    buckets = [found[end_ms] for end_ms in sorted(found)]
    return [TimerBucket(0, to_ms, overdue), *buckets] if overdue else buckets


def _sum(count: TimerCount, more: timer_inspector_pb2.TopicTimers) -> TimerCount:
    return TimerCount(
        count.topic,
        count.pending + more.pending,
        count.accepted + more.accepted,
        count.fired + more.fired,
        count.cancelled + more.cancelled,
        count.replaced + more.replaced,
        count.lost + more.lost,
    )
