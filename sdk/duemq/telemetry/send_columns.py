"""Light spans of sends by column: what `columns.encode` makes of the spans they stand for.

Most columns have one value a frame, whose encoding is repeated, and the ids of a frame's messages
are one join, so that no object is made for a span.  A column is a field with a length;
fields may stand in any order, so encoded columns are put behind one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import mul
from struct import Struct

from duemq.protocol.message_ids import INDEXES
from duemq.protocol.record_bytes import LENGTH_DELIMITED, varint
from duemq.telemetry.light_spans import SendRows
from duemq.telemetry.string_columns import joined, numbered, put_by_frame, put_texts
from duemq.tracing import attributes as attribute
from duemq.tracing.sampling import SPAN_ID_BYTES
from duemq.tracing.sends import SendFrame
from duemq.v1.trace_pb2 import SpanBatch

_TAGS = {
    field.name: varint(field.number << 3 | LENGTH_DELIMITED)
    for field in SpanBatch.DESCRIPTOR.fields
}
fixed64 = Struct("<Q").pack


def encode(rows: SendRows, schema_version: int, service: str, instance: str) -> bytes:
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
        _numbers("start_ns", [frame.lights.starts_ns for frame in frames], fixed64),
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


def by_frame(name: str, encoded: Iterable[bytes], counts: Sequence[int]) -> bytes:
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
    return by_frame("queue_id", encoded, rows.counts)


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
