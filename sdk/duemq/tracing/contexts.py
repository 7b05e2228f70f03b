"""Creation contexts: how a message carries its send span (W3C Trace Context), and baggage."""

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

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"

LINKS_MAX = 32
"""Creation contexts that one span names; OpenTelemetry's own default limit is 128."""

_W3C = TraceContextTextMapPropagator()
_W3C_BAGGAGE = W3CBaggagePropagator()
# What we write ourselves; everything else is the library's to read.
_USUAL = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
USUAL_LENGTH = 55
"""Of `traceparent`, as we write it."""
_USUAL_SIGNS = ((0, "0"), (1, "0"), (2, "-"), (35, "-"), (52, "-"))
# In ids that are none, and hardly ever in others.
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16

SAMPLED_SIGNS = "13579bdf"
"""Its last one says that it is sampled."""
_SAMPLED = frozenset(SAMPLED_SIGNS)


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


def is_sampled(text: str) -> bool:
    """Whether a `traceparent` decides for a trace."""
    if len(text) == USUAL_LENGTH and text.startswith("00-"):
        return text[-1] in _SAMPLED
    context = extract({TRACEPARENT: text})
    return context is not None and context.trace_flags.sampled


def usual_ids(texts: Sequence[str]) -> tuple[bytes, bytes] | None:
    """(Trace ids, span ids), one after the other, of `traceparent`s.

    None: there are none, or one is not sampled, not valid, or not as we write it.
    """
    if set(map(len, texts)) != {USUAL_LENGTH}:
        return None
    joined, count = "".join(texts), len(texts)
    for place, sign in _USUAL_SIGNS:
        if joined[place::USUAL_LENGTH] != sign * count:
            return None
    if joined[USUAL_LENGTH - 1 :: USUAL_LENGTH].strip(SAMPLED_SIGNS):
        return None
    trace_ids = "".join([text[3:35] for text in texts])
    span_ids = "".join([text[36:52] for text in texts])
    hexes = trace_ids + span_ids + joined[USUAL_LENGTH - 2 :: USUAL_LENGTH]
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
