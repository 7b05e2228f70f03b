"""OpenTelemetry spans of a message's way through the queue.

    send ──► store ──► (delayed: schedule ──► fire ──► store) ──► receive ──► process (──► settle)
    producer broker     timer service           broker            consumer    consumer

Off until the application sets a tracer provider, `duemq.telemetry.configure` does, or `use`
is called.  Callers ask `enabled()` once per frame (or once at start) and call nothing else
while it is false, so that tracing that is off costs one boolean.  Sampling is the
provider's business (OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG).

A message's creation context is its send span.  Where that is sampled, it travels as the property
`traceparent` (W3C Trace Context); everyone downstream spans what carries one and nothing else,
whatever their own samplers say, so that tracing costs what it samples (sampling.py).  One that the
application set itself stays and is followed.  What handles a frame of many messages becomes one
span: child of the first sampled context in it and linked to all of them (at most LINKS_MAX).
`messaging.batch.message_count` says how many messages there are, `duemq.sampled_count` how many of
them are in a trace, where that is not all.  Topics of the system (%TRACE% among them) are never
traced.  A message that was not processed has a span `settle` for its sending back, and a span
`process` for each attempt.  `store`, `schedule` and `fire` are made by the services.

Names follow the OpenTelemetry messaging conventions 1.44 (copied as strings: they are still
in development); what they lack has the prefix `duemq.`.  A process span is a child of the
creation context as well as linked to it, so that one message is one trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from time import time_ns
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    TracerProvider,
)
from opentelemetry.util.types import AttributeValue

from duemq.message import traceparents
from duemq.protocol.names import SYSTEM_SIGN
from duemq.tracing.contexts import (
    TRACEPARENT,
    Found,
    contexts_in,
    extract,
    is_sampled,
    properties_of,
)
from duemq.tracing.sampling import ChosenIds, Head

if TYPE_CHECKING:
    from duemq.message import Message
    from duemq.tracing.sends import Sink

SYSTEM = "messaging.system"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
TOPIC = "messaging.destination.name"
QUEUE = "messaging.destination.partition.id"
GROUP = "messaging.consumer.group.name"
CLIENT_ID = "messaging.client.id"
MESSAGE_ID = "messaging.message.id"
BODY_BYTES = "messaging.message.body.size"
BATCH_COUNT = "messaging.batch.message_count"
ERROR_TYPE = "error.type"
SAMPLED_COUNT = "duemq.sampled_count"
BROKER = "duemq.broker"
QUEUE_OFFSET = "duemq.queue_offset"
KEY = "duemq.key"
TAG = "duemq.tag"
ATTEMPT = "duemq.attempt"
DUE_MS = "duemq.due_ms"
LATENESS_MS = "duemq.lateness_ms"
DEAD_LETTER = "duemq.dead_letter"

_SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

# The conventions know these types; store, schedule and fire are ours.
_OPERATION_TYPES = {
    "send": "send",
    "receive": "receive",
    "process": "process",
    "settle": "settle",
}

Blame = Callable[[BaseException, Sequence["Message"]], Mapping[int, BaseException]]
"""An error for each message that failed, by its place, when the callback raised."""

_tracer: Tracer | None = None
_chosen: Tracer | None = None
"""The same, for spans without a parent that are to be sampled."""
_provider: TracerProvider | None = None
head = Head("")
"""Of the provider's sampler, while `enabled`."""


def scope() -> tuple[str, str, str]:
    """Of all our spans: name, version, and the conventions they follow."""
    from duemq import __version__  # here: the package imports its parts first

    return "duemq", __version__, _SCHEMA_URL


