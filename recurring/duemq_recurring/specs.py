"""Schedules as clients write and read them: protobuf to the words of the rules, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from duemq.errors import TooLarge
from duemq.protocol import checks, limits, timer_keys
from duemq.protocol.record_bytes import text_hash
from duemq.v1 import message_pb2, schedule_pb2
from duemq_recurring import moves
from duemq_recurring.occurrences import END_MS, CatchUp, Recurrence
from duemq_recurring.schedule import Plan, Schedule
from duemq_recurring.wall_clock import Dst

T = TypeVar("T")

NEXT_MAX = 1_000
"""Occurrences that are told at once."""
OUTCOMES = {
    moves.CREATED: schedule_pb2.SCHEDULE_CREATED,
    moves.CHANGED: schedule_pb2.SCHEDULE_CHANGED,
    moves.UNCHANGED: schedule_pb2.SCHEDULE_UNCHANGED,
    moves.EXISTS: schedule_pb2.SCHEDULE_EXISTS,
}
"""Of moves.py."""
_DST: dict[int, Dst] = {
    schedule_pb2.DST_POLICY_UNSPECIFIED: Dst.ONCE,
    schedule_pb2.DST_ONCE: Dst.ONCE,
    schedule_pb2.DST_SKIP: Dst.SKIP,
    schedule_pb2.DST_TWICE: Dst.TWICE,
    schedule_pb2.DST_SHIFT: Dst.SHIFT,
}
_CATCH_UP: dict[int, CatchUp] = {
    schedule_pb2.CATCH_UP_POLICY_UNSPECIFIED: CatchUp.LATEST,
    schedule_pb2.CATCH_UP_ALL: CatchUp.ALL,
    schedule_pb2.CATCH_UP_LATEST: CatchUp.LATEST,
    schedule_pb2.CATCH_UP_NONE: CatchUp.NONE,
}
_DST_NUMBERS = {dst: number for number, dst in _DST.items()}
_CATCH_UP_NUMBERS = {policy: number for number, policy in _CATCH_UP.items()}
# What schedules give their messages themselves.
_NOT_GIVEN = (
    "message_id",
    "ordering_key",
    "born_ms",
    "due_ms",
    "attempt",
    "retry",
    "timer_key",
)


def plan_of(spec: schedule_pb2.ScheduleSpec) -> Plan:
    """Raises InvalidArgument, TooLarge.  The recurrence's numbers are checked by the core."""
    timer_keys.check_keyed_topic(spec.topic)
    which = spec.WhichOneof("when")
    if which is None:
        raise checks.wrong("every_ms", "neither", "every_ms or cron")
    if spec.zone and which != "cron":
        raise checks.wrong("zone", spec.zone, "only with cron: every_ms counts what passes")
    recurrence = Recurrence(
        every_ms=spec.every_ms,
        cron=spec.cron,
        zone=spec.zone or "UTC",
        dst=_known("dst", spec.dst, _DST),
        catch_up=_known("catch_up", spec.catch_up, _CATCH_UP),
        from_ms=spec.from_ms,
        until_ms=spec.until_ms or END_MS,
        count=spec.count,
        jitter_ms=spec.jitter_ms,
    )
    if which == "cron" and not spec.cron:
        raise checks.wrong("cron", spec.cron, "an expression")
    recurrence.check()
    record = spec.record
    _check_record(record)
    return Plan(
        spec.topic,
        recurrence,
        record.SerializeToString(deterministic=True),
        text_hash(record.tag.encode()),
        text_hash(record.key.encode()),
        from_given=bool(spec.from_ms),
    )


def policy_of(number: int) -> CatchUp | None:
    """Of a request; None: the schedule's own.  Raises InvalidArgument."""
    return _known("catch_up", number, _CATCH_UP) if number else None


def _known(field: str, number: int, known: Mapping[int, T]) -> T:
    if number not in known:
        raise checks.wrong(field, number, f"one of {', '.join(map(str, known))}")
    return known[number]


def _check_record(record: message_pb2.Record) -> None:
    for field in _NOT_GIVEN:
        if record.HasField(field) if field == "retry" else getattr(record, field):
            raise checks.wrong(f"record.{field}", getattr(record, field), "empty in a schedule")
    if len(record.body) > limits.MESSAGE_BYTES_DEFAULT:
        raise _too_large("record.body", len(record.body), limits.MESSAGE_BYTES_DEFAULT)
    others = record.ByteSize() - len(record.body)
    if others > limits.PROPERTIES_BYTES_DEFAULT:
        raise _too_large("record.properties", others, limits.PROPERTIES_BYTES_DEFAULT)


def _too_large(field: str, size: int, limit: int) -> TooLarge:
    return TooLarge(f"{field}: {size} bytes, at most {limit}", field=field, value=size, limit=limit)


def proto_of_schedule(schedule: Schedule) -> schedule_pb2.Schedule:
    """As clients get it."""
    plan, recurrence = schedule.plan, schedule.plan.recurrence
    spec = schedule_pb2.ScheduleSpec(
        topic=plan.topic,
        record=message_pb2.Record.FromString(plan.record),
        zone=recurrence.zone if recurrence.cron else "",
        dst=_DST_NUMBERS[recurrence.dst],  # type: ignore[arg-type]
        catch_up=_CATCH_UP_NUMBERS[recurrence.catch_up],  # type: ignore[arg-type]
        from_ms=recurrence.from_ms,
        until_ms=recurrence.until_ms if recurrence.until_ms < END_MS else 0,
        count=recurrence.count,
        jitter_ms=recurrence.jitter_ms,
    )
    if recurrence.cron:
        spec.cron = recurrence.cron
    else:
        spec.every_ms = recurrence.every_ms
    return schedule_pb2.Schedule(
        name=schedule.name,
        spec=spec,
        paused=schedule.state.paused,
        ended=schedule.ended,
        stored=schedule.state.stored,
        waiting=[
            message_pb2.TimerHandle(
                store_id=each.source[0],
                queue_id=each.source[1],
                offset=each.offset,
                due_ms=each.due_ms,
            )
            for each in schedule.pending
        ],
    )
