"""OpenTelemetry spans of a message's way through the queue.

    send ──► store ──► (delayed: schedule ──► fire ──► store) ──► receive ──► process (──► settle)
    producer broker     timer service           broker            consumer    consumer

Off until the application sets a tracer provider, `duemq.telemetry.configure` does, or `use`
is called.  Callers ask `enabled()` once per frame (or once at start) and call nothing else
while it is false, so that tracing that is off costs one boolean.  Sampling is the
provider's business (OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG).

A message's creation context is its send span.  It travels as the property `traceparent`
(W3C Trace Context), sampled or not, so that everyone downstream follows the producer's
decision (contexts.py).  What handles a frame of many messages becomes one span: child of
the first sampled context in it, linked to the others, `messaging.batch.message_count` says
how many.  Topics of the system (%TRACE% among them) are never traced.  A message that was not
processed has a span `settle` for its sending back, and a span `process` for each attempt.

Names follow the OpenTelemetry messaging conventions 1.44 (copied as strings: they are still
in development); what they lack has the prefix `duemq.`.  A process span is a child of the
creation context, not only linked to it, so that one message is one trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from duemq.protocol.names import SYSTEM_SIGN
from duemq.tracing.contexts import contexts_in, extract, properties_of

if TYPE_CHECKING:
    from duemq.message import Message

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
BROKER = "duemq.broker"
QUEUE_OFFSET = "duemq.queue_offset"
KEY = "duemq.key"
TAG = "duemq.tag"
ATTEMPT = "duemq.attempt"
DUE_MS = "duemq.due_ms"
LATENESS_MS = "duemq.lateness_ms"
DEAD_LETTER = "duemq.dead_letter"

FIRE_SPANS_MAX = 64
"""Spans that one batch of fires becomes; more distinct due times share spans."""

_SCOPE = "duemq"

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


def use(provider: TracerProvider | None) -> None:
    """Traces with this provider instead of the process's; None: back to the process's."""
    global _tracer
    _tracer = provider.get_tracer(_SCOPE) if provider is not None else None


def enabled() -> bool:
    """Whether someone wants spans.  About 1 us while off: ask per frame, not per message."""
    global _tracer
    if _tracer is not None:
        return True
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return False
    _tracer = provider.get_tracer(_SCOPE)
    return True


def traced(topic: str) -> bool:
    """Whether messages of this topic are traced: those of the system are not."""
    return not topic.startswith(SYSTEM_SIGN)


# ── producer ─────────────────────────────────────────────────────────────────────────


class SendSpan:
    """One message on its way; ended by exactly one of `stored` and `failed`."""

    __slots__ = ("_span", "properties")

    def __init__(self, span: Span) -> None:
        self._span = span
        self.properties = properties_of(span.get_span_context())
        """To be added to the message's properties before it is encoded."""

    def stored(
        self,
        broker: str,
        queue: int,
        offset: int,
        *,
        due_ms: int = 0,
        end_ns: int | None = None,
    ) -> None:
        """The broker has it; for a delayed message queue and offset are those in %TIMER%."""
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    QUEUE: str(queue),
                    QUEUE_OFFSET: offset,
                    **_filled({BROKER: broker, DUE_MS: due_ms}),
                }
            )
        self._span.end(end_ns)

    def failed(self, error: BaseException) -> None:
        """It was not stored, or nobody knows."""
        _fail(self._span, error)
        self._span.end()


