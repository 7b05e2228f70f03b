"""What a producer's messages carry, and which spans they have, by what the sampler says."""

from contextlib import contextmanager

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from duemq.errors import TooLarge, Unavailable
from duemq.message import Outgoing
from duemq.producing.batch import NO_LABELS, PLAIN, Batch
from duemq.producing.batch_encoding import NO_EXTRAS, Numbers
from duemq.producing.intake import Intake
from duemq.producing.keyed.batch import KeyedBatch
from duemq.producing.outbox import Outbox, Target
from duemq.protocol.due import DELAYS_MS
from duemq.telemetry.exporter import DueMQSpanExporter
from duemq.telemetry.pipeline import Pipeline, Provider
from duemq.tracing import sends, spans
from duemq.tracing.contexts import TRACEPARENT, extract
from duemq.tracing.sampling import RUN_MESSAGES, runs_of
from duemq.v1.broker_pb2 import SendRequest
from duemq.v1.message_pb2 import RecordBatch
from duemq.v1.timer_pb2 import EXISTS, SCHEDULED, ScheduleResponse
from duemq.v1.trace_pb2 import SpanBatch

COUNT = 1_000
ON, OFF, TENTH = sampling.DEFAULT_ON, sampling.DEFAULT_OFF, sampling.ParentBasedTraceIdRatio(0.1)
HALF = sampling.ParentBasedTraceIdRatio(0.5)
OWN = "00-" + "1" * 32 + "-" + "2" * 16 + "-0"


class Sink:
    def __init__(self):
        self.batches = []

    def send(self, *bodies):
        self.batches += map(SpanBatch.FromString, bodies)

    def close(self):
        pass


class Producer:
    """Offers messages and answers all batches."""

    def __init__(self, sampler, provider=Provider):
        self.outbox = Outbox(1 << 30, 1 << 20, lambda: None)
        self.intake = Intake(self.outbox)
        self.target = Target("orders", (), traced=True)
        self.provider = provider(sampler=sampler, shutdown_on_exit=False)
        self.sink = Sink()
        self.pipeline = Pipeline(self.provider, DueMQSpanExporter(lambda: self.sink))
        spans.use(self.provider)

    def submit(self, count, **options):
        names = "key", "tag", "ordering_key", "properties", "delay", "deliver_at", "delay_level"
        given = [options.get(name) for name in names]
        for _ in range(count):
            self.intake.offer(self.target, b"body", *given)

    def send_many(self, count, **options):
        common = Outgoing(b"", **options)
        for chunk in self.intake.chunks([b"body"] * count, common):
            self.intake.offer_chunk(self.target, chunk, common, [])

    def answered(self, error=None):
        """The requests that went out."""
        batches = self.outbox.take_arrivals()
        requests = []
        for number, batch in enumerate(batches):
            self.outbox.seal(batch)
            requests.append(SendRequest.FromString(batch.encode(3, Numbers(1, 0, number))))
            if error is None:
                batch.stored("broker-0", 7, 3, 100, 1_000, b"")
            else:
                batch.failed(error)
            batch.wake()
        sent = [each for request in requests for each in request.batches]
        for batch in sent:
            entries = [RecordBatch(records=[record]) for record in batch.records.records]
            assert [entry.ByteSize() for entry in entries] == list(batch.sizes)
        return sent

    def exported(self):
        """(trace id, span id) of the spans, as far as light ones go."""
        self.pipeline.flush()
        return {
            (batch.trace_ids[16 * row : 16 * row + 16], batch.span_ids[8 * row : 8 * row + 8])
            for batch in self.sink.batches
            for row in range(batch.rows)
        }


def carried(batches):
    """The contexts that the messages carry."""
    return {
        carried_by(record)
        for batch in batches
        for record in batch.records.records
        if TRACEPARENT in record.properties
    }


def carried_by(record):
    found = extract(record.properties)
    return found.trace_id.to_bytes(16, "big"), found.span_id.to_bytes(8, "big")


def sampled_in(batch):
    """Whether the runs of a frame are sampled, each; none: no message is."""
    sampled = [TRACEPARENT in record.properties for record in batch.records.records]
    if not any(sampled):
        return ()
    by_run = [set(sampled[run.start : run.stop]) for run in runs_of(len(sampled))]
    assert all(len(each) == 1 for each in by_run)
    return tuple(each.pop() for each in by_run)


