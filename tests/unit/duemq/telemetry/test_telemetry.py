import logging
import os
import threading
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from duemq import telemetry
from duemq.errors import InvalidArgument, Timeout, TooLarge
from duemq.producing import blocking
from duemq.telemetry.counts import SpanCounts
from duemq.telemetry.exporter import DueMQSpanExporter
from duemq.telemetry.pipeline import Pipeline
from duemq.tracing import spans as tracing
from duemq.v1.trace_pb2 import SpanBatch


class MemorySink:
    def __init__(self):
        self.batches = []
        self.fail_with = None
        self.rows_max = 10**9
        self.closed = False
        self.thread = ""

    def send(self, *bodies):
        self.thread = threading.current_thread().name
        if self.fail_with is not None:
            raise self.fail_with
        batches = [SpanBatch.FromString(body) for body in bodies]
        if sum(batch.rows for batch in batches) > self.rows_max:
            raise TooLarge("too large")
        self.batches += batches

    def close(self):
        self.closed = True


@pytest.fixture
def sink():
    return MemorySink()


@pytest.fixture
def provider(sink):
    provider = TracerProvider(shutdown_on_exit=False)
    tracing.use(provider)
    yield provider
    tracing.use(None)
    provider.shutdown()


def send(count, topic="orders"):
    for i in range(count):
        span = tracing.start_send(topic, f"m{i}")
        if span is not None:
            span.stored("broker-0", 0, i)


def finished(count):
    provider = TracerProvider(shutdown_on_exit=False)
    tracer = provider.get_tracer("t")
    spans = [tracer.start_span(f"s{i}") for i in range(count)]
    for span in spans:
        span.end()
    return spans


def test_spans_arrive_in_batches_of_at_most_512(provider, sink):
    pipeline = Pipeline(provider, DueMQSpanExporter(lambda: sink))
    send(1_100)
    pipeline.shutdown(timeout_s=30)
    assert sum(batch.rows for batch in sink.batches) == 1_100
    assert max(batch.rows for batch in sink.batches) == 512
    assert (pipeline.exported, pipeline.dropped) == (1_100, 0)
    assert sink.closed


def test_the_sink_is_made_at_first_use_only(provider):
    made = []
    pipeline = Pipeline(provider, DueMQSpanExporter(lambda: made.append(1) or MemorySink()))
    pipeline.shutdown(timeout_s=30)
    assert made == []


def test_what_the_queue_cannot_hold_is_dropped_counted_and_said_once(
    provider, sink, monkeypatch, caplog
):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    gate = threading.Event()
    slow = DueMQSpanExporter(lambda: sink)
    send_now = sink.send
    sink.send = lambda *bodies: (gate.wait(30), send_now(*bodies))
    pipeline = Pipeline(provider, slow)
    send(1_000)
    gate.set()
    pipeline.shutdown(timeout_s=30)
    assert pipeline.dropped > 0
    assert pipeline.dropped + pipeline.exported == 1_000
    assert pipeline.dropped_by_reason["queue_full"] == pipeline.dropped
    said = [record.message for record in caplog.records if record.name.startswith("duemq.")]
    assert said[0] == "100 spans wait for export, further ones are dropped"
    assert said[-1] == f"{pipeline.dropped} spans were dropped, {pipeline.exported} exported"
    assert len(said) <= 3


def test_a_failing_export_is_counted_and_said_once(sink, caplog):
    exporter = DueMQSpanExporter(lambda: sink)
    sink.fail_with = Timeout("no answer")
    with caplog.at_level(logging.INFO, "duemq.telemetry"):
        assert exporter.export(finished(3)) is SpanExportResult.FAILURE
        assert exporter.export(finished(2)) is SpanExportResult.FAILURE
        sink.fail_with = None
        assert exporter.export(finished(4)) is SpanExportResult.SUCCESS
    assert (exporter.counts.exported, exporter.dropped) == (4, 5)
    assert exporter.counts.dropped["export_failed"] == 5
    assert [record.message for record in caplog.records] == [
        "spans dropped: no answer",
        "trace export works again",
    ]


def test_an_error_of_any_kind_is_counted(sink):
    exporter = DueMQSpanExporter(lambda: sink)
    sink.fail_with = TypeError("a bug")
    assert exporter.export(finished(3)) is SpanExportResult.FAILURE
    assert exporter.dropped == 3


def test_a_batch_that_is_too_large_goes_in_halves(sink):
    sink.rows_max = 2
    exporter = DueMQSpanExporter(lambda: sink)
    assert exporter.export(finished(7)) is SpanExportResult.SUCCESS
    assert [name for batch in sink.batches for name in batch.name.values] == [
        f"s{i}" for i in range(7)
    ]


def test_one_span_that_is_too_large_is_dropped_alone(sink):
    sink.rows_max = 0
    exporter = DueMQSpanExporter(lambda: sink)
    assert exporter.export(finished(3)) is SpanExportResult.FAILURE
    assert exporter.dropped == 3


def test_one_span_that_cannot_be_written_is_dropped_alone(sink):
    exporter = DueMQSpanExporter(lambda: sink)
    before_all_time = ReadableSpan("wrong", start_time=-1)
    exporter.export([*finished(5), before_all_time, *finished(2)])
    assert (exporter.counts.exported, exporter.dropped) == (7, 1)
    assert sum(batch.rows for batch in sink.batches) == 7