def use(provider: TracerProvider | None) -> None:
    """Traces with this provider instead of the process's; None: back to the process's."""
    global _provider, _tracer, _chosen, head
    if provider is None:
        _tracer = None
        return
    name, version, schema_url = scope()
    _tracer = _chosen = provider.get_tracer(name, version, schema_url)
    _provider = provider
    # Where OpenTelemetry is disabled, the tracer is none of its SDK's.
    sampler = getattr(provider, "sampler", None) if hasattr(_tracer, "id_generator") else None
    head = Head(sampler.get_description() if sampler is not None else "")
    if head.known:
        _chosen = copy(_tracer)
        _chosen.id_generator = ChosenIds(_tracer.id_generator, head)  # type: ignore[attr-defined]


def enabled() -> bool:
    """Whether someone wants spans.  About 1 us while off: ask per frame, not per message."""
    if _tracer is not None:
        return True
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return False
    use(provider)
    return True


def sink() -> Sink | None:
    """Who takes light spans."""
    return getattr(_provider, "sink", None)


def light_sink() -> Sink | None:
    """The same, if spans may be light: nobody else looks at them, and the sampler is known."""
    found = sink()
    return found if found is not None and found.alone and head.known else None


def traced(topic: str) -> bool:
    """Whether messages of this topic are traced: those of the system are not."""
    return not topic.startswith(SYSTEM_SIGN)


# ── producer ─────────────────────────────────────────────────────────────────────────


class SendSpan:
    """One message on its way; ended by exactly one of `stored` and `failed`."""

    __slots__ = ("_span", "properties")

    def __init__(self, span: Span, *, carried: bool = False) -> None:
        """`carried`: the message has a creation context already."""
        self._span = span
        self.properties = {} if carried else properties_of(span.get_span_context())
        """To be added to the message's properties before it is encoded."""

    def stored(
        self,
        broker: str,
        queue: int,
        offset: int,
        *,
        message_id: str = "",
        due_ms: int = 0,
        end_ns: int | None = None,
    ) -> None:
        """The broker has it; for a delayed message queue and offset are those in %TIMER%."""
        attributes: dict[str, AttributeValue] = {QUEUE: str(queue), QUEUE_OFFSET: offset}
        attributes |= filled({MESSAGE_ID: message_id, BROKER: broker, DUE_MS: due_ms})
        self._span.set_attributes(attributes)
        self._span.end(end_ns)

    def failed(self, error: BaseException, *, message_id: str = "") -> None:
        """It was not stored, or nobody knows."""
        self._span.set_attributes(filled({MESSAGE_ID: message_id}))
        _fail(self._span, error)
        self._span.end()


def start_send(
    topic: str,
    message_id: str = "",
    *,
    chosen: bool = False,
    key: str | None = None,
    tag: str | None = None,
    body_bytes: int = 0,
    client_id: str = "",
    properties: Mapping[str, str] | None = None,
) -> SendSpan | None:
    """Starts a message's send span as a child of the caller's span; None: not traced.

    `chosen`: the decision for it was made.  `properties` are the application's own.  A creation
    context in them stays the message's: the span is its child, and there is none if it is not
    sampled.
    """
    if not traced(topic) or not enabled():
        return None
    creation = extract(properties) if properties else None
    if _refused(creation):
        return None
    attributes = attributes_of("send", topic)
    attributes[BODY_BYTES] = body_bytes
    attributes |= filled({MESSAGE_ID: message_id, KEY: key, TAG: tag, CLIENT_ID: client_id})
    tracer = _chosen if chosen else _tracer
    assert tracer is not None
    span = tracer.start_span(
        f"send {topic}",
        context=_context(creation) if creation is not None else None,
        # By the conventions: PRODUCER is the span that is the creation context.
        kind=SpanKind.PRODUCER if creation is None else SpanKind.CLIENT,
        attributes=attributes,
        links=_links(creation),
    )
    return SendSpan(span, carried=creation is not None) if span.is_recording() else None


# ── consumer ─────────────────────────────────────────────────────────────────────────


