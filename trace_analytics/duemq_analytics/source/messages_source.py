"""Messages of any topic to Arrow, column by column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from duemq_analytics.source.client import Run
from duemq_analytics.source.plan import QueueRange
from duemq_analytics.source.schema import Column, arrow_schema

_US_PER_MS = 1_000

Values = Callable[[str, QueueRange, Sequence[Run]], list[Any]]


def to_arrow(
    topic: str, source: QueueRange, runs: Sequence[Run], columns: Sequence[Column]
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
    return lambda topic, source, runs: [value(record) for run in runs for record in run.records]


def _count(runs: Sequence[Run]) -> int:
    return sum(len(run.records) for run in runs)


def _offsets(topic: str, source: QueueRange, runs: Sequence[Run]) -> list[int]:
    return [run.offset + i for run in runs for i in range(len(run.records))]


def _store_times(topic: str, source: QueueRange, runs: Sequence[Run]) -> list[int]:
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
        "first_failed_ts": retry.first_failed_ms * _US_PER_MS,
        "last_failed_ts": retry.last_failed_ms * _US_PER_MS,
        "error": retry.error,
    }


_VALUES: Mapping[str, Values] = {
    "message_id": _of_record(lambda record: record.message_id),
    "topic": _constant(lambda topic, source: topic),
    "broker": _constant(lambda topic, source: source.broker),
    "queue": _constant(lambda topic, source: source.queue),
    "offset": _offsets,
    "key": _of_record(lambda record: record.key or None),
    "tag": _of_record(lambda record: record.tag or None),
    "ordering_key": _of_record(lambda record: record.ordering_key or None),
    "body": _of_record(lambda record: record.body),
    "properties": _of_record(lambda record: sorted(record.properties.items())),
    "born_ts": _of_record(lambda record: record.born_ms * _US_PER_MS or None),
    "store_ts": _store_times,
    "due_ts": _of_record(lambda record: record.due_ms * _US_PER_MS or None),
    "attempt": _of_record(lambda record: record.attempt),
    "retry": _of_record(_retry),
    "timer_key": _of_record(lambda record: record.timer_key or None),
}
