import subprocess
import sys
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    ParentBased,
    ParentBasedTraceIdRatio,
)
from opentelemetry.trace import SpanKind, StatusCode

from duemq.consumer.delivery.calling import Calling
from duemq.errors import ReadOnly
from duemq.message import Message, Origin, Untraced
from duemq.outcomes import BatchFailed, RetryLater
from duemq.tracing import attributes as attribute
from duemq.tracing import contexts as trace_contexts
from duemq.tracing import processing
from duemq.tracing import spans as tracing
from duemq.tracing.contexts import TRACEPARENT, TRACESTATE
from duemq.v1.message_pb2 import Record


@pytest.fixture
def recorded():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)
    provider.shutdown()


@contextmanager
def sampled_by(sampler, exporter):
    """Traces with this sampler meanwhile, as another process might."""
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield
    tracing.use(None)


SAMPLED = {TRACEPARENT: "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
REFUSED = {TRACEPARENT: "00-" + "1" * 32 + "-" + "2" * 16 + "-00"}


def receive(topic, properties, count=1, last_offset=0):
    """Records a pull from offset 0 on."""
    times = {"start_ns": 1, "end_ns": 2}
    carried = [properties[TRACEPARENT]] if TRACEPARENT in properties else []
    tracing.record_receive(
        topic, "b", 0, 0, count, last_offset=last_offset, carried=carried, **times
    )


def received(topic="orders", properties=SAMPLED, deliveries=0, origin=None, **fields):
    record = {"message_id": "m1", "key": "k", "body": b"body"} | fields
    return Message(
        Record(properties=properties, attempt=deliveries, **record),
        origin or Origin(topic, "broker-0", 3),
        7,
        0,
    )


def parts(spans):
    return [span.name for span in spans.get_finished_spans()]


def test_nothing_is_spanned_while_nobody_asked_for_spans():
    assert not tracing.enabled()
    assert tracing.start_send("orders", "m1") is None
    tracing.record_settle(received(), start_ns=1, end_ns=2)
    with processing.process([received()]):
        pass


def test_tracing_needs_the_api_only():
    code = (
        "import sys; import duemq.tracing.spans as t; assert not t.enabled(); "
        "assert not [m for m in sys.modules if m.startswith('opentelemetry.sdk')]; "
        "import duemq.telemetry as l; assert l.configure('app', 'off') is None; "
        "assert not [m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'grpc'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_send_span_carries_its_context_and_where_the_message_lies(recorded):
    sending = tracing.start_send("orders", "m1", key="k", tag="red", body_bytes=4)
    context = trace_contexts.extract(sending.properties)
    sending.stored("broker-0", 2, 0, due_ms=1_000)
    (span,) = recorded.get_finished_spans()
    assert span.name == "send orders"
    assert span.kind is SpanKind.PRODUCER
    assert (context.trace_id, context.span_id) == (span.context.trace_id, span.context.span_id)
    assert dict(span.attributes) == {
        attribute.SYSTEM: "duemq",
        attribute.OPERATION: "send",
        attribute.OPERATION_TYPE: "send",
        attribute.TOPIC: "orders",
        attribute.MESSAGE_ID: "m1",
        attribute.BODY_BYTES: 4,
        attribute.KEY: "k",
        attribute.TAG: "red",
        attribute.BROKER: "broker-0",
        attribute.QUEUE: "2",
        attribute.QUEUE_OFFSET: 0,
        attribute.DUE_MS: 1_000,
    }


def test_a_failed_send_names_the_error(recorded):
    tracing.start_send("orders", "m1").failed(ReadOnly("disk full"))
    (span,) = recorded.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "disk full"
    assert span.attributes[attribute.ERROR_TYPE] == "READ_ONLY"


def test_processing_is_part_of_the_message_s_trace(recorded):
    sending = tracing.start_send("orders", "m1")
    sending.stored("broker-0", 3, 7)
    with processing.process([received(properties=sending.properties, deliveries=2)], group="g"):
        pass
    sent, processed = recorded.get_finished_spans()
    assert processed.kind is SpanKind.CONSUMER
    assert processed.context.trace_id == sent.context.trace_id
    assert processed.parent.span_id == sent.context.span_id
    assert [link.context.span_id for link in processed.links] == [sent.context.span_id]
    assert processed.attributes[attribute.GROUP] == "g"
    assert processed.attributes[attribute.ATTEMPT] == 2
    assert attribute.LATENESS_MS not in processed.attributes


def test_a_sending_back_is_part_of_the_message_s_trace(recorded):
    sending = tracing.start_send("orders", "m1")
    sending.stored("broker-0", 3, 7)
    message = received(properties=sending.properties)
    tracing.record_settle(
        message, start_ns=1_000, end_ns=2_000, group="g", attempt=1, due_ms=1_790_000_010_000
    )
    sent, settled = recorded.get_finished_spans()
    assert (settled.name, settled.kind) == ("settle orders", SpanKind.CLIENT)
    assert settled.parent.span_id == sent.context.span_id
    assert [link.context.span_id for link in settled.links] == [sent.context.span_id]
    assert (settled.start_time, settled.end_time) == (1_000, 2_000)
    assert settled.attributes[attribute.OPERATION_TYPE] == "settle"
    assert settled.attributes[attribute.GROUP] == "g"
    assert settled.attributes[attribute.ATTEMPT] == 1
    assert settled.attributes[attribute.DUE_MS] == 1_790_000_010_000
    assert settled.attributes[attribute.DEAD_LETTER] is False


def test_a_sending_back_that_fails_says_so(recorded):
    tracing.record_settle(received(), start_ns=1, end_ns=2, error=ReadOnly("disk full"))
    (span,) = recorded.get_finished_spans()
    assert span.attributes[attribute.ERROR_TYPE] == "READ_ONLY"


def test_a_callback_that_raises_fails_its_span_and_still_raises(recorded):
    with pytest.raises(KeyError), processing.process([received()]):
        raise KeyError("nope")
    (span,) = recorded.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes[attribute.ERROR_TYPE] == "KeyError"


class Raising(SpanProcessor):
    def on_start(self, span, parent_context=None):
        if span.name.startswith("receive"):
            raise RuntimeError("at the start")

    def on_end(self, span):
        raise RuntimeError("at the end")


def test_a_span_processor_that_raises_fails_neither_callback_nor_pull():
    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON))
    provider.add_span_processor(Raising())
    tracing.use(provider)
    try:
        with processing.process([received()]):
            pass
        receive("orders", SAMPLED)
    finally:
        tracing.use(None)