def test_after_the_stop_time_nothing_is_sent(sink):
    exporter = DueMQSpanExporter(lambda: sink)
    exporter.stop_at(0.0)
    assert exporter.export(finished(3)) is SpanExportResult.FAILURE
    assert sink.batches == []


def test_shutdown_does_not_wait_for_an_export_that_hangs(provider, sink):
    gate = threading.Event()
    sink.send = lambda *bodies: gate.wait(30)
    pipeline = Pipeline(provider, DueMQSpanExporter(lambda: sink))
    send(1)
    pipeline.shutdown(timeout_s=0.01)
    assert (pipeline.exported, pipeline.dropped) == (0, 1)
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "duemq-trace-stop":
            thread.join()
    # What was told holds, whatever became of it.
    assert (pipeline.exported, pipeline.dropped_by_reason["shutdown"]) == (0, 1)


def test_unsampled_spans_are_no_loss(sink):
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    tracing.use(provider)
    pipeline = Pipeline(provider, DueMQSpanExporter(lambda: sink))
    send(10)
    pipeline.shutdown(timeout_s=30)
    tracing.use(None)
    assert (pipeline.exported, pipeline.dropped) == (0, 0)


def test_spans_that_wait_when_the_provider_ends_are_counted(sink, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    provider = TracerProvider(shutdown_on_exit=False)
    tracing.use(provider)
    pipeline = Pipeline(provider, DueMQSpanExporter(lambda: sink))
    sink.fail_with = Timeout("no answer")
    send(5)
    provider.shutdown()  # by the application, not through the pipeline
    tracing.use(None)
    assert (pipeline.exported, pipeline.dropped) == (0, 5)


def test_a_forked_child_counts_from_zero():
    counts = SpanCounts()
    assert counts.admit(1) is None
    assert counts.admit(1) == "queue_full"
    child = os.fork()
    if child == 0:
        whole = counts.waiting + counts.exported + sum(counts.dropped.values())
        os._exit(whole)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (counts.waiting, counts.dropped["queue_full"]) == (1, 1)


def test_a_forked_child_has_a_sink_of_its_own_and_leaves_its_parent_s_open():
    """Numbers of its own among that: brokers drop what comes twice under the same ones."""
    made, closed = [], []

    class Sink:
        def __init__(self):
            made.append(self)
            self.sent = 0

        def send(self, *bodies):
            self.sent += 1

        def close(self):
            closed.append(self)

    exporter = DueMQSpanExporter(Sink)
    span = ReadableSpan("s")
    exporter.deliver([span])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            exporter.deliver([span])
            exporter.shutdown()
            sent, own_alone_is_closed = [sink.sent for sink in made], closed == made[1:]
            code = 7 if sent == [1, 1] and own_alone_is_closed else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    exporter.deliver([span])
    exporter.shutdown()
    assert [sink.sent for sink in made] == [2]
    assert closed == made


def test_a_process_tells_all_that_it_lost(sink, monkeypatch):
    """Over several `configure`; each pipeline here is made of a sink in memory."""
    providers = []

    def start(service, exporter, *, nameserver, instance, tls):
        providers.append(TracerProvider(shutdown_on_exit=False))
        tracing.use(providers[-1])
        return Pipeline(providers[-1], DueMQSpanExporter(lambda: sink))

    monkeypatch.setattr("duemq.telemetry.pipeline.start", start)
    before = telemetry.dropped()["export_failed"], telemetry.exported()
    for count in (3, 4):
        telemetry.configure("app")
        sink.fail_with = Timeout("no answer")
        send(count)
        telemetry._pipeline.flush()
        sink.fail_with = None
        send(1)
        telemetry._pipeline.flush()
    telemetry.shutdown()
    tracing.use(None)
    after = telemetry.dropped()["export_failed"], telemetry.exported()
    assert (after[0] - before[0], after[1] - before[1]) == (7, 2)


def test_an_unknown_exporter_is_refused():
    with pytest.raises(InvalidArgument, match="'jaeger' is not allowed") as refused:
        telemetry.configure("app", "jaeger")
    assert (refused.value.field, refused.value.limit) == ("tracing", "one of off, duemq, otlp")


def test_off_is_off():
    assert telemetry.configure("app", "off") is None
    assert not tracing.enabled()


def test_the_environment_decides(monkeypatch):
    monkeypatch.delenv("DUEMQ_TRACING", raising=False)
    assert telemetry.configure_from_env("app") is None
    monkeypatch.setenv("DUEMQ_TRACING", "nonsense")
    with pytest.raises(InvalidArgument):
        telemetry.configure_from_env("app")


def test_at_exit_producers_that_nobody_closed_send_before_the_spans_end(monkeypatch):
    ended = []
    pipeline = SimpleNamespace(shutdown=lambda timeout_s: ended.append("spans"))
    monkeypatch.setattr(telemetry, "_pipeline", pipeline)
    monkeypatch.setattr(blocking, "close_producers", lambda: ended.append("producers"))
    telemetry._end()
    assert ended == ["producers", "spans"]


def test_who_breaks_off_what_producers_still_send_at_exit_has_the_spans_all_the_same(monkeypatch):
    ended = []

    def close_producers():
        raise KeyboardInterrupt

    pipeline = SimpleNamespace(shutdown=lambda timeout_s: ended.append("spans"))
    monkeypatch.setattr(telemetry, "_pipeline", pipeline)
    monkeypatch.setattr(blocking, "close_producers", close_producers)
    with pytest.raises(KeyboardInterrupt):
        telemetry._end()
    assert ended == ["spans"]
