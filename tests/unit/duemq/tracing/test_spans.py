import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
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
from duemq.message import Message, Origin
from duemq.outcomes import BatchFailed, RetryLater
from duemq.tracing import contexts as trace_contexts
from duemq.tracing import spans as tracing
from duemq.tracing.contexts import TRACEPARENT, TRACESTATE
from duemq.v1.message_pb2 import Record, RecordBatch


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


def weight(span):
    """As the aggregations weigh."""
    of = span.attributes
    return of.get(tracing.SAMPLED_COUNT) or of.get(tracing.BATCH_COUNT) or 1


def unsampled_send():
    """What a producer in another process sends, where the sampler says no."""
    span = TracerProvider(sampler=ALWAYS_OFF).get_tracer("off").start_span("send orders")
    return tracing.SendSpan(span)


def received(**changes):
    message = {
        "message_id": "m1",
        "topic": "orders",
        "broker": "broker-0",
        "queue": 3,
        "offset": 7,
        "key": "k",
        "tag": None,
        "body": b"body",
        "deliveries": 0,
        "due_ms": None,
        "properties": {},
    }
    return SimpleNamespace(**(message | changes))


def encoded(*properties):
    batch = RecordBatch(records=[Record(body=b"x" * 40, properties=p) for p in properties])
    return batch.SerializeToString()


def parts(spans):
    return [span.name for span in spans.get_finished_spans()]


def test_nothing_is_spanned_while_nobody_asked_for_spans():
    assert not tracing.enabled()
    assert tracing.start_send("orders", "m1") is None
    tracing.record_store("orders", "b", 0, 0, 1, start_ns=1, end_ns=2)
    with tracing.process([received()]):
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
        tracing.SYSTEM: "duemq",
        tracing.OPERATION: "send",
        tracing.OPERATION_TYPE: "send",
        tracing.TOPIC: "orders",
        tracing.MESSAGE_ID: "m1",
        tracing.BODY_BYTES: 4,
        tracing.KEY: "k",
        tracing.TAG: "red",
        tracing.BROKER: "broker-0",
        tracing.QUEUE: "2",
        tracing.QUEUE_OFFSET: 0,
        tracing.DUE_MS: 1_000,
    }


def test_a_failed_send_names_the_error(recorded):
    tracing.start_send("orders", "m1").failed(ReadOnly("disk full"))
    (span,) = recorded.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "disk full"
    assert span.attributes[tracing.ERROR_TYPE] == "READ_ONLY"


def test_processing_is_part_of_the_message_s_trace(recorded):
    sending = tracing.start_send("orders", "m1")
    sending.stored("broker-0", 3, 7)
    with tracing.process([received(properties=sending.properties, deliveries=2)], group="g"):
        pass
    sent, processed = recorded.get_finished_spans()
    assert processed.kind is SpanKind.CONSUMER
    assert processed.context.trace_id == sent.context.trace_id
    assert processed.parent.span_id == sent.context.span_id
    assert [link.context.span_id for link in processed.links] == [sent.context.span_id]
    assert processed.attributes[tracing.GROUP] == "g"
    assert processed.attributes[tracing.ATTEMPT] == 2
    assert tracing.LATENESS_MS not in processed.attributes


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
    assert settled.attributes[tracing.OPERATION_TYPE] == "settle"
    assert settled.attributes[tracing.GROUP] == "g"
    assert settled.attributes[tracing.ATTEMPT] == 1
    assert settled.attributes[tracing.DUE_MS] == 1_790_000_010_000
    assert settled.attributes[tracing.DEAD_LETTER] is False


def test_a_sending_back_that_fails_says_so(recorded):
    tracing.record_settle(received(), start_ns=1, end_ns=2, error=ReadOnly("disk full"))
    (span,) = recorded.get_finished_spans()
    assert span.attributes[tracing.ERROR_TYPE] == "READ_ONLY"


def test_a_callback_that_raises_fails_its_span_and_still_raises(recorded):
    with pytest.raises(KeyError), tracing.process([received()]):
        raise KeyError("nope")
    (span,) = recorded.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes[tracing.ERROR_TYPE] == "KeyError"


def test_of_a_batch_only_what_is_named_fails_its_span(recorded):
    origin = Origin("orders", "broker-0", 3)
    batch = [Message(Record(message_id=f"m{n}"), origin, n, 0) for n in range(3)]

    def receive(messages):
        raise BatchFailed({messages[1]: KeyError("nope"), messages[2]: RetryLater("5m")})

    with (
        pytest.raises(BatchFailed),
        Calling(receive, batch=True, group="g", client_id="").span(batch),
    ):
        receive(batch)
    spans = {span.attributes[tracing.MESSAGE_ID]: span for span in recorded.get_finished_spans()}
    assert spans["m0"].status.status_code is StatusCode.UNSET
    assert [spans[name].attributes.get(tracing.ERROR_TYPE) for name in ("m0", "m1", "m2")] == [
        None,
        "KeyError",
        "RetryLater",
    ]


