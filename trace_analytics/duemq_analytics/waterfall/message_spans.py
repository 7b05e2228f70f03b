"""Which spans are of one message, out of the batches of the trace topic.  Pure.

Only the spans of its sending and of callbacks have the message's id.  Those of frames (store,
schedule, fire, receive) have its creation context as their parent or among their links, of which
a span has up to 32, or cover the place where it lay.  So batches are looked through twice: for the
id, which says what the contexts and places are, then for those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import repeat

from google.protobuf.message import DecodeError

from duemq.errors import Corrupt
from duemq.tracing.attributes import LAST_OFFSET
from duemq.v1.trace_pb2 import SpanBatch
from duemq_analytics.source import schema, spans
from duemq_analytics.source.plan import QueueRange
from duemq_analytics.waterfall.places import (
    PLACES_MAX,
    Context,
    Place,
    Places,
    Span,
    covers,
    named,
    places_of,
    whole,
)

SPANS_MAX = 10_000
"""Of one message."""


@dataclass
class MessageSpans:
    """Gathers the spans of the message `message_id`."""

    message_id: str
    found: list[Span] = field(default_factory=list)
    contexts: set[Context] = field(default_factory=set)
    """That its frames' spans name."""
    places: dict[Place, set[str]] = field(default_factory=dict)
    """Where it lay; the first PLACES_MAX."""
    looked_at: int = 0
    """Spans, in the first look."""
    undecodable: set[tuple[str, int, int]] = field(default_factory=set)
    """Where messages lie that are no spans: broker, queue, offset."""

    def look_for_id(self, body: bytes, broker: str, queue: int, offset: int) -> None:
        """The first look at a message of the trace topic."""
        try:
            self.looked_at += SpanBatch.FromString(body).rows
        except DecodeError:
            self.undecodable.add((broker, queue, offset))
            return
        if self.message_id.encode() not in body:
            return
        for row in self._rows(body, broker, queue, offset):
            if row["message_id"] == self.message_id:
                self._add(row)
                self.contexts |= contexts(row)
                for place, groups in places_of([row]).items():
                    if place in self.places or len(self.places) < PLACES_MAX:
                        self.places.setdefault(place, set()).update(groups)

    def look_for_frames(self, body: bytes, broker: str, queue: int, offset: int) -> None:
        """The second look, after all of the first."""
        is_named = any(bytes.fromhex(trace_id) in body for trace_id, _ in self.contexts)
        if not (is_named or self._may_cover(body)):
            return
        for row in self._rows(body, broker, queue, offset):
            if row["message_id"] is None and is_of(row, self.contexts, self.places):
                self._add(row)

    def in_order(self) -> list[Span]:
        """By their starts."""
        return sorted(self.found, key=lambda row: (row["start_ns"], -row["duration_ns"]))

    def _add(self, row: Span) -> None:
        if len(self.found) < SPANS_MAX:
            self.found.append(row)

    def _may_cover(self, body: bytes) -> bool:
        """Whether a batch has frames with an offset of the message; quicker than its rows."""
        try:
            batch = SpanBatch.FromString(body)
        except DecodeError:
            return False
        if any(LAST_OFFSET in text for text in batch.attributes.values):
            return True
        # A column of zeros is left out.
        offsets = batch.queue_offset or repeat(0)
        frames = [
            range(first, first + count)
            for first, count in zip(offsets, batch.batch_count, strict=False)
            if count > 1
        ]
        return any(place.offset in frame for frame in frames for place in self.places)

    def _rows(self, body: bytes, broker: str, queue: int, offset: int) -> Iterable[Span]:
        place = QueueRange(broker, "", queue, offset, offset + 1)
        try:
            rows: list[Span] = spans.to_arrow(body, place, offset, schema.SPANS).to_pylist()
        except Corrupt:
            self.undecodable.add((broker, queue, offset))
            return []
        return rows


def contexts(row: Span) -> set[Context]:
    """What a span with the message's id says its creation context is."""
    if row["operation"] == "send" and row["kind"] == "PRODUCER":
        return whole({(row["trace_id"], row["span_id"])})
    return named(row)


def is_of(frame: Span, contexts: Collection[Context], places: Places) -> bool:
    """Whether a frame had the message with these contexts, which lay there."""
    return any(context in contexts for context in named(frame)) or covers(frame, places)
