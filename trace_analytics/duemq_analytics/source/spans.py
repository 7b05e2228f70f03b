"""SpanBatch (protos/duemq/v1/trace.proto) to Arrow, column by column, never span by span.

The way here, from OpenTelemetry, is duemq/telemetry/columns.py.  A column that a batch does not
have is the default in every row.  Defaults that mean "none" become null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from operator import not_
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError

from duemq.errors import Corrupt
from duemq.protocol.limits import SPAN_NUMBERS
from duemq.v1.trace_pb2 import SpanBatch, StringColumn
from duemq_analytics.source import packed
from duemq_analytics.source.plan import QueueRange
from duemq_analytics.source.schema import Column, arrow_schema

SCHEMA_VERSION = 2
"""The newest that is understood.  A newer one only adds columns, which are left out here."""

SPANS_MAX = 65_536
"""Rows in one batch; writers put 512.  A larger number is damage."""

TEXT_MAX = 64 * 1024 * 1024
"""Characters in one column of a batch.  A dictionary can claim any number in few bytes."""

_TRACE_ID_BYTES = 16
_SPAN_ID_BYTES = 8
_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
_KEPT = 64
"""Arrays of a kind that are kept, at most."""
_NO_QUEUE = -1
_MOST = {kind: int(np.iinfo(kind).max) for kind in (np.int32, np.uint32, np.int64, np.uint64)}


def to_arrow(
    body: bytes,
    source: QueueRange,
    offset: int,
    columns: Sequence[Column],
    dictionaries: Collection[str] = (),
) -> pa.RecordBatch:
    """A batch of the spans with these columns (of schema.SPANS) and no others.

    `source` and `offset` say where the message lies.  Strings of the columns `dictionaries` stay
    what they are on the wire: indexes into a table.  Raises Corrupt naming place and column.
    """
    place = f"{source.broker}/{source.queue}/{offset}"
    try:
        batch = SpanBatch.FromString(body)
    except DecodeError as error:
        raise Corrupt(f"trace message {place} is no SpanBatch: {error}", field="body") from error
    if not 0 < batch.rows <= SPANS_MAX:
        raise Corrupt(f"trace message {place}: {batch.rows} rows", field="rows", limit=SPANS_MAX)
    if len(batch.span_ids) != batch.rows * _SPAN_ID_BYTES:  # No span is without one.
        raise Corrupt(
            f"trace message {place}, column span_id: {len(batch.span_ids)} bytes for "
            f"{batch.rows} ids of {_SPAN_ID_BYTES}",
            field="span_id",
        )
    arrays = []
    for column in columns:
        try:
            array = _ARRAYS[column.name](batch, source, offset)
            arrays.append(_as_wanted(array, column.name in dictionaries))
        except (ValueError, IndexError, RecursionError, pa.ArrowException) as error:
            raise Corrupt(
                f"trace message {place}, column {column.name}: {error}", field=column.name
            ) from error
    return pa.RecordBatch.from_arrays(
        arrays, schema=_schema(tuple(columns), frozenset(dictionaries))
    )


def undecodable(
    body: bytes, reason: str, source: QueueRange, offset: int, columns: Sequence[Column]
) -> pa.RecordBatch:
    """One row that stands for a message which `to_arrow` refused: place, reason and bytes."""
    row = {
        "trace_broker": source.broker,
        "trace_queue": source.queue,
        "trace_offset": offset,
        "undecodable_reason": reason,
        "undecodable_body": body,
    }
    arrays = [pa.array([row.get(column.name)], column.arrow_type) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


@lru_cache(maxsize=_KEPT)
def _schema(columns: tuple[Column, ...], dictionaries: frozenset[str]) -> pa.Schema:
    return arrow_schema(columns, dictionaries)


# ── columns ──────────────────────────────────────────────────────────────────────────

Make = Callable[[SpanBatch, QueueRange, int], pa.Array]


def _as_wanted(array: pa.Array, as_dictionary: bool) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        return array if as_dictionary else array.dictionary_decode()
    if not as_dictionary:
        return array
    if array.null_count == len(array):
        return _nulls(len(array), _DICTIONARY)
    return array.dictionary_encode()


def _strings(column: StringColumn, rows: int) -> pa.Array:
    """A dictionary array, or nulls where there is none; the empty string is null."""
    if not column.rows:
        return _nulls(rows, pa.string())
    indexes = _numbers(column, "rows", rows, np.int32)
    values = list(column.values)
    if len(indexes) and int(indexes.max()) >= len(values):
        raise ValueError(f"index {indexes.max()} of {len(values)} values")
    _require_bounded(values, indexes)
    empty = None
    if "" in values:
        empty = np.fromiter(map(not_, values), bool, len(values))[indexes]
    return pa.DictionaryArray.from_arrays(
        pa.array(indexes, mask=empty), pa.array(values, pa.string())
    )


def _require_bounded(values: Sequence[str], indexes: np.ndarray) -> None:
    """Raises ValueError where a dictionary would become more than TEXT_MAX characters."""
    if max(map(len, values), default=0) * len(indexes) <= TEXT_MAX:
        return
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    total = int(lengths[indexes].sum())
    if total > TEXT_MAX:
        raise ValueError(f"{total:,} characters, more than {TEXT_MAX:,}")


def _numbers(owner: SpanBatch | StringColumn, name: str, rows: int, dtype: Any) -> np.ndarray:
    """A repeated number field; zeros if the batch has none."""
    count = len(getattr(owner, name))
    if not count:
        return np.zeros(rows, dtype)
    if count != rows:
        raise ValueError(f"{count} entries for {rows} rows")
    found = packed.numbers(owner, name)
    most = _MOST[dtype]
    if found.dtype == np.uint64 and int(found.max()) > most:  # unsigned on the wire only
        raise ValueError(f"a number beyond {most}: {found.max()}")
    if allowed := SPAN_NUMBERS.get(name):
        low, high = int(found.min()), int(found.max())
        if low < allowed[0] or high > allowed[-1]:
            wrong = high if high > allowed[-1] else low
            raise ValueError(f"{wrong} is not between {allowed[0]} and {allowed[-1]}")
    return found.astype(dtype)


def _int64(batch: SpanBatch, name: str, *, null: int | None = None) -> pa.Array:
    if null == 0 and not getattr(batch, name):
        return _nulls(batch.rows, pa.int64())
    numbers = _numbers(batch, name, batch.rows, np.int64)
    return pa.array(numbers, pa.int64(), mask=None if null is None else numbers == null)


def _hex(ids: bytes, width: int, rows: int) -> pa.Array:
    """Ids in hexadecimal, without an object a row; all zero is null."""
    if not ids:
        return _nulls(rows, pa.string())
    if len(ids) != rows * width:
        raise ValueError(f"{len(ids)} bytes for {rows} ids of {width}")
    starts = np.arange(rows + 1, dtype=np.int32) * (width * 2)
    text = pa.StringArray.from_buffers(rows, pa.py_buffer(starts), pa.py_buffer(ids.hex().encode()))
    filled = np.frombuffer(ids, np.uint8).reshape(rows, width).any(axis=1)
    if filled.all():
        return text
    return pc.if_else(pa.array(filled), text, pa.scalar(None, pa.string()))


def _string(name: str) -> Make:
    return lambda batch, source, offset: _strings(getattr(batch, name), batch.rows)


def _integer(name: str, *, null: int | None = None) -> Make:
    return lambda batch, source, offset: _int64(batch, name, null=null)


def _queues(batch: SpanBatch) -> np.ndarray:
    if not batch.queue_id:
        return np.full(batch.rows, _NO_QUEUE, np.int32)
    return _numbers(batch, "queue_id", batch.rows, np.int32)


def _queue(batch: SpanBatch, source: QueueRange, offset: int) -> pa.Array:
    queues = _queues(batch)
    return pa.array(queues, pa.int32(), mask=queues == _NO_QUEUE)


def _queue_offset(batch: SpanBatch, source: QueueRange, offset: int) -> pa.Array:
    """0 is an offset like others; without a queue there is none."""
    offsets = _numbers(batch, "queue_offset", batch.rows, np.int64)
    return pa.array(offsets, pa.int64(), mask=_queues(batch) == _NO_QUEUE)


def _lateness(batch: SpanBatch, source: QueueRange, offset: int) -> pa.Array:
    """0 is on time; without a due time, or where a fire stored nothing, there is none."""
    rows = batch.rows
    if not batch.due_ms:
        return _nulls(rows, pa.int64())
    fired = _is(batch.operation, rows, "fire") & ~_is(batch.status, rows, "ERROR")
    measured = (fired | _is(batch.operation, rows, "process")) & (
        _numbers(batch, "due_ms", rows, np.int64) != 0
    )
    return pa.array(_numbers(batch, "lateness_ms", rows, np.int64), pa.int64(), mask=~measured)


def _is(column: StringColumn, rows: int, wanted: str) -> np.ndarray:
    """Which rows have this string."""
    if wanted not in column.values:
        return np.zeros(rows, bool)
    matches = np.array([value == wanted for value in column.values])
    return matches[_numbers(column, "rows", rows, np.uint32)]


def _attempt(batch: SpanBatch, source: QueueRange, offset: int) -> pa.Array:
    return pa.array(_numbers(batch, "attempt", batch.rows, np.int32), pa.int32())


def _start_ts(batch: SpanBatch, source: QueueRange, offset: int) -> pa.Array:
    starts = _numbers(batch, "start_ns", batch.rows, np.uint64)
    return pa.array((starts // 1_000).astype(np.int64), pa.timestamp("us", tz="UTC"))


def _links(batch: SpanBatch, source: QueueRange, offset: int) -> pa.Array:
    if not batch.link_counts and not batch.link_trace_ids:
        return _no_links(batch.rows)
    counts = _numbers(batch, "link_counts", batch.rows, np.int64)
    total = int(counts.sum())
    if total * _TRACE_ID_BYTES != len(batch.link_trace_ids):
        raise ValueError(f"{len(batch.link_trace_ids)} bytes of trace ids for {total} links")
    links = pa.StructArray.from_arrays(
        [
            _hex(batch.link_trace_ids, _TRACE_ID_BYTES, total),
            _hex(batch.link_span_ids, _SPAN_ID_BYTES, total),
        ],
        names=["trace_id", "span_id"],
    )
    starts = np.zeros(batch.rows + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return pa.ListArray.from_arrays(pa.array(starts), links)


def _attributes(batch: SpanBatch, source: QueueRange, offset: int) -> pa.Array:
    """JSON objects to maps; each distinct one is parsed once."""
    kind = pa.map_(pa.string(), pa.string())
    if not batch.attributes.rows:
        return _no_attributes(batch.rows)
    maps = [_map(text) for text in batch.attributes.values]
    indexes = _numbers(batch.attributes, "rows", batch.rows, np.uint32)
    if len(indexes) and int(indexes.max()) >= len(maps):
        raise ValueError(f"index {indexes.max()} of {len(maps)} values")
    _require_bounded(batch.attributes.values, indexes)
    return pa.array([maps[index] for index in indexes], kind)


# Arrays are never changed, and most batches have as many rows: what is empty is made once.
@lru_cache(maxsize=_KEPT)
def _nulls(rows: int, kind: pa.DataType) -> pa.Array:
    return pa.nulls(rows, kind)


@lru_cache(maxsize=_KEPT)
def _no_links(rows: int) -> pa.Array:
    texts = pa.array([], pa.string())
    links = pa.StructArray.from_arrays([texts, texts], names=["trace_id", "span_id"])
    return pa.ListArray.from_arrays(pa.array(np.zeros(rows + 1, np.int32)), links)


@lru_cache(maxsize=_KEPT)
def _no_attributes(rows: int) -> pa.Array:
    texts = pa.array([], pa.string())
    return pa.MapArray.from_arrays(pa.array(np.zeros(rows + 1, np.int32)), texts, texts)


@lru_cache(maxsize=_KEPT)
def _zeros(rows: int) -> pa.Array:
    return pa.array(np.zeros(rows, np.int32))


@lru_cache(maxsize=_KEPT)
def _numbered(rows: int) -> pa.Array:
    return pa.array(np.arange(rows, dtype=np.int32))


def _map(text: str) -> list[tuple[str, str]]:
    parsed = json.loads(text or "{}")
    if not isinstance(parsed, dict):
        raise ValueError(f"{text[:40]!r} is no JSON object")
    return [
        (_whole(k), _whole(v if isinstance(v, str) else json.dumps(v))) for k, v in parsed.items()
    ]


def _whole(text: str) -> str:
    """JSON may have halves of characters, which Arrow does not take."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _constant(kind: pa.DataType, value: Callable[[SpanBatch, QueueRange, int], Any]) -> Make:
    return lambda batch, source, offset: pa.repeat(
        pa.scalar(value(batch, source, offset), kind), batch.rows
    )


