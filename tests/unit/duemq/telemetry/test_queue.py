"""When spans that wait are exported, and how many at once."""

import os
import signal
import threading

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider

from duemq.message import Message, Origin
from duemq.producing.batch import Batch
from duemq.telemetry.exporter import CountingExporter
from duemq.telemetry.light_spans import SendRows
from duemq.telemetry.queue import SpanQueue
from duemq.tracing.process_frames import Call, frame_of
from duemq.tracing.sends import SendFrame
from duemq.v1.message_pb2 import Record
from tests.unit.duemq.telemetry.made_lights import Light, lights_of


class Exporter(CountingExporter):
    """Remembers how many spans each export had."""

    batches_max = 8

    def __init__(self):
        super().__init__()
        self.exports = []
        self.some = threading.Condition()

    def deliver(self, spans):
        with self.some:
            self.exports.append(len(spans))
            self.some.notify_all()

    def wait_for(self, exports):
        with self.some:
            assert self.some.wait_for(lambda: len(self.exports) >= exports, 60)
            return self.exports


@pytest.fixture
def queue(request, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setenv(name, value)
    made = SpanQueue(Exporter(), Resource({}))
    made.exporter = made._exporter
    yield made
    made.shutdown()


def frame(count):
    batch = Batch("orders", (None, 0), {}, 1, b"0" * 25, 0)
    light = Light(bytes(16), bytes(8), 1, 4, None, None, None)
    return SendFrame(batch, lights_of([(index, light) for index in range(count)]), 2)


def finished():
    span = TracerProvider(shutdown_on_exit=False).get_tracer("t").start_span("s")
    span.end()
    return span


def test_light_spans_wait_for_a_full_export_and_the_rest_of_them_for_the_next(queue):
    for _ in range(9):
        queue.put(frame(481))
    assert queue.exporter.wait_for(1) == [8 * 481]
    for _ in range(8):
        queue.put(frame(481))
    assert queue.exporter.wait_for(2) == [8 * 481] * 2
    queue.force_flush()
    assert queue.exporter.exports == [8 * 481] * 2 + [481]


def test_spans_of_sends_and_callbacks_fill_exports_of_their_own(queue):
    call = Call("orders", "broker-0", 0, "g", "c", 1, 2)
    messages = [Message(Record(), Origin("orders", "broker-0", 0), 0, 0)] * 100
    for _ in range(8):
        queue.put(frame(200))
        queue.put(frame_of(messages, b"a" * 1_600, b"b" * 800).ended(call))
    queue.force_flush()
    assert sorted(queue.exporter.exports) == [800, 1_600]


def test_other_spans_wait_for_a_batch_and_take_no_light_ones_along(queue):
    queue.put(frame(100))
    span = finished()
    for _ in range(512):
        queue.on_end(span)
    assert queue.exporter.wait_for(1)[0] == 512
    queue.force_flush()
    assert queue.exporter.exports == [512, 100]


@pytest.mark.parametrize("queue", [{"OTEL_BSP_MAX_QUEUE_SIZE": "1000"}], indirect=True)
def test_of_a_small_queue_light_spans_leave_before_it_is_full(queue):
    queue.put(frame(512))
    assert queue.exporter.wait_for(1) == [512]


@pytest.mark.parametrize("queue", [{"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "100"}], indirect=True)
def test_a_frame_beyond_an_export_fills_several(queue):
    queue.put(frame(1_700))
    assert queue.exporter.wait_for(3) == [800, 800, 100]


@pytest.mark.parametrize("queue", [{"OTEL_BSP_SCHEDULE_DELAY": "1"}], indirect=True)
def test_what_does_not_fill_an_export_goes_after_a_while(queue):
    queue.put(frame(3))
    queue.on_end(finished())
    assert sorted(queue.exporter.wait_for(2)) == [1, 3]


def test_what_comes_during_an_export_waits_for_the_next_as_long_as_others(queue):
    """Else a process that always has something to do exports without a pause, a few at a time."""
    deliver, more = queue.exporter.deliver, iter(range(20))

    def delivering(spans):
        deliver(spans)
        if next(more, None) is not None:
            queue.put(frame(1))

    queue.exporter.deliver = delivering
    queue.put(frame(3))
    queue.force_flush()
    assert queue.exporter.exports == [3]
    queue.force_flush()
    assert queue.exporter.exports == [3, 1]


@pytest.mark.parametrize("queue", [{"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4"}], indirect=True)
def test_a_flush_exports_all_that_waited_whatever_comes_meanwhile(queue, monkeypatch):
    """Spans of another kind, say, which have exports of their own."""
    monkeypatch.setattr(queue, "_wake_if_full", lambda: None)  # its thread leaves all to the flush
    exported, deliver = [], queue.exporter.deliver

    def delivering(spans):
        deliver(spans)
        exported.append((type(spans), len(spans)))
        for _ in range(4 if len(exported) < 100 else 0):
            queue.on_end(finished())

    queue.exporter.deliver = delivering
    for _ in range(16):
        queue.put(frame(32))
    queue.on_end(finished())
    queue.force_flush()
    assert sum(count for kind, count in exported if kind is SendRows) == 16 * 32
    assert len(exported) == 1 + 16  # and nothing is exported for the sake of what comes


@pytest.mark.parametrize("ended", [False, True])
def test_in_a_forked_child_a_queue_goes_on_unless_it_had_ended(queue, ended):
    """Of a parent that had its tracing end before it forks, its children have their own."""
    if ended:
        queue.shutdown()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            queue.put(frame(3))
            queue.on_end(finished())
            queue.force_flush()
            code = 10 + sum(queue.exporter.exports)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (10 if ended else 14)


def test_in_a_child_that_is_forked_during_the_shutdown_nothing_hangs(queue):
    under_way, may_end = threading.Event(), threading.Event()

    def delivering(spans):
        under_way.set()
        assert may_end.wait(60)

    queue.exporter.deliver = delivering
    queue.put(frame(1))
    stopping = threading.Thread(target=queue.shutdown)
    stopping.start()
    assert under_way.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends it, if it hangs
        code = 1
        try:
            queue.put(frame(3))
            queue.force_flush()
            code = 10 + queue.exporter.counts.dropped["shutdown"]
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    may_end.set()
    stopping.join(60)
    assert code == 13
    assert queue.exporter.counts.exported == 1
