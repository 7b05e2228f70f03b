"""OpenTelemetry spans → SpanBatch → Arrow: what goes in comes out."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from duemq.errors import Corrupt
from duemq.protocol.due import DUE_MS_MAX
from duemq.telemetry import columns
from duemq.tracing import attributes as attribute
from duemq.v1.trace_pb2 import SpanBatch
from duemq_analytics.source import schema, spans
from duemq_analytics.source.plan import QueueRange

# Generating spans takes long where the machine is busy; that says nothing about them.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SOURCE = QueueRange("broker-0", "h:1", 2, 0, 100)

RANGES = {
    "attempt": range(-(2**31), 2**31),
    "batch_count": range(2**31),
    "sampled_count": range(2**31),
    "due_ms": range(DUE_MS_MAX + 1),
    "lateness_ms": range(-DUE_MS_MAX, DUE_MS_MAX + 1),
}
"""What is beyond stays with the attributes that have no column."""

texts = st.text(st.characters(codec="utf-8"), max_size=8)
contexts = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.just(TraceFlags(1)),
)
values = st.one_of(texts, st.integers(-(2**63), 2**63 - 1), st.booleans())
known = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(columns.STRING_ATTRIBUTES.values(), texts),
        **dict.fromkeys(columns.INTEGER_ATTRIBUTES.values(), st.integers(-(2**31), 2**31 - 1)),
        attribute.QUEUE: st.integers(0, 2**31 - 1).map(str),
    },
)
# Of any type under any name: what has no column, or not the column's type.
others = st.dictionaries(
    st.one_of(
        texts,
        st.sampled_from([attribute.QUEUE, attribute.TOPIC, attribute.DUE_MS]),
    ),
    values,
)


@st.composite
def readable(draw):
    start = draw(st.integers(0, 2**62))
    return ReadableSpan(
        name=draw(texts),
        context=draw(contexts),
        parent=draw(st.none() | contexts),
        resource=Resource({"service.name": draw(texts), "service.instance.id": draw(texts)}),
        attributes=draw(others) | draw(known),
        links=[Link(context) for context in draw(st.lists(contexts, max_size=3))],
        kind=draw(st.sampled_from(SpanKind)),
        status=Status(draw(st.sampled_from(StatusCode))),
        start_time=start,
        end_time=start + draw(st.integers(0, 2**40)),
    )


def row_of(span, index):
    """What the table should hold, worked out the slow way."""
    attributes = dict(span.attributes)
    strings = {
        column: attributes.pop(name) or None
        for column, name in columns.STRING_ATTRIBUTES.items()
        if type(attributes.get(name)) is str
    }
    numbers = {
        column: attributes.pop(name)
        for column, name in columns.INTEGER_ATTRIBUTES.items()
        if type(attributes.get(name)) is int
        and attributes[name] in RANGES.get(column, range(-(2**63), 2**63))
    }
    queue = attributes.get(attribute.QUEUE)
    if isinstance(queue, str) and queue.isascii() and queue.isdigit() and int(queue) < 2**31:
        queue = int(attributes.pop(attribute.QUEUE))
    else:
        queue = None
    due, operation = numbers.get("due_ms", 0), strings.get("operation")
    status = span.status.status_code.name
    late = due and (operation == "process" or (operation == "fire" and status != "ERROR"))
    hidden = {attribute.SYSTEM, attribute.OPERATION_TYPE}
    return {
        "trace_id": f"{span.context.trace_id:032x}",
        "span_id": f"{span.context.span_id:016x}",
        "parent_span_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "links": [
            {
                "trace_id": f"{link.context.trace_id:032x}",
                "span_id": f"{link.context.span_id:016x}",
            }
            for link in span.links
            if span.parent is None or link.context.span_id != span.parent.span_id
        ],
        "name": span.name or None,
        "kind": span.kind.name,
        "start_ns": span.start_time,
        "duration_ns": span.end_time - span.start_time,
        "status": status,
        **{column: strings.get(column) for column in columns.STRING_ATTRIBUTES},
        "service": span.resource.attributes["service.name"] or None,
        "instance": span.resource.attributes["service.instance.id"] or None,
        "queue": queue,
        "queue_offset": numbers.get("queue_offset", 0) if queue is not None else None,
        "body_bytes": numbers.get("body_bytes", 0),
        "batch_count": numbers.get("batch_count") or None,
        "sampled_count": numbers.get("sampled_count") or None,
        "due_ms": due or None,
        "lateness_ms": numbers.get("lateness_ms", 0) if late else None,
        "attempt": numbers.get("attempt", 0),
        "attributes": sorted(
            (name, value if isinstance(value, str) else json.dumps(value))
            for name, value in attributes.items()
            if name not in hidden
        ),
        "schema_version": columns.SCHEMA_VERSION,
        "trace_broker": "broker-0",
        "trace_queue": 2,
        "trace_offset": 9,
        "trace_row": index,
    }


@unhurried
@given(st.lists(readable(), min_size=1, max_size=6))
def test_every_span_comes_out_as_it_went_in(given_spans):
    batch = spans.to_arrow(columns.encode(given_spans), SOURCE, 9, schema.SPANS)
    assert batch.schema == schema.arrow_schema(schema.SPANS)
    batch.validate(full=True)
    rows = batch.to_pylist()
    for row in rows:
        micros = row.pop("start_ts").timestamp() if row["start_ns"] < 2**50 else None
        if micros is not None:
            assert abs(micros - row["start_ns"] / 1e9) < 1e-6
        row.pop("start_ts", None)
        row["attributes"] = sorted(row["attributes"])
    assert rows == [row_of(span, index) for index, span in enumerate(given_spans)]


def test_a_link_to_the_parent_is_worth_no_bytes():
    parent, other = (SpanContext(7, span_id, True, TraceFlags(1)) for span_id in (8, 9))
    links = [Link(parent), Link(other)]
    span = ReadableSpan("process", SpanContext(7, 10, False), parent, links=links)
    batch = spans.to_arrow(columns.encode([span]), SOURCE, 9, schema.SPANS)
    (row,) = batch.to_pylist()
    assert row["parent_span_id"] == f"{8:016x}"
    assert [link["span_id"] for link in row["links"]] == [f"{9:016x}"]


@pytest.mark.parametrize("name", ["file", attribute.TOPIC])
def test_half_a_character_costs_neither_the_span_nor_those_beside_it(name):
    # What Python makes of a file's name that is not UTF-8.
    context = SpanContext(7, 8, False)
    read = ReadableSpan("read a\udcff", context, attributes={name: "a\udcff", "raw": b"\xff"})
    batch = spans.to_arrow(columns.encode([read]), SOURCE, 9, schema.SPANS)
    (row,) = batch.to_pylist()
    assert (row["name"], row["topic"]) == ("read a?", None)
    assert dict(row["attributes"]) == {name: "a?", "raw": "b'\\xff'"}


def test_what_an_application_s_spans_say_of_another_system_s_messages_is_not_taken_for_ours():
    other = {attribute.SYSTEM: "kafka", attribute.TOPIC: "orders", attribute.OPERATION: "send"}
    called = {attribute.SERVER_ADDRESS: "shop"}
    own = {attribute.SYSTEM: "duemq", attribute.TOPIC: "orders", attribute.SERVER_ADDRESS: "b-0"}
    given_spans = [
        ReadableSpan("x", SpanContext(7, 8, False), attributes=each)
        for each in (other, called, own)
    ]
    rows = spans.to_arrow(columns.encode(given_spans), SOURCE, 9, schema.SPANS).to_pylist()
    assert [row["topic"] for row in rows] == [None, None, "orders"]
    assert [dict(row["attributes"]) for row in rows] == [other, called, {}]


@unhurried
@given(st.lists(readable(), min_size=1, max_size=4), st.data())
def test_damage_is_an_error_or_other_values_but_never_a_wrong_shape(given_spans, data):
    body = bytearray(columns.encode(given_spans))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        batch = spans.to_arrow(bytes(body), SOURCE, 9, schema.SPANS)
    except Corrupt:
        return
    batch.validate(full=True)


@pytest.mark.parametrize(
    ("change", "column"),
    [
        (lambda b: b.topic.rows.__setitem__(0, 9), "topic"),
        (lambda b: b.topic.rows.append(0), "topic"),
        (lambda b: b.duration_ns.extend([1, 2]), "duration_ns"),
        (lambda b: b.duration_ns.append(1 << 63), "duration_ns"),
        # What no report could add up, or write as a time.
        (lambda b: b.due_ms.append(DUE_MS_MAX + 1), "due_ms"),
        (lambda b: b.due_ms.append(-1), "due_ms"),
        (lambda b: b.batch_count.append(1 << 31), "batch_count"),
        (lambda b: b.sampled_count.append(-1), "sampled_count"),
        (lambda b: (b.due_ms.append(1), b.lateness_ms.append(-DUE_MS_MAX - 1)), "lateness_ms"),
        (lambda b: setattr(b, "span_ids", b"123"), "span_id"),
        (lambda b: b.link_counts.append(1), "links"),
        (lambda b: b.attributes.values.__setitem__(0, "["), "attributes"),
        (lambda b: b.attributes.values.__setitem__(0, "1"), "attributes"),
    ],
)
def test_a_damaged_column_is_named(change, column):
    batch = SpanBatch(rows=1, trace_ids=bytes(16), span_ids=bytes(8), start_ns=[1])
    batch.operation.values.append("process")
    batch.operation.rows.append(0)
    batch.topic.values.append("orders")
    batch.topic.rows.append(0)
    batch.attributes.values.append('{"a":1}')
    batch.attributes.rows.append(0)
    change(batch)
    with pytest.raises(Corrupt) as refused:
        spans.to_arrow(batch.SerializeToString(), SOURCE, 9, schema.SPANS)
    assert refused.value.field == column
    assert "broker-0/2/9" in str(refused.value)


def test_what_is_no_batch_is_refused():
    with pytest.raises(Corrupt, match="no SpanBatch"):
        spans.to_arrow(b"\xff\xff\xff", SOURCE, 9, schema.SPANS)
    for damaged in (SpanBatch(rows=-1), SpanBatch(), SpanBatch(rows=65_537)):
        with pytest.raises(Corrupt, match="rows"):
            spans.to_arrow(damaged.SerializeToString(), SOURCE, 9, schema.SPANS)


def test_few_bytes_do_not_become_many_rows_or_long_texts():
    claims = SpanBatch(rows=65_536)
    with pytest.raises(Corrupt, match="0 bytes for 65536 ids"):
        spans.to_arrow(claims.SerializeToString(), SOURCE, 9, schema.SPANS)
    rows = 2_000
    claims = SpanBatch(rows=rows, trace_ids=bytes(16 * rows), span_ids=bytes(8 * rows))
    claims.name.values.append("x" * 100_000)
    claims.name.rows.extend([0] * rows)
    with pytest.raises(Corrupt, match="200,000,000 characters") as refused:
        spans.to_arrow(claims.SerializeToString(), SOURCE, 9, schema.SPANS)
    assert refused.value.field == "name"
    deep = SpanBatch(rows=1, trace_ids=bytes(16), span_ids=bytes(8))
    deep.attributes.values.append("[" * 100_000)
    deep.attributes.rows.append(0)
    with pytest.raises(Corrupt, match="column attributes"):
        spans.to_arrow(deep.SerializeToString(), SOURCE, 9, schema.SPANS)
