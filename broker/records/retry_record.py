"""A record as it is sent back: the stored bytes, with the story of its failures put in.  Pure.

What the producer wrote is copied as it is, also what this release does not know.  Cut out are the
fields that belong to the system (due_ms, attempt, retry), and put in anew are the last two, in
front and the source first of all: a replay need not read on.  Readers of protobuf do not mind the
order.  test_retry_record.py holds this and duemq.v1.Record together.  Field
numbers are those of message.proto.

    Record   8 due_ms  9 attempt  10 retry
    Retry    1 group  2 origin  3 origin_offset  4 first_failed_ms  5 last_failed_ms  6 error
             7 source  8 source_offset
    QueueRef 1 topic  2 broker  3 queue_id
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duemq.errors import Corrupt
from duemq.protocol.limits import ATTEMPT_MAX
from duemq.protocol.record_bytes import (
    ENTRY_TAG,
    FIXED32,
    FIXED64,
    LENGTH_DELIMITED,
    VARINT,
    read_entry,
    read_varint,
    varint,
)

_DUE_MS, _ATTEMPT, _RETRY = 8, 9, 10
_OURS = frozenset((_DUE_MS, _ATTEMPT, _RETRY))
_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
_ENTRY_TAG = bytes((ENTRY_TAG,))
_ATTEMPT_TAG = _ATTEMPT << 3 | VARINT
_RETRY_TAG, _SOURCE_TAG = _RETRY << 3 | LENGTH_DELIMITED, 7 << 3 | LENGTH_DELIMITED
_SOURCE_OFFSET_TAG = 8 << 3 | VARINT
_U64 = (1 << 64) - 1

Buffer = bytes | memoryview
SentBackFrom = tuple[str, int, int]
"""Topic, queue id, offset: a place on this broker."""


class MessagePlace(NamedTuple):
    """Where a message lies, or lay."""

    topic: str
    broker: str
    queue_id: int
    offset: int


class Story(NamedTuple):
    """The fields of duemq.v1.Retry."""

    group: str
    origin: MessagePlace
    first_failed_ms: int
    last_failed_ms: int
    error: str
    source: MessagePlace


def _spans(data: bytes) -> list[tuple[int, int, int, int]]:
    """(tag, start, start of the value, end) of each field.

    Raises Corrupt if the bytes are not a protobuf message.
    """
    spans = []
    at, end = 0, len(data)
    while at < end:
        start = at
        tag, at = read_varint(data, at, end) if data[at] >= 0x80 else (data[at], at + 1)
        value_at = at
        kind = tag & 7
        if kind == LENGTH_DELIMITED:
            length, value_at = read_varint(data, at, end)
            at = value_at + length
        elif kind == VARINT:
            _, at = read_varint(data, at, end)
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            at = -1
        if not start < value_at <= at <= end or not tag >> 3:
            raise Corrupt(f"what is stored is no Record: illegal field at byte {start}")
        spans.append((tag, start, value_at, at))
    return spans


def content(entry: Buffer) -> bytes:
    """A record without its entry's tag and length.  Raises Corrupt."""
    head, end = read_entry(entry, 0, len(entry))
    if head < 0 or end != len(entry):
        raise Corrupt("what is stored is no entry of a RecordBatch")
    return bytes(entry[head:])


def read(record: bytes) -> tuple[int, Story | None]:
    """(attempt, story) of a record that was sent back before.  Raises Corrupt."""
    attempt = 0
    story: Story | None = None
    for tag, _, value_at, end in _spans(record):
        if tag == _ATTEMPT_TAG:
            attempt = min(max(_number(read_varint(record, value_at, end)[0]), 0), ATTEMPT_MAX)
        elif tag == _RETRY_TAG:
            story = _story(record[value_at:end])
    return attempt, story


