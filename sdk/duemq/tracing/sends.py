"""Send spans of a producer's batch: begun when its messages are, ended when it is answered.

Where all spans of the process go to our own exporter and to nobody else (`spans.light_sink`), a
span is a tuple until it is exported: one of OpenTelemetry's would cost more than the message.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Iterable, Mapping, Sequence
from random import getrandbits, randbytes
from time import time_ns
from typing import NamedTuple, Protocol, TypeAlias

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, SpanKind
from opentelemetry.util.types import AttributeValue

from duemq.protocol.record_bytes import property_entry
from duemq.tracing import spans
from duemq.tracing.contexts import TRACEPARENT, Found, extract

UNSAMPLED = INVALID_SPAN_CONTEXT
"""The parent of what gets no trace."""

# {"traceparent": "00-…"} with the length of the usual text, as an entry of Record.properties.
_HEAD = b"\x32\x46\x0a\x0btraceparent\x12\x3700-"


class Light(NamedTuple):
    """A send span that only we know of."""

    trace_id: bytes
    span_id: bytes
    start_ns: int
    body_bytes: int
    key: str | None
    tag: str | None
    parent: SpanContext | None

    @property
    def encoded(self) -> bytes:
        """What the message's record is to carry."""
        return b"%b%b-%b-01" % (_HEAD, hexlify(self.trace_id), hexlify(self.span_id))


Begun: TypeAlias = "Light | spans.SendSpan"


class Answered(Protocol):
    """A batch whose outcome is known (producing/batch.py)."""

    topic: str
    broker: str
    queue_id: int
    base_offset: int
    due_ms: bytes

    @property
    def error(self) -> BaseException | None:
        """Why it was not stored."""

    def message_id(self, index: int) -> str:
        """Of a message."""

    def due_ms_of(self, index: int) -> int:
        """Of a message, unless `due_ms` is empty."""


class SendFrame(NamedTuple):
    """The light spans of a batch."""

    batch: Answered
    begun: Sequence[tuple[int, Light]]
    """(index of the message, its span)."""
    end_ns: int


class Sink(Protocol):
    """Who exports light spans."""

    @property
    def alone(self) -> bool:
        """Nobody else looks at spans of the process."""

    def put(self, frame: SendFrame) -> None:
        """Takes those of a batch over, or counts them as dropped."""

    def record(
        self,
        name: str,
        kind: SpanKind,
        attributes: dict[str, AttributeValue],
        parent: SpanContext,
        found: Found,
        start_ns: int,
        end_ns: int,
        error: BaseException | None,
    ) -> None:
        """Takes a finished one over that is linked to `found`, or counts it as dropped."""


def parent_of(properties: Mapping[str, str] | None) -> SpanContext | None:
    """The span that decides: the one that the message carries, or the caller's.

    None: there is none, the sampler draws.  UNSAMPLED: no trace.
    """
    creation = extract(properties) if properties else None
    if creation is not None:
        return creation if creation.trace_flags.sampled else UNSAMPLED
    caller = trace.get_current_span().get_span_context()
    if not caller.is_valid:
        return None
    return UNSAMPLED if spans.head.known and not spans.head.follows(caller) else caller


def begin(
    topic: str,
    body_bytes: int,
    key: str | None = None,
    tag: str | None = None,
    properties: Mapping[str, str] | None = None,
    parent: SpanContext | None = None,
) -> tuple[Begun, bytes] | None:
    """Begins a message's send span; with it, what its record is to carry.

    The decision was made, by `parent_of` or by the sampler's `gap`, unless the sampler is not
    known: None if that refuses.
    """
    span = spans.start_send(
        topic,
        key=key,
        tag=tag,
        body_bytes=body_bytes,
        properties=properties,
        chosen=parent is None,
    )
    if span is None:
        return None
    texts = ((name.encode(), value.encode()) for name, value in span.properties.items())
    return span, b"".join(property_entry(name, value) for name, value in texts)


def begin_light(
    messages: Iterable[tuple[int, int]],
    key: str | None,
    tag: str | None,
    properties: Mapping[str, str] | None,
    parent: SpanContext | None,
) -> list[tuple[int, Begun, bytes]] | None:
    """As `begin`, of a frame's messages (index, bytes of the body); None: spans cannot be light."""
    carries = TRACEPARENT in (properties or ()) or (parent is not None and parent.trace_state)
    if carries or spans.light_sink() is None:
        return None
    low_bits, start_ns = spans.head.low_bits, time_ns()
    begun: list[tuple[int, Begun, bytes]] = []
    for index, body_bytes in messages:
        trace_id = parent.trace_id if parent else getrandbits(64) << 64 | low_bits()
        ids = trace_id.to_bytes(16, "big"), randbytes(8)
        light = Light(*ids, start_ns, body_bytes, key, tag, parent)
        begun.append((index, light, light.encoded))
    return begun


def end(batch: Answered, begun: Sequence[tuple[int, Begun]], server: str = "") -> None:
    """The batch was answered, or given up.  `server`: the address of the broker that has it."""
    light: list[tuple[int, Light]] = []
    for index, span in begun:
        if isinstance(span, Light):
            light.append((index, span))
        elif batch.error is not None:
            span.failed(batch.error, message_id=batch.message_id(index))
        else:
            span.stored(
                batch.broker,
                batch.queue_id,
                batch.base_offset + index,
                message_id=batch.message_id(index),
                due_ms=batch.due_ms_of(index) if batch.due_ms else 0,
                server=server,
            )
    sink = spans.sink()
    if light and sink is not None:
        sink.put(SendFrame(batch, light, time_ns()))
