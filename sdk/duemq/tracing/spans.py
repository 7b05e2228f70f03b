"""OpenTelemetry spans of a message's way through the queue.

    send ──► store ──► (delayed: schedule ──► fire ──► store) ──► receive ──► process (──► settle)
    producer broker     timer service           broker            consumer    consumer

Off until the application sets a tracer provider, `duemq.telemetry.configure` does, or `use`
is called.  Callers ask `enabled()` once per frame and call nothing else while it is false.

A message's creation context is its send span.  Where that is sampled, it travels as the property
`traceparent` (W3C Trace Context); everyone downstream spans what carries one and nothing else,
whatever their own samplers say.  One that the application set itself stays and is followed.  What
handles a frame of many messages becomes one span: child of the first sampled context in it and
linked to all of them (at most LINKS_MAX).  Topics of the system are never traced.  A message that
was not processed has a span `settle` for its sending back, and a span `process` for each attempt.

A process span (processing.py) is a child of the creation context, too: one message is one trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Tracer,
    TracerProvider,
)
from opentelemetry.util.types import AttributeValue

from duemq.protocol.names import SYSTEM_SIGN
from duemq.tracing import guarded
from duemq.tracing.attributes import (
    ATTEMPT,
    BATCH_COUNT,
    BODY_BYTES,
    BROKER,
    CLIENT_ID,
    DEAD_LETTER,
    DUE_MS,
    ERROR_TYPE,
    GROUP,
    KEY,
    LAST_OFFSET,
    MESSAGE_ID,
    QUEUE,
    QUEUE_OFFSET,
    SAMPLED_COUNT,
    TAG,
    attributes_of,
    failure,
    filled,
    of_message,
    server_of,
)
from duemq.tracing.contexts import (
    LINKS_MAX,
    TRACEPARENT,
    FoundContexts,
    extract,
    is_sampled,
    properties_of,
)
from duemq.tracing.sampling import ChosenIds, Head

if TYPE_CHECKING:
    from duemq.message import Message
    from duemq.tracing.sends import SpanSink

_SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

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


def sink() -> SpanSink | None:
    """Who takes light spans."""
    return getattr(_provider, "sink", None)


def light_sink() -> SpanSink | None:
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
        server: str = "",
    ) -> None:
        """The broker has it; for a delayed message queue and offset are those in %TIMER%.

        `server`: its address.
        """
        attributes = server_of(server) | {QUEUE: str(queue), QUEUE_OFFSET: offset}
        attributes |= filled({MESSAGE_ID: message_id, BROKER: broker, DUE_MS: due_ms})
        self._span.set_attributes(attributes)
        guarded.end(self._span)

    def failed(self, error: BaseException, *, message_id: str = "") -> None:
        """It was not stored, or nobody knows."""
        self._span.set_attributes(filled({MESSAGE_ID: message_id}))
        fail(self._span, error)
        guarded.end(self._span)


def start_send(
    topic: str,
    message_id: str = "",
    *,
    chosen: bool = False,
    key: str | None = None,
    tag: str | None = None,
    body_bytes: int = 0,
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
    attributes |= filled({MESSAGE_ID: message_id, KEY: key, TAG: tag})
    tracer = _chosen if chosen else _tracer
    assert tracer is not None
    span = guarded.start(
        tracer,
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
    last_offset: int,
    start_ns: int,
    end_ns: int,
    group: str = "",
    client_id: str = "",
    server: str = "",
    carried: Sequence[str] = (),
) -> None:
    """Records that a pull brought `count` records of one queue, from `offset` to `last_offset`.

    `server`: the broker's address.  `carried`: the `traceparent`s of their messages.
    """
    if not (traced(topic) and enabled()):
        return
    attributes = attributes_of("receive", topic) | server_of(server)
    attributes |= {QUEUE: str(queue), QUEUE_OFFSET: offset, BATCH_COUNT: count}
    attributes |= filled({BROKER: broker, GROUP: group, CLIENT_ID: client_id})
    if last_offset - offset != count - 1:
        attributes[LAST_OFFSET] = last_offset  # there are gaps
    sampled = list(filter(is_sampled, carried))
    found = FoundContexts(sampled[:LINKS_MAX], len(sampled))
    record("receive", SpanKind.CLIENT, topic, attributes, found, start_ns, end_ns, None)


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
    server: str = "",
    error: BaseException | None = None,
) -> None:
    """Records that a consumer sent a message back: from the request to the broker's answer.

    `attempt` is that of the delivery which failed, `due_ms` says when the next one is due, `server`
    is the broker's address.
    """
    if not traced(message.topic) or not enabled():
        return
    creation = creation_of(message)
    if creation is None or _refused(creation):
        return
    attributes = attributes_of("settle", message.topic) | of_message(message, group, client_id)
    attributes |= server_of(server)
    attributes |= {ATTEMPT: attempt, DEAD_LETTER: dead_letter} | filled({DUE_MS: due_ms})
    found = FoundContexts([message.properties[TRACEPARENT]], 1)
    record("settle", SpanKind.CLIENT, message.topic, attributes, found, start_ns, end_ns, error)


# ── recording ────────────────────────────────────────────────────────────────────────


class Finished(NamedTuple):
    """A light span that is linked to `found`."""

    name: str
    kind: SpanKind
    attributes: dict[str, AttributeValue]
    parent: SpanContext
    found: FoundContexts
    start_ns: int
    end_ns: int
    error: BaseException | None


def record(
    operation: str,
    kind: SpanKind,
    topic: str,
    attributes: dict[str, AttributeValue],
    found: FoundContexts,
    start_ns: int,
    end_ns: int,
    error: BaseException | None,
) -> None:
    """Records one span for all of `found`; none for none.  While `enabled`.

    What is not sampled is not counted: all spans of all messages add up to the same numbers.
    """
    first = next(found.sampled, None)
    if first is None:
        return
    if found.count != attributes.get(BATCH_COUNT, found.count):
        attributes[SAMPLED_COUNT] = found.count
    end_ns = max(start_ns, end_ns)
    light = light_sink()
    if light is not None and head.follows(first):
        name = f"{operation} {topic}"
        light.record(Finished(name, kind, attributes, first, found, start_ns, end_ns, error))
        return
    span = begin(operation, topic, kind, attributes, list(found.sampled), start_ns)
    if error is not None:
        fail(span, error, end_ns)
    guarded.end(span, end_ns)


def begin(
    operation: str,
    topic: str,
    kind: SpanKind,
    attributes: dict[str, AttributeValue],
    creations: Sequence[SpanContext],
    start_ns: int | None = None,
    span_id: int | None = None,
) -> Span:
    """Begins the span of messages with these creation contexts: linked to all, child of the first.

    While `enabled`.  Of a malformed context, none: a trace of its own.  `span_id`: of a child that
    others know already.
    """
    tracer = copy(_tracer) if span_id else _tracer
    assert tracer is not None
    if span_id:
        ids = SimpleNamespace(generate_span_id=lambda: span_id)
        tracer.id_generator = ids  # type: ignore[attr-defined]
    return guarded.start(
        tracer,
        f"{operation} {topic}",
        context=_context(creations[0] if creations else None),
        kind=kind,
        attributes=attributes,
        links=_links(*creations),
        start_time=start_ns,
    )


def creation_of(message: Message) -> SpanContext | None:
    """The creation context that a message carries."""
    return extract(message.properties) if message.may_be_traced else None


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


def fail(span: Span, error: BaseException, at_ns: int | None = None) -> None:
    """The span's operation failed; the error becomes an event of it."""
    if span.is_recording():
        name, status = failure(error)
        span.set_attribute(ERROR_TYPE, name)
        guarded.record(span, error, at_ns)
        span.set_status(status)
