"""Creation contexts: how a message carries its send span (W3C Trace Context).

Brokers and timer shards do not decode records: `contexts_in` finds the encoded property by a byte
search.  Only what is sampled carries one, so that most frames need no more than that search.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

LINKS_MAX = 32
"""Creation contexts that one span names; OpenTelemetry's own default limit is 128."""

_W3C = TraceContextTextMapPropagator()
# What we write ourselves; everything else is the library's to read.
_USUAL = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_USUAL_BYTES = 55

# How a map entry {"traceparent": <text>} of Record.properties starts on the wire; the text's length
# (one byte) and the text follow.
_ENCODED_PROPERTY = b"\x0a\x0btraceparent\x12"
_SAMPLED = frozenset(b"13579bdf")


@dataclass(frozen=True)
class Found:
    """What the messages of a frame carry."""

    sampled: list[SpanContext] = field(default_factory=list)
    """Creation contexts, the first LINKS_MAX."""
    count: int = 0
    """Messages whose producers decided for a trace."""


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
    sampled: list[SpanContext] = []
    count = 0
    at = searched.find(_ENCODED_PROPERTY, start, past)
    while at >= 0:
        at += len(_ENCODED_PROPERTY)
        text = searched[at + 1 : min(past, at + 1 + searched[at])] if at < past else b""
        if _is_usual(text):
            marked = text[-1] in _SAMPLED
            context = None
        else:
            context = extract({TRACEPARENT: text.decode("ascii", "replace")})
            marked = context is not None and context.trace_flags.sampled
        if marked:
            count += 1
            if len(sampled) < limit:
                context = context or extract({TRACEPARENT: text.decode("ascii", "replace")})
                if context is not None:
                    sampled.append(context)
        at = searched.find(_ENCODED_PROPERTY, at, past)
    return Found(sampled, count)


def _is_usual(text: bytes) -> bool:
    return len(text) == _USUAL_BYTES and text.startswith(b"00-")


def properties_of(context: SpanContext) -> dict[str, str]:
    """What a message carries of its send span: nothing unless that is sampled."""
    if not (context.is_valid and context.trace_flags.sampled):
        return {}
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    if not context.trace_state:
        return {TRACEPARENT: parent}
    return {TRACEPARENT: parent, TRACESTATE: context.trace_state.to_header()}
