"""A record as it is sent back: the stored bytes, with the story of its failures put in.  Pure.

What the producer wrote is copied as it is, also what this release does not know.  Cut out are the
fields that belong to the system (due_ms, attempt, retry), and put in anew are the last two.  The
bytes are those of duemq.v1.Record; tests/unit/broker/test_retry_record.py holds both together.
Field numbers are those of message.proto.

    Record   8 due_ms  9 attempt  10 retry
    Retry    1 group  2 origin  3 origin_offset  4 first_failed_ms  5 last_failed_ms  6 error
             7 source  8 source_offset
    QueueRef 1 topic  2 broker  3 queue_id
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from broker.pull_encoding import varint
from broker.records import ENTRY_TAG, read_varint
from duemq.errors import Corrupt

ERROR_CHARACTERS_MAX = 1_024
ATTEMPT_MAX = (1 << 31) - 1

_DUE_MS, _ATTEMPT, _RETRY = 8, 9, 10
_OURS = frozenset((_DUE_MS, _ATTEMPT, _RETRY))
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_U64 = (1 << 64) - 1

Buffer = bytes | memoryview
Source = tuple[str, int, int]
"""Topic, queue id, offset: a place on this broker."""


class Place(NamedTuple):
    """Where a message lies, or lay."""

    topic: str
    broker: str
    queue_id: int
    offset: int


class Story(NamedTuple):
    """The fields of duemq.v1.Retry."""

    group: str
    origin: Place
    first_failed_ms: int
    last_failed_ms: int
    error: str
    source: Place


class _Field(NamedTuple):
    """A field of a message: `start` to `end`, its tag included; its value is a number or bytes."""

    number: int
    start: int
    end: int
    value: Any


def _fields(data: Buffer) -> Iterator[_Field]:
    """Raises Corrupt if the bytes are not a protobuf message."""
    at, end = 0, len(data)
    while at < end:
        start = at
        tag, at = read_varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        value: Any = None
        if at > 0 and number and kind == _LENGTH_DELIMITED:
            length, at = read_varint(data, at, end)
            value = data[at : at + length] if at > 0 else b""
            at = at + length if at > 0 else at
        elif at > 0 and number and kind == _VARINT:
            value, at = read_varint(data, at, end)
        elif at > 0 and number and kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            at = -1
        if not start < at <= end:
            raise Corrupt(f"what is stored is no Record: illegal field at byte {start}")
        yield _Field(number, start, at, value)


def content(entry: Buffer) -> Buffer:
    """A record without its entry's tag and length.  Raises Corrupt."""
    length, head = read_varint(entry, 1, len(entry))
    if len(entry) < 2 or entry[0] != ENTRY_TAG or head < 0 or head + length != len(entry):
        raise Corrupt("what is stored is no entry of a RecordBatch")
    return entry[head:]


def read(record: Buffer) -> tuple[int, Story | None]:
    """(attempt, story) of a record that was sent back before.  Raises Corrupt."""
    attempt = 0
    story: Story | None = None
    for field in _fields(record):
        if field.number == _ATTEMPT and isinstance(field.value, int):
            attempt = min(max(_number(field.value), 0), ATTEMPT_MAX)
        elif field.number == _RETRY:
            story = _story(field.value)
    return attempt, story


def _values(data: Any) -> dict[int, Any]:
    """The last value of each field; nothing of what is no message."""
    if not isinstance(data, bytes | memoryview):
        return {}
    return {field.number: field.value for field in _fields(data)}


def _story(data: Any) -> Story:
    values = _values(data)
    return Story(
        group=_text(values.get(1)),
        origin=_place(values.get(2), values.get(3)),
        first_failed_ms=_number(values.get(4)),
        last_failed_ms=_number(values.get(5)),
        error=_text(values.get(6)),
        source=_place(values.get(7), values.get(8)),
    )


def _place(queue: Any, offset: Any) -> Place:
    values = _values(queue)
    return Place(
        _text(values.get(1)), _text(values.get(2)), _number(values.get(3)), _number(offset)
    )


def _text(value: Any) -> str:
    return bytes(value).decode(errors="replace") if isinstance(value, bytes | memoryview) else ""


def _number(value: Any) -> int:
    """An int64 of the wire."""
    if not isinstance(value, int):
        return 0
    return value - (1 << 64) if value >> 63 else value


def rewritten(record: Buffer, attempt: int, story: Story) -> bytes:
    """The entry of a RecordBatch with this attempt and story.  Raises Corrupt."""
    parts: list[Buffer] = []
    kept_from = 0
    for field in _fields(record):
        if field.number in _OURS:
            parts.append(record[kept_from : field.start])
            kept_from = field.end
    parts.append(record[kept_from:])
    parts.append(_int_field(_ATTEMPT, attempt))
    parts.append(_bytes_field(_RETRY, _encode(story)))
    length = sum(map(len, parts))
    return b"".join((bytes((ENTRY_TAG,)), varint(length), *parts))


def _encode(story: Story) -> bytes:
    return b"".join(
        (
            _bytes_field(1, story.group.encode()),
            _bytes_field(2, _queue(story.origin)),
            _int_field(3, story.origin.offset),
            _int_field(4, story.first_failed_ms),
            _int_field(5, story.last_failed_ms),
            _bytes_field(6, story.error.encode()),
            _bytes_field(7, _queue(story.source)),
            _int_field(8, story.source.offset),
        )
    )


def _queue(place: Place) -> bytes:
    return b"".join(
        (
            _bytes_field(1, place.topic.encode()),
            _bytes_field(2, place.broker.encode()),
            _int_field(3, place.queue_id),
        )
    )


def _bytes_field(number: int, value: bytes) -> bytes:
    if not value:
        return b""
    return b"".join((varint(number << 3 | _LENGTH_DELIMITED), varint(len(value)), value))


def _int_field(number: int, value: int) -> bytes:
    return varint(number << 3 | _VARINT) + varint(value & _U64) if value else b""


def sources(payload: memoryview, sizes: npt.NDArray[np.uint32]) -> Iterator[Source]:
    """Where the records of a send-back frame were sent back from.  Raises Corrupt."""
    start = 0
    for size in sizes.tolist():
        _, story = read(content(payload[start : start + size]))
        if story is None:
            raise Corrupt("a record of a send-back frame has no story")
        yield story.source.topic, story.source.queue_id, story.source.offset
        start += size
