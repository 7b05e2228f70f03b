"""Which spans are of one message, out of the batches of the trace topic.  Pure.

Only the spans of its sending and of callbacks have the message's id.  Those of frames (store,
schedule, fire, receive, settle) have its creation context as their parent or among their links,
of which a span has up to 32.  So batches are looked through twice: for the id, which says what the
contexts are, then for those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from duemq.errors import Corrupt
from duemq.v1.trace_pb2 import SpanBatch
from duemq_analytics.source import schema, spans
from duemq_analytics.source.plan import QueueRange

SPANS_MAX = 10_000
"""Of one message."""

Span = Mapping[str, Any]
"""A row of schema.SPANS."""
Context = tuple[str, str]
"""(trace id, span id), in hexadecimal."""


@dataclass
class MessageSpans:
    """Gathers the spans of the message `message_id`."""

    message_id: str
    found: list[Span] = field(default_factory=list)
    contexts: set[Context] = field(default_factory=set)
    """That its frames' spans name."""
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

    def look_for_frames(self, body: bytes, broker: str, queue: int, offset: int) -> None:
        """The second look, after all of the first."""
        if not any(bytes.fromhex(trace_id) in body for trace_id, _ in self.contexts):
            return
        for row in self._rows(body, broker, queue, offset):
            if row["message_id"] is None and not self.contexts.isdisjoint(named(row)):
                self._add(row)

    def in_order(self) -> list[Span]:
        """By their starts."""
        return sorted(self.found, key=lambda row: (row["start_ns"], -row["duration_ns"]))

    def _add(self, row: Span) -> None:
        if len(self.found) < SPANS_MAX:
            self.found.append(row)

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
        return {(row["trace_id"], row["span_id"])}
    return named(row)


def named(row: Span) -> set[Context]:
    """A span's parent and links."""
    named = {(link["trace_id"], link["span_id"]) for link in row["links"] or ()}
    if row["parent_span_id"] is not None:
        named.add((row["trace_id"], row["parent_span_id"]))
    return named
