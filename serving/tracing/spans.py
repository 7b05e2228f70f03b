"""Spans of brokers and timer services: finished ones, one for the sampled messages of a frame.

`duemq.tracing.spans` says what spans there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from duemq.tracing.attributes import (
    BATCH_COUNT,
    BODY_BYTES,
    BROKER,
    DUE_MS,
    LATENESS_MS,
    QUEUE,
    QUEUE_OFFSET,
    TIMED,
    attributes_of,
)
from duemq.tracing.spans import enabled, record, traced
from duemq_server.serving.tracing.encoded_contexts import contexts_in

__all__ = ["enabled", "record_fire", "record_schedule", "record_store", "traced"]

NEVER = 1 << 62
FIRE_SPANS_MAX = 64
"""Spans that one batch of fires becomes; more distinct due times share spans.

Such a span is as late as the message in its middle: as many are earlier as are later.
"""


def record_store(
    topic: str,
    broker: str,
    queue: int,
    offset: int,
    count: int,
    *,
    start_ns: int,
    end_ns: int,
    body_bytes: int = 0,
    records: bytes | memoryview = b"",
    timed: bool = False,
    error: BaseException | None = None,
) -> None:
    """Records that a frame was stored: from its arrival to its durability.

    `topic` is what the producer asked for, also where the frame lies in %TIMER% (`timed`);
    queue and offset say where it lies.  `records`: the encoded batch, in which the creation
    contexts are found.
    """
    attributes = attributes_of("store", topic)
    attributes |= {BROKER: broker, QUEUE: str(queue), QUEUE_OFFSET: offset, BATCH_COUNT: count}
    if body_bytes:
        attributes[BODY_BYTES] = body_bytes
    if timed:
        attributes[TIMED] = True
    _record_frame("store", SpanKind.SERVER, topic, attributes, records, start_ns, end_ns, error)


def record_schedule(
    topic: str,
    broker: str,
    queue: int,
    offset: int,
    count: int,
    *,
    start_ns: int,
    end_ns: int,
    due_ms: int = 0,
    records: bytes | memoryview = b"",
    error: BaseException | None = None,
) -> None:
    """Records that a timer shard has a frame of %TIMER% durably: from fetched to durable.

    Broker, queue and offset say where in %TIMER% it lay; `due_ms` is its earliest due time.
    """
    attributes = attributes_of("schedule", topic)
    attributes |= {BROKER: broker, QUEUE: str(queue), QUEUE_OFFSET: offset, BATCH_COUNT: count}
    if due_ms:
        attributes[DUE_MS] = due_ms
    _record_frame(
        "schedule", SpanKind.INTERNAL, topic, attributes, records, start_ns, end_ns, error
    )


def record_fire(
    topic: str,
    broker: str,
    queue: int,
    offset: int,
    due_ms: Sequence[int],
    *,
    store_ms: int,
    start_ns: int,
    end_ns: int,
    answered_ms: int = NEVER,
    records: bytes | memoryview = b"",
    sizes: Sequence[int] = (),
    error: BaseException | None = None,
) -> None:
    """Records a batch of fires: from its dispatch to the broker's answer.

    One span for each run of one due time (ascending, one entry a record), so that lateness
    (`store_ms`, the broker's, less due) stays exact without a span a message.  What was answered
    sooner, at `answered_ms`, is shown then, or when it is due.  `sizes` are the batch's side array;
    with `records` they find each run's creation contexts.
    """
    if not due_ms or not traced(topic) or not enabled():
        return
    records = bytes(records)
    ends = _ends(sizes) if len(sizes) == len(due_ms) else []
    for first, past in _runs(due_ms, FIRE_SPANS_MAX):
        attributes = attributes_of("fire", topic)
        due = due_ms[(first + past) // 2]
        attributes |= {
            BROKER: broker,
            QUEUE: str(queue),
            QUEUE_OFFSET: offset + first,
            BATCH_COUNT: past - first,
            DUE_MS: due,
        }
        if error is None:
            attributes[LATENESS_MS] = min(store_ms, max(answered_ms, due)) - due
        start = ends[first - 1] if ends and first else 0
        end = ends[past - 1] if ends else len(records)
        found = contexts_in(records, start=start, end=end)
        record("fire", SpanKind.PRODUCER, topic, attributes, found, start_ns, end_ns, error)


def _runs(due_ms: Sequence[int], runs_max: int) -> list[tuple[int, int]]:
    """Half-open ranges of equal due times; where there are too many, the middle one counts."""
    starts = [i for i in range(len(due_ms)) if i == 0 or due_ms[i] != due_ms[i - 1]]
    if len(starts) > runs_max:
        starts = [starts[i * len(starts) // runs_max] for i in range(runs_max)]
    return list(zip(starts, [*starts[1:], len(due_ms)], strict=True))


def _ends(sizes: Sequence[int]) -> list[int]:
    ends, position = [], 0
    for size in sizes:
        position += int(size)
        ends.append(position)
    return ends


def _record_frame(
    operation: str,
    kind: SpanKind,
    topic: str,
    attributes: dict[str, AttributeValue],
    records: bytes | memoryview,
    start_ns: int,
    end_ns: int,
    error: BaseException | None,
) -> None:
    """Records one span for the sampled messages of a frame; BATCH_COUNT says how many it has."""
    if traced(topic) and enabled():
        found = contexts_in(records)
        record(operation, kind, topic, attributes, found, start_ns, end_ns, error)
