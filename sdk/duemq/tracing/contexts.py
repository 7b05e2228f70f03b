"""Creation contexts: how a message carries its send span (W3C Trace Context), and baggage.

Brokers and timer shards do not decode records: `contexts_in` finds the encoded property by a byte
search.  Only what is sampled carries one, so that most frames need no more than that search.
"""

from __future__ import annotations

import re
from binascii import unhexlify
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from duemq.protocol.record_bytes import read_entry

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"

LINKS_MAX = 32
"""Creation contexts that one span names; OpenTelemetry's own default limit is 128."""

_W3C = TraceContextTextMapPropagator()
_W3C_BAGGAGE = W3CBaggagePropagator()
# What we write ourselves; everything else is the library's to read.
_USUAL = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_USUAL_LENGTH = 55
_USUAL_SIGNS = ((0, "0"), (1, "0"), (2, "-"), (35, "-"), (52, "-"))
# In ids that are none, and hardly ever in others.
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16

# How a map entry {"traceparent": <text>} of Record.properties starts on the wire; the text's length
# (one byte) and the text follow.
_ENCODED_PROPERTY = b"\x0a\x0btraceparent\x12"
_USUAL_HEAD = bytes([_USUAL_LENGTH]) + b"00-"
# From where the property begins.
_HEAD_AT = len(_ENCODED_PROPERTY)
_IDS_AT = _HEAD_AT + len(_USUAL_HEAD)
_USUAL_BYTES = _HEAD_AT + 1 + _USUAL_LENGTH
_FLAG_AT = _USUAL_BYTES - 1
_USUAL_START = tuple(bytes([byte]) for byte in _ENCODED_PROPERTY + _USUAL_HEAD)
_SAMPLED_SIGNS = "13579bdf"
_SAMPLED = frozenset(_SAMPLED_SIGNS)
_SAMPLED_FLAGS = _SAMPLED_SIGNS.encode()
# So many entries of one size are worth looking at by column.
_REGULAR_MIN = 16


@dataclass(frozen=True)
class FoundContexts:
    """What the messages of a frame carry."""

    texts: list[str] = field(default_factory=list)
    """Of `traceparent`, sampled ones, the first LINKS_MAX; parsed when they are asked for."""
    count: int = 0
    """Messages whose producers decided for a trace."""

    @property
    def sampled(self) -> Iterator[SpanContext]:
        """Creation contexts."""
        parsed = (extract({TRACEPARENT: text}) for text in self.texts)
        return (context for context in parsed if context is not None)

    @property
    def ids(self) -> Iterator[tuple[bytes, bytes]]:
        """(trace id, span id) of the same, without a context for each."""
        for text in self.texts:
            usual = _USUAL.fullmatch(text)
            if usual is not None:
                ids = unhexlify(usual[1]), unhexlify(usual[2])
                if any(ids[0]) and any(ids[1]):
                    yield ids
            elif (context := extract({TRACEPARENT: text})) is not None:
                yield context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")


def extract(properties: Mapping[str, str]) -> SpanContext | None:
    """The creation context that a message's properties carry; None: none or malformed."""
    if TRACEPARENT not in properties:
        return None
    usual = _USUAL.fullmatch(properties[TRACEPARENT])
    if usual is not None and TRACESTATE not in properties:
        flags = TraceFlags(int(usual[3], 16))
        context = SpanContext(int(usual[1], 16), int(usual[2], 16), True, flags)
    else:
        context = trace.get_current_span(_W3C.extract(properties, Context())).get_span_context()
    return context if context.is_valid else None


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


def is_sampled(text: str) -> bool:
    """Whether a `traceparent` decides for a trace."""
    if len(text) == _USUAL_LENGTH and text.startswith("00-"):
        return text[-1] in _SAMPLED
    context = extract({TRACEPARENT: text})
    return context is not None and context.trace_flags.sampled


def usual_ids(texts: Sequence[str]) -> tuple[bytes, bytes] | None:
    """(Trace ids, span ids), one after the other, of `traceparent`s.

    None: there are none, or one is not sampled, not valid, or not as we write it.
    """
    if set(map(len, texts)) != {_USUAL_LENGTH}:
        return None
    joined, count = "".join(texts), len(texts)
    for place, sign in _USUAL_SIGNS:
        if joined[place::_USUAL_LENGTH] != sign * count:
            return None
    if joined[_USUAL_LENGTH - 1 :: _USUAL_LENGTH].strip(_SAMPLED_SIGNS):
        return None
    trace_ids = "".join([text[3:35] for text in texts])
    span_ids = "".join([text[36:52] for text in texts])
    hexes = trace_ids + span_ids + joined[_USUAL_LENGTH - 2 :: _USUAL_LENGTH]
    if hexes.encode().translate(None, b"0123456789abcdef"):
        return None
    if _NO_TRACE in trace_ids or _NO_SPAN in span_ids:
        return None
    return unhexlify(trace_ids), unhexlify(span_ids)


def properties_of(context: SpanContext) -> dict[str, str]:
    """What a message carries of its send span: nothing unless that is sampled."""
    if not (context.is_valid and context.trace_flags.sampled):
        return {}
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    if not context.trace_state:
        return {TRACEPARENT: parent}
    return {TRACEPARENT: parent, TRACESTATE: context.trace_state.to_header()}


def baggage_to_carry() -> dict[str, str]:
    """The caller's baggage as a property (W3C Baggage, at most 8,192 bytes); empty: it has none."""
    carried: dict[str, str] = {}
    _W3C_BAGGAGE.inject(carried)
    return carried


def with_baggage(context: Context, properties: Mapping[str, str]) -> Context:
    """The context and the baggage that a message carries."""
    return _W3C_BAGGAGE.extract(properties, context) if BAGGAGE in properties else context
