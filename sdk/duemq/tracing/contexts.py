"""Creation contexts: how a message carries its send span (W3C Trace Context).

Brokers and timer shards do not decode records: `contexts_in` finds the encoded property by a byte
search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

LINKS_MAX = 32
"""Creation contexts that one span names; OpenTelemetry's own default limit is 128."""

_W3C = TraceContextTextMapPropagator()

# How a map entry {"traceparent": <text>} of Record.properties starts on the wire; the text's length
# (one byte) and the text follow.
_ENCODED_PROPERTY = b"\x0a\x0btraceparent\x12"

# Places in a text that the length's byte is in front of.  Every version has the flags there, unless
# there is white space in front.
_DASH, _FLAGS_END = 3, 55
_SAMPLED = frozenset(b"13579bdf")
_REFUSED = frozenset(b"02468ace")


@dataclass(frozen=True)
class Found:
    """What the messages of a frame carry."""

    sampled: list[SpanContext] = field(default_factory=list)
    """Creation contexts, the first LINKS_MAX."""
    refused: int = 0
    """Messages whose producers decided against a trace."""


def extract(properties: Mapping[str, str]) -> SpanContext | None:
    """The creation context that a message's properties carry; None: none or malformed."""
    if TRACEPARENT not in properties:
        return None
    context = trace.get_current_span(_W3C.extract(properties, Context())).get_span_context()
    return context if context.is_valid else None


def contexts_in(
    records: bytes | memoryview, *, start: int = 0, end: int | None = None, limit: int = LINKS_MAX
) -> Found:
    """The creation contexts in encoded records, found without decoding them.

    A body that happens to hold the same bytes counts too and does no other harm.
    """
    searched = bytes(records)[start:end]  # no copy if it is bytes and whole
    texts = searched.split(_ENCODED_PROPERTY)[1:]
    # What this costs a message is one step of this comprehension.
    flags = bytes(
        [
            text[_FLAGS_END] if len(text) > _FLAGS_END and text[_DASH] == 0x2D else _flags(text)
            for text in texts
        ]
    )
    marked = (text for text, flag in zip(texts, flags, strict=True) if flag in _SAMPLED)
    parsed = (extract({TRACEPARENT: _text(text)}) for text in islice(marked, limit))
    sampled = [context for context in parsed if context is not None]
    return Found(sampled, sum(map(flags.count, _REFUSED)))


def _flags(encoded: bytes) -> int:
    """As found in an unusual text; 0: none."""
    context = extract({TRACEPARENT: _text(encoded)})
    return 0 if context is None else b"01"[context.trace_flags.sampled]


def _text(encoded: bytes) -> str:
    """A text that its length's byte is in front of."""
    return encoded[1 : 1 + encoded[0]].decode("ascii", "replace") if encoded else ""


def properties_of(context: SpanContext) -> dict[str, str]:
    """What a message carries of its send span."""
    if not context.is_valid:
        return {}
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    if not context.trace_state:
        return {TRACEPARENT: parent}
    return {TRACEPARENT: parent, TRACESTATE: context.trace_state.to_header()}
