"""Spans by column: the body of a %TRACE% message (protos/duemq/v1/trace.proto).

A column in which every row has the default is left out.  Attributes go to their column if it can
hold them; the rest is one JSON object a row.
The way back, to Arrow, is trace_analytics/duemq_analytics/source/spans.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from duemq.protocol.limits import SPAN_NUMBERS
from duemq.telemetry import light_columns
from duemq.telemetry.light_spans import LightSpan, ProcessRows, SendRows
from duemq.tracing import attributes as attribute
from duemq.v1.trace_pb2 import SpanBatch

SCHEMA_VERSION = 2

BATCH_SPANS_MAX = 512
"""Spans in one SpanBatch (protos/duemq/v1/trace.proto)."""

STRING_ATTRIBUTES: Mapping[str, str] = {
    "operation": attribute.OPERATION,
    "topic": attribute.TOPIC,
    "message_id": attribute.MESSAGE_ID,
    "key": attribute.KEY,
    "tag": attribute.TAG,
    "consumer_group": attribute.GROUP,
    "client_id": attribute.CLIENT_ID,
    "broker": attribute.BROKER,
    "error_type": attribute.ERROR_TYPE,
}
"""Column of SpanBatch → attribute."""

INTEGER_ATTRIBUTES: Mapping[str, str] = {
    "queue_offset": attribute.QUEUE_OFFSET,
    "body_bytes": attribute.BODY_BYTES,
    "batch_count": attribute.BATCH_COUNT,
    "sampled_count": attribute.SAMPLED_COUNT,
    "due_ms": attribute.DUE_MS,
    "lateness_ms": attribute.LATENESS_MS,
    "attempt": attribute.ATTEMPT,
}

_OURS = "duemq"

# Said by the system itself, the operation, the broker's name; worth no bytes.
_IMPLIED = frozenset(
    {
        attribute.SYSTEM,
        attribute.OPERATION_TYPE,
        attribute.SERVER_ADDRESS,
        attribute.SERVER_PORT,
    }
)

_INT64 = range(-(2**63), 2**63)
_RANGES = SPAN_NUMBERS | {"attempt": range(-(2**31), 2**31)}


def encode(spans: Sequence[ReadableSpan]) -> bytes:
    """One SpanBatch of these spans, serialized."""
    if isinstance(spans, SendRows):
        return light_columns.encode_sends(spans, SCHEMA_VERSION, *_process_of(spans.resource))
    if isinstance(spans, ProcessRows):
        return light_columns.encode_calls(spans, SCHEMA_VERSION, *_process_of(spans.resource))
    batch = SpanBatch(schema_version=SCHEMA_VERSION, rows=len(spans))
    _put_identity(batch, spans)
    _put_times(batch, spans)
    _put_links(batch, spans)
    _put_attributes(batch, spans)
    return batch.SerializeToString()


def _put_identity(batch: SpanBatch, spans: Sequence[ReadableSpan]) -> None:
    contexts = [span.get_span_context() for span in spans]
    batch.trace_ids = b"".join((c.trace_id if c else 0).to_bytes(16, "big") for c in contexts)
    batch.span_ids = b"".join((c.span_id if c else 0).to_bytes(8, "big") for c in contexts)
    if any(span.parent for span in spans):
        batch.parent_span_ids = b"".join(
            (span.parent.span_id if span.parent else 0).to_bytes(8, "big") for span in spans
        )
    light_columns.put_texts(batch.name, [_whole(span.name) for span in spans])
    light_columns.put_texts(batch.kind, [span.kind.name for span in spans])
    light_columns.put_texts(batch.status, [span.status.status_code.name for span in spans])
    for column, name in ((batch.service, "service.name"), (batch.instance, "service.instance.id")):
        light_columns.put_texts(column, [_text_of(span.resource, name) for span in spans])


def _put_times(batch: SpanBatch, spans: Sequence[ReadableSpan]) -> None:
    starts = [span.start_time or 0 for span in spans]
    batch.start_ns.extend(starts)
    batch.duration_ns.extend(
        max(0, (span.end_time or start) - start) for span, start in zip(spans, starts, strict=True)
    )


def _put_links(batch: SpanBatch, spans: Sequence[ReadableSpan]) -> None:
    of_spans = [_links_of(span) for span in spans]
    if not any(of_spans):
        return
    links = [ids for of_span in of_spans for ids in of_span]
    batch.link_counts.extend(map(len, of_spans))
    batch.link_trace_ids = b"".join([trace_id for trace_id, _ in links])
    batch.link_span_ids = b"".join([span_id for _, span_id in links])


def _links_of(span: ReadableSpan) -> list[tuple[bytes, bytes]]:
    """Without the parent, which has a column and is linked to by most spans."""
    parent = (span.parent.span_id if span.parent is not None else 0).to_bytes(8, "big")
    return [ids for ids in _link_ids(span) if ids[1] != parent]


def _link_ids(span: ReadableSpan) -> Iterable[tuple[bytes, bytes]]:
    if isinstance(span, LightSpan):
        return span.link_ids
    contexts = (link.context for link in span.links)
    return ((c.trace_id.to_bytes(16, "big"), c.span_id.to_bytes(8, "big")) for c in contexts)


def _put_attributes(batch: SpanBatch, spans: Sequence[ReadableSpan]) -> None:
    rows = [dict(span.attributes or {}) for span in spans]
    # Another system's topics and messages are not to be counted among ours.
    known = [row if row.get(attribute.SYSTEM, _OURS) == _OURS else {} for row in rows]
    for column, name in STRING_ATTRIBUTES.items():
        light_columns.put_texts(getattr(batch, column), _taken(known, name, _is_string, ""))
    for column, name in INTEGER_ATTRIBUTES.items():
        fits = partial(_is_integer, _RANGES.get(column, _INT64))
        _put_numbers(getattr(batch, column), _taken(known, name, fits, 0))
    queues = _taken(known, attribute.QUEUE, _is_queue, -1)
    if any(queue != -1 for queue in queues):
        batch.queue_id.extend(int(queue) for queue in queues)
    light_columns.put_texts(batch.attributes, [_rest(row) for row in rows])


def _taken(
    rows: Sequence[dict[str, Any]], name: str, fits: Callable[[Any], bool], default: Any
) -> list[Any]:
    """The attribute out of every row; one that does not fit stays with the rest."""
    return [row.pop(name) if name in row and fits(row[name]) else default for row in rows]


def _is_string(value: Any) -> bool:
    return isinstance(value, str) and _whole(value) == value


def _whole(text: str) -> str:
    """Without halves of characters, as a file's name can have: protobuf takes none."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _is_integer(allowed: range, value: Any) -> bool:
    return type(value) is int and value in allowed


def _is_queue(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit() and int(value) < 2**31


def _rest(row: Mapping[str, Any]) -> str:
    ours = row.get(attribute.SYSTEM) == _OURS
    rest = {name: value for name, value in row.items() if not (ours and name in _IMPLIED)}
    return json.dumps(rest, separators=(",", ":"), sort_keys=True, default=str) if rest else ""


def _process_of(resource: Resource) -> tuple[str, str]:
    return _text_of(resource, "service.name"), _text_of(resource, "service.instance.id")


def _text_of(resource: Resource | None, name: str) -> str:
    value = resource.attributes.get(name, "") if resource else ""
    return _whole(value) if isinstance(value, str) else json.dumps(value)


def _put_numbers(column: Any, values: Sequence[int]) -> None:
    if any(values):
        column.extend(values)
