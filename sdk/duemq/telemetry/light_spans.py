"""Light spans (`duemq.tracing.sends`) on their way out: columns, or OpenTelemetry's when asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from random import getrandbits
from typing import Any, overload

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from duemq.tracing import attributes as attribute
from duemq.tracing import spans as tracing
from duemq.tracing.contexts import Found
from duemq.tracing.sends import Light, SendFrame

_SCOPE = InstrumentationScope(*tracing.scope())
_UNSET = Status(StatusCode.UNSET)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class LightSpan(ReadableSpan):
    """A finished span.  What it is linked to is a list of texts until somebody looks."""

    def __init__(
        self,
        name: str,
        kind: SpanKind,
        attributes: dict[str, AttributeValue],
        parent: SpanContext,
        found: Found,
        start_ns: int,
        end_ns: int,
        error: BaseException | None,
        resource: Resource,
    ) -> None:
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
        self._found = found

    @property
    def links(self) -> Sequence[Link]:
        """The creation contexts of its messages."""
        return [Link(context) for context in self._found.sampled]


@dataclass(slots=True)
class SendRows(Sequence[ReadableSpan]):
    """Spans by column; as a sequence, OpenTelemetry's, made when they are asked for."""

    resource: Resource
    lights: list[Light]
    topics: list[str]
    message_ids: list[str]
    brokers: list[str]
    queues: list[int]
    offsets: list[int]
    due_ms: list[int]
    end_ns: list[int]
    errors: list[BaseException | None]

    @classmethod
    def of(cls, frames: Iterable[SendFrame], resource: Resource) -> SendRows:
        """The spans of frames, in their order."""
        rows = cls(resource, [], [], [], [], [], [], [], [], [])
        for batch, begun, end_ns in frames:
            count = len(begun)
            stored = batch.error is None
            rows.lights += [light for _, light in begun]
            rows.topics += [batch.topic] * count
            rows.message_ids += [batch.message_id(index) for index, _ in begun]
            rows.brokers += [batch.broker if stored else ""] * count
            rows.queues += [batch.queue_id if stored else -1] * count
            rows.offsets += [batch.base_offset + index if stored else 0 for index, _ in begun]
            due_ms = batch.due_ms if stored else b""
            rows.due_ms += [batch.due_ms_of(index) if due_ms else 0 for index, _ in begun]
            rows.end_ns += [end_ns] * count
            rows.errors += [batch.error] * count
        return rows

    def __len__(self) -> int:
        return len(self.lights)

    @overload
    def __getitem__(self, index: int) -> ReadableSpan: ...
    @overload
    def __getitem__(self, index: slice) -> SendRows: ...
    def __getitem__(self, index: int | slice) -> ReadableSpan | SendRows:
        columns = [getattr(self, each.name) for each in fields(self)[1:]]
        if isinstance(index, slice):
            return SendRows(self.resource, *(column[index] for column in columns))
        return self._span(*(column[index] for column in columns))

    def __iter__(self) -> Iterator[ReadableSpan]:
        return map(self.__getitem__, range(len(self)))

    def _span(
        self,
        light: Light,
        topic: str,
        message_id: str,
        broker: str,
        queue: int,
        offset: int,
        due_ms: int,
        end_ns: int,
        error: BaseException | None,
    ) -> ReadableSpan:
        attributes: dict[str, Any] = attribute.attributes_of("send", topic)
        attributes[attribute.BODY_BYTES] = light.body_bytes
        attributes |= attribute.filled(
            {
                attribute.MESSAGE_ID: message_id,
                attribute.KEY: light.key,
                attribute.TAG: light.tag,
            }
        )
        status = _UNSET
        if error is None:
            attributes |= {attribute.QUEUE: str(queue), attribute.QUEUE_OFFSET: offset}
            attributes |= attribute.filled({attribute.BROKER: broker, attribute.DUE_MS: due_ms})
        else:
            attributes[attribute.ERROR_TYPE], status = attribute.failure(error)
        return ReadableSpan(
            f"send {topic}",
            SpanContext(
                int.from_bytes(light.trace_id, "big"),
                int.from_bytes(light.span_id, "big"),
                False,
                _SAMPLED,
            ),
            light.parent,
            self.resource,
            attributes,
            kind=SpanKind.PRODUCER,
            status=status,
            start_time=light.start_ns,
            end_time=max(end_ns, light.start_ns),
            instrumentation_scope=_SCOPE,
        )