def test_of_a_batch_only_what_is_named_fails_its_span(recorded):
    origin = Origin("orders", "broker-0", 3)
    batch = [
        Message(Record(message_id=f"m{n}", properties=SAMPLED), origin, n, 0) for n in range(3)
    ]

    def receive(messages):
        raise BatchFailed({messages[1]: KeyError("nope"), messages[2]: RetryLater("5m")})

    with (
        pytest.raises(BatchFailed),
        Calling(receive, batch=True, group="g", client_id="").span(batch),
    ):
        receive(batch)
    spans = {span.attributes[attribute.MESSAGE_ID]: span for span in recorded.get_finished_spans()}
    assert spans["m0"].status.status_code is StatusCode.UNSET
    assert [spans[name].attributes.get(attribute.ERROR_TYPE) for name in ("m0", "m1", "m2")] == [
        None,
        "KeyError",
        "RetryLater",
    ]


def test_a_batch_callback_gets_a_span_a_message_and_the_first_is_current(recorded):
    first = tracing.start_send("orders", "m1")
    batch = [received(properties=first.properties), received(message_id="m2")]
    batch.append(received(message_id="m4", properties={}))
    with processing.process(batch):
        inner = tracing.start_send("answers", "m3")
    inner.stored("broker-0", 0, 0)
    spans = {span.attributes[attribute.MESSAGE_ID]: span for span in recorded.get_finished_spans()}
    assert sorted(spans) == ["m1", "m2", "m3"]
    assert spans["m3"].parent.span_id == spans["m1"].context.span_id