def test_a_batch_callback_gets_a_span_a_message_and_the_first_is_current(recorded):
    first = tracing.start_send("orders", "m1")
    batch = [received(properties=first.properties), received(message_id="m2")]
    with tracing.process(batch):
        inner = tracing.start_send("answers", "m3")
    inner.stored("broker-0", 0, 0)
    spans = {span.attributes[tracing.MESSAGE_ID]: span for span in recorded.get_finished_spans()}
    assert sorted(spans) == ["m1", "m2", "m3"]
    assert spans["m3"].parent.span_id == spans["m1"].context.span_id


def test_a_delayed_message_is_late_by_its_start_less_its_due_time(recorded):
    with tracing.process([received(due_ms=1)]):
        pass
    (span,) = recorded.get_finished_spans()
    assert span.attributes[tracing.DUE_MS] == 1
    assert span.attributes[tracing.LATENESS_MS] == span.start_time // 1_000_000 - 1


def test_topics_of_the_system_are_not_traced(recorded):
    assert tracing.start_send("%TRACE%", "m1") is None
    tracing.record_store("%TRACE%", "b", 0, 0, 1, start_ns=1, end_ns=2)
    tracing.record_receive("%TRACE%", "b", 0, 0, 1, start_ns=1, end_ns=2)
    tracing.record_fire("%TRACE%", "b", 0, 0, [1], store_ms=2, start_ns=1, end_ns=2)
    with tracing.process([received(topic="%TRACE%")]):
        pass
    assert parts(recorded) == []


def test_a_store_span_joins_the_first_context_of_its_frame_and_links_the_others(recorded):
    sends = [tracing.start_send("orders", f"m{i}") for i in range(3)]
    tracing.record_store(
        "orders",
        "broker-0",
        1,
        40,
        3,
        start_ns=1_000,
        end_ns=5_000,
        records=memoryview(encoded(*[{"a": "b"} | s.properties for s in sends])),
    )
    (span,) = recorded.get_finished_spans()
    contexts = [trace_contexts.extract(send.properties) for send in sends]
    assert span.parent.span_id == contexts[0].span_id
    assert [link.context.span_id for link in span.links] == [c.span_id for c in contexts]
    assert (span.start_time, span.end_time) == (1_000, 5_000)
    assert span.attributes[tracing.BATCH_COUNT] == 3


def test_a_producer_s_decision_against_a_trace_holds_for_the_frame(recorded):
    sending = unsampled_send()
    assert not trace_contexts.extract(sending.properties).trace_flags.sampled
    frame = encoded(sending.properties)
    tracing.record_store("orders", "b", 0, 0, 1, start_ns=1, end_ns=2, records=frame)
    tracing.record_schedule("orders", "b", 0, 0, 1, start_ns=1, end_ns=2, records=frame)
    tracing.record_fire("orders", "b", 0, 0, [1], store_ms=2, start_ns=1, end_ns=2, records=frame)
    with tracing.process([received(properties=sending.properties)]):
        pass
    assert parts(recorded) == []


def test_a_frame_without_contexts_starts_a_trace_of_its_own(recorded):
    tracing.record_store("orders", "b", 0, 0, 1, start_ns=1, end_ns=2, records=encoded({}))
    tracing.record_schedule("orders", "b", 0, 0, 5, start_ns=1, end_ns=2, due_ms=9)
    store, schedule = recorded.get_finished_spans()
    assert store.parent is None
    assert store.context.trace_id != schedule.context.trace_id


def test_fires_of_one_due_time_are_one_span_with_their_own_contexts(recorded):
    sends = [tracing.start_send("orders", f"m{i}") for i in range(4)]
    records = [encoded(send.properties) for send in sends]
    tracing.record_fire(
        "orders",
        "broker-0",
        2,
        100,
        [1_000, 1_000, 1_001, 1_005],
        store_ms=1_006,
        start_ns=1,
        end_ns=2,
        records=b"".join(records),
        sizes=[len(record) for record in records],
    )
    spans = recorded.get_finished_spans()
    contexts = [trace_contexts.extract(send.properties) for send in sends]
    told = [
        (
            span.attributes[tracing.BATCH_COUNT],
            span.attributes[tracing.QUEUE_OFFSET],
            span.attributes[tracing.LATENESS_MS],
            span.parent.span_id,
        )
        for span in spans
    ]
    assert told == [
        (2, 100, 6, contexts[0].span_id),
        (1, 102, 5, contexts[2].span_id),
        (1, 103, 1, contexts[3].span_id),
    ]


