"""Answers of Pull, written by hand: one join instead of three copies of the records.  Pure.

The bytes are those of duemq.v1.PullResponse; test_pull_encoding.py holds both together.  Field
numbers are those of broker.proto.
"""

from collections.abc import Sequence
from typing import NamedTuple

from duemq.protocol.record_bytes import varint
from duemq_server.broker.reading.selection import FrameRun

_RESPONSE_QUEUES = b"\x12"  # field 2, length-delimited
_QUEUE_RECORDS = b"\x22"  # field 4
_RUN_OFFSETS, _RUN_COUNTS, _RUN_STORE_MS = b"\x2a", b"\x32", b"\x3a"  # fields 5 to 7, packed
_NEXT_OFFSET, _MIN_OFFSET, _MAX_OFFSET = b"\x40", b"\x48", b"\x50"  # fields 8 to 10
_UNTRACED = b"\x58\x01"  # field 11: true
_HEAD_BYTES = 64  # of a queue, about


class QueueAnswer(NamedTuple):
    """One queue of an answer.  `error`: encoded duemq.v1.Error, or empty."""

    topic: str
    queue_id: int
    slices: Sequence[memoryview] = ()
    size: int = 0
    runs: Sequence[FrameRun] = ()
    next_offset: int = 0
    min_offset: int = 0
    max_offset: int = 0
    error: bytes = b""
    untraced: bool = False


def size_of(answers: Sequence[QueueAnswer]) -> int:
    """About how large `encode` makes them."""
    return sum(answer.size + len(answer.error) + _HEAD_BYTES for answer in answers)


def encode(response_head: bytes, answers: Sequence[QueueAnswer]) -> bytes:
    """A PullResponse: `response_head` (all its other fields, encoded) and the queues."""
    parts: list[bytes | memoryview] = [response_head]
    for answer in answers:
        head = _head(answer)
        parts += (_RESPONSE_QUEUES, varint(len(head) + answer.size), head)
        parts += answer.slices
    return b"".join(parts)


def _head(answer: QueueAnswer) -> bytes:
    """The encoded QueueRecords but for the records, which come last."""
    topic = answer.topic.encode()
    parts = [b"\x0a", varint(len(topic)), topic]
    if answer.queue_id:
        parts += (b"\x10", varint(answer.queue_id & 0xFFFF_FFFF_FFFF_FFFF))
    if answer.error:
        parts += (b"\x1a", varint(len(answer.error)), answer.error)
    if answer.runs:
        parts += _packed(_RUN_OFFSETS, [run.offset for run in answer.runs])
        parts += _packed(_RUN_COUNTS, [run.records for run in answer.runs])
        parts += _packed(_RUN_STORE_MS, [run.store_ms for run in answer.runs])
    for tag, value in (
        (_NEXT_OFFSET, answer.next_offset),
        (_MIN_OFFSET, answer.min_offset),
        (_MAX_OFFSET, answer.max_offset),
    ):
        if value:
            parts += (tag, varint(value & 0xFFFF_FFFF_FFFF_FFFF))  # negative: echoed, if asked so
    if answer.untraced:
        parts.append(_UNTRACED)
    if answer.size:
        parts += (_QUEUE_RECORDS, varint(answer.size))
    return b"".join(parts)


def _packed(tag: bytes, values: list[int]) -> tuple[bytes, bytes, bytes]:
    data = b"".join(map(varint, values))
    return tag, varint(len(data)), data
