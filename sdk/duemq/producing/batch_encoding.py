"""The bytes of a batch: a duemq.v1.SendRequest, built without an object a message.

A record is laid out in the order of its field numbers, as protobuf would:

    0A len(record)                          entry of RecordBatch.records
       0A len(body) body                    body
       12 1C message_id                     28 hex digits, see message_ids.py
       …                                    key, tag, ordering_key, properties: "extras"
       38 born_ms

All that does not differ from message to message is made once; the rest comes from tables (the
index digits) and caches (the lengths), so that the whole batch is one `bytes.join` over columns.

The request id is the batch's own.  Encoded requests may be joined: protobuf merges them to one
request with all the batches and the last one's id, which is what a frame of several batches is.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import add
from typing import NamedTuple

from duemq.errors import TooLarge
from duemq.protocol import checks
from duemq.protocol.due import DELAY_LEVELS
from duemq.protocol.limits import PROPERTIES_BYTES_DEFAULT
from duemq.protocol.message_ids import ID_CHARS, INDEXES
from duemq.protocol.record_bytes import property_entry, text_hash, varint
from duemq.tracing.contexts import BAGGAGE, TRACEPARENT
from duemq.v1.view_pb2 import SendRequestView

_TRACING = frozenset((TRACEPARENT, BAGGAGE))

BLOCK_MESSAGES = len(INDEXES)
"""Messages of one batch at most: three hex digits of their ids count them."""

_ID_FIELD = b"\x12" + bytes([ID_CHARS])
_ID_FIELD_BYTES = len(_ID_FIELD) + ID_CHARS
_UNTRACED = b"\x70\x01"
# Distinct lengths remembered; beyond that the cache starts anew.
_LENGTHS_MAX = 65_536
# Lanes whose head is kept encoded; of more, some are encoded again each time.
_LANES_MAX = 4_096


class Extras(NamedTuple):
    """What a message has beside its body."""

    encoded: bytes
    tag_hash: int
    key_hash: int
    traced: bool = False
    """It may carry a trace context or baggage."""


NO_EXTRAS = Extras(b"", 0, 0)


def extras_of(
    key: str | None,
    tag: str | None,
    ordering_key: str | None,
    properties: Mapping[str, str] | None,
    timer_key: str | None = None,
) -> Extras:
    """Raises InvalidArgument for what is not text, TooLarge beyond PROPERTIES_BYTES_DEFAULT."""
    encoded, tag_hash, key_hash = b"", 0, 0
    if key is not None and (text := _utf8("key", key)):
        encoded = b"\x1a" + varint(len(text)) + text
        key_hash = text_hash(text)
    if tag is not None and (text := _utf8("tag", tag)):
        encoded += b"\x22" + varint(len(text)) + text
        tag_hash = text_hash(text)
    if ordering_key is not None and (text := _utf8("ordering_key", ordering_key)):
        encoded += b"\x2a" + varint(len(text)) + text
    if properties is not None:
        if not isinstance(properties, Mapping):
            raise checks.wrong("properties", properties, "a mapping of text to text")
        encoded += b"".join(
            property_entry(_utf8("properties", name), _utf8("properties", value))
            for name, value in properties.items()
        )
    if len(encoded) > PROPERTIES_BYTES_DEFAULT:
        raise TooLarge(
            f"key, tag, ordering key and properties have {len(encoded)} bytes, "
            f"{PROPERTIES_BYTES_DEFAULT} are allowed",
            field="properties",
            value=len(encoded),
            limit=PROPERTIES_BYTES_DEFAULT,
        )
    if timer_key is not None and (text := _utf8("timer_key", timer_key)):
        encoded += b"\x5a" + varint(len(text)) + text
    traced = properties is not None and not _TRACING.isdisjoint(properties)
    return Extras(encoded, tag_hash, key_hash, traced)


def _utf8(field: str, text: str) -> bytes:
    if not isinstance(text, str):
        raise checks.wrong(field, text, f"text, not {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise checks.wrong(field, text, "valid Unicode") from None


Carried = tuple[int, Sequence[bytes]]
"""What messages next to each other have besides: (index of the first, encoded properties).