def record_receive(
    topic: str,
    broker: str,
    queue: int,
    offset: int,
    count: int,
    *,
    start_ns: int,
    end_ns: int,
    group: str = "",
    client_id: str = "",
    records: bytes | memoryview = b"",
    error: BaseException | None = None,
) -> None:
    """Records that a pull brought `count` records of one queue, the first at `offset`."""
    attributes = attributes_of("receive", topic)
    attributes |= {QUEUE: str(queue), QUEUE_OFFSET: offset, BATCH_COUNT: count}
    attributes |= filled({BROKER: broker, GROUP: group, CLIENT_ID: client_id})
    record_frame("receive", SpanKind.CLIENT, topic, attributes, records, start_ns, end_ns, error)


def wanted(messages: Sequence[Message]) -> bool:
    """Whether any of these messages may have a process span.  Those of a pull are together."""
    if not messages or not enabled():
        return False
    if messages[0].came_with(messages[-1]):
        return messages[0].may_be_traced
    return any(message.may_be_traced for message in messages)


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
    chosen = _sampled(messages) if wanted(messages) else {}
    if not chosen:
        with _unsampled(messages):
            yield
        return
    light = light_sink()
    started_ns = time_ns()
    # Of light ones the first is a real span too: the callback may add to it.
    begun = list(chosen)[: None if light is None else 1]
    spans = {index: _start_process(messages[index], group, client_id) for index in begun}
    token = attach(trace.set_span_in_context(spans[begun[0]]))
    blamed: Mapping[int, BaseException] = {}
    try:
        yield
    except BaseException as error:
        blamed = blame(error, messages) if blame else dict.fromkeys(chosen, error)
        raise
    finally:
        detach(token)
        for index, span in spans.items():
            if index in blamed:
                _fail(span, blamed[index])
            span.end()
        if light is not None:
            for index in chosen.keys() - spans.keys():
                message = messages[index]
                attributes = _process_attributes(message, group, client_id, started_ns)
                found = Found([chosen[index]], 1)
                times = started_ns, time_ns()
                kind, cause = SpanKind.CONSUMER, blamed.get(index)
                record("process", kind, message.topic, attributes, found, *times, cause)


def _sampled(messages: Sequence[Message]) -> dict[int, str]:
    """The `traceparent` of those that carry a trace, by place."""
    carried = traceparents(messages)
    return {
        index: text
        for index, text in carried.items()
        if is_sampled(text) and traced(messages[index].topic)
    }


def _unsampled(messages: Sequence[Message]) -> AbstractContextManager[object]:
    """What is sent from the callback of a message that says "no trace" has none either."""
    creation = _creation(messages[0]) if messages and enabled() else None
    return nullcontext() if creation is None else trace.use_span(NonRecordingSpan(creation))


def _creation(message: Message) -> SpanContext | None:
    return extract(message.properties) if message.may_be_traced else None


def _start_process(message: Message, group: str, client_id: str) -> Span:
    creation = _creation(message)
    assert _tracer is not None
    return _tracer.start_span(
        f"process {message.topic}",
        context=_context(creation),
        kind=SpanKind.CONSUMER,
        attributes=_process_attributes(message, group, client_id, time_ns()),
        links=_links(creation),
    )


def _process_attributes(
    message: Message, group: str, client_id: str, started_ns: int
) -> dict[str, AttributeValue]:
    attributes = attributes_of("process", message.topic) | _of_message(message, group, client_id)
    attributes |= {BODY_BYTES: len(message.body), ATTEMPT: message.deliveries}
    if message.due_ms:
        attributes[DUE_MS] = message.due_ms
        attributes[LATENESS_MS] = started_ns // 1_000_000 - message.due_ms
    return attributes


