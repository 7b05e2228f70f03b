"""Light spans are what OpenTelemetry's would be."""

import re
import struct

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

import duemq
from duemq.errors import Unavailable
from duemq.producing.batch import Batch
from duemq.telemetry import columns
from duemq.telemetry.light_spans import LightSpan, SendRows
from duemq.tracing import attributes as attribute
from duemq.tracing.contexts import FoundContexts, extract
from duemq.tracing.sends import SendFrame, SpanRun
from duemq.tracing.spans import Finished
from duemq.v1.message_pb2 import Record
from duemq.v1.trace_pb2 import SpanBatch
from tests.unit.duemq.telemetry.made_lights import Light, lights_of

RESOURCE = Resource({"service.name": "shop", "service.instance.id": "shop-1"})
PARENT = SpanContext(7, 8, False, TraceFlags(1))


def batch(due_ms=b"", error=None):
    made = Batch("orders", (None, 0), {}, 1, b"0" * 25, 0)
    made.bodies = [b"x"] * 5
    if error is None:
        made.stored("broker-0", 1, 3, 100, 9, due_ms)
    else:
        made.failed(error)
    return made


def light(number, parent=None, key=None):
    ids = number.to_bytes(16, "big"), (number + 1).to_bytes(8, "big")
    return Light(*ids, 1_000 + number, 40, key, "red", parent)


def light_span(found):
    span = Finished("store orders", SpanKind.SERVER, {}, PARENT, found, 1, 2, None)
    return LightSpan(span, RESOURCE)


def rows():
    due = struct.pack("<5q", *range(50, 55))
    frames = [
        SendFrame(batch(), lights_of([(0, light(1)), (4, light(2, PARENT, "k"))]), 5_000),
        SendFrame(batch(due), lights_of([(2, light(3))]), 6_000),
        SendFrame(batch(error=Unavailable("gone")), lights_of([(1, light(4))]), 7_000),
    ]
    return SendRows(frames, RESOURCE)


def encoded(spans):
    return SpanBatch.FromString(columns.encode(spans))


def test_columns_of_sends_are_those_of_the_spans_they_stand_for():
    assert encoded(rows()) == encoded(list(rows()))


def test_a_part_of_the_rows_is_rows():
    whole = rows()
    assert [len(whole), len(whole[1:3]), len(whole[:0])] == [4, 2, 0]
    assert encoded(whole[1:3]) == encoded(list(whole)[1:3])


def test_a_run_carries_its_spans():
    run = lights_of([(number, light(number)) for number in range(1, 70, 10)])
    carried = re.findall(rb"00-\w{32}-(\w{16})-01", b"".join(run.encoded))
    assert [int(span_id, 16) for span_id in carried] == list(range(2, 72, 10))
    assert list(run.part(2, 5).encoded) == list(run.encoded)[2:5]


def test_spans_that_come_one_by_one_are_those_that_their_messages_carry():
    run = SpanRun()
    for number in range(40):
        parent = PARENT if number % 3 == 1 else None
        run.begin(number + number // 20, number, f"k{number}", None, parent)
    (first, some), (second, others) = run.carried()
    assert (first, len(some), second) == (0, 20, 21)
    given, lights = [*some, *others], run.lights()
    assert list(lights.encoded) == given
    assert list(lights.indexes) == [*range(20), *range(21, 41)]
    assert list(lights.body_bytes) == list(range(40))
    found = [extract(Record.FromString(each).properties) for each in given]
    assert len({context.span_id for context in found}) == 40
    of_parents = {number for number, each in enumerate(found) if each.trace_id == PARENT.trace_id}
    assert of_parents == set(range(1, 40, 3))
    assert [number for number, each in enumerate(lights.parents) if each] == sorted(of_parents)


def test_a_send_says_what_became_of_it():
    stored, child, late, failed = rows()
    assert stored.attributes[attribute.QUEUE_OFFSET] == 100
    assert stored.instrumentation_scope.version == duemq.__version__
    assert stored.instrumentation_scope.schema_url.endswith("/1.44.0")
    assert (child.parent, child.attributes[attribute.KEY]) == (PARENT, "k")
    assert late.attributes[attribute.DUE_MS] == 52
    assert failed.attributes[attribute.ERROR_TYPE] == "UNAVAILABLE"
    assert attribute.QUEUE not in failed.attributes
    assert failed.end_time - failed.start_time == 7_000 - 1_004


def test_a_span_of_a_frame_is_linked_to_all_its_messages():
    texts = [f"00-{7:032x}-{number:016x}-01" for number in (8, 9)]
    found = FoundContexts(texts, 2)
    span = light_span(found)
    assert [link.context.span_id for link in span.links] == [8, 9]
    assert (span.context.trace_id, span.parent) == (7, PARENT)
    assert span.context.span_id not in (0, 8)


def test_links_of_a_frame_s_span_are_put_in_as_others_are():
    texts = [f"00-{7:032x}-{number:016x}-01" for number in range(1, 20)]
    texts += [f"cc-{7:032x}-{20:016x}-01-what-will-be", f"00-{0:032x}-{21:016x}-01", "00-0"]
    span = light_span(FoundContexts(texts, 22))
    other = ReadableSpan(
        span.name,
        span.context,
        PARENT,
        RESOURCE,
        links=span.links,
        kind=span.kind,
        start_time=1,
        end_time=2,
    )
    assert encoded([span]) == encoded([other])
    assert list(encoded([span]).link_counts) == [19]  # without the parent's