def start_send(
    topic: str,
    message_id: str,
    *,
    key: str | None = None,
    tag: str | None = None,
    body_bytes: int = 0,
    client_id: str = "",
) -> SendSpan | None:
    """Starts a message's send span as a child of the caller's span; None: not traced."""
    if not traced(topic) or not enabled():
        return None
    attributes = _attributes("send", topic)
    attributes[MESSAGE_ID] = message_id
    attributes[BODY_BYTES] = body_bytes
    attributes |= _filled({KEY: key, TAG: tag, CLIENT_ID: client_id})
    assert _tracer is not None
    return SendSpan(
        _tracer.start_span(f"send {topic}", kind=SpanKind.PRODUCER, attributes=attributes)
    )


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
    attributes = _attributes("receive", topic)
    attributes |= {QUEUE: str(queue), QUEUE_OFFSET: offset, BATCH_COUNT: count}
    attributes |= _filled({BROKER: broker, GROUP: group, CLIENT_ID: client_id})
    _record_frame("receive", SpanKind.CLIENT, topic, attributes, records, start_ns, end_ns, error)


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
    if not messages or not enabled():
        yield
        return
    spans = {
        index: span
        for index, message in enumerate(messages)
        if traced(message.topic) and (span := _start_process(message, group, client_id))
    }
    first = next(iter(spans.values()), None)
    token = attach(trace.set_span_in_context(first)) if first is not None else None
    try:
        yield
    except BaseException as error:
        blamed = blame(error, messages) if blame else dict.fromkeys(spans, error)
        for index in spans.keys() & blamed.keys():
            _fail(spans[index], blamed[index])
        raise
    finally:
        if token is not None:
            detach(token)
        for span in spans.values():
            span.end()


def _start_process(message: Message, group: str, client_id: str) -> Span | None:
    assert _tracer is not None
    span = _tracer.start_span(
        f"process {message.topic}",
        context=_context(extract(message.properties)),
        kind=SpanKind.CONSUMER,
        attributes=_attributes("process", message.topic),
    )
    if not span.is_recording():
        return None
    attributes = _of_message(message, group, client_id)
    attributes |= {BODY_BYTES: len(message.body), ATTEMPT: message.deliveries}
    if message.due_ms:
        started_ms = getattr(span, "start_time", 0) // 1_000_000
        attributes[DUE_MS] = message.due_ms
        attributes[LATENESS_MS] = started_ms - message.due_ms
    span.set_attributes(attributes)
    return span


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
    attributes = _attributes("settle", message.topic) | _of_message(message, group, client_id)
    attributes |= {ATTEMPT: attempt, DEAD_LETTER: dead_letter} | _filled({DUE_MS: due_ms})
    creation = extract(message.properties)
    contexts = [creation] if creation is not None else []
    _record("settle", SpanKind.CLIENT, message.topic, attributes, contexts, start_ns, end_ns, error)


def _of_message(message: Message, group: str, client_id: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        MESSAGE_ID: message.message_id,
        QUEUE: str(message.queue),
        QUEUE_OFFSET: message.offset,
    }
    return attributes | _filled(
        {
            BROKER: message.broker,
            GROUP: group,
            CLIENT_ID: client_id,
            KEY: message.key,
            TAG: message.tag,
        }
    )


# ── broker and timer service: finished spans of whole frames ─────────────────────────


def record_store(
    topic: str,
    broker: str,
    queue: int,
    offset: int,
    count: int,
    *,
    start_ns: int,
    end_ns: int,
    body_bytes: int = 0,
    records: bytes | memoryview = b"",
    timed: bool = False,
    error: BaseException | None = None,
) -> None:
    """Records that a frame was stored: from its arrival to its durability.

    `topic` is what the producer asked for, also where the frame lies in %TIMER% (`timed`);
    queue and offset say where it lies.  `records` (the encoded batch) serves to find the
    creation contexts; without it the span starts a trace of its own.
    """
    attributes = _attributes("store", topic)
    attributes |= {BROKER: broker, QUEUE: str(queue), QUEUE_OFFSET: offset, BATCH_COUNT: count}
    if body_bytes:
        attributes[BODY_BYTES] = body_bytes
    if timed:
        attributes["duemq.timed"] = True
    _record_frame("store", SpanKind.SERVER, topic, attributes, records, start_ns, end_ns, error)


def record_schedule(
    topic: str,
    broker: str,
    queue: int,
    offset: int,
    count: int,
    *,
    start_ns: int,
    end_ns: int,
    due_ms: int = 0,
    records: bytes | memoryview = b"",
    error: BaseException | None = None,
) -> None:
    """Records that a timer shard has a frame of %TIMER% durably: from fetched to durable.

    Broker, queue and offset say where in %TIMER% it lay; `due_ms` is its earliest due time.
    """
    attributes = _attributes("schedule", topic)
    attributes |= {BROKER: broker, QUEUE: str(queue), QUEUE_OFFSET: offset, BATCH_COUNT: count}
    if due_ms:
        attributes[DUE_MS] = due_ms
    _record_frame(
        "schedule", SpanKind.INTERNAL, topic, attributes, records, start_ns, end_ns, error
    )


