"""What timer shards hold: counted, and looked at one by one: by handle, or in due order."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import fields

from duemq.administering.asking import refuse_missing
from duemq.administering.timer_shards import AskingShards
from duemq.descriptions import TimerBucket, TimerCount, TimerDescription, TimerState
from duemq.errors import DuemqError, MissingBroker, Unavailable
from duemq.producing.cancels import Handle, decoded_all
from duemq.producing.handle import text_of
from duemq.protocol import checks, moments
from duemq.protocol.limits import TIMERS_MAX
from duemq.protocol.moments import Moment
from duemq.protocol.route import TimerShard
from duemq.protocol.timer_keys import check_selection
from duemq.transport import retrying, status
from duemq.v1 import stubs, timer_inspector_pb2
from duemq.v1.message_pb2 import TimerHandle

Stub = stubs.TimerInspectorStub
PAGE = 500  # timers asked for at once
_STATES = {
    timer_inspector_pb2.TIMER_PENDING: TimerState.PENDING,
    timer_inspector_pb2.TIMER_FIRED: TimerState.FIRED,
    timer_inspector_pb2.TIMER_CANCELLED: TimerState.CANCELLED,
}


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

    async def get_timers(self, handles: Sequence[Handle]) -> list[TimerDescription]:
        """What became of delayed messages, by receipt or handle; of pending ones all, with bodies.

        A shard that is away or has not received a message yet is asked again for
        `request_timeout_s`.  Raises InvalidArgument for what is not a handle, Unavailable, Corrupt;
        its `answers` are those of the others, by position.
        """
        wanted = decoded_all(handles)
        found: dict[int, TimerDescription] = {}
        deadline = time.monotonic() + self._asker.timeout_s

        async def attempt(left_s: float) -> None:
            by_shard: defaultdict[str, list[int]] = defaultdict(list)
            failures: list[BaseException | None] = []
            for at, handle in enumerate(wanted):
                if at in found:
                    continue
                try:
                    by_shard[self._client.timer_of(handle.queue_id).address].append(at)
                except Unavailable as error:
                    failures.append(error)
            asked = (
                self._get(address, wanted, places, found, left_s)
                for address, places in by_shard.items()
            )
            failures += await asyncio.gather(*asked, return_exceptions=True)
            retrying.raise_one_of(failures)

        try:
            await retrying.until(deadline, attempt, self._client.settings.away_timeout_s)
        except DuemqError as error:
            error.answers = found
            raise
        return [found[at] for at in range(len(wanted))]

    async def _get(
        self,
        address: str,
        wanted: Sequence[TimerHandle],
        places: Sequence[int],
        found: dict[int, TimerDescription],
        left_s: float,
    ) -> Exception | None:
        """Fills `found`; the last error of a handle."""
        error, done = None, 0
        while done < len(places):
            asked = places[done : done + TIMERS_MAX]
            request = timer_inspector_pb2.GetTimersRequest(handles=[wanted[at] for at in asked])
            answer = await self._client.once(address, Stub.ask("GetTimers", request), left_s)
            if not answer.timers:
                return Unavailable(f"{address} answered nothing for {len(asked)} handles")
            for at, each in zip(asked, answer.timers, strict=False):
                if each.HasField("error"):
                    error = status.from_proto(each.error)
                else:
                    found[at] = _description(each, with_body=True)
            done += len(answer.timers)
        return error

    async def list_timers(
        self,
        topic: str,
        *,
        key_prefix: str = "",
        since: Moment | None = None,
        until: Moment | None = None,
        limit: int | None = None,
        bodies: bool = False,
    ) -> AsyncGenerator[TimerDescription, None]:
        """A topic's pending messages in due order, read page by page as they are taken.

        Of a `timer_key` that begins with `key_prefix`; due at `since` or later, and before `until`;
        at most `limit`.  What is pending all the while comes once; what comes or goes meanwhile,
        may.  Raises InvalidArgument; PartialAnswer, when all others are handed out, if a shard is
        away; Corrupt.
        """
        request = _request(topic, key_prefix, since, until, limit, bodies)
        alive, missing = self._shards(), list[MissingBroker]()
        listings = [_Listing(self, each, request, missing) for each in alive]
        await asyncio.gather(*(each.fill() for each in listings))
        left = limit
        while left is None or left > 0:
            heads = [each for each in listings if each.timers]
            if not heads:
                break
            first = min(heads, key=lambda each: each.timers[0].handle.due_ms)
            yield _description(first.timers.pop(0), with_body=bodies)
            left = None if left is None else left - 1
            if not first.timers:
                await first.fill()
        missing += await self._lost(alive)
        refuse_missing(missing, partial=[])


class _Listing:
    """A shard's part of a list, a page at a time."""

    def __init__(
        self,
        admin: Timers,
        shard: TimerShard,
        request: timer_inspector_pb2.ListTimersRequest,
        missing: list[MissingBroker],
    ) -> None:
        self.timers: list[timer_inspector_pb2.TimerInfo] = []
        self._admin = admin
        self._shard = shard
        self._missing = missing
        self._request = timer_inspector_pb2.ListTimersRequest()
        self._request.CopyFrom(request)
        self._over = False

    async def fill(self) -> None:
        """Gets the next timers, if there are any."""
        while not self.timers and not self._over:
            page = await self._admin._ask_or_miss(
                self._shard,
                Stub.ask("ListTimers", self._request),
                self._missing,
            )
            if page is None:
                self._over = True
                return
            self.timers.extend(page.timers)
            self._request.token = page.token
            self._over = not page.token


def _request(
    topic: str,
    key_prefix: str,
    since: Moment | None,
    until: Moment | None,
    limit: int | None,
    bodies: bool,
) -> timer_inspector_pb2.ListTimersRequest:
    check_selection(topic, key_prefix)
    checks.flag("bodies", bodies)
    from_ms, to_ms = moments.span_ms(since, until, time.time_ns() // 1_000_000)
    if limit is not None:
        checks.whole("limit", limit, 1, 1 << 40)
    return timer_inspector_pb2.ListTimersRequest(
        topic=topic,
        key_prefix=key_prefix,
        from_ms=from_ms,
        to_ms=0 if to_ms is None else max(1, to_ms),
        limit=min(limit or PAGE, PAGE),
        with_bodies=bodies,
    )


def _description(found: timer_inspector_pb2.TimerInfo, *, with_body: bool) -> TimerDescription:
    handle = found.handle
    text = text_of(handle)
    state = _STATES.get(found.state, TimerState.UNKNOWN)
    if not found.HasField("record"):
        return TimerDescription(text, state, handle.due_ms)
    record = found.record
    state = TimerState.HELD if found.held else state
    return TimerDescription(
        text,
        state,
        handle.due_ms,
        found.topic,
        record.timer_key or None,
        record.key or None,
        record.tag or None,
        record.message_id,
        dict(record.properties),
        record.body if with_body else None,
    )


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
    names = [each.name for each in fields(TimerCount)[1:]]
    return TimerCount(count.topic, *(getattr(count, each) + getattr(more, each) for each in names))
