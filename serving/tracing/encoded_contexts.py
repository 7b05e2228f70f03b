"""Creation contexts in encoded records, which brokers and timer shards do not decode.

`contexts_in` finds the encoded property by a byte search.  Only what is sampled carries one, so
that most frames need no more than that search.
"""

from __future__ import annotations

from collections.abc import Sequence

from duemq.protocol.record_bytes import read_entry
from duemq.tracing.contexts import LINKS_MAX, SAMPLED_SIGNS, USUAL_LENGTH, FoundContexts, is_sampled

# How a map entry {"traceparent": <text>} of Record.properties starts on the wire; the text's length
# (one byte) and the text follow.
_ENCODED_PROPERTY = b"\x0a\x0btraceparent\x12"
_USUAL_HEAD = bytes([USUAL_LENGTH]) + b"00-"
# From where the property begins.
_HEAD_AT = len(_ENCODED_PROPERTY)
_IDS_AT = _HEAD_AT + len(_USUAL_HEAD)
_USUAL_BYTES = _HEAD_AT + 1 + USUAL_LENGTH
_FLAG_AT = _USUAL_BYTES - 1
_USUAL_START = tuple(bytes([byte]) for byte in _ENCODED_PROPERTY + _USUAL_HEAD)
_SAMPLED_FLAGS = SAMPLED_SIGNS.encode()
# So many entries of one size are worth looking at by column.
_REGULAR_MIN = 16


def contexts_in(
    records: bytes | memoryview, *, start: int = 0, end: int | None = None
) -> FoundContexts:
    """The sampled creation contexts in encoded records, found without decoding them.

    A body that happens to hold the same bytes counts too and does no other harm.
    """
    searched = records if isinstance(records, bytes) else bytes(records)
    past = len(searched) if end is None else end
    places: list[int] = []
    while start < past:
        size, count = _regular(searched, start, past)
        if count < _REGULAR_MIN:
            places += _by_search(searched, start, past)
            break
        stop = start + size * count
        places += _by_column(searched, start, stop, size) or _by_search(searched, start, stop)
        start = stop
    return FoundContexts([_text_of(searched, at, past) for at in places[:LINKS_MAX]], len(places))


def _regular(records: bytes, start: int, past: int) -> tuple[int, int]:
    """(Bytes of the entry that begins here, how many as large there are from here on)."""
    record_at, end = read_entry(records, start, past)
    if record_at < 0:
        return 0, 0
    size = end - start
    counts = []
    for place in range(start, record_at):
        column = records[place : past - size + 1 + place - start : size]
        counts.append(len(column) - len(column.lstrip(records[place : place + 1])))
    return size, min(counts)


def _by_column(records: bytes, start: int, stop: int, size: int) -> Sequence[int]:
    """Where the properties are, if all entries, of this size, have a sampled one at one place.

    As `send_many` makes them.  It takes a slice for each byte of a property's head.
    """
    at = records.find(_ENCODED_PROPERTY, start, start + size)
    if at < 0 or at + _USUAL_BYTES > start + size:
        return ()
    count = (stop - start) // size
    for place, byte in enumerate(_USUAL_START, at):
        if records[place:stop:size] != byte * count:
            return ()
    flags = records[at + _FLAG_AT : stop : size]
    return () if flags.translate(None, _SAMPLED_FLAGS) else range(at, stop, size)


def _by_search(records: bytes, start: int, past: int) -> Sequence[int]:
    """Where sampled properties are."""
    found: list[int] = []
    add, rfind = found.append, records.rfind
    # From the end: the interpreter's search backwards is the quicker one.
    at = rfind(_ENCODED_PROPERTY, start, past)
    while at >= 0:
        # Nearly all are usual, and only the first become texts.
        if at <= past - _USUAL_BYTES and records[at + _HEAD_AT : at + _IDS_AT] == _USUAL_HEAD:
            if records[at + _FLAG_AT] in _SAMPLED_FLAGS:
                add(at)
        elif at < past - _HEAD_AT and is_sampled(_text_of(records, at, past)):
            add(at)
        at = rfind(_ENCODED_PROPERTY, start, at)
    return found[::-1]


def _text_of(records: bytes, at: int, past: int) -> str:
    """Of the property that is encoded at a place."""
    text_at = at + _HEAD_AT + 1
    return records[text_at : min(past, text_at + records[text_at - 1])].decode("ascii", "replace")
