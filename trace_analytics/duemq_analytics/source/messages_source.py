"""Messages of any topic to Arrow, column by column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

from duemq.protocol.due import DUE_MS_MAX
from duemq_analytics.source.client import RecordRun
from duemq_analytics.source.plan import QueueRange
from duemq_analytics.source.schema import Column, arrow_schema

_US_PER_MS = 1_000

Values = Callable[[str, QueueRange, Sequence[RecordRun]], list[Any]]


def to_arrow(
    topic: str, source: QueueRange, runs: Sequence[RecordRun], columns: Sequence[Column]
) -> pa.RecordBatch:
    """A batch of these records with these columns (of schema.MESSAGES) and no others.

    Empty key, tag and ordering key are null, and so are times that are not set.
    """
    arrays = [
        pa.array(_VALUES[column.name](topic, source, runs), column.arrow_type) for column in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _constant(value: Callable[[str, QueueRange], Any]) -> Values:
    return lambda topic, source, runs: [value(topic, source)] * _count(runs)


def _of_record(value: Callable[[Any], Any]) -> Values:
    return lambda topic, source, runs: [each for run in runs for each in map(value, run.records)]


def _field(name: str) -> Values:
    return _of_record(attrgetter(name))


def _field_or_null(name: str) -> Values:
    field = attrgetter(name)
    return lambda topic, source, runs: [
        each or None for run in runs for each in map(field, run.records)
    ]


def _time(name: str) -> Values:
    field = attrgetter(name)
    return lambda topic, source, runs: [
        each for run in runs for each in map(_us_of, map(field, run.records))
    ]


def _us_of(ms: int) -> int | None:
    """Null: not set, or no time: whoever sends writes any number."""
    return ms * _US_PER_MS if 0 < ms <= DUE_MS_MAX else None


def _properties(record: Any) -> Sequence[tuple[str, str]]:
    properties = record.properties
    # Most messages have none, and asking for its items costs more than the rest of a record.
    return sorted(properties.items()) if properties else ()


def _count(runs: Sequence[RecordRun]) -> int:
    return sum(len(run.records) for run in runs)


def _offsets(topic: str, source: QueueRange, runs: Sequence[RecordRun]) -> list[int]:
    return [run.offset + i for run in runs for i in range(len(run.records))]


def _store_times(topic: str, source: QueueRange, runs: Sequence[RecordRun]) -> list[int]:
    return [run.store_ms * _US_PER_MS for run in runs for _ in run.records]


def _retry(record: Any) -> dict[str, Any] | None:
    if not record.HasField("retry"):
        return None
    retry = record.retry
    return {
        "group": retry.group,
        "topic": retry.origin.topic,
        "broker": retry.origin.broker,
        "queue": retry.origin.queue_id,
        "offset": retry.origin_offset,
        "first_failed_ts": _us_of(retry.first_failed_ms),
        "last_failed_ts": _us_of(retry.last_failed_ms),
        "error": retry.error,
    }


_VALUES: Mapping[str, Values] = {
    "message_id": _field("message_id"),
    "topic": _constant(lambda topic, source: topic),
    "broker": _constant(lambda topic, source: source.broker),
    "queue": _constant(lambda topic, source: source.queue),
    "offset": _offsets,
    "key": _field_or_null("key"),
    "tag": _field_or_null("tag"),
    "ordering_key": _field_or_null("ordering_key"),
    "body": _field("body"),
    "properties": _of_record(_properties),
    "born_ts": _time("born_ms"),
    "store_ts": _store_times,
    "due_ts": _time("due_ms"),
    "attempt": _field("attempt"),
    "retry": _of_record(_retry),
    "timer_key": _field_or_null("timer_key"),
}
