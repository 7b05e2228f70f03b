"""Send spans of a producer's batch: begun when its messages are, ended when it is answered.

Where all spans of the process go to our own exporter and to nobody else (`spans.light_sink`), the
spans of messages next to each other are one tuple until they are exported: one of OpenTelemetry's
would cost more than the message.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import getrandbits, randbytes
from struct import Struct
from time import time_ns
from typing import NamedTuple, Protocol, Self, TypeAlias

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, SpanKind
from opentelemetry.util.types import AttributeValue

from duemq.protocol.record_bytes import property_entry
from duemq.tracing import spans
from duemq.tracing.contexts import TRACEPARENT, Found, extract
from duemq.tracing.sampling import SPAN_ID_BYTES, TRACE_ID_BYTES

UNSAMPLED = INVALID_SPAN_CONTEXT
"""The parent of what gets no trace."""

# {"traceparent": "00-…"} with the length of the usual text, as an entry of Record.properties.
_ENTRY = b"\x32\x46\x0a\x0btraceparent\x12\x3700-%b-%b-01"
_ENTRY_BYTES = len(_ENTRY % (bytes(2 * TRACE_ID_BYTES), bytes(2 * SPAN_ID_BYTES)))
_LENGTHS_KEPT = 64


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
        return _ENTRY % (hexlify(self.trace_id), hexlify(self.span_id))


class Lights(NamedTuple):
    """Such spans of a batch's messages, by column: an entry a message in each."""

    indexes: Sequence[int]
    trace_ids: bytes
    span_ids: bytes
    starts_ns: Sequence[int]
    body_bytes: Sequence[int]
    keys: Sequence[str | None]
    tags: Sequence[str | None]
    parents: Sequence[SpanContext | None]

    @classmethod
    def of(cls, each_one: Sequence[tuple[int, Light]]) -> Lights:
        """Of these messages: (index, span)."""
        indexes, lights = zip(*each_one, strict=True)
        trace_ids, span_ids, *rest = zip(*lights, strict=True)
        return cls(indexes, b"".join(trace_ids), b"".join(span_ids), *rest)

    @property
    def encoded(self) -> Sequence[bytes]:
        """What each message's record is to carry."""
        # A few calls for all of them, not one for each.
        count = len(self.indexes)
        ids = [b""] * (2 * count)
        ids[0::2] = _pieces(2 * TRACE_ID_BYTES, count).unpack(hexlify(self.trace_ids))
        ids[1::2] = _pieces(2 * SPAN_ID_BYTES, count).unpack(hexlify(self.span_ids))
        return _pieces(_ENTRY_BYTES, count).unpack(_ENTRY * count % tuple(ids))

    def part(self, first: int, past: int) -> Lights:
        """Some of them."""
        return Lights(
            self.indexes[first:past],
            self.trace_ids[TRACE_ID_BYTES * first : TRACE_ID_BYTES * past],
            self.span_ids[SPAN_ID_BYTES * first : SPAN_ID_BYTES * past],
            self.starts_ns[first:past],
            self.body_bytes[first:past],
            self.keys[first:past],
            self.tags[first:past],
            self.parents[first:past],
        )


@lru_cache(_LENGTHS_KEPT)
def _pieces(size: int, count: int) -> Struct:
    """Cuts bytes into so many of that size."""
    return Struct(f"{size}s" * count)


Begun: TypeAlias = "Light | Lights | spans.SendSpan"


class Answered(Protocol):
    """A batch whose outcome is known (producing/batch.py)."""

    topic: str
    id_head: bytes
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
    """Light spans of a batch."""

    batch: Answered
    lights: Lights
    end_ns: int

    @property
    def rows(self) -> int:
        """How many they are."""
        return len(self.lights.indexes)

    def part(self, first: int, past: int) -> SendFrame:
        """Some of them."""
        return self._replace(lights=self.lights.part(first, past))


class LightFrame(Protocol):
    """Light spans by column: SendFrame, or process_frames.ProcessFrame."""

    @property
    def rows(self) -> int:
        """How many they are."""

    def part(self, first: int, past: int) -> Self:
        """Some of them."""


class Sink(Protocol):
    """Who exports light spans."""

    @property
    def alone(self) -> bool:
        """Nobody else looks at spans of the process."""

    def put(self, frame: LightFrame) -> None:
        """Takes them over, or counts them as dropped."""

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


def may_be_light(properties: Mapping[str, str] | None, parent: SpanContext | None) -> bool:
    """Whether the spans of messages with these properties are ours alone to make."""
    carries = TRACEPARENT in (properties or ()) or (parent is not None and parent.trace_state)
    return not carries and spans.light_sink() is not None


def begin_light(
    body_bytes: int,
    key: str | None,
    tag: str | None,
    parent: SpanContext | None,
) -> Light:
    """As `begin`, where spans `may_be_light`."""
    trace_id = parent.trace_id if parent else getrandbits(64) << 64 | spans.head.low_bits()
    ids = trace_id.to_bytes(TRACE_ID_BYTES, "big"), randbytes(SPAN_ID_BYTES)
    return Light(*ids, time_ns(), body_bytes, key, tag, parent)


def begin_lights(
    indexes: range,
    body_bytes: Sequence[int],
    key: str | None,
    tag: str | None,
    parent: SpanContext | None,
) -> Lights:
    """The same for messages next to each other that share the rest."""
    count = len(indexes)
    if parent is None:
        trace_ids = spans.head.trace_ids(count)
    else:
        trace_ids = parent.trace_id.to_bytes(TRACE_ID_BYTES, "big") * count
    return Lights(
        indexes,
        trace_ids,
        randbytes(SPAN_ID_BYTES * count),
        [time_ns()] * count,
        body_bytes,
        [key] * count,
        [tag] * count,
        [parent] * count,
    )


def end(batch: Answered, begun: Sequence[tuple[int, Begun]], server: str = "") -> None:
    """The batch was answered, or given up.  `server`: the address of the broker that has it."""
    frames: list[Lights] = []
    each_one: list[tuple[int, Light]] = []
    for index, span in begun:
        if isinstance(span, Light):
            each_one.append((index, span))
        elif isinstance(span, Lights):
            frames.append(span)
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
    if each_one:
        frames.append(Lights.of(each_one))
    sink = spans.sink()
    if sink is not None:
        for lights in frames:
            sink.put(SendFrame(batch, lights, time_ns()))
