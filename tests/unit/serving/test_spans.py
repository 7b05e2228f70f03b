"""Spans of services: one for the sampled messages of a frame."""

from collections import Counter
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, ParentBasedTraceIdRatio

from duemq.message import Message, Origin
from duemq.tracing import attributes as attribute
from duemq.tracing import contexts as trace_contexts
from duemq.tracing import processing
from duemq.tracing import spans as tracing
from duemq.tracing.contexts import TRACEPARENT
from duemq.v1.message_pb2 import Record, RecordBatch
from duemq_server.serving.tracing import spans as services

SAMPLED = {TRACEPARENT: "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
REFUSED = {TRACEPARENT: "00-" + "1" * 32 + "-" + "2" * 16 + "-00"}


@contextmanager
def sampled_by(sampler, exporter):
    """Traces with this sampler meanwhile."""
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield
    tracing.use(None)


@pytest.fixture
def recorded():
    exporter = InMemorySpanExporter()
    with sampled_by(ParentBased(ALWAYS_ON), exporter):
        yield exporter


def weight(span):
    """As the aggregations weigh."""
    of = span.attributes
    return of.get(attribute.SAMPLED_COUNT) or of.get(attribute.BATCH_COUNT) or 1


def encoded(*properties):
    batch = RecordBatch(records=[Record(body=b"x" * 40, properties=p) for p in properties])
    return batch.SerializeToString()


def test_a_store_span_joins_the_first_context_of_its_frame_and_links_the_others(recorded):
    sends = [tracing.start_send("orders", f"m{i}") for i in range(3)]
    services.record_store(
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
    assert span.attributes[attribute.BATCH_COUNT] == 3


def test_fires_of_one_due_time_are_one_span_with_their_own_contexts(recorded):
    sends = [tracing.start_send("orders", f"m{i}") for i in range(4)]
    records = [encoded(send.properties) for send in sends]
    services.record_fire(
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
            span.attributes[attribute.BATCH_COUNT],
            span.attributes[attribute.QUEUE_OFFSET],
            span.attributes[attribute.LATENESS_MS],
            span.parent.span_id,
        )
        for span in spans
    ]
    assert told == [
        (2, 100, 6, contexts[0].span_id),
        (1, 102, 5, contexts[2].span_id),
        (1, 103, 1, contexts[3].span_id),
    ]


@pytest.mark.parametrize("properties", [{}, {"a": "b"}, REFUSED])
def test_a_frame_without_a_sampled_message_has_no_span(recorded, properties):
    frame = encoded(properties, properties)
    whole = {"start_ns": 1, "end_ns": 2, "records": frame}
    services.record_store("orders", "b", 0, 0, 2, **whole)
    services.record_schedule("orders", "b", 0, 0, 2, **whole)
    services.record_fire("orders", "b", 0, 0, [1, 1], store_ms=2, **whole)
    assert recorded.get_finished_spans() == ()


def test_topics_of_the_system_are_not_traced(recorded):
    whole = {"start_ns": 1, "end_ns": 2, "records": encoded(SAMPLED)}
    services.record_store("%TRACE%", "b", 0, 0, 1, **whole)
    services.record_fire("%TRACE%", "b", 0, 0, [1], store_ms=2, **whole)
    assert recorded.get_finished_spans() == ()


def test_of_a_frame_the_sampled_messages_are_counted(recorded):
    frame = encoded(REFUSED, SAMPLED, {"a": "b"}, SAMPLED, {})
    services.record_store("orders", "b", 0, 0, 5, start_ns=1, end_ns=2, records=frame)
    (span,) = recorded.get_finished_spans()
    assert (weight(span), span.attributes[attribute.BATCH_COUNT]) == (2, 5)


def test_fires_of_many_due_times_share_a_bounded_number_of_spans(recorded):
    due = list(range(10_000))
    record = encoded(SAMPLED)
    services.record_fire(
        "orders",
        "b",
        0,
        0,
        due,
        store_ms=10_000,
        start_ns=1,
        end_ns=2,
        records=record * len(due),
        sizes=[len(record)] * len(due),
    )
    spans = recorded.get_finished_spans()
    assert len(spans) == services.FIRE_SPANS_MAX
    assert sum(span.attributes[attribute.BATCH_COUNT] for span in spans) == len(due)
    for span in spans:
        first, count = (span.attributes[n] for n in (attribute.QUEUE_OFFSET, attribute.BATCH_COUNT))
        late = [10_000 - due_ms for due_ms in due[first : first + count]]
        assert abs(span.attributes[attribute.LATENESS_MS] - sum(late) / count) <= 1
        assert span.attributes[attribute.DUE_MS] in due[first : first + count]


@pytest.mark.parametrize(
    ("store_ms", "answered_ms", "late_ms"),
    [(9, 7, 0), (9, 9, 1), (12, 10, 2), (12, 14, 4), (7, 20, -1), (7, 5, -1)],
)
def test_what_is_stored_ahead_is_not_late_and_what_is_seen_too_soon_is_early(
    recorded, store_ms, answered_ms, late_ms
):
    """Its time is the last one's of its batch, which may be long after it was shown."""
    records = encoded(SAMPLED)
    whole = {"start_ns": 1, "end_ns": 2, "records": records, "sizes": [len(records)]}
    services.record_fire(
        "orders", "b", 0, 0, [8], store_ms=store_ms, answered_ms=answered_ms, **whole
    )
    (span,) = recorded.get_finished_spans()
    assert span.attributes[attribute.LATENESS_MS] == late_ms


def test_all_spans_of_sampled_messages_add_up_to_the_same():
    recorded = InMemorySpanExporter()
    frames = []
    with sampled_by(ParentBasedTraceIdRatio(0.1), recorded):
        for at in range(0, 2_000, 50):
            sends = [tracing.start_send("orders", f"m{at + i}") for i in range(50)]
            for send in filter(None, sends):
                send.stored("broker-0", 0, 0)
            frames.append([send.properties if send else {} for send in sends])
    # Brokers and consumers follow, whatever their own samplers are.
    with sampled_by(ALWAYS_ON, recorded):
        for frame in frames:
            records = [encoded(properties) for properties in frame]
            whole = {"start_ns": 1, "end_ns": 2, "records": b"".join(records)}
            services.record_store("orders", "b", 0, 0, 50, **whole)
            services.record_schedule("orders", "b", 0, 0, 50, **whole)
            carried = [each[TRACEPARENT] for each in frame if each]
            times = {"start_ns": 1, "end_ns": 2}
            tracing.record_receive(
                "orders", "b", 0, 0, 50, last_offset=49, carried=carried, **times
            )
            due = [1] * 25 + [2] * 25
            sizes = [len(record) for record in records]
            services.record_fire("orders", "b", 0, 0, due, store_ms=3, sizes=sizes, **whole)
            origin = Origin("orders", "b", 0)
            messages = [Message(Record(properties=p), origin, n, 0) for n, p in enumerate(frame)]
            with processing.process(messages):
                pass
            for message in messages:
                tracing.record_settle(message, start_ns=1, end_ns=2)
    counted = Counter()
    for span in recorded.get_finished_spans():
        counted[span.attributes[attribute.OPERATION]] += weight(span)
    assert 100 < counted["send"] < 400
    assert set(counted) == {"send", "store", "schedule", "receive", "fire", "process", "settle"}
    assert set(counted.values()) == {counted["send"]}