def rows_of(batch):
    """(message id, ((trace id, span id), queue offset, bytes of the body)) of a SpanBatch."""
    texts = batch.message_id
    for row in range(batch.rows):
        ids = batch.trace_ids[16 * row : 16 * row + 16], batch.span_ids[8 * row : 8 * row + 8]
        yield texts.values[texts.rows[row]], (ids, batch.queue_offset[row], batch.body_bytes[row])


def outcomes_of(batch):
    """(message id, type of the error) of a SpanBatch."""
    ids, errors = batch.message_id, batch.error_type
    for row in range(batch.rows):
        error = errors.values[errors.rows[row]] if errors.rows else ""
        yield ids.values[ids.rows[row]], error


@contextmanager
def inside(*, sampled):
    context = SpanContext(0xABC, 0xDEF, False, TraceFlags(int(sampled)))
    with trace.use_span(NonRecordingSpan(context)):
        yield


@pytest.fixture(params=[Provider, TracerProvider], ids=["light", "sdk"])
def producer(request):
    made = []

    def make(sampler):
        made.append(Producer(sampler, request.param))
        return made[-1]

    yield make
    spans.use(None)
    for each in made:
        each.pipeline.shutdown(30)


@pytest.fixture(params=[TENTH])
def only_light(request):
    made = Producer(request.param)
    yield made
    spans.use(None)
    made.pipeline.shutdown(30)


CALLS = pytest.mark.parametrize("call", ["submit", "send_many"])


@CALLS
def test_what_is_not_sampled_carries_nothing_and_the_frame_says_so(producer, call):
    p = producer(OFF)
    getattr(p, call)(COUNT)
    batches = p.answered()
    assert all(batch.untraced for batch in batches)
    assert not any(r.properties for batch in batches for r in batch.records.records)
    assert p.exported() == set()


@CALLS
def test_a_tenth_carries_its_span_and_no_other_message_does(producer, call):
    p = producer(TENTH)
    batches = []
    for _ in range(2 * COUNT):
        getattr(p, call)(5)
        batches += p.answered()
    assert sum(len(batch.records.records) for batch in batches) == 10 * COUNT
    found = carried(batches)
    # Six standard deviations of a binomial distribution, of frames of 5.
    assert abs(len(found) - COUNT) <= 6 * 30 * 5**0.5
    assert p.exported() == found
    assert not any(batch.untraced for batch in batches if carried([batch]))


@pytest.mark.parametrize("only_light", [HALF], indirect=True)
def test_what_submit_sends_is_traced_by_runs_of_a_frame(only_light):
    seen = set()
    for _ in range(20):
        only_light.submit(1_100)
        for batch in only_light.answered():
            sampled = [TRACEPARENT in record.properties for record in batch.records.records]
            runs = [set(sampled[at : at + RUN_MESSAGES]) for at in range(0, 1_100, RUN_MESSAGES)]
            assert all(len(run) == 1 for run in runs)
            assert batch.untraced == (not any(sampled))
            seen |= {run.pop() for run in runs}
    assert seen == {True, False}


@pytest.mark.parametrize("only_light", [HALF], indirect=True)
def test_what_send_many_sends_is_traced_by_runs_and_frames_without_one_say_so(only_light):
    for _ in range(20):
        only_light.send_many(1_100)
    batches = only_light.answered()
    # Frames of one run and of two; a chance of one in 2^19 that one of the two is not seen.
    assert {sampled_in(batch) for batch in batches} >= {(), (True,)}
    assert all(batch.untraced == (not sampled_in(batch)) for batch in batches)
    assert carried(batches) == only_light.exported()


@CALLS
@pytest.mark.parametrize("options", [{}, {"key": "k", "properties": {"a": "b"}}])
def test_each_message_carries_the_span_that_says_where_it_lies(producer, call, options):
    p = producer(HALF)
    for count in (1, 2, 700, 3, 1, 1_300, 1, 1, 5):
        getattr(p, call)(count, **options)
    batches = p.answered()
    records = {
        record.message_id: (carried_by(record), 100 + index, len(record.body))
        for batch in batches
        for index, record in enumerate(batch.records.records)
        if TRACEPARENT in record.properties
    }
    p.exported()
    rows = [row for batch in p.sink.batches for row in rows_of(batch)]
    assert dict(rows) == records
    assert len(rows) == len(records)


