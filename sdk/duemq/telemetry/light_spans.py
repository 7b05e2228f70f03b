"""Light spans (`duemq.tracing.sends`) on their way out: columns, or OpenTelemetry's when asked."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from random import getrandbits
from typing import Any, Generic, Self, TypeVar, overload

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from duemq.tracing import attributes as attribute
from duemq.tracing import spans as tracing
from duemq.tracing.process_frames import ProcessFrame
from duemq.tracing.sends import LightFrame, SendFrame

_SCOPE = InstrumentationScope(*tracing.scope())
_UNSET = Status(StatusCode.UNSET)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class LightSpan(ReadableSpan):
    """A finished span.  What it is linked to is a list of texts until somebody looks."""

    def __init__(self, span: tracing.Finished, resource: Resource) -> None:
        name, kind, attributes, parent, self._found, start_ns, end_ns, error = span
        status = _UNSET
        if error is not None:
            attributes[attribute.ERROR_TYPE], status = attribute.failure(error)
        super().__init__(
            name,
            SpanContext(parent.trace_id, getrandbits(63) + 1, False, _SAMPLED),
            parent,
            resource,
            attributes,
            kind=kind,
            status=status,
            start_time=start_ns,
            end_time=end_ns,
            instrumentation_scope=_SCOPE,
        )

    @property
    def links(self) -> Sequence[Link]:
        """The creation contexts of its messages."""
        return [Link(context) for context in self._found.sampled]

    @property
    def link_ids(self) -> Iterable[tuple[bytes, bytes]]:
        """(trace id, span id) of the same."""
        return self._found.ids


_Frame = TypeVar("_Frame", bound=LightFrame)


class LightRows(Sequence[ReadableSpan], Generic[_Frame]):
    """Spans of frames; as a sequence, OpenTelemetry's, made when they are asked for."""

    def __init__(self, frames: Sequence[_Frame], resource: Resource) -> None:
        """`resource`: whose spans they are."""
        self.frames = frames
        self.resource = resource
        self.counts = [frame.rows for frame in frames]
        """Of `frames`."""
        self._ends = list(accumulate(self.counts))

    @abstractmethod
    def span(self, frame: _Frame) -> ReadableSpan:
        """The only one of a frame."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> ReadableSpan: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> ReadableSpan | Self:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return type(self)(self._between(start, stop), self.resource)
        at = range(len(self))[index]
        return self.span(*self._between(at, at + 1))

    def __iter__(self) -> Iterator[ReadableSpan]:
        return map(self.__getitem__, range(len(self)))

    def _between(self, start: int, stop: int) -> list[_Frame]:
        at = bisect_right(self._ends, start)
        found: list[_Frame] = []
        while start < stop:
            frame, count = self.frames[at], self.counts[at]
            first = start - (self._ends[at] - count)
            past = min(count, first + stop - start)
            found.append(frame if past - first == count else frame.part(first, past))
            start += past - first
            at += 1
        return found


class SendRows(LightRows[SendFrame]):
    """Spans of sends."""

    def span(self, frame: SendFrame) -> ReadableSpan:
        """The only one of a frame."""
        batch, lights, end_ns = frame
        index, start_ns = lights.indexes[0], lights.starts_ns[0]
        attributes: dict[str, Any] = attribute.attributes_of("send", batch.topic)
        attributes[attribute.BODY_BYTES] = lights.body_bytes[0]
        attributes |= attribute.filled(
            {
                attribute.MESSAGE_ID: batch.message_id(index),
                attribute.KEY: lights.keys[0],
                attribute.TAG: lights.tags[0],
            }
        )
        status = _UNSET
        if batch.error is None:
            due_ms = batch.due_ms_of(index) if batch.due_ms else 0
            attributes[attribute.QUEUE] = str(batch.queue_id)
            attributes[attribute.QUEUE_OFFSET] = batch.base_offset + index
            attributes |= attribute.filled(
                {attribute.BROKER: batch.broker, attribute.DUE_MS: due_ms}
            )
        else:
            attributes[attribute.ERROR_TYPE], status = attribute.failure(batch.error)
        return ReadableSpan(
            f"send {batch.topic}",
            SpanContext(
                int.from_bytes(lights.trace_ids, "big"),
                int.from_bytes(lights.span_ids, "big"),
                False,
                _SAMPLED,
            ),
            lights.parents[0],
            self.resource,
            attributes,
            kind=SpanKind.PRODUCER,
            status=status,
            start_time=start_ns,
            end_time=max(end_ns, start_ns),
            instrumentation_scope=_SCOPE,
        )


class ProcessRows(LightRows[ProcessFrame]):
    """Spans of callbacks."""

    def span(self, frame: ProcessFrame) -> ReadableSpan:
        """The only one of a frame."""
        call, due_ms, failed = frame.call, frame.due_ms[0], frame.failures[0]
        attributes: dict[str, Any] = attribute.attributes_of("process", call.topic)
        attributes |= {
            attribute.QUEUE: str(call.queue),
            attribute.QUEUE_OFFSET: frame.offsets[0],
            attribute.BODY_BYTES: frame.body_bytes[0],
            attribute.ATTEMPT: frame.attempts[0],
        }
        attributes |= attribute.filled(
            {
                attribute.MESSAGE_ID: frame.message_ids[0],
                attribute.BROKER: call.broker,
                attribute.GROUP: call.group,
                attribute.CLIENT_ID: call.client_id,
                attribute.BROADCAST: isinstance(call.client_id, attribute.BroadcastId),
                attribute.KEY: frame.keys[0],
                attribute.TAG: frame.tags[0],
                attribute.DUE_MS: due_ms,
            }
        )
        if due_ms:
            attributes[attribute.LATENESS_MS] = call.start_ns // 1_000_000 - due_ms
        if failed is not None:
            attributes[attribute.ERROR_TYPE] = failed[0]
        trace_id = int.from_bytes(frame.trace_ids, "big")
        parent_id = int.from_bytes(frame.parent_ids, "big")
        parent = SpanContext(trace_id, parent_id, True, _SAMPLED)
        return ReadableSpan(
            f"process {call.topic}",
            SpanContext(trace_id, int.from_bytes(frame.span_ids, "big"), False, _SAMPLED),
            parent,
            self.resource,
            attributes,
            links=[Link(parent)],
            kind=SpanKind.CONSUMER,
            status=_UNSET if failed is None else failed[1],
            start_time=call.start_ns,
            end_time=call.end_ns,
            instrumentation_scope=_SCOPE,
        )


def rows_of(frame: LightFrame) -> type[LightRows[Any]]:
    """What frames of its kind are spans of."""
    return ProcessRows if isinstance(frame, ProcessFrame) else SendRows