The properties are as long for each of them.
"""


class _Heads(dict[tuple[int, int], bytes]):
    """(bytes of the body, bytes after the body) → what stands before the body."""

    def __missing__(self, lengths: tuple[int, int]) -> bytes:
        body_bytes, rest_bytes = lengths
        body_head = b"\x0a" + varint(body_bytes)
        head = b"\x0a" + varint(len(body_head) + body_bytes + rest_bytes) + body_head
        if len(self) >= _LENGTHS_MAX:
            self.clear()
        self[lengths] = head
        return head


_heads = _Heads()


class Numbers(NamedTuple):
    """What a batch is told apart by."""

    producer_id: int
    epoch: int
    sequence: int


def records_and_sizes(
    bodies: Sequence[bytes],
    extras: Sequence[bytes] | None,
    id_head: bytes,
    born: Sequence[tuple[int, int]],
    carried: Sequence[Carried] = (),
) -> tuple[list[bytes], "array[int]"]:
    """The records' pieces in order, and their encoded sizes.

    `id_head`: the ids but for their index.  `born`: (index of the first message, born_ms) of
    each run of messages.
    """
    count = len(bodies)
    id_field = _ID_FIELD + id_head
    if carried and (extras is not None or count == 1):
        extras = _joined(extras, carried, count)
        carried = ()
    if count == 1:
        # Sent one at a time: columns of one entry would cost the sender 20 us of its latency.
        body, extra, tail = bodies[0], extras[0] if extras else b"", _tail(born[-1][1])
        rest_bytes = _ID_FIELD_BYTES + len(extra) + len(tail)
        head = _heads[len(body), rest_bytes]
        sizes = array("I", (len(head) + len(body) + rest_bytes,))
        return [head, body, id_field, INDEXES[0], extra, tail], sizes
    tails = _tails(born, count)
    lengths = list(map(len, bodies))
    rests = [len(tail) + _ID_FIELD_BYTES for tail in tails]
    if extras is not None:
        rests = list(map(add, rests, map(len, extras)))
    width = 5 if extras is None else 6
    parts: list[bytes] = [b""] * (width * count)
    if extras is None and len(set(lengths)) == 1 and len(set(rests)) == 1:
        head = _heads[lengths[0], rests[0]]
        parts[0::width] = [head] * count
        sizes = array("I", [len(head) + lengths[0] + rests[0]]) * count
        for first, encoded in carried:
            past, rest_bytes = first + len(encoded), rests[0] + len(encoded[0])
            head = _heads[lengths[0], rest_bytes]
            size = len(head) + lengths[0] + rest_bytes
            if past == first + 1:
                parts[width * first], sizes[first] = head, size
            else:
                parts[width * first : width * past : width] = [head] * len(encoded)
                sizes[first:past] = array("I", [size]) * len(encoded)
    else:
        for first, encoded in carried:
            past = first + len(encoded)
            rests[first:past] = map(add, rests[first:past], map(len, encoded))
        heads = list(map(_heads.__getitem__, zip(lengths, rests, strict=True)))
        parts[0::width] = heads
        sizes = array("I", map(add, map(add, map(len, heads), lengths), rests))
    parts[1::width] = bodies
    parts[2::width] = [id_field] * count
    parts[3::width] = INDEXES[:count]
    if extras is not None:
        parts[4::width] = extras
    parts[width - 1 :: width] = tails
    for first, encoded in carried:
        if len(encoded) == 1:
            parts[width * first + width - 1] = encoded[0] + tails[first]
        else:
            past = first + len(encoded)
            with_tails = list(map(add, encoded, tails[first:past]))
            parts[width * first + width - 1 : width * past : width] = with_tails
    return parts, sizes


def _joined(extras: Sequence[bytes] | None, carried: Sequence[Carried], count: int) -> list[bytes]:
    column = list(extras or [b""] * count)
    for first, encoded in carried:
        past = first + len(encoded)
        column[first:past] = map(add, column[first:past], encoded)
    return column


def _tails(born: Sequence[tuple[int, int]], count: int) -> list[bytes]:
    tails: list[bytes] = []
    ends = [start for start, _ in born[1:]] + [count]
    for (start, born_ms), end in zip(born, ends, strict=True):
        tails += [_tail(born_ms)] * (end - start)
    return tails


@lru_cache(maxsize=64)
def _tail(born_ms: int) -> bytes:
    return b"\x38" + varint(born_ms)


def packed32(numbers: Sequence[int] | int, count: int) -> bytes:
    """Little-endian u32s: of a sequence, or one number `count` times."""
    if isinstance(numbers, int):
        return numbers.to_bytes(4, "little") * count
    return _little(array("I", numbers))


def _little(numbers: "array[int]") -> bytes:
    if sys.byteorder == "big":  # pragma: no cover
        numbers.byteswap()
    return numbers.tobytes()


def due_array(due_field: int, values: Sequence[int]) -> bytes:
    """The packed array of due times; one entry when all are equal."""
    if len(set(values)) == 1:
        values = values[:1]
    return _little(array("I" if due_field == DELAY_LEVELS else "q", values))


@lru_cache(maxsize=_LANES_MAX)
def lane_head(topic: str, queue_id: int, producer_id: int, epoch: int) -> bytes:
    """The fields of a batch that its lane's batches share."""
    name = topic.encode()
    return b"".join(
        (
            b"\x0a",
            varint(len(name)),
            name,
            b"\x10",
            varint(queue_id * 2 if queue_id >= 0 else -queue_id * 2 - 1),  # zigzag
            b"\x18",
            varint(producer_id),
            b"\x20",
            varint(epoch),
        )
    )


def request(
    request_id: int,
    topic: str,
    queue_id: int,
    numbers: Numbers,
    parts: list[bytes],
    sizes: "array[int]",
    tag_hashes: bytes,
    key_hashes: bytes,
    due_field: int = 0,
    due_values: bytes = b"",
    *,
    untraced: bool = False,
) -> bytes:
    """The encoded SendRequest of one batch."""
    head = b"".join(
        (
            lane_head(topic, queue_id, numbers.producer_id, numbers.epoch),
            b"\x28",
            varint(numbers.sequence),
            b"\x32",
            varint(records_bytes := sum(sizes)),
        )
    )
    array_head = varint(len(tag_hashes))
    tail = [b"\x3a", array_head, _little(sizes), b"\x42", array_head, tag_hashes]
    tail += [b"\x4a", array_head, key_hashes]
    if due_field:
        tail += [bytes([due_field << 3 | 2]), varint(len(due_values)), due_values]
    if untraced:
        tail.append(_UNTRACED)
    batch_bytes = len(head) + records_bytes + sum(map(len, tail))
    start = b"\x08" + varint(request_id) + b"\x12" + varint(batch_bytes) + head
    return b"".join([start, *parts, *tail])


def renumbered(encoded: bytes, queue_id: int, numbers: Numbers) -> bytes:
    """A batch's request for another lane or with other numbers; for the rare refused batch."""
    view = SendRequestView.FromString(encoded)
    batch = view.batches[0]
    batch.queue_id = queue_id
    batch.producer_id, batch.producer_epoch, batch.sequence = numbers
    return view.SerializeToString()