def record_fire(
    topic: str,
    broker: str,
    queue: int,
    offset: int,
    due_ms: Sequence[int],
    *,
    store_ms: int,
    start_ns: int,
    end_ns: int,
    records: bytes | memoryview = b"",
    sizes: Sequence[int] = (),
    error: BaseException | None = None,
) -> None:
    """Records a batch of fires: from its dispatch to the broker's answer.

    One span for each run of one due time (ascending, one entry a record), so that lateness
    (`store_ms`, the broker's, less due) stays exact without a span a message.  `sizes` are the
    batch's side array; with `records` they find each run's creation contexts.
    """
    if not due_ms or not traced(topic) or not enabled():
        return
    records = bytes(records)
    ends = _ends(sizes) if len(sizes) == len(due_ms) else []
    for first, past in _runs(due_ms, FIRE_SPANS_MAX):
        attributes = _attributes("fire", topic)
        attributes |= {
            BROKER: broker,
            QUEUE: str(queue),
            QUEUE_OFFSET: offset + first,
            BATCH_COUNT: past - first,
            DUE_MS: due_ms[first],
        }
        if error is None:
            attributes[LATENESS_MS] = store_ms - due_ms[first]
        start = ends[first - 1] if ends and first else 0
        end = ends[past - 1] if ends else len(records)
        contexts = contexts_in(records, start=start, end=end)
        _record("fire", SpanKind.PRODUCER, topic, attributes, contexts, start_ns, end_ns, error)


def _runs(due_ms: Sequence[int], runs_max: int) -> list[tuple[int, int]]:
    """Half-open ranges of equal due times; where there are too many, the earliest counts."""
    starts = [i for i in range(len(due_ms)) if i == 0 or due_ms[i] != due_ms[i - 1]]
    if len(starts) > runs_max:
        starts = [starts[i * len(starts) // runs_max] for i in range(runs_max)]
    return list(zip(starts, [*starts[1:], len(due_ms)], strict=True))


def _ends(sizes: Sequence[int]) -> list[int]:
    ends, position = [], 0
    for size in sizes:
        position += int(size)
        ends.append(position)
    return ends


# ── recording ────────────────────────────────────────────────────────────────────────


def _record_frame(
    operation: str,
    kind: SpanKind,
    topic: str,
    attributes: dict[str, AttributeValue],
    records: bytes | memoryview,
    start_ns: int,
    end_ns: int,
    error: BaseException | None,
) -> None:
    if traced(topic) and enabled():
        contexts = contexts_in(records)
        _record(operation, kind, topic, attributes, contexts, start_ns, end_ns, error)


def _record(
    operation: str,
    kind: SpanKind,
    topic: str,
    attributes: dict[str, AttributeValue],
    contexts: list[SpanContext] | None,
    start_ns: int,
    end_ns: int,
    error: BaseException | None,
) -> None:
    if contexts is None:
        return  # Their producers decided against a trace.
    assert _tracer is not None
    span = _tracer.start_span(
        f"{operation} {topic}",
        context=_context(contexts[0] if contexts else None),
        kind=kind,
        attributes=attributes,
        links=[Link(context) for context in contexts[1:]],
        start_time=start_ns,
    )
    if error is not None:
        _fail(span, error)
    span.end(max(start_ns, end_ns))


def _context(parent: SpanContext | None) -> Context:
    """A context of its own: whatever span is current here has nothing to do with it."""
    if parent is None:
        return Context()
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())


def _attributes(operation: str, topic: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        SYSTEM: "duemq",
        OPERATION: operation,
        TOPIC: topic,
    }
    if operation in _OPERATION_TYPES:
        attributes[OPERATION_TYPE] = _OPERATION_TYPES[operation]
    return attributes


def _filled(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """Without what is empty."""
    return {name: value for name, value in attributes.items() if value}


def _fail(span: Span, error: BaseException) -> None:
    if span.is_recording():
        code = getattr(error, "code", None)
        span.set_attribute(ERROR_TYPE, getattr(code, "name", None) or type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, str(error)[:200]))