def test_fires_of_many_due_times_share_a_bounded_number_of_spans(recorded):
    due = list(range(10_000))
    tracing.record_fire("orders", "b", 0, 0, due, store_ms=10_000, start_ns=1, end_ns=2)
    spans = recorded.get_finished_spans()
    assert len(spans) == tracing.FIRE_SPANS_MAX
    assert sum(span.attributes[tracing.BATCH_COUNT] for span in spans) == len(due)
    assert max(span.attributes[tracing.LATENESS_MS] for span in spans) == 10_000


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
    with tracing.process([received(properties={TRACEPARENT: parent, TRACESTATE: "v=1"})]):
        sending = tracing.start_send("answers", "m2")
    assert context.trace_state.get("v") == "1"
    assert sending.properties[TRACESTATE] == "v=1"


def test_links_are_bounded_and_what_was_refused_is_counted():
    sampled = {TRACEPARENT: "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    refused = {TRACEPARENT: "00-" + "1" * 32 + "-" + "2" * 16 + "-00"}
    found = trace_contexts.contexts_in(encoded(*[sampled] * 100, {"a": "b"}))
    assert (len(found.sampled), found.refused) == (trace_contexts.LINKS_MAX, 0)
    found = trace_contexts.contexts_in(encoded(*[refused] * 1_000, sampled))
    assert (len(found.sampled), found.refused) == (1, 1_000)
    cut = encoded(sampled)[:-1]
    assert trace_contexts.contexts_in(cut) == trace_contexts.Found()


@pytest.mark.parametrize("form", ["00-{}", " 00-{}", "00-{} ", "01-{}", "cc-{}-what-will-be"])
def test_whatever_the_standard_allows_is_found_in_a_frame_too(form):
    properties = {TRACEPARENT: form.format("1" * 32 + "-" + "2" * 16 + "-01")}
    context = trace_contexts.extract(properties)
    assert context.span_id == int("2" * 16, 16)
    assert trace_contexts.contexts_in(encoded(properties)) == trace_contexts.Found([context], 0)
    properties = {TRACEPARENT: form.format("1" * 32 + "-" + "2" * 16 + "-02")}
    assert trace_contexts.contexts_in(encoded(properties)) == trace_contexts.Found([], 1)


def test_all_spans_of_sampled_messages_add_up_to_the_same(recorded):
    frames = []
    with sampled_by(ParentBasedTraceIdRatio(0.1), recorded):
        for at in range(0, 2_000, 50):
            sends = [tracing.start_send("orders", f"m{at + i}") for i in range(50)]
            for send in sends:
                send.stored("broker-0", 0, 0)
            frames.append([send.properties for send in sends])
    # Brokers and consumers follow, whatever their own samplers are.
    with sampled_by(ALWAYS_ON, recorded):
        for frame in frames:
            records = [encoded(properties) for properties in frame]
            whole = {"start_ns": 1, "end_ns": 2, "records": b"".join(records)}
            tracing.record_store("orders", "b", 0, 0, 50, **whole)
            tracing.record_schedule("orders", "b", 0, 0, 50, **whole)
            tracing.record_receive("orders", "b", 0, 0, 50, **whole)
            due = [1] * 25 + [2] * 25
            sizes = [len(record) for record in records]
            tracing.record_fire("orders", "b", 0, 0, due, store_ms=3, sizes=sizes, **whole)
            messages = [received(properties=properties) for properties in frame]
            with tracing.process(messages):
                pass
            for message in messages:
                tracing.record_settle(message, start_ns=1, end_ns=2)
    counted = Counter()
    for span in recorded.get_finished_spans():
        counted[span.attributes[tracing.OPERATION]] += weight(span)
    assert 100 < counted["send"] < 400
    assert set(counted) == {"send", "store", "schedule", "receive", "fire", "process", "settle"}
    assert set(counted.values()) == {counted["send"]}


def test_messages_of_producers_that_do_not_trace_are_counted(recorded):
    refused = unsampled_send().properties
    frame = encoded(refused, {}, {"a": "b"})
    tracing.record_store("orders", "b", 0, 0, 3, start_ns=1, end_ns=2, records=frame)
    (span,) = recorded.get_finished_spans()
    assert (span.parent, weight(span)) == (None, 2)
    assert span.attributes[tracing.BATCH_COUNT] == 3


def test_what_is_sent_while_a_message_without_a_trace_is_processed_has_none(recorded):
    with tracing.process([received(properties=unsampled_send().properties)]):
        sending = tracing.start_send("answers", "m2")
    sending.stored("broker-0", 0, 0)
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