def _values(data: bytes) -> dict[int, Any]:
    """The last value of each field, by number: an int or bytes."""
    values: dict[int, Any] = {}
    for tag, _, value_at, end in _spans(data):
        kind = tag & 7
        if kind == LENGTH_DELIMITED:
            values[tag >> 3] = data[value_at:end]
        elif kind == VARINT:
            values[tag >> 3], _ = read_varint(data, value_at, end)
    return values


def _story(data: bytes) -> Story:
    values = _values(data)
    return Story(
        group=_text(values.get(1)),
        origin=_place(values.get(2), values.get(3)),
        first_failed_ms=_number(values.get(4)),
        last_failed_ms=_number(values.get(5)),
        error=_text(values.get(6)),
        source=_place(values.get(7), values.get(8)),
    )


def _place(queue: Any, offset: Any) -> MessagePlace:
    values = _values(queue) if isinstance(queue, bytes) else {}
    return MessagePlace(
        _text(values.get(1)), _text(values.get(2)), _number(values.get(3)), _number(offset)
    )


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _number(value: Any) -> int:
    """An int64 of the wire."""
    if not isinstance(value, int):
        return 0
    return value - (1 << 64) if value >> 63 else value


def rewritten(record: bytes, attempt: int, story: Story) -> bytes:
    """The entry of a RecordBatch with this attempt and story.  Raises Corrupt."""
    parts = [_bytes_field(_RETRY, _encode(story)), _int_field(_ATTEMPT, attempt)]
    kept_from = 0
    for tag, start, _, end in _spans(record):
        if tag >> 3 in _OURS:
            parts.append(record[kept_from:start])
            kept_from = end
    parts.append(record[kept_from:] if kept_from else record)
    length = sum(map(len, parts))
    return b"".join((_ENTRY_TAG, varint(length), *parts))


def _encode(story: Story) -> bytes:
    return b"".join(
        (
            _bytes_field(7, _queue(*story.source[:3])),
            _int_field(8, story.source.offset),
            _bytes_field(1, story.group.encode()),
            _bytes_field(2, _queue(*story.origin[:3])),
            _int_field(3, story.origin.offset),
            _int_field(4, story.first_failed_ms),
            _int_field(5, story.last_failed_ms),
            _bytes_field(6, story.error.encode()),
        )
    )


@functools.lru_cache(maxsize=1_024)
def _queue(topic: str, broker: str, queue_id: int) -> bytes:
    return b"".join(
        (
            _bytes_field(1, topic.encode()),
            _bytes_field(2, broker.encode()),
            _int_field(3, queue_id),
        )
    )


def _bytes_field(number: int, value: bytes) -> bytes:
    if not value:
        return b""
    return b"".join((varint(number << 3 | LENGTH_DELIMITED), varint(len(value)), value))


def _int_field(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value & _U64) if value else b""


def sources(payload: memoryview, sizes: npt.NDArray[np.uint32]) -> Iterator[SentBackFrom]:
    """Where the records of a send-back frame were sent back from.  Raises Corrupt."""
    data = bytes(payload)
    places: dict[bytes, tuple[str, int]] = {}
    start = 0
    for size in sizes.tolist():
        end = start + size
        _, at = read_varint(data, start + 1, end)
        _, at = _head(data, at, end, _RETRY_TAG)
        length, at = _head(data, at, end, _SOURCE_TAG)
        queue = data[at : at + length]
        place = places.get(queue)
        if place is None:
            values = _values(queue)
            place = places[queue] = (_text(values.get(1)), _number(values.get(3)))
        at += length
        offset = 0
        if at < end and data[at] == _SOURCE_OFFSET_TAG:
            offset, _ = read_varint(data, at + 1, end)
        yield *place, offset
        start = end


def _head(data: bytes, at: int, end: int, tag: int) -> tuple[int, int]:
    """(Length, start) of the field that must begin here."""
    length, value_at = read_varint(data, at + 1, end)
    if at < 0 or data[at] != tag or value_at < 0 or value_at + length > end:
        raise Corrupt(f"what is stored is no record that was sent back (byte {at} of its frame)")
    return length, value_at
