"""Spans of lists by column are those that OpenTelemetry's own tracer would make."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from duemq.consumer.delivery.calling import Calling
from duemq.message import Message, Origin, Untraced
from duemq.outcomes import BatchFailed, errors_of
from duemq.telemetry.exporter import DueMQSpanExporter
from duemq.telemetry.pipeline import Pipeline, Provider
from duemq.tracing import processing, spans
from duemq.tracing.attributes import BroadcastId
from duemq.tracing.contexts import TRACEPARENT
from duemq.v1.message_pb2 import Record
from duemq_analytics.source import schema
from duemq_analytics.source.plan import QueueRange
from duemq_analytics.source.spans import to_arrow

PULL = Origin("orders", "broker-0", 3)
SOURCE = QueueRange("broker-0", "h:1", 2, 0, 100)
# Of spans, what is not the same twice.
OWN = ("span_id", "start_ts", "start_ns", "duration_ns", "lateness_ms", "trace_row")
SPANS = schema.SPANS


class Sink:
    def __init__(self):
        self.bodies = []

    def send(self, *bodies):
        self.bodies += bodies

    def close(self):
        pass


def spans_of(
    messages, *, light, sampler=sampling.DEFAULT_ON, error=None, client_id="c", callback=None
):
    """Rows by message id, as readers of the trace topic see them."""
    sink = Sink()
    provider = Provider(sampler=sampler, shutdown_on_exit=False)
    pipeline = Pipeline(provider, DueMQSpanExporter(lambda: sink))
    if not light:
        provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    spans.use(provider)
    try:
        with processing.process(messages, group="billing", client_id=client_id, blame=errors_of):
            if callback is not None:
                callback(trace.get_current_span())
            if error is not None:
                raise error
    except BatchFailed:
        pass
    finally:
        spans.use(None)
        pipeline.shutdown(30)
    rows = [row for body in sink.bodies for row in to_arrow(body, SOURCE, 9, SPANS).to_pylist()]
    assert all(row["lateness_ms"] for row in rows if row["due_ms"])
    return {row["message_id"]: {k: v for k, v in row.items() if k not in OWN} for row in rows}


def traceparent(number, flags="01"):
    return f"00-{0xAB << 100 | number:032x}-{0xCD << 50 | number:016x}-{flags}"


def message(number, origin=PULL, properties=None, **fields):
    properties = {TRACEPARENT: traceparent(number)} if properties is None else properties
    record = Record(message_id=f"m{number}", body=b"x" * number, properties=properties, **fields)
    return Message(record, origin, 100 + number, 0)


def pull(*odd):
    """Every other message of it is traced."""
    traced = [message(n, properties={} if n % 2 else None) for n in range(20)]
    return [*traced, *odd, message(30, key="k", tag="t", due_ms=5, attempt=2)]


@pytest.fixture
def single_spans(monkeypatch):
    """Messages that had a span made for them alone."""
    begun, begin = [], spans.begin

    def beginning(operation, topic, kind, attributes, *rest):
        begun.append(attributes["messaging.message.id"])
        return begin(operation, topic, kind, attributes, *rest)

    monkeypatch.setattr(spans, "begin", beginning)
    return begun


def test_a_pull_s_spans_are_those_of_the_library(single_spans):
    found = spans_of(pull(), light=True)
    assert single_spans == []
    assert len(found) == 11
    assert found == spans_of(pull(), light=False)


def test_a_list_of_several_pulls_of_a_queue_is_one_frame(single_spans):
    others = [message(n, Origin(*PULL)) for n in (31, 32)]
    found = spans_of([*pull(), *others], light=True)
    assert single_spans == []
    assert found == spans_of([*pull(), *others], light=False)


def test_that_every_member_gets_everything_is_said():
    found = spans_of(pull(), light=True, client_id=BroadcastId("c"))
    assert found == spans_of(pull(), light=False, client_id=BroadcastId("c"))
    assert {tuple(row["attributes"]) for row in found.values()} == {(("duemq.broadcast", "true"),)}


def test_who_failed_is_said():
    failed = {n: ValueError("no") for n in (message(0), message(4), message(30))}
    found = spans_of(pull(), light=True, error=BatchFailed(failed))
    assert found == spans_of(pull(), light=False, error=BatchFailed(failed))
    errors = {message_id for message_id, row in found.items() if row["status"] == "ERROR"}
    assert errors == {"m0", "m4", "m30"}


class Unspeakable(Exception):
    def __str__(self):
        raise TypeError("no text")


@pytest.mark.parametrize("light", [True, False])
def test_an_exception_without_a_text_stays_what_the_callback_said(light):
    # `spans_of` lets BatchFailed pass alone: what is not among its failures is done.
    failed = {n: Unspeakable() for n in (message(0), message(4))}
    found = spans_of(pull(), light=light, error=BatchFailed(failed))
    assert {row["error_type"] for row in found.values()} == {None, "Unspeakable"}


@pytest.mark.parametrize(
    "odd",
    [
        message(40, properties={TRACEPARENT: traceparent(40, "00")}),
        message(40, properties={TRACEPARENT: "nonsense"}),
        message(40, properties={TRACEPARENT: traceparent(40), "tracestate": "a=b"}),
        message(40, properties={TRACEPARENT: traceparent(40).upper()}),
        message(40, origin=Origin("refunds", "broker-1", 0)),
        message(40, origin=Origin("%TRACE%", "broker-1", 0)),
    ],
)
def test_an_odd_one_changes_nothing_for_the_rest(odd):
    wanted = spans_of(pull(), light=False)
    for messages in (pull(odd), [*pull(), odd]):
        found = spans_of(messages, light=True)
        assert {name: row for name, row in found.items() if name != "m40"} == wanted


def test_a_due_time_beyond_all_times_is_none():
    (row,) = spans_of([message(1), message(2, due_ms=2**62)][1:], light=True).values()
    assert row["message_id"] == "m2"
    found = spans_of([message(1), message(2, due_ms=2**62)], light=True)
    assert found["m2"]["due_ms"] is None


def test_a_sampler_that_asks_no_parent_is_asked_unless_it_takes_all(single_spans):
    half = sampling.TraceIdRatioBased(0.5)
    found = spans_of(pull(), light=True, sampler=half)
    assert (len(found), single_spans) == (11, [])
    refused = message(40, properties={TRACEPARENT: f"00-{'f' * 32}-{'f' * 16}-01"})
    assert spans_of(pull(refused), light=True, sampler=half) == found
    assert len(single_spans) == 12


def test_what_the_callback_adds_to_the_current_span_is_said(single_spans):
    def callback(span):
        span.set_attribute("found", 3)
        span.add_event("looked")
        span.update_name("process invoices")
        assert span.attributes["found"] == 3  # as OpenTelemetry's own has it

    found = spans_of(pull(), light=True, callback=callback)
    assert single_spans == ["m0"]
    assert ("found", "3") in found["m0"]["attributes"]
    assert found == spans_of(pull(), light=False, callback=callback)


def test_the_current_span_is_who_it_says_whether_it_is_asked_for_more_or_not():
    contexts = []

    def callback(span):
        contexts.append(span.get_span_context())
        assert span.is_recording()
        if len(contexts) > 1:
            span.set_attribute("found", 3)
            assert span.made().get_span_context() == contexts[-1] == span.get_span_context()

    state = {TRACEPARENT: traceparent(7), "tracestate": "a=b"}
    for _ in range(2):
        (row,) = spans_of([message(7, properties=state)], light=True, callback=callback).values()
        assert row["parent_span_id"] == f"{0xCD << 50 | 7:016x}"
    assert all(context.trace_id == 0xAB << 100 | 7 for context in contexts)
    assert {context.trace_state["a"] for context in contexts} == {"b"}
    assert contexts[0].span_id != contexts[1].span_id


def test_a_span_that_is_over_is_what_it_was():
    kept = []
    found = spans_of([message(1)], light=True, callback=kept.append)
    assert not kept[0].is_recording()
    kept[0].set_attribute("late", 1)
    kept[0].end()
    assert found == spans_of([message(1)], light=False)


def test_the_row_of_the_first_has_the_id_that_was_current():
    contexts, frames = [], []
    provider = Provider(sampler=sampling.DEFAULT_ON, shutdown_on_exit=False)
    pipeline = Pipeline(provider, DueMQSpanExporter(Sink))
    provider.sink.put = frames.append
    spans.use(provider)
    try:
        with processing.process(pull()):
            contexts.append(trace.get_current_span().get_span_context())
    finally:
        spans.use(None)
        pipeline.shutdown(30)
    (frame,) = frames
    assert frame.rows == 11
    assert frame.span_ids[:8] == contexts[0].span_id.to_bytes(8, "big")


def test_who_is_called_for_many_messages_asks_once_whether_anybody_watches():
    calling = Calling(lambda message: None, batch=False, group="billing", client_id="c")
    assert calling.watch() is None
    found = []

    def callback(span):
        # Nobody's, but for those with a trace.
        watch = calling.watch(pull())
        for each in (message(1, properties={}), message(2)):
            with watch([each]):
                found.append(trace.get_current_span() is not span)
        assert calling.watch([message(1, properties={})]) is None
        assert calling.watch([message(1, Untraced(*PULL)), message(2, Untraced(*PULL))]) is None
        assert calling.watch() is not None

    spans_of([message(9)], light=True, callback=callback)
    assert found == [False, True]


def test_of_one_message_without_a_trace_nobody_wants_to_know():
    provider = Provider(sampler=sampling.DEFAULT_ON, shutdown_on_exit=False)
    spans.use(provider)
    try:
        plain, pulled = message(1, properties={"a": "b"}), message(2)
        baggage = message(3, properties={"baggage": "a=b"})
        assert [processing.wanted([each]) for each in (plain, pulled, baggage)] == [0, 1, 1]
        assert processing.wanted([plain, pulled])
    finally:
        spans.use(None)
