"""Light spans of callbacks by column: what `columns.encode` makes of the spans they stand for."""

from __future__ import annotations

from opentelemetry.trace import Status

from duemq.protocol.record_bytes import varint
from duemq.telemetry.light_spans import ProcessRows
from duemq.telemetry.send_columns import by_frame, fixed64
from duemq.telemetry.string_columns import joined, put_by_frame, put_texts, repeated
from duemq.tracing.attributes import BROADCAST, BroadcastId
from duemq.v1.trace_pb2 import SpanBatch


def encode(rows: ProcessRows, schema_version: int, service: str, instance: str) -> bytes:
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
        by_frame("start_ns", map(fixed64, starts_ns), counts),
        by_frame("duration_ns", [varint(call.end_ns - call.start_ns) for call in calls], counts),
        by_frame("queue_id", [varint(call.queue << 1) for call in calls], counts),
    )
    return b"".join(columns)


def _rest(client_id: str) -> str:
    """What has no column."""
    return f'{{"{BROADCAST}":true}}' if isinstance(client_id, BroadcastId) else ""


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
