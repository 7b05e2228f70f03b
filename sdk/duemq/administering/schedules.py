"""Schedules, messages that repeat: each is asked of the timer shard that its name belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duemq.administering.asking import Method, T, refuse_missing
from duemq.administering.timer_shards import AskingShards
from duemq.descriptions import CatchUp, DstPolicy, Occurrence, Schedule
from duemq.errors import MissingBroker
from duemq.producing.batch_encoding import extras_of
from duemq.protocol import checks, due, moments, timer_keys
from duemq.protocol.moments import Moment
from duemq.protocol.retry_policy import Delay
from duemq.protocol.route import TimerShard
from duemq.v1 import message_pb2, schedule_pb2, stubs

Stub = stubs.SchedulesStub
LISTED_AT_ONCE = 500
NEXT_MAX = 1_000
_OUTCOMES = {
    schedule_pb2.SCHEDULE_CREATED: "created",
    schedule_pb2.SCHEDULE_CHANGED: "changed",
    schedule_pb2.SCHEDULE_UNCHANGED: "unchanged",
    schedule_pb2.SCHEDULE_EXISTS: "exists",
}
_DST = {
    DstPolicy.ONCE: schedule_pb2.DST_ONCE,
    DstPolicy.SKIP: schedule_pb2.DST_SKIP,
    DstPolicy.TWICE: schedule_pb2.DST_TWICE,
    DstPolicy.SHIFT: schedule_pb2.DST_SHIFT,
}
_CATCH_UP = {
    CatchUp.ALL: schedule_pb2.CATCH_UP_ALL,
    CatchUp.LATEST: schedule_pb2.CATCH_UP_LATEST,
    CatchUp.NONE: schedule_pb2.CATCH_UP_NONE,
}
_DST_NAMES = {number: name for name, number in _DST.items()}
_CATCH_UP_NAMES = {number: name for name, number in _CATCH_UP.items()}


class Schedules(AskingShards):
    """What the admin client does about schedules."""

    async def put_schedule(
        self,
        name: str,
        *,
        topic: str,
        body: bytes = b"",
        every: Delay | None = None,
        cron: str | None = None,
        zone: str | None = None,
        dst: str = DstPolicy.ONCE,
        catch_up: str = CatchUp.LATEST,
        start: Moment | None = None,
        until: Moment | None = None,
        count: int | None = None,
        jitter: Delay | None = None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        if_absent: bool = False,
    ) -> tuple[str, Schedule]:
        """Has a message sent to `topic` again and again; or changes what the name stands for.

        `every` so long, from 1 s on, counted from `start` (None: the first comes one period from
        now); or by `cron`: five fields, or six with seconds in front, or `@daily` and the like, on
        the wall clocks of `zone` (an IANA name; None: UTC).  `start` and `until`: the first one is
        then or later, the last one then or sooner.  At most `count` are sent.  With `jitter` each
        is due up to so much later, always the same for the same one.  `dst`: what becomes of wall
        times that do not exist, or exist twice.  `catch_up`: what becomes of those that could not
        be kept in time.

        The answer is created, changed, unchanged (it was the same), or with `if_absent` exists
        (another one is there, and stays), and the schedule as it is now, durable.  Raises
        InvalidArgument, TooLarge, TopicNotFound, Overloaded (too many), ReadOnly, Unavailable.
        """
        record, now_ms = _record(body, key, tag, properties), self._now_ms()
        spec = _spec(topic, record, now_ms, every, cron, zone, start, until, jitter)
        spec.dst = _number("dst", dst, DstPolicy, _DST)  # type: ignore[assignment]
        spec.catch_up = _number("catch_up", catch_up, CatchUp, _CATCH_UP)  # type: ignore[assignment]
        if count is not None:
            checks.whole("count", count, 1, 1 << 53)
            spec.count = count
        request = schedule_pb2.PutScheduleRequest(name=name, spec=spec, if_absent=if_absent)
        answer = await self._at_shard_of(name, Stub.ask("PutSchedule", request))
        return _OUTCOMES[answer.outcome], _schedule(answer.schedule)

    async def schedule(self, name: str) -> Schedule:
        """A schedule as it is now.  Raises ScheduleNotFound, InvalidArgument, Unavailable."""
        request = schedule_pb2.GetScheduleRequest(name=name)
        return _schedule(await self._at_shard_of(name, Stub.ask("GetSchedule", request)))

    async def schedules(self) -> list[Schedule]:
        """All schedules, by name.

        Raises PartialAnswer, whose `partial` is the list, if a timer shard is away.
        """
        alive, missing = self._shards(), list[MissingBroker]()
        parts = await self._together(self._kept_by(shard, missing) for shard in alive)
        found = sorted((each for part in parts for each in part), key=lambda each: each.name)
        missing += await self._lost(alive)
        refuse_missing(missing, partial=found)
        return found

    async def _kept_by(self, shard: TimerShard, missing: list[MissingBroker]) -> list[Schedule]:
        """Of a shard; what came, if it goes away."""
        found: list[Schedule] = []
        request = schedule_pb2.ListSchedulesRequest(count=LISTED_AT_ONCE)
        while True:
            page = await self._ask_or_miss(shard, Stub.ask("ListSchedules", request), missing)
            if page is None:
                return found
            found += map(_schedule, page.schedules)
            if not page.more or not page.schedules:
                return found
            request.after = found[-1].name

    async def next_occurrences(self, name: str, count: int = 5) -> list[Occurrence]:
        """When a schedule is due next, if nothing happens to it meanwhile; up to 1,000.

        Those that wait are the first.  Of a paused one: from now on, without what it has missed.
        Raises ScheduleNotFound, InvalidArgument, Unavailable.
        """
        checks.whole("count", count, 1, NEXT_MAX)
        request = schedule_pb2.NextOccurrencesRequest(name=name, count=count)
        answer = await self._at_shard_of(name, Stub.ask("NextOccurrences", request))
        return [Occurrence(each.at_ms, each.due_ms) for each in answer.occurrences]

    async def pause_schedule(self, name: str) -> Schedule:
        """Nothing comes of it until it is resumed; what waits of it is taken away.

        What was sent by then stays sent.  Raises ScheduleNotFound, Unavailable.
        """
        request = schedule_pb2.PauseScheduleRequest(name=name)
        return _schedule(await self._at_shard_of(name, Stub.ask("PauseSchedule", request)))

    async def resume_schedule(self, name: str, *, catch_up: str | None = None) -> Schedule:
        """It goes on; `catch_up`: of what was missed, in place of its own policy.

        Raises ScheduleNotFound, Unavailable.
        """
        request = schedule_pb2.ResumeScheduleRequest(name=name)
        if catch_up is not None:
            request.catch_up = _number("catch_up", catch_up, CatchUp, _CATCH_UP)  # type: ignore[assignment]
        return _schedule(await self._at_shard_of(name, Stub.ask("ResumeSchedule", request)))

    async def delete_schedule(self, name: str) -> bool:
        """It is gone, and what waits of it; False: there was none, or this was asked before.

        Raises InvalidArgument, Unavailable.
        """
        request = schedule_pb2.DeleteScheduleRequest(name=name)
        answer = await self._at_shard_of(name, Stub.ask("DeleteSchedule", request))
        return answer.deleted

    async def _at_shard_of(self, name: str, method: Method[T]) -> T:
        timer_keys.check_schedule_name(name)
        shards = await self._shards_known()
        return await self._at_shard(timer_keys.shard_of_schedule(name, shards), method)


def _record(
    body: bytes, key: str | None, tag: str | None, properties: Mapping[str, str] | None
) -> message_pb2.Record:
    if not isinstance(body, bytes):
        raise checks.wrong("body", body, "bytes")
    record = message_pb2.Record.FromString(extras_of(key, tag, None, properties).encoded)
    record.body = body
    return record


def _spec(
    topic: str,
    record: message_pb2.Record,
    now_ms: int,
    every: Delay | None,
    cron: str | None,
    zone: str | None,
    start: Moment | None,
    until: Moment | None,
    jitter: Delay | None,
) -> schedule_pb2.ScheduleSpec:
    timer_keys.check_keyed_topic(topic)
    checks.at_most_one(every=every, cron=cron)
    if every is None and cron is None:
        raise checks.wrong("every", None, "every or cron")
    if zone is not None and cron is None:
        raise checks.wrong("zone", zone, "only with cron: every counts the time that passes")
    spec = schedule_pb2.ScheduleSpec(topic=topic, record=record, zone=zone or "")
    if cron is not None:
        spec.cron = cron
    if every is not None:
        spec.every_ms = due.delay_ms(every, "every")
    if start is not None:
        spec.from_ms = moments.epoch_ms(start, now_ms, "start") or 1  # 0: not given
    if until is not None:
        spec.until_ms = moments.epoch_ms(until, now_ms, "until") or 1
    if jitter is not None:
        spec.jitter_ms = due.delay_ms(jitter, "jitter")
    return spec


def _number(field: str, given: str, kinds: Any, numbers: Mapping[Any, int]) -> int:
    checks.one_of(field, given, [each.value for each in kinds])
    return numbers[kinds(given)]


def _schedule(found: schedule_pb2.Schedule) -> Schedule:
    spec = found.spec
    return Schedule(
        name=found.name,
        topic=spec.topic,
        body=spec.record.body,
        key=spec.record.key or None,
        tag=spec.record.tag or None,
        properties=dict(spec.record.properties),
        every_ms=spec.every_ms or None,
        cron=spec.cron or None,
        zone=spec.zone or None,
        dst=_DST_NAMES[spec.dst],
        catch_up=_CATCH_UP_NAMES[spec.catch_up],
        start_ms=spec.from_ms or None,
        until_ms=spec.until_ms or None,
        count=spec.count or None,
        jitter_ms=spec.jitter_ms,
        paused=found.paused,
        ended=found.ended,
        stored=found.stored,
        next_due_ms=min((each.due_ms for each in found.waiting), default=None),
    )