@CALLS
def test_the_caller_s_span_decides(producer, call):
    p = producer(TENTH)
    with inside(sampled=True):
        getattr(p, call)(5)
    taken = carried(p.answered())
    assert {trace_id[-2:] for trace_id, _ in taken} == {b"\x0a\xbc"}
    assert (len(taken), p.exported()) == (5, taken)
    p = producer(ON)
    with inside(sampled=False):
        getattr(p, call)(5)
    [batch] = p.answered()
    assert batch.untraced
    assert p.exported() == set()


@CALLS
def test_a_context_of_the_application_s_own_stays_and_decides(producer, call):
    p = producer(OFF)
    getattr(p, call)(3, properties={TRACEPARENT: OWN + "1"})
    [batch] = p.answered()
    assert {r.properties[TRACEPARENT] for r in batch.records.records} == {OWN + "1"}
    assert not batch.untraced
    assert {trace_id.hex() for trace_id, _ in p.exported()} == {"1" * 32}
    p = producer(ON)
    getattr(p, call)(3, properties={TRACEPARENT: OWN + "0"})
    [batch] = p.answered()
    assert {r.properties[TRACEPARENT] for r in batch.records.records} == {OWN + "0"}
    assert p.exported() == set()


def test_a_sampler_of_another_kind_is_asked(producer):
    class Odd(sampling.Sampler):
        asked = 0

        def should_sample(self, *_, **__):
            self.asked += 1
            taken = self.asked % 2
            decision = sampling.Decision.RECORD_AND_SAMPLE if taken else sampling.Decision.DROP
            return sampling.SamplingResult(decision)

        def get_description(self):
            return "Odd"

    sampler = Odd()
    p = producer(sampler)
    p.submit(5)
    p.send_many(5)
    found = carried(p.answered())
    assert sampler.asked == 10
    assert (len(found), p.exported()) == (5, found)


@CALLS
def test_labels_and_lengths_may_differ_from_message_to_message(producer, call):
    p = producer(HALF)
    found = set()
    for number in range(200):
        common = {"key": f"k{number}"} if number % 3 else {}
        getattr(p, call)(1 + number % 5, **common, properties={"a": "b" * number})
        getattr(p, call)(2, properties={"a": "b" * number})
        found |= carried(p.answered())
    assert p.exported() == found
    assert found


def test_spans_say_what_became_of_the_message(producer):
    p = producer(ON)
    p.submit(1, key="k", tag="t", properties={"a": "b"})
    [batch] = p.answered()
    [record] = batch.records.records
    assert (record.key, record.tag, record.properties["a"]) == ("k", "t", "b")
    p.submit(1)
    p.answered(Unavailable("gone"))
    p.exported()
    rows = [batch for batch in p.sink.batches if batch.rows]
    texts = {value for batch in rows for value in batch.message_id.values}
    assert record.message_id in texts
    assert len(texts) == 2
    assert [value for batch in rows for value in batch.error_type.values if value] == [
        "UNAVAILABLE"
    ]
    assert 3 in [queue for batch in rows for queue in batch.queue_id]
    assert 100 in [offset for batch in rows for offset in batch.queue_offset]


@pytest.mark.parametrize("refused", [{0}, {1, 3}])
def test_under_timer_keys_only_what_was_refused_has_failed(producer, refused):
    p = producer(ON)
    batch = KeyedBatch("orders", (None, DELAYS_MS), {}, 0, b"0" * 25, 0)
    batch.draw(0)
    answer = ScheduleResponse()
    for index in range(5):
        batch.trace(index, 4, NO_EXTRAS, NO_LABELS, None)
        batch.bodies.append(b"body")
        batch.timer_keys.append(f"k{index}")
        answer.results.add(outcome=EXISTS if index in refused else SCHEDULED)
    batch.answered("timer-0", answer)
    batch.wake()
    p.exported()
    told = {text: bool(error) for sent in p.sink.batches for text, error in outcomes_of(sent)}
    assert told == {batch.message_id(index): index in refused for index in range(5)}


