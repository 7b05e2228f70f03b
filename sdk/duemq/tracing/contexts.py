"""Creation contexts: how a message carries its send span (W3C Trace Context).

Brokers and timer shards do not decode records: `contexts_in` finds the encoded property by a byte
search.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from opentelemetry.trace import SpanContext, TraceFlags, TraceState

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

LINKS_MAX = 32
"""Creation contexts that one span names; OpenTelemetry's own default limit is 128."""

SEARCHED_MAX = 512
"""Creation contexts looked at in a frame to find sampled ones."""

_TRACEPARENT_PATTERN = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_TRACEPARENT_LENGTH = 55

# How a map entry {"traceparent": <55 characters>} of Record.properties starts on the wire.
_ENCODED_PROPERTY = b"\x0a\x0btraceparent\x12" + bytes([_TRACEPARENT_LENGTH])


def extract(properties: Mapping[str, str]) -> SpanContext | None:
    """The creation context that a message's properties carry; None: none or malformed."""
    context = _parse(properties.get(TRACEPARENT, ""))
    state = properties.get(TRACESTATE)
    if context is None or not state:
        return context
    return SpanContext(
        context.trace_id,
        context.span_id,
        is_remote=True,
        trace_flags=context.trace_flags,
        trace_state=TraceState.from_header([state]),
    )


def contexts_in(
    records: bytes | memoryview, *, start: int = 0, end: int | None = None, limit: int = LINKS_MAX
) -> list[SpanContext] | None:
    """Sampled creation contexts in encoded records, found without decoding them.

    None: the records carry contexts, and none of those looked at is sampled.  A body that
    happens to hold the same bytes yields a link too many and does no other harm.
    """
    records = bytes(records)  # bytes.find is what makes this cheap; no copy if it is bytes.
    found: list[SpanContext] = []
    seen = 0
    past = len(records) if end is None else end
    at = records.find(_ENCODED_PROPERTY, start, past)
    while at >= 0 and seen < SEARCHED_MAX and len(found) < limit:
        value = at + len(_ENCODED_PROPERTY)
        at = value + _TRACEPARENT_LENGTH
        context = _parse(records[value:at].decode("ascii", "replace"))
        if context is not None:
            seen += 1
            if context.trace_flags.sampled:
                found.append(context)
        at = records.find(_ENCODED_PROPERTY, at, past)
    return found if found or not seen else None


def _parse(traceparent: str) -> SpanContext | None:
    match = _TRACEPARENT_PATTERN.fullmatch(traceparent)
    if match is None:
        return None
    context = SpanContext(
        int(match[1], 16),
        int(match[2], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match[3], 16)),
    )
    return context if context.is_valid else None


def properties_of(context: SpanContext) -> dict[str, str]:
    """What a message carries of its send span."""
    if not context.is_valid:
        return {}
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    if not context.trace_state:
        return {TRACEPARENT: parent}
    return {TRACEPARENT: parent, TRACESTATE: context.trace_state.to_header()}
