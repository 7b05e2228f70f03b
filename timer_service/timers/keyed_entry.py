"""SCHEDULE (kind 21): timers that come, go, or both, at once.  Little-endian; see log_entries.py.

A request of Schedule or Reschedule is one entry, a list of keys to cancel one or several parts.
A crash leaves the whole of it or nothing.

off  size  field          meaning
 0   16    request_id     zeros: it is not remembered
16    4    part           of the request
20    4    gone           timers that go
24    4    cancelled      how many of these were cancelled, the first ones; the others are replaced;
                         bit 31: they were fired by hand, and what comes for them is due at once
28    4    came           timers that come
32    4    frames         runs of these with the same target
36    4    names_length
40    8    store_id       whose offsets the timers that come have: the shard's own
48    4    queue_id       the shard's number
52    4    answer_length
56    8    at_ms          when it was decided, Unix ms
64    8    frames_length
72   32*g  gone           as CANCEL names them
 .    8*n  hashes         u64 (key_hash.py): of the cancelled ones, then of those that come; 0: none
 .    2*f  broker_length  u16: of each frame's broker, "" where any will do
 .    n    names          of the brokers, UTF-8; with the lengths zero-padded to a multiple of 8
 .    a    answer         results as below; zero-padded to a multiple of 8
 .    n    frames         log entries of kind 1 (storage/frame.py), whole

The answer begins with 0, or with 1 if what follows is compressed (zlib): one result after the
other.  A result is its outcome (u8) and as many handles as OUTCOMES says: store_id u64,
queue_id u32, offset i64, due_ms i64.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from duemq_server.timer_service.timers.keyed import (
    EXISTS,
    FIRED,
    REPLACED,
    RESCHEDULED,
    SCHEDULED,
    UNKNOWN,
    Handle,
)
from duemq_server.timer_service.timers.log_entries import (
    CancelledTable,
    SourceId,
    decode_cancelled,
)
from duemq_server.timer_service.timers.rows import Hashes

CANCELLED, NOT_YET = "CANCELLED", "NOT_YET"
OUTCOMES = {
    SCHEDULED: (1, 1),
    REPLACED: (2, 2),
    EXISTS: (3, 1),
    RESCHEDULED: (4, 1),
    FIRED: (5, 0),
    UNKNOWN: (6, 0),
    CANCELLED: (7, 0),
    NOT_YET: (8, 0),
}
"""The number of each outcome, and how many handles follow."""
_BY_NUMBER = {number: (name, handles) for name, (number, handles) in OUTCOMES.items()}
REQUEST_ID_BYTES = 16
NO_REQUEST = bytes(REQUEST_ID_BYTES)
_FIRED = 1 << 31
_COMPRESSED_FROM = 256  # bytes: a list's handles are much alike

_HEADER = struct.Struct("<16sIIIIIIQIIqQ")
_GONE = struct.Struct("<QIIqq")
_HANDLE = struct.Struct("<QIqq")
assert (_HEADER.size, _GONE.size, _HANDLE.size) == (72, 32, 28)


class Result(NamedTuple):
    """An outcome and its handles."""

    outcome: str
    handles: tuple[Handle, ...] = ()


class RequestKey(NamedTuple):
    """What a request, or a part of one, is known by."""

    id: bytes
    part: int = 0

    def name(self) -> bytes:
        """The same in bytes: 16, or 20 of a part."""
        return self.id + self.part.to_bytes(4, "little") if self.part else self.id


class Changed(NamedTuple):
    """What an entry says."""

    request: RequestKey
    at_ms: int
    cancelled: Sequence[Handle]
    cancelled_hashes: Hashes
    replaced: Sequence[Handle]
    source: SourceId  # of what comes
    brokers: Sequence[str]  # of each frame
    hashes: Hashes  # of what comes
    frames: bytes | memoryview
    answer: bytes
    frames_at: int = 0  # of the body
    topics: Sequence[int] = ()
    """Marks of the topics of what goes: the cancelled ones', then the replaced ones'."""
    fired: bool = False
    """The replaced ones go out at once: who asks for them by their handles is told FIRED."""
    table: CancelledTable | None = None
    """The replaced ones and `topics`, in columns; these are empty then, and none is cancelled."""


def encode(changed: Changed) -> list[bytes | memoryview]:
    """Parts of a body; the frames, the last part, are not copied."""
    gone_count, gone = _encode_gone(changed)
    names = [broker.encode() for broker in changed.brokers]
    text = struct.pack(f"<{len(names)}H", *map(len, names)) + b"".join(names)
    header = _HEADER.pack(
        *changed.request,
        gone_count,
        len(changed.cancelled) | (_FIRED if changed.fired else 0),
        len(changed.hashes),
        len(names),
        len(text) - 2 * len(names),
        *changed.source,
        len(changed.answer),
        changed.at_ms,
        len(changed.frames),
    )
    head = b"".join(
        (
            header,
            gone,
            changed.cancelled_hashes.astype("<u8").tobytes(),
            changed.hashes.astype("<u8").tobytes(),
            text.ljust(_aligned(len(text)), b"\0"),
            changed.answer.ljust(_aligned(len(changed.answer)), b"\0"),
        )
    )
    return [head, changed.frames]


def _encode_gone(changed: Changed) -> tuple[int, bytes]:
    """How many, and the column."""
    if changed.table is not None:
        return len(changed.table), changed.table.tobytes()
    gone = [*changed.cancelled, *changed.replaced]
    marks = changed.topics or [0] * len(gone)
    packed = (
        _GONE.pack(*source, mark, offset, due_ms)
        for (source, offset, due_ms), mark in zip(gone, marks, strict=True)
    )
    return len(gone), b"".join(packed)


def decode(body: memoryview, *, in_columns: bool = False) -> Changed:
    """Reads a body; `in_columns`: with a table, if no timer was cancelled or fired by hand."""
    (
        request_id,
        part,
        gone_count,
        cancelled,
        came,
        frames,
        names_length,
        store_id,
        queue_id,
        answer_length,
        at_ms,
        frames_length,
    ) = _HEADER.unpack_from(body)
    fired, cancelled = bool(cancelled & _FIRED), cancelled & ~_FIRED
    at = _HEADER.size
    column = body[at : at + _GONE.size * gone_count]
    table = decode_cancelled(column) if in_columns and not (cancelled or fired) else None
    named = [] if table is not None else list(_GONE.iter_unpack(column))
    gone = [
        Handle(SourceId(store, queue), offset, due_ms) for store, queue, _, offset, due_ms in named
    ]
    at += _GONE.size * gone_count
    hashes = np.frombuffer(body, "<u8", cancelled + came, at).astype(np.uint64)
    at += 8 * len(hashes)
    lengths = struct.unpack_from(f"<{frames}H", body, at)
    text, cut = bytes(body[at + 2 * frames : at + 2 * frames + names_length]), 0
    brokers = []
    for length in lengths:
        brokers.append(text[cut : cut + length].decode())
        cut += length
    at += _aligned(2 * frames + names_length)
    answer = bytes(body[at : at + answer_length])
    at += _aligned(answer_length)
    return Changed(
        RequestKey(request_id, part),
        at_ms,
        gone[:cancelled],
        hashes[:cancelled],
        gone[cancelled:],
        SourceId(store_id, queue_id),
        brokers,
        hashes[cancelled:],
        body[at : at + frames_length],
        answer,
        at,
        [mark for _, _, mark, _, _ in named],
        fired,
        table,
    )


def encode_answer(results: Sequence[Result]) -> bytes:
    """The results as an entry has them."""
    parts: list[bytes] = []
    for outcome, handles in results:
        parts.append(bytes((OUTCOMES[outcome][0],)))
        parts += [_HANDLE.pack(*source, offset, due_ms) for source, offset, due_ms in handles]
    plain = b"".join(parts)
    if len(plain) < _COMPRESSED_FROM:
        return b"\0" + plain
    return b"\1" + zlib.compress(plain, 1)


def decode_answer(answer: bytes) -> list[Result]:
    """Reads `encode_answer`'s bytes."""
    plain = zlib.decompress(answer[1:]) if answer[0] else answer[1:]
    results, at = [], 0
    while at < len(plain):
        name, count = _BY_NUMBER[plain[at]]
        end = at + 1 + _HANDLE.size * count
        handles = _HANDLE.iter_unpack(plain[at + 1 : end])
        results.append(
            Result(
                name, tuple(Handle(SourceId(s, q), offset, due) for s, q, offset, due in handles)
            )
        )
        at = end
    return results


def _aligned(length: int) -> int:
    return (length + 7) & ~7