_ARRAYS: Mapping[str, Make] = {
    "trace_id": lambda batch, *_: _hex(batch.trace_ids, _TRACE_ID_BYTES, batch.rows),
    "span_id": lambda batch, *_: _hex(batch.span_ids, _SPAN_ID_BYTES, batch.rows),
    "parent_span_id": lambda batch, *_: _hex(batch.parent_span_ids, _SPAN_ID_BYTES, batch.rows),
    "links": _links,
    "name": _string("name"),
    "kind": _string("kind"),
    "start_ts": _start_ts,
    "start_ns": _integer("start_ns"),
    "duration_ns": _integer("duration_ns"),
    "status": _string("status"),
    "error_type": _string("error_type"),
    "service": _string("service"),
    "instance": _string("instance"),
    "operation": _string("operation"),
    "topic": _string("topic"),
    "broker": _string("broker"),
    "queue": _queue,
    "queue_offset": _queue_offset,
    "message_id": _string("message_id"),
    "key": _string("key"),
    "tag": _string("tag"),
    "consumer_group": _string("consumer_group"),
    "client_id": _string("client_id"),
    "body_bytes": _integer("body_bytes"),
    "batch_count": _integer("batch_count", null=0),
    "due_ms": _integer("due_ms", null=0),
    "lateness_ms": _lateness,
    "attempt": _attempt,
    "attributes": _attributes,
    "schema_version": _constant(pa.int32(), lambda batch, *_: batch.schema_version),
    "trace_broker": lambda batch, source, offset: pa.DictionaryArray.from_arrays(
        _zeros(batch.rows), pa.array([source.broker])
    ),
    "trace_queue": _constant(pa.int32(), lambda batch, source, offset: source.queue),
    "trace_offset": _constant(pa.int64(), lambda batch, source, offset: offset),
    "trace_row": lambda batch, *_: _numbered(batch.rows),
    "sampled_count": _integer("sampled_count", null=0),
    "undecodable_reason": lambda batch, *_: pa.nulls(batch.rows, pa.string()),
    "undecodable_body": lambda batch, *_: pa.nulls(batch.rows, pa.binary()),
}
