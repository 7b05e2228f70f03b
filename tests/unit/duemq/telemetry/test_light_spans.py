"""Light spans are what OpenTelemetry's would be."""

import struct

from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

import duemq
from duemq.errors import Unavailable
from duemq.producing.batch import Batch
from duemq.telemetry import columns
from duemq.telemetry.light_spans import LightSpan, SendRows
from duemq.tracing import attributes as attribute
from duemq.tracing.contexts import Found
from duemq.tracing.sends import Light, SendFrame

RESOURCE = Resource({"service.name": "shop", "service.instance.id": "shop-1"})
PARENT = SpanContext(7, 8, False, TraceFlags(1))


def batch(due_ms=b"", error=None):
    made = Batch("orders", (None, 0), {}, 1, b"0" * 25, 0)
    made.fill([b"x"] * 5, None, 0)
    if error is None:
        made.stored("broker-0", 1, 3, 100, 9, due_ms)
    else:
        made.failed(error)
    return made


def light(number, parent=None, key=None):
    ids = number.to_bytes(16, "big"), (number + 1).to_bytes(8, "big")
    return Light(*ids, 1_000 + number, 40, key, "red", parent)


def rows():
    due = struct.pack("<5q", *range(50, 55))
    frames = [
        SendFrame(batch(), [(0, light(1)), (4, light(2, PARENT, "k"))], 5_000),
        SendFrame(batch(due), [(2, light(3))], 6_000),
        SendFrame(batch(error=Unavailable("gone")), [(1, light(4))], 7_000),
    ]
    return SendRows.of(frames, RESOURCE)


def test_columns_of_sends_are_those_of_the_spans_they_stand_for():
    assert columns.encode(rows()) == columns.encode(list(rows()))


def test_a_part_of_the_rows_is_rows():
    whole = rows()
    assert [len(whole), len(whole[1:3]), len(whole[:0])] == [4, 2, 0]
    assert columns.encode(whole[1:3]) == columns.encode(list(whole)[1:3])


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
    found = Found(texts, 2)
    span = LightSpan("store orders", SpanKind.SERVER, {}, PARENT, found, 1, 2, None, RESOURCE)
    assert [link.context.span_id for link in span.links] == [8, 9]
    assert (span.context.trace_id, span.parent) == (7, PARENT)
    assert span.context.span_id not in (0, 8)
