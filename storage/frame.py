"""Message frame: one batch of records of one queue, the body of a log entry of kind 1.

Little-endian.  Cost is per frame: payload and arrays go in and come out as they
are, and no record becomes a Python object.

off  size  field               meaning
 0    8    base_offset         queue offset of the first record
 8    8    store_ms            when the broker accepted the batch
16    8    producer_id         0: not idempotent
24    8    sequence            counts the batches of the producer's lane
32    4    producer_epoch
36    4    queue_id            i32; where the records lie
40    4    count               records
44    4    payload_length
48    2    topic_length
50    2    target_topic_length
52    4    target_queue_id     i32; -1: any
56    4    flags               bit 0: timed; bit 1: send-back; bit 2: untraced
60    4    reserved            zero
64         topic, UTF-8; target topic, UTF-8; zeros up to a multiple of 8
           sizes       u32 × count   bytes of each record in the payload
           tag_hashes  u32 × count   CRC-32 of the tag, 0 without
           key_hashes  u32 × count   CRC-32 of the key, 0 without
           zeros up to a multiple of 8
           due_ms      i64 × count   only when timed
           payload                   the records, one after the other

The target is what the producer asked for, where the frame lies elsewhere: a timed
one in the timer topic, a due one in another queue than it was accepted for.
Otherwise it is empty and -1.

A send-back frame holds records that a group could not process and that its broker stored anew; for
which group, and where they lay before, stands in its topic and its records
(broker/groups/send_back.py).

In an untraced frame no record carries a sampled trace context: its sender says so.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from duemq_server.storage.disk import Buffer, nbytes

U32: TypeAlias = "np.ndarray[Any, np.dtype[np.uint32]]"
I64: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

KIND = 1
HEADER = struct.Struct("<qqQQIiIIHHiII")
HEADER_BYTES = 64
assert HEADER.size == HEADER_BYTES
RECORD_BYTES_MIN = 12
"""Of a frame for each record: its size and hashes."""
FLAG_TIMED = 1
FLAG_SEND_BACK = 2
FLAG_UNTRACED = 4
_FLAGS_AT = 56
_EXTENT = struct.Struct("<q32xIIHH4xI")
"""Of the header what says where the records lie."""
NO_TARGET_QUEUE = -1


def _aligned(n: int) -> int:
    return (n + 7) & -8


def encode_parts(
    *,
    topic: str,
    queue_id: int,
    base_offset: int,
    store_ms: int,
    sizes: Buffer,
    tag_hashes: Buffer,
    key_hashes: Buffer,
    payload: Buffer,
    producer_id: int = 0,
    producer_epoch: int = 0,
    sequence: int = 0,
    target_topic: str = "",
    target_queue_id: int = NO_TARGET_QUEUE,
    due_ms: Buffer | None = None,
    send_back: bool = False,
    untraced: bool = False,
) -> list[Buffer]:
    """Buffers of a frame, none of them copied.

    `sizes`, `tag_hashes` and `key_hashes` are packed u32, `due_ms` packed i64,
    all little-endian with an entry a record; `due_ms` makes the frame timed.
    Raises ValueError if the arrays do not fit each other or the payload.
    """
    array_bytes = nbytes(sizes)
    count, rest = divmod(array_bytes, 4)
    if rest or nbytes(tag_hashes) != array_bytes or nbytes(key_hashes) != array_bytes:
        raise ValueError(
            f"sizes, tag_hashes and key_hashes have {array_bytes}, {nbytes(tag_hashes)} and"
            f" {nbytes(key_hashes)} bytes, not four a record each"
        )
    if due_ms is not None and nbytes(due_ms) != 8 * count:
        raise ValueError(f"due_ms has {nbytes(due_ms)} bytes for {count} records")
    names = topic.encode()
    topic_length = len(names)
    names += target_topic.encode()
    header = HEADER.pack(
        base_offset,
        store_ms,
        producer_id,
        sequence,
        producer_epoch,
        queue_id,
        count,
        nbytes(payload),
        topic_length,
        len(names) - topic_length,
        target_queue_id,
        (FLAG_TIMED if due_ms is not None else 0)
        | (FLAG_SEND_BACK if send_back else 0)
        | (FLAG_UNTRACED if untraced else 0),
        0,
    )
    head = header + names.ljust(_aligned(len(names)), b"\0")
    parts: list[Buffer] = [head, sizes, tag_hashes, key_hashes]
    if count & 1:
        parts.append(b"\0\0\0\0")
    if due_ms is not None:
        parts.append(due_ms)
    parts.append(payload)
    return parts


class Frame:
    """A frame as it lies in its entry; arrays are views and made when asked for."""

    def __init__(self, body: memoryview) -> None:
        if len(body) < HEADER_BYTES:
            raise ValueError(f"a frame of {len(body)} bytes is shorter than its header")
        (
            self.base_offset,
            self.store_ms,
            self.producer_id,
            self.sequence,
            self.producer_epoch,
            self.queue_id,
            self.count,
            self.payload_length,
            self._topic_length,
            self._target_topic_length,
            self.target_queue_id,
            self.flags,
            _,
        ) = HEADER.unpack_from(body)
        self.body = body
        self._arrays_at = HEADER_BYTES + _aligned(self._topic_length + self._target_topic_length)
        self._due_at = _aligned(self._arrays_at + 12 * self.count)
        self.payload_at = self._due_at + (8 * self.count if self.timed else 0)
        """Where the payload starts in the body."""
        if self.payload_at + self.payload_length != len(body):
            raise ValueError(
                f"a frame of {len(body)} bytes whose header says"
                f" {self.payload_at + self.payload_length}"
            )

    @property
    def timed(self) -> bool:
        """Whether the records have due times."""
        return bool(self.flags & FLAG_TIMED)

    @property
    def send_back(self) -> bool:
        """Whether a group sent the records back."""
        return bool(self.flags & FLAG_SEND_BACK)

    @property
    def untraced(self) -> bool:
        """Whether no record carries a sampled trace context."""
        return is_untraced(self.body)

    @cached_property
    def topic(self) -> str:
        """The topic it lies in."""
        return str(self.body[HEADER_BYTES : HEADER_BYTES + self._topic_length], "utf-8")

    @cached_property
    def target_topic(self) -> str:
        """The topic that the producer asked for; empty: this one."""
        start = HEADER_BYTES + self._topic_length
        return str(self.body[start : start + self._target_topic_length], "utf-8")

    def _u32(self, index: int) -> U32:
        at = self._arrays_at + 4 * self.count * index
        return np.frombuffer(self.body, "<u4", self.count, at)

    @property
    def sizes(self) -> U32:
        """Bytes of each record."""
        return self._u32(0)

    @property
    def tag_hashes(self) -> U32:
        """CRC-32 of each record's tag."""
        return self._u32(1)

    @property
    def key_hashes(self) -> U32:
        """CRC-32 of each record's key."""
        return self._u32(2)

    @property
    def due_ms(self) -> I64:
        """Due time of each record; empty unless timed."""
        return np.frombuffer(self.body, "<i8", self.count if self.timed else 0, self._due_at)

    @property
    def payload(self) -> memoryview:
        """The records, one after the other."""
        return self.body[self.payload_at :]

    @cached_property
    def _ends(self) -> I64:
        return np.cumsum(self.sizes, dtype=np.int64)

    def place(self, offset: int, count: int) -> tuple[int, int]:
        """Where in the body the records from a queue offset on lie; (0, 0): not all are here."""
        first = offset - self.base_offset
        if not 0 <= first < first + count <= self.count:
            return 0, 0
        start = int(self._ends[first - 1]) if first else 0
        return self.payload_at + start, self.payload_at + int(self._ends[first + count - 1])

    @property
    def end_offset(self) -> int:
        """The queue offset after the last record."""
        return self.base_offset + self.count


def decode(body: memoryview | bytes) -> Frame:
    """Views a frame.  Raises ValueError if the lengths do not add up."""
    return Frame(memoryview(body))


def is_untraced(body: memoryview, at: int = 0) -> bool:
    """Of the frame that begins at `at`: whether it says that no record carries a trace."""
    return bool(body[at + _FLAGS_AT] & FLAG_UNTRACED)


Extent = tuple[int, int, int, int]
"""Which records a frame has, by offset and count, and from where to where they lie."""


def extent_of(body: memoryview, at: int = 0) -> Extent:
    """Of the frame that begins at `at`, and is known to be one; cheaper than a Frame."""
    base_offset, count, length, topic, target, flags = _EXTENT.unpack_from(body, at)
    start = at + _aligned(HEADER_BYTES + _aligned(topic + target) + 12 * count)
    if flags & FLAG_TIMED:
        start += 8 * count
    return base_offset, count, start, start + length
