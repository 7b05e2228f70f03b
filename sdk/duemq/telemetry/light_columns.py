"""Light spans by column: what `columns.encode` makes of the spans they stand for.

Most columns have one value a frame, whose encoding is repeated, and the ids of a frame's messages
are one join, so that no object is made for a span.  A column is a field with a length;
fields may stand in any order, so encoded columns are put behind one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain, repeat
from operator import mul
from struct import Struct
from typing import TypeVar

from opentelemetry.trace import Status

from duemq.protocol.message_ids import INDEXES
from duemq.protocol.record_bytes import LENGTH_DELIMITED, varint
from duemq.telemetry.light_spans import ProcessRows, SendRows
from duemq.tracing import attributes as attribute
from duemq.tracing.sampling import SPAN_ID_BYTES
from duemq.tracing.sends import SendFrame
from duemq.v1.trace_pb2 import SpanBatch, StringColumn

_Value = TypeVar("_Value")

_TAGS = {
    field.name: varint(field.number << 3 | LENGTH_DELIMITED)
    for field in SpanBatch.DESCRIPTOR.fields
}
_fixed64 = Struct("<Q").pack


def encode_sends(rows: SendRows, schema_version: int, service: str, instance: str) -> bytes:
    """One SpanBatch of them, serialized."""
    frames = rows.frames
    batch = SpanBatch(schema_version=schema_version, rows=len(rows))
    _put_shared(batch, rows, service, instance)
    put_texts(batch.key, [key or "" for frame in frames for key in frame.lights.keys])
    put_texts(batch.tag, [tag or "" for frame in frames for tag in frame.lights.tags])
    columns = [
        batch.SerializeToString(),
        _column("trace_ids", b"".join([frame.lights.trace_ids for frame in frames])),
        _column("span_ids", b"".join([frame.lights.span_ids for frame in frames])),
        _numbers("start_ns", [frame.lights.starts_ns for frame in frames], _fixed64),
        _numbers("duration_ns", list(map(_durations_ns, frames)), varint),
        _queues(rows),
        _numbers("body_bytes", [frame.lights.body_bytes for frame in frames], varint),
        SpanBatch(queue_offset=_filled(map(_offsets, frames))).SerializeToString(),
        _message_ids(rows),
    ]
    parents = joined(frame.lights.parents for frame in frames)
    if any(parents):
        ids = [parent.span_id if parent else 0 for parent in parents]
        encoded = b"".join([each.to_bytes(SPAN_ID_BYTES, "big") for each in ids])
        columns.append(_column("parent_span_ids", encoded))
    if any(frame.batch.due_ms for frame in frames):
        columns.append(SpanBatch(due_ms=_filled(map(_due_ms, frames))).SerializeToString())
    return b"".join(columns)


# ── texts ────────────────────────────────────────────────────────────────────────────


def _put_shared(batch: SpanBatch, rows: SendRows, service: str, instance: str) -> None:
    """The columns in which all spans of a frame have the same."""
    batches = [frame.batch for frame in rows.frames]
    failures = [attribute.failure(each.error)[0] if each.error else "" for each in batches]
    for column, values in (
        (batch.name, [f"send {each.topic}" for each in batches]),
        (batch.kind, ["PRODUCER"]),
        (batch.status, ["ERROR" if failed else "UNSET" for failed in failures]),
        (batch.error_type, failures),
        (batch.service, [service]),
        (batch.instance, [instance]),
        (batch.operation, ["send"]),
        (batch.topic, [each.topic for each in batches]),
        (batch.broker, ["" if each.error else each.broker for each in batches]),
    ):
        put_by_frame(column, values, rows.counts)


def _message_ids(rows: SendRows) -> bytes:
    texts = b"".join(map(_id_texts, rows.frames))
    return _column("message_id", texts + numbered(len(rows)).SerializeToString())


def _id_texts(frame: SendFrame) -> bytes:
    """Entries of StringColumn.values."""
    head = frame.batch.id_head
    head = b"\x0a" + varint(len(head) + len(INDEXES[0])) + head
    return head + head.join(map(INDEXES.__getitem__, frame.lights.indexes))


# ── numbers ──────────────────────────────────────────────────────────────────────────


def _numbers(
    name: str, parts: Sequence[Sequence[int]], encode_one: Callable[[int], bytes]
) -> bytes:
    """A column of packed numbers, by frame."""
    if all(part.count(part[0]) == len(part) for part in parts):
        if not any(part[0] for part in parts):
            return b""
        return _column(name, b"".join([encode_one(part[0]) * len(part) for part in parts]))
    batch = SpanBatch()
    getattr(batch, name).extend(joined(parts))
    return batch.SerializeToString()


def _by_frame(name: str, encoded: Iterable[bytes], counts: Sequence[int]) -> bytes:
    """A column of packed numbers: so many times each."""
    return _column(name, b"".join(map(mul, encoded, counts)))


def _column(name: str, content: bytes) -> bytes:
    return _TAGS[name] + varint(len(content)) + content


def _queues(rows: SendRows) -> bytes:
    queues = [-1 if frame.batch.error else frame.batch.queue_id for frame in rows.frames]
    if all(queue == -1 for queue in queues):
        return b""
    # Zigzag, for -1 is no queue.
    encoded = [varint(queue << 1 if queue >= 0 else 1) for queue in queues]
    return _by_frame("queue_id", encoded, rows.counts)


def _durations_ns(frame: SendFrame) -> Sequence[int]:
    starts, end_ns = frame.lights.starts_ns, frame.end_ns
    if starts.count(starts[0]) == len(starts):
        return [max(0, end_ns - starts[0])] * len(starts)
    return [max(0, end_ns - start_ns) for start_ns in starts]


def _offsets(frame: SendFrame) -> Iterable[int]:
    batch, indexes = frame.batch, frame.lights.indexes
    if batch.error:
        return repeat(0, len(indexes))
    if isinstance(indexes, range):
        return range(batch.base_offset + indexes.start, batch.base_offset + indexes.stop)
    return map(batch.base_offset.__add__, indexes)


def _due_ms(frame: SendFrame) -> Iterable[int]:
    batch, indexes = frame.batch, frame.lights.indexes
    if batch.error or not batch.due_ms:
        return repeat(0, len(indexes))
    return map(batch.due_ms_of, indexes)


def _filled(parts: Iterable[Iterable[int]]) -> Sequence[int]:
    """All of them; none where they say nothing."""
    numbers = joined(parts)
    return numbers if any(numbers) else ()


# ── callbacks ────────────────────────────────────────────────────────────────────────


def encode_calls(rows: ProcessRows, schema_version: int, service: str, instance: str) -> bytes:
    """One SpanBatch of them, serialized."""
    frames, counts = rows.frames, rows.counts
    calls = [frame.call for frame in frames]
    batch = SpanBatch(schema_version=schema_version, rows=len(rows))
    for shared, values in (
        (batch.name, [f"process {call.topic}" for call in calls]),
        (batch.kind, ["CONSUMER"]),
        (batch.operation, ["process"]),
        (batch.service, [service]),
        (batch.instance, [instance]),
        (batch.topic, [call.topic for call in calls]),
        (batch.broker, [call.broker for call in calls]),
        (batch.consumer_group, [call.group for call in calls]),
        (batch.client_id, [call.client_id for call in calls]),
        (batch.attributes, [_rest(call.client_id) for call in calls]),
    ):
        put_by_frame(shared, values, counts)
    batch.trace_ids = b"".join([frame.trace_ids for frame in frames])
    batch.span_ids = b"".join([frame.span_ids for frame in frames])
    batch.parent_span_ids = b"".join([frame.parent_ids for frame in frames])
    put_texts(batch.message_id, joined(frame.message_ids for frame in frames))
    put_texts(batch.key, joined(frame.keys for frame in frames))
    put_texts(batch.tag, joined(frame.tags for frame in frames))
    for numbers, each in (
        (batch.queue_offset, joined(frame.offsets for frame in frames)),
        (batch.body_bytes, joined(frame.body_bytes for frame in frames)),
        (batch.attempt, joined(frame.attempts for frame in frames)),
    ):
        if any(each):  # a column of zeros is left out
            numbers.extend(each)
    starts_ns = [call.start_ns for call in calls]
    _put_dues(batch, joined(frame.due_ms for frame in frames), starts_ns, counts)
    _put_failures(batch, joined(frame.failures for frame in frames))
    columns = (
        batch.SerializeToString(),
        _by_frame("start_ns", map(_fixed64, starts_ns), counts),
        _by_frame("duration_ns", [varint(call.end_ns - call.start_ns) for call in calls], counts),
        _by_frame("queue_id", [varint(call.queue << 1) for call in calls], counts),
    )
    return b"".join(columns)


def _rest(client_id: str) -> str:
    """What has no column."""
    return (
        f'{{"{attribute.BROADCAST}":true}}' if isinstance(client_id, attribute.BroadcastId) else ""
    )


def _put_dues(
    batch: SpanBatch, dues_ms: list[int], starts_ns: list[int], counts: list[int]
) -> None:
    """With the lateness that they make."""
    if any(dues_ms):
        starts_ms = repeated([start_ns // 1_000_000 for start_ns in starts_ns], counts)
        late = [s - due if due else 0 for s, due in zip(starts_ms, dues_ms, strict=True)]
        batch.due_ms.extend(dues_ms)
        if any(late):
            batch.lateness_ms.extend(late)


def _put_failures(batch: SpanBatch, failures: list[tuple[str, Status] | None]) -> None:
    if any(failures):
        put_texts(batch.error_type, [failed[0] if failed else "" for failed in failures])
        put_texts(batch.status, ["ERROR" if failed else "UNSET" for failed in failures])
    else:
        put_by_frame(batch.status, ["UNSET"], [len(failures)])


# -- columns of texts, each text once


def put_texts(column: StringColumn, values: Sequence[str]) -> None:
    """One a row; nothing where all are empty."""
    table = dict.fromkeys(values)
    if len(table) == 1:  # of most columns: the same in every row
        _put_one(column, values[0], len(values))
        return
    if len(table) == len(values):
        column.rows.MergeFrom(numbered(len(values)).rows)
    else:
        numbers = dict(zip(table, range(len(table)), strict=True))
        column.rows.extend(map(numbers.__getitem__, values))
    column.values.extend(table)


def put_by_frame(column: StringColumn, values: Sequence[str], counts: Sequence[int]) -> None:
    """So many rows of each value."""
    table = dict.fromkeys(values)
    if len(table) == 1:
        _put_one(column, values[0], sum(counts))
        return
    numbers = dict(zip(table, range(len(table)), strict=True))
    column.rows.extend(repeated(map(numbers.__getitem__, values), counts))
    column.values.extend(table)


def _put_one(column: StringColumn, value: str, count: int) -> None:
    if value:
        column.values.append(value)
        column.rows.MergeFrom(_zeros(count).rows)


@lru_cache
def numbered(count: int) -> StringColumn:
    """So many rows, each of a value of its own."""
    return StringColumn(rows=range(count))


@lru_cache
def _zeros(count: int) -> StringColumn:
    """So many rows of the first value."""
    return StringColumn(rows=[0] * count)


def repeated(values: Iterable[_Value], counts: Sequence[int]) -> list[_Value]:
    """Each so many times."""
    return joined(map(repeat, values, counts))


def joined(parts: Iterable[Iterable[_Value]]) -> list[_Value]:
    """One after the other."""
    return list(chain.from_iterable(parts))