def test_a_delayed_message_is_late_by_its_start_less_its_due_time(recorded):
    with processing.process([received(due_ms=1)]):
        pass
    (span,) = recorded.get_finished_spans()
    assert span.attributes[attribute.DUE_MS] == 1
    assert span.attributes[attribute.LATENESS_MS] == span.start_time // 1_000_000 - 1


def test_a_pull_with_gaps_says_where_it_ends(recorded):
    receive("orders", SAMPLED, 3, last_offset=2)
    receive("orders", SAMPLED, 3, last_offset=9)
    ends = [span.attributes.get(attribute.LAST_OFFSET) for span in recorded.get_finished_spans()]
    assert ends == [None, 9]


def test_topics_of_the_system_are_not_traced(recorded):
    assert tracing.start_send("%TRACE%", "m1") is None
    receive("%TRACE%", SAMPLED)
    with processing.process([received(topic="%TRACE%")]):
        pass
    assert parts(recorded) == []


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "G" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-01-x",
    ],
)
def test_a_malformed_context_is_none(traceparent):
    assert trace_contexts.extract({TRACEPARENT: traceparent}) is None


def test_trace_state_travels(recorded):
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    context = trace_contexts.extract({TRACEPARENT: parent, TRACESTATE: "v=1"})
    with processing.process([received(properties={TRACEPARENT: parent, TRACESTATE: "v=1"})]):
        sending = tracing.start_send("answers", "m2")
    assert context.trace_state.get("v") == "1"
    assert sending.properties[TRACESTATE] == "v=1"


def test_what_is_sent_while_a_message_without_a_trace_is_processed_has_none(recorded):
    with processing.process([received(properties=REFUSED)]):
        assert tracing.start_send("answers", "m2") is None
    assert parts(recorded) == []


def test_a_creation_context_of_the_application_s_own_stays(recorded):
    own = {TRACEPARENT: "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    sending = tracing.start_send("orders", "m1", properties=own)
    assert sending.properties == {}
    sending.stored("broker-0", 0, 0)
    (span,) = recorded.get_finished_spans()
    assert span.kind is SpanKind.CLIENT
    assert f"{span.context.trace_id:x}" == "1" * 32
    assert f"{span.parent.span_id:x}" == "2" * 16
    assert [f"{link.context.span_id:x}" for link in span.links] == ["2" * 16]
    refused = {TRACEPARENT: own[TRACEPARENT][:-1] + "0"}
    assert tracing.start_send("orders", "m2", properties=refused) is None
    malformed = tracing.start_send("orders", "m3", properties={TRACEPARENT: "nonsense"})
    assert set(malformed.properties) == {TRACEPARENT}


def test_what_carries_no_sampled_context_has_no_span(recorded):
    for properties in ({}, {"a": "b"}, REFUSED, {TRACEPARENT: "nonsense"}):
        message = received(properties=properties)
        with processing.process([message, message]):
            pass
        tracing.record_settle(message, start_ns=1, end_ns=2)
        receive("orders", properties)
    assert parts(recorded) == []


def test_of_what_a_broker_calls_untraced_nobody_looks_at_the_properties(recorded):
    message = received(origin=Untraced("orders", "broker-0", 3))
    assert not processing.wanted([message])
    with processing.process([message]):
        pass
    assert parts(recorded) == []
    assert processing.wanted([message, received()])


@pytest.mark.parametrize("form", ["00-{}-01", " 00-{}-01", "00-{}-03 ", "01-{}-01"])
def test_a_context_in_any_form_of_the_standard_is_followed(recorded, form):
    text = form.format("1" * 32 + "-" + "2" * 16)
    with processing.process([received(properties={TRACEPARENT: text})]):
        pass
    (span,) = recorded.get_finished_spans()
    assert f"{span.parent.span_id:x}" == "2" * 16


def test_a_sampler_that_refuses_leaves_the_message_as_it_is(recorded):
    with sampled_by(ALWAYS_OFF, recorded):
        assert tracing.start_send("orders", "m1") is None


def test_what_was_drawn_is_sampled_by_the_sampler(recorded):
    with sampled_by(ParentBasedTraceIdRatio(1e-6), recorded):
        assert tracing.start_send("orders", "m1", chosen=True) is not None
        assert tracing.head.known