@pytest.mark.parametrize("listed", [False, True])
def test_of_a_batch_only_what_was_too_large_has_failed(producer, listed):
    p = producer(ON)
    bodies = [b"small", b"too large", b"small", b"too large", b"small"]
    batch = Batch("orders", PLAIN, {}, 1, b"0" * 25, 0)
    batch.draw(0)
    listed = listed and sends.may_be_light(None, None)
    for index in range(5):
        if not listed:
            batch.trace(index, len(bodies[index]), NO_EXTRAS, NO_LABELS, None)
            batch.bodies.append(bodies[index])
    if listed:
        lights = sends.begin_lights(range(5), list(map(len, bodies)), None, None, None)
        batch.fill(bodies, None, 0, [(0, lights, lights.encoded)])
        batch.bodies = bodies
    batch.encode(0, Numbers(1, 0, 0))
    assert batch.leave_out(TooLarge("no", field="body", limit=5))
    batch.stored("b0", 7, 2, 100, 1, b"")
    batch.wake()
    p.exported()
    told, offsets = {}, []
    for sent in p.sink.batches:
        told |= {text: bool(error) for text, error in outcomes_of(sent)}
        offsets += [offset for offset in sent.queue_offset if offset]
    assert told == {batch.message_id(index): index in (1, 3) for index in range(5)}
    assert sorted(offsets) == [100, 101, 102]


def test_who_else_looks_at_the_process_s_spans_sees_those_of_sends():
    seen = InMemorySpanExporter()
    p = Producer(ON)
    p.provider.add_span_processor(SimpleSpanProcessor(seen))
    p.submit(2)
    p.answered()
    spans.use(None)
    p.pipeline.shutdown(30)
    assert [span.name for span in seen.get_finished_spans()] == ["send orders"] * 2
    assert sum(batch.rows for batch in p.sink.batches) == 2


def test_where_opentelemetry_is_disabled_nothing_is_traced(monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    p = Producer(ON)
    p.submit(3)
    p.send_many(3)
    assert carried(p.answered()) == set()
    spans.use(None)
    assert p.exported() == set()
    p.pipeline.shutdown(30)


def test_spans_that_nobody_takes_are_counted(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    p = Producer(ON)
    p.sink.send = None
    p.send_many(5)
    p.answered()
    p.exported()
    assert p.pipeline.dropped_by_reason["export_failed"] == 5
    p.pipeline.shutdown(30)
    p.send_many(7)
    p.answered()
    spans.use(None)
    assert p.pipeline.dropped_by_reason["shutdown"] == 7


def test_what_the_messages_of_a_frame_share_is_asked_for_once(only_light, monkeypatch):
    light_sink, asked = spans.light_sink, []
    monkeypatch.setattr(spans, "light_sink", lambda: asked.append(1) or light_sink())
    only_light.send_many(COUNT)
    with inside(sampled=True):
        only_light.send_many(COUNT)
    frames = only_light.answered()
    assert len(asked) == len(frames)
    assert carried(frames) == only_light.exported()
    assert len(only_light.exported()) >= COUNT


class Failing(sampling.Sampler):
    def should_sample(self, *_, **__):
        raise RuntimeError("no idea")

    def get_description(self):
        return "Failing"


@CALLS
def test_a_sampler_that_raises_costs_the_span_and_not_the_message(producer, call):
    p = producer(Failing())
    getattr(p, call)(3)
    getattr(p, call)(3, key="k")
    assert sum(len(batch.records.records) for batch in p.answered()) == 6
    assert p.exported() == set()


class Raising(SpanProcessor):
    def on_end(self, span):
        raise RuntimeError("no room")


@pytest.mark.parametrize("error", [None, Unavailable("away")])
def test_who_waits_is_told_though_a_span_processor_raises(producer, error):
    p = producer(ON)
    p.provider.add_span_processor(Raising())
    p.submit(2)
    told = []
    for batch in p.outbox.arrivals:
        batch.on_done(lambda: told.append("done"))
    p.answered(error)
    assert told == ["done"]


def test_who_waits_is_told_though_a_broker_answered_fewer_due_times_than_messages():
    p = Producer(ON, TracerProvider)
    p.submit(2, delay="1s")
    [batch] = p.outbox.take_arrivals()
    told = []
    batch.on_done(lambda: told.append("done"))
    batch.stored("broker-0", 7, 3, 100, 1_000, bytes(8))
    batch.wake()
    assert told == ["done"]
    spans.use(None)
    p.pipeline.shutdown(30)