def record_settle(
    message: Message,
    *,
    start_ns: int,
    end_ns: int,
    group: str = "",
    client_id: str = "",
    attempt: int = 0,
    dead_letter: bool = False,
    due_ms: int = 0,
    error: BaseException | None = None,
) -> None:
    """Records that a consumer sent a message back: from the request to the broker's answer.

    `attempt` is that of the delivery which failed, `due_ms` says when the next one is due.
    """
    if not traced(message.topic) or not enabled():
        return
    creation = _creation(message)
    if creation is None or _refused(creation):
        return
    attributes = attributes_of("settle", message.topic) | _of_message(message, group, client_id)
    attributes |= {ATTEMPT: attempt, DEAD_LETTER: dead_letter} | filled({DUE_MS: due_ms})
    found = Found([message.properties[TRACEPARENT]], 1)
    record("settle", SpanKind.CLIENT, message.topic, attributes, found, start_ns, end_ns, error)


def _of_message(message: Message, group: str, client_id: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        MESSAGE_ID: message.message_id,
        QUEUE: str(message.queue),
        QUEUE_OFFSET: message.offset,
    }
    return attributes | filled(
        {
            BROKER: message.broker,
            GROUP: group,
            CLIENT_ID: client_id,
            KEY: message.key,
            TAG: message.tag,
        }
    )


# ── recording ────────────────────────────────────────────────────────────────────────


def record_frame(
    operation: str,
    kind: SpanKind,
    topic: str,
    attributes: dict[str, AttributeValue],
    records: bytes | memoryview,
    start_ns: int,
    end_ns: int,
    error: BaseException | None,
) -> None:
    """Records one span for the sampled messages of a frame; BATCH_COUNT says how many it has."""
    if traced(topic) and enabled():
        found = contexts_in(records)
        record(operation, kind, topic, attributes, found, start_ns, end_ns, error)


def record(
    operation: str,
    kind: SpanKind,
    topic: str,
    attributes: dict[str, AttributeValue],
    found: Found,
    start_ns: int,
    end_ns: int,
    error: BaseException | None,
) -> None:
    """Records one span for all of `found`; none for none.  While `enabled`.

    Messages that are not sampled are not counted, so that all spans of all messages add up to the
    same numbers.
    """
    first = next(found.sampled, None)
    if first is None:
        return
    if found.count != attributes.get(BATCH_COUNT, found.count):
        attributes[SAMPLED_COUNT] = found.count
    end_ns = max(start_ns, end_ns)
    light = light_sink()
    if light is not None and head.follows(first):
        light.record(
            f"{operation} {topic}", kind, attributes, first, found, start_ns, end_ns, error
        )
        return
    assert _tracer is not None
    span = _tracer.start_span(
        f"{operation} {topic}",
        context=_context(first),
        kind=kind,
        attributes=attributes,
        links=_links(*found.sampled),
        start_time=start_ns,
    )
    if error is not None:
        _fail(span, error)
    span.end(end_ns)


def _refused(creation: SpanContext | None) -> bool:
    """Whether the producer decided against a trace."""
    return creation is not None and not creation.trace_flags.sampled


def _links(*contexts: SpanContext | None) -> list[Link]:
    return [Link(context) for context in contexts if context is not None]


def _context(parent: SpanContext | None) -> Context:
    """A context of its own: whatever span is current here has nothing to do with it."""
    if parent is None:
        return Context()
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())


def attributes_of(operation: str, topic: str) -> dict[str, AttributeValue]:
    """What all spans of an operation have."""
    attributes: dict[str, AttributeValue] = {
        SYSTEM: "duemq",
        OPERATION: operation,
        TOPIC: topic,
    }
    if operation in _OPERATION_TYPES:
        attributes[OPERATION_TYPE] = _OPERATION_TYPES[operation]
    return attributes


def filled(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """Without what is empty."""
    return {name: value for name, value in attributes.items() if value}


def failure(error: BaseException) -> tuple[str, Status]:
    """What a span says of an error: ERROR_TYPE and status."""
    code = getattr(error, "code", None)
    name = getattr(code, "name", None) or type(error).__name__
    return name, Status(StatusCode.ERROR, str(error)[:200])


def _fail(span: Span, error: BaseException) -> None:
    if span.is_recording():
        name, status = failure(error)
        span.set_attribute(ERROR_TYPE, name)
        span.set_status(status)
