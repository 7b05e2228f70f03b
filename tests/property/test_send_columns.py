"""Light spans of sends by column are those of the spans that they stand for."""

import struct

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanContext, TraceFlags

from duemq.errors import TooLarge, Unavailable
from duemq.producing.batch import Batch
from duemq.telemetry import columns
from duemq.telemetry.light_spans import SendRows
from duemq.tracing.sends import Lights, SendFrame
from duemq_analytics.source import schema
from duemq_analytics.source.plan import QueueRange
from duemq_analytics.source.spans import to_arrow
from tests.unit.duemq.telemetry.made_lights import Light, lights_of

MESSAGES = 6
SOURCE = QueueRange("broker-0", "h:1", 2, 0, 100)
RESOURCE = Resource({"service.name": "shop", "service.instance.id": "shop-1"})

# Generating spans takes long where the machine is busy; that says nothing about them.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

ids = st.tuples(st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8))
parents = st.none() | st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.just(False),
    st.just(TraceFlags(1)),
)
labels = st.none() | st.sampled_from(["", "a", "ä" * 40])
times = st.integers(1, 2**62)
sizes = st.sampled_from([0, 1, 127, 128, 1_024]) | st.integers(0, 2**22)


@st.composite
def batches(draw):
    queue, head = draw(st.integers(-1, 300)), draw(st.sampled_from([b"0" * 25, b"f" * 25]))
    made = Batch(draw(st.sampled_from(["orders", "refunds"])), (None, 0), {}, 1, head, 0)
    made.bodies = [b""] * MESSAGES
    if draw(st.booleans()):
        made.failed(draw(st.sampled_from([Unavailable("gone"), TooLarge("much")])))
    else:
        dues = draw(st.lists(st.integers(0, 2**40), min_size=MESSAGES, max_size=MESSAGES))
        due_ms = draw(st.sampled_from([b"", struct.pack(f"<{MESSAGES}q", *dues)]))
        broker = draw(st.sampled_from(["broker-0", "broker-1"]))
        made.stored(broker, 1, max(0, queue), draw(st.integers(0, 2**60)), 9, due_ms)
    return made


@st.composite
def each_one(draw):
    indexes = draw(st.sets(st.integers(0, MESSAGES - 1), min_size=1))
    return lights_of(
        [
            (index, Light(*draw(ids), *map(draw, (times, sizes, labels, labels, parents))))
            for index in sorted(indexes)
        ]
    )


@st.composite
def runs(draw):
    first = draw(st.integers(0, MESSAGES - 1))
    indexes = range(first, draw(st.integers(first + 1, MESSAGES)))
    count = len(indexes)
    made = [draw(ids) for _ in indexes]
    body_bytes = draw(st.lists(sizes, min_size=count, max_size=count))
    shared = [[draw(each)] * count for each in (labels, labels, parents)]
    joined = (b"".join(column) for column in zip(*made, strict=True))
    return Lights(indexes, *joined, [draw(times)] * count, body_bytes, *shared)


frames = st.builds(SendFrame, batches(), each_one() | runs(), times)


def read(spans):
    """What readers of the topic make of them."""
    return to_arrow(columns.encode(spans), SOURCE, 9, schema.SPANS).to_pylist()


def check_any_part(rows, data):
    """Columns of some of the rows are those of the spans that they stand for."""
    one_by_one = list(rows)
    assert len(rows) == len(one_by_one) == sum(frame.rows for frame in rows.frames)
    first = data.draw(st.integers(0, len(rows) - 1))
    past = data.draw(st.integers(first + 1, len(rows)))
    assert read(rows[first:past]) == read(one_by_one[first:past])


@unhurried
@given(st.lists(frames, min_size=1, max_size=4), st.data())
def test_columns_of_any_part_are_those_of_its_spans(given_frames, data):
    check_any_part(SendRows(given_frames, RESOURCE), data)
