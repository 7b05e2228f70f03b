"""Process spans: the application's callback, a span a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import time_ns
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import attach, detach, get_current
from opentelemetry.trace import (
    INVALID_SPAN,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
)
from opentelemetry.util.types import AttributeValue

from duemq.message import records_of, traceparents
from duemq.tracing import guarded, spans
from duemq.tracing.attributes import (
    ATTEMPT,
    BODY_BYTES,
    DUE_MS,
    LATENESS_MS,
    attributes_of,
    of_message,
)
from duemq.tracing.contexts import (
    BAGGAGE,
    TRACEPARENT,
    is_sampled,
    usual_ids,
    with_baggage,
)
from duemq.tracing.process_frames import Call, ProcessFrame, frame_of
from duemq.tracing.sampling import SPAN_ID_BYTES

if TYPE_CHECKING:
    from duemq.message import Message

Blame = Callable[[BaseException, Sequence["Message"]], Mapping[int, BaseException]]
"""An error for each message that failed, by its place, when the callback raised."""


def _asked(name: str) -> Any:
    def asked(span: CurrentSpan, *given: Any, **named: Any) -> Any:
        return getattr(span.made(), name)(*given, **named)

    return asked


class CurrentSpan(Span):
    """Of a message with a sampled context: OpenTelemetry's once more is asked than who it is."""

    def __init__(
        self, message: Message, span_id: bytes, make: Callable[[Message, int], Span]
    ) -> None:
        """`span_id`: and whatever follows it."""
        self._message = message
        self._span_id = int.from_bytes(span_id[:SPAN_ID_BYTES], "big")
        self._make = make
        self._context: SpanContext | None = None

    def made(self) -> Span:
        """OpenTelemetry's; of two threads that ask at once, one's."""
        known = self.__dict__
        return known.get("made_") or known.setdefault(
            "made_", self._make(self._message, self._span_id)
        )

    def is_made(self) -> bool:
        """Whether anybody asked.  From now on nobody can."""
        return self.__dict__.setdefault("made_", INVALID_SPAN) is not INVALID_SPAN

    def get_span_context(self) -> SpanContext:
        """As of a child of the message's creation context."""
        if self._context is None:
            creation = spans.creation_of(self._message)
            assert creation is not None
            of_all = creation.trace_id, self._span_id, False, TraceFlags(TraceFlags.SAMPLED)
            self._context = SpanContext(*of_all, creation.trace_state)
        return self._context

    def is_recording(self) -> bool:
        """Until it ends."""
        made: Span | None = self.__dict__.get("made_")
        return made is None or made.is_recording()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)

    end = _asked("end")
    set_attributes = _asked("set_attributes")
    set_attribute = _asked("set_attribute")
    add_event = _asked("add_event")
    add_link = _asked("add_link")
    update_name = _asked("update_name")
    set_status = _asked("set_status")
    record_exception = _asked("record_exception")


def wanted(messages: Sequence[Message]) -> bool:
    """Whether any of these messages may have a process span.  Those of a pull are together."""
    if not messages or not spans.enabled():
        return False
    if not messages[0].came_with(messages[-1]):
        return any(message.may_be_traced for message in messages)
    if len(messages) > 1 or not messages[0].may_be_traced:
        return messages[0].may_be_traced
    (record,) = records_of(messages)
    return TRACEPARENT in record.properties or BAGGAGE in record.properties


@contextmanager
def process(
    messages: Sequence[Message],
    *,
    group: str = "",
    client_id: str = "",
    blame: Blame | None = None,
) -> Iterator[None]:
    """Spans the callback for these messages, one span a message; an exception fails them.

    `blame` says which of them; without it, all.  Each is a child of its message's creation context,
    so that end-to-end times stay exact for a batch callback too; the first sampled one is current
    while the callback runs.
    """
    places, frame = _chosen(messages) if wanted(messages) else ((), None)
    if not places:
        with _unsampled(messages):
            yield
        return
    started_ns = time_ns()
    begin = partial(_begin, group=group, client_id=client_id, started_ns=started_ns)
    first = messages[places[0]]
    # Of light ones the first alone: the callback may add to it.
    light = CurrentSpan(first, frame.span_ids, begin) if frame is not None else None
    begun = {places[0]: light} if light else {at: begin(messages[at]) for at in places}
    context = with_baggage(get_current(), first.properties)
    token = attach(trace.set_span_in_context(begun[places[0]], context))
    blamed: Mapping[int, BaseException] = {}
    try:
        yield
    except BaseException as error:
        blamed = blame(error, messages) if blame else dict.fromkeys(places, error)
        raise
    finally:
        detach(token)
        for index in begun.keys() & blamed.keys():
            spans.fail(begun[index], blamed[index])
        if frame is not None and light is not None and (sink := spans.sink()) is not None:
            own = light.is_made()  # otherwise its row says all of it
            origin = first.topic, first.broker, first.queue
            call = Call(*origin, group, client_id, started_ns, max(started_ns, time_ns()))
            ended = frame.ended(call, [blamed.get(index) for index in places] if blamed else ())
            if len(places) > own:
                sink.put(ended.part(1, len(places)) if own else ended)
            begun = begun if own else {}
        for span in begun.values():
            guarded.end(span)


def _chosen(messages: Sequence[Message]) -> tuple[Sequence[int], ProcessFrame | None]:
    """(Places of messages that get a span, these if they can be light)."""
    carried, first = traceparents(messages), messages[0]
    traced = [messages[index] for index in carried]
    alike = first.topic == first.stored_topic and all(map(first.lay_with, traced))
    if alike and spans.light_sink() is not None and spans.traced(first.topic):
        ids = usual_ids(list(carried.values()))
        if ids is not None and spans.head.follows_all(ids[0]):
            return list(carried), frame_of(traced, *ids)
    return list(_sampled(messages, carried)), None


def _sampled(messages: Sequence[Message], carried: Mapping[int, str]) -> dict[int, str]:
    """Of what messages carry, by place, that of sampled traces."""
    return {
        index: text
        for index, text in carried.items()
        if is_sampled(text) and spans.traced(messages[index].topic)
    }


@contextmanager
def _unsampled(messages: Sequence[Message]) -> Iterator[None]:
    """What is sent from the callback of a message that says "no trace" has none either.

    Its baggage goes on all the same.
    """
    context = get_current()
    if messages and messages[0].may_be_traced and spans.enabled():
        context = with_baggage(context, messages[0].properties)
        creation = spans.creation_of(messages[0])
        if creation is not None:
            context = trace.set_span_in_context(NonRecordingSpan(creation), context)
    token = attach(context)
    try:
        yield
    finally:
        detach(token)


def _begin(
    message: Message, span_id: int | None = None, *, group: str, client_id: str, started_ns: int
) -> Span:
    creation = spans.creation_of(message)
    creations = [] if creation is None else [creation]
    attributes = _process_attributes(message, group, client_id, started_ns)
    kind = SpanKind.CONSUMER
    times = started_ns, span_id
    return spans.begin("process", message.topic, kind, attributes, creations, *times)


def _process_attributes(
    message: Message, group: str, client_id: str, started_ns: int
) -> dict[str, AttributeValue]:
    attributes = attributes_of("process", message.topic) | of_message(message, group, client_id)
    attributes |= {BODY_BYTES: len(message.body), ATTEMPT: message.deliveries}
    if message.due_ms:
        attributes[DUE_MS] = message.due_ms
        attributes[LATENESS_MS] = started_ns // 1_000_000 - message.due_ms
    return attributes
