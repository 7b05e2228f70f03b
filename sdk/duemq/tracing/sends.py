"""Send spans of a producer's batch: begun when its messages are, ended when it is answered.

Where all spans of the process go to our own exporter and to nobody else (`spans.light_sink`), the
spans of messages next to each other are one tuple until they are exported.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from random import randbytes
from struct import Struct
from time import time_ns
from typing import NamedTuple, Protocol, Self, TypeAlias

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext

from duemq.protocol.record_bytes import property_entry
from duemq.tracing import spans
from duemq.tracing.contexts import TRACEPARENT, extract
from duemq.tracing.sampling import SPAN_ID_BYTES, TRACE_ID_BYTES

UNSAMPLED = INVALID_SPAN_CONTEXT
"""The parent of what gets no trace."""

# {"traceparent": "00-…"} with the length of the usual text, as an entry of Record.properties.
_ENTRY = b"\x32\x46\x0a\x0btraceparent\x12\x3700-%b-%b-01"
ENTRY_BYTES = len(_ENTRY % (bytes(2 * TRACE_ID_BYTES), bytes(2 * SPAN_ID_BYTES)))
_LENGTHS_KEPT = 64


class Lights(NamedTuple):
    """Spans of a batch's messages that only we know of, by column: an entry a message in each."""

    indexes: Sequence[int]
    trace_ids: bytes
    span_ids: bytes
    starts_ns: Sequence[int]
    body_bytes: Sequence[int]
    keys: Sequence[str | None]
    tags: Sequence[str | None]
    parents: Sequence[SpanContext | None]

    @property
    def encoded(self) -> Sequence[bytes]:
        """What each message's record is to carry."""
        return _entries(self.trace_ids, self.span_ids, len(self.indexes))

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


class SpanRun:
    """Light spans of a batch's messages that come one by one, drawn when all are there."""

    def __init__(self) -> None:
        self._begun: list[tuple[int, int, int, str | None, str | None, SpanContext | None]] = []
        self._lights: Lights | None = None

    def begin(
        self,
        index: int,
        body_bytes: int,
        key: str | None,
        tag: str | None,
        parent: SpanContext | None,
    ) -> None:
        """Of the message at `index`."""
        self._begun.append((index, time_ns(), body_bytes, key, tag, parent))

    def lights(self) -> Lights:
        """Of all; no further one may begin."""
        if self._lights is None:
            indexes, starts_ns, sizes, keys, tags, parents = zip(*self._begun, strict=True)
            ids = bytearray(spans.head.trace_ids(len(indexes)))
            for at, parent in enumerate(parents) if any(parents) else ():
                if parent is not None:
                    own = parent.trace_id.to_bytes(TRACE_ID_BYTES, "big")
                    ids[TRACE_ID_BYTES * at : TRACE_ID_BYTES * (at + 1)] = own
            span_ids = randbytes(SPAN_ID_BYTES * len(indexes))
            drawn = bytes(ids), span_ids, starts_ns
            self._lights = Lights(indexes, *drawn, sizes, keys, tags, parents)
        return self._lights

    def carried(self) -> Iterator[tuple[int, Sequence[bytes]]]:
        """What the records of messages next to each other are to carry, by index of the first."""
        lights = self.lights()
        indexes, encoded, first = lights.indexes, lights.encoded, 0
        for past in range(1, len(indexes) + 1):
            if past == len(indexes) or indexes[past] != indexes[past - 1] + 1:
                yield indexes[first], encoded[first:past]
                first = past


def _entries(trace_ids: bytes, span_ids: bytes, count: int) -> Sequence[bytes]:
    """What the records of messages with these spans carry."""
    # A few calls for all of them, not one for each.
    ids = [b""] * (2 * count)
    ids[0::2] = _pieces(2 * TRACE_ID_BYTES, count).unpack(hexlify(trace_ids))
    ids[1::2] = _pieces(2 * SPAN_ID_BYTES, count).unpack(hexlify(span_ids))
    return _pieces(ENTRY_BYTES, count).unpack(_ENTRY * count % tuple(ids))


@lru_cache(_LENGTHS_KEPT)
def _pieces(size: int, count: int) -> Struct:
    """Cuts bytes into so many of that size."""
    return Struct(f"{size}s" * count)


Begun: TypeAlias = "Lights | SpanRun | spans.SendSpan"


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
    """Light spans by column: SendFrame, or processing.ProcessFrame."""

    @property
    def rows(self) -> int:
        """How many they are."""

    def part(self, first: int, past: int) -> Self:
        """Some of them."""


class SpanSink(Protocol):
    """Who exports light spans."""

    @property
    def alone(self) -> bool:
        """Nobody else looks at spans of the process."""

    def put(self, frame: LightFrame) -> None:
        """Takes them over, or counts them as dropped."""

    def record(self, span: spans.Finished) -> None:
        """Takes it over, or counts it as dropped."""


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
) -> tuple[Begun, Sequence[bytes]] | None:
    """Begins a message's send span; with it, what its record is to carry, if anything.

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
    encoded = b"".join(property_entry(name, value) for name, value in texts)
    return span, (encoded,) if encoded else ()


def may_be_light(properties: Mapping[str, str] | None, parent: SpanContext | None) -> bool:
    """Whether the spans of messages with these properties are ours alone to make."""
    carries = TRACEPARENT in (properties or ()) or (parent is not None and parent.trace_state)
    return not carries and spans.light_sink() is not None


def begin_lights(
    indexes: range,
    body_bytes: Sequence[int],
    key: str | None,
    tag: str | None,
    parent: SpanContext | None,
) -> Lights:
    """Of messages next to each other that share the rest, where spans `may_be_light`."""
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


def one_by_one(begun: Iterable[tuple[int, Begun]]) -> Iterator[tuple[int, Begun]]:
    """The same, each of one message: where some of a batch failed and others did not."""
    for index, span in begun:
        lights = span.lights() if isinstance(span, SpanRun) else span
        if isinstance(lights, Lights):
            yield from ((each, lights.part(at, at + 1)) for at, each in enumerate(lights.indexes))
        else:
            yield index, span


def end(batch: Answered, begun: Sequence[tuple[int, Begun]], server: str = "") -> None:
    """The batch was answered, or given up.  `server`: the address of the broker that has it."""
    frames: list[Lights] = []
    for index, span in begun:
        if isinstance(span, Lights):
            frames.append(span)
        elif isinstance(span, SpanRun):
            frames.append(span.lights())
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
    if sink is not None:
        for lights in frames:
            sink.put(SendFrame(batch, lights, time_ns()))
