"""What stands for a timer's key in columns and on disk, and the key as a record has it.  Pure.

The hash never changes: blocks and the log have it.  It is a hint only: two keys may have the same,
so the record's own is compared before anything is done to its timer.
"""

from __future__ import annotations

import hashlib

from duemq.protocol.record_bytes import (
    FIXED32,
    FIXED64,
    LENGTH_DELIMITED,
    VARINT,
    read_entry,
    read_varint,
)
from duemq_server.timer_service.timers.keyed import TimerKey

# Fields of Record.
_TIMER_KEY_TAG = 11 << 3 | LENGTH_DELIMITED
_KEY_TAG = 3 << 3 | LENGTH_DELIMITED


def hash_of(key: TimerKey) -> int:
    """Hash of a topic and a key, 64 bits; never 0."""
    text = f"{key.topic}\0{key.key}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") or 1


def key_in(entry: bytes | memoryview) -> str:
    """The timer key of a record, given its entry in a RecordBatch; empty: it has none."""
    return _text_in(entry, _TIMER_KEY_TAG)


def message_key_in(entry: bytes | memoryview) -> str:
    """As `key_in`, of its `key`, which others may have, too."""
    return _text_in(entry, _KEY_TAG)


def _text_in(entry: bytes | memoryview, wanted: int) -> str:
    data, key = bytes(entry), b""
    at, end = read_entry(data, 0, len(data))
    while 0 <= at < end:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = read_varint(data, at - 1, end)
            if at < 0:
                break
        start = at
        if tag & 7 != LENGTH_DELIMITED:
            at = _after(data, tag & 7, at, end)
            continue
        if at < end and data[at] < 0x80:  # nearly always
            start, at = at + 1, at + 1 + data[at]
        else:
            length, start = read_varint(data, at, end)
            at = start + length if start >= 0 else -1
        if tag == wanted and at <= end:
            key = data[start:at]
    return key.decode(errors="replace")


def _after(data: bytes, wire: int, at: int, end: int) -> int:
    """Where a value ends that has no length; -1: malformed."""
    if wire == VARINT:
        return read_varint(data, at, end)[1]
    if wire == FIXED64:
        return at + 8
    return at + 4 if wire == FIXED32 else -1
