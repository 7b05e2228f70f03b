"""Creation contexts: how a message carries its send span (W3C Trace Context), and baggage.

Brokers and timer shards do not decode records: `contexts_in` finds the encoded property by a byte
search.  Only what is sampled carries one, so that most frames need no more than that search.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

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

# How a map entry {"traceparent": <text>} of Record.properties starts on the wire; the text's length
# (one byte) and the text follow.
_ENCODED_PROPERTY = b"\x0a\x0btraceparent\x12"
_SAMPLED = frozenset("13579bdf")


@dataclass(frozen=True)
class Found:
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
    records: bytes | memoryview, *, start: int = 0, end: int | None = None, limit: int = LINKS_MAX
) -> Found:
    """The sampled creation contexts in encoded records, found without decoding them.

    A body that happens to hold the same bytes counts too and does no other harm.
    """
    searched = records if isinstance(records, bytes) else bytes(records)
    past = len(searched) if end is None else end
    found: list[str] = []
    # From the end: the interpreter's search backwards is the quicker one.
    at = searched.rfind(_ENCODED_PROPERTY, start, past)
    while at >= 0:
        text_at = at + len(_ENCODED_PROPERTY) + 1
        if text_at <= past:
            text_end = min(past, text_at + searched[text_at - 1])
            text = searched[text_at:text_end].decode("ascii", "replace")
            if is_sampled(text):
                found.append(text)
        at = searched.rfind(_ENCODED_PROPERTY, start, at)
    return Found(found[: -limit - 1 : -1], len(found))


def is_sampled(text: str) -> bool:
    """Whether a `traceparent` decides for a trace."""
    if len(text) == _USUAL_LENGTH and text.startswith("00-"):
        return text[-1] in _SAMPLED
    context = extract({TRACEPARENT: text})
    return context is not None and context.trace_flags.sampled


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
