"""What timer shards hold, asked of all of them and joined."""

from __future__ import annotations

from collections.abc import Iterable

from duemq.administering.asking import refuse_missing
from duemq.administering.asking_shards import AskingShards
from duemq.descriptions import TimerBucket, TimerCount
from duemq.v1 import timer_inspector_pb2, timer_inspector_pb2_grpc

Stub = timer_inspector_pb2_grpc.TimerInspectorStub


class Timers(AskingShards):
    """What the admin client asks timer shards about their timers."""

    async def count_timers(self, topic: str | None = None) -> list[TimerCount]:
        """How many delayed messages each topic has, and what became of the others; exact.

        Sorted by topic; of `topic`, one count, even if there never was any.  Topics beyond the
        first 4,096 of a shard are counted together, as "".  Raises PartialAnswer, whose `partial`
        is the list, if a shard is away; InvalidArgument for a topic that a shard counts with
        others.
        """
        request = timer_inspector_pb2.CountTimersRequest(topic=topic or "")
        answers, missing = await self._each_shard(Stub.ask("CountTimers", request))
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
        request = timer_inspector_pb2.GetHistogramRequest(topic=topic or "", at_ms=self._now_ms())
        answers, missing = await self._each_shard(
            Stub.ask("GetHistogram", request),
            self._asker.timeout_s,  # the first one reads what there is of each timer
        )
        buckets = _joined(answers)
        refuse_missing(missing, partial=buckets)
        return buckets


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
        count.held + more.held,
        count.dropped + more.dropped,
    )
