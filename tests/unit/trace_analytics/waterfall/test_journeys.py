from duemq_analytics.source import schema
from duemq_analytics.waterfall.journeys import (
    contexts_of,
    journeys,
    places_to_look_at,
    times_to_look_at,
)
from duemq_analytics.waterfall.places import CLOCKS_APART, PLACES_MAX

TRACE, OTHER = "0a" * 16, "0b" * 16


def span(operation, start_ns, span_id, **columns):
    row = dict.fromkeys(column.name for column in schema.SPANS)
    row |= {"trace_id": TRACE, "duration_ns": 5, "operation": operation, "start_ns": start_ns}
    return row | {"span_id": span_id, **columns}


SENT = [
    span("send", 10, "s1", message_id="m1", kind="PRODUCER"),
    span("send", 11, "s2", message_id="m2", kind="PRODUCER"),
]


def told(found):
    return {
        name: [(row["operation"], row["start_ns"]) for row in rows] for name, rows in found.items()
    }


def test_a_frame_is_of_every_message_that_it_names():
    frames = [
        span("receive", 40, "r", trace_id=OTHER, links=[{"trace_id": TRACE, "span_id": "s2"}]),
        span("store", 20, "t", parent_span_id="s1", links=[{"trace_id": TRACE, "span_id": "s2"}]),
        span("store", 21, "u", parent_span_id="s9"),
        span("store", 22, "v", parent_span_id="s1", trace_id=OTHER),  # an id of another trace
    ]
    called = span("process", 50, "p", message_id="m1", parent_span_id="s1")
    assert told(journeys([called, *SENT], frames)) == {
        "m1": [("send", 10), ("store", 20), ("process", 50)],
        "m2": [("send", 11), ("store", 20), ("receive", 40)],
    }


def test_what_began_together_is_in_the_order_of_what_contains_what():
    called = span("process", 10, "p", message_id="m1", parent_span_id="s1", duration_ns=1)
    (found,) = journeys([called, SENT[0]], []).values()
    assert [row["operation"] for row in found] == ["send", "process"]


def test_a_message_s_contexts_are_its_sending_or_what_its_calls_name():
    called = span("process", 50, "p", message_id="m3", parent_span_id="s3")
    assert contexts_of([*SENT, called]) == {
        "m1": {(TRACE, "s1")},
        "m2": {(TRACE, "s2")},
        "m3": {(TRACE, "s3")},
    }


def test_contexts_have_both_ids():
    """A report asks for each as one text."""
    links = [{"trace_id": None, "span_id": "s4"}, {"trace_id": TRACE, "span_id": None}]
    called = span("process", 50, "p", message_id="m1", links=links)
    sent = span("send", 10, "s1", message_id="m2", kind="PRODUCER", trace_id=None)
    assert contexts_of([called, sent]) == {"m1": set(), "m2": set()}


def test_an_id_that_many_have_takes_no_places_from_others():
    place = {"topic": "orders", "broker": "b", "queue": 0}
    many = [
        span("send", at, f"s{at}", message_id="m1", queue_offset=at, **place) for at in range(99)
    ]
    one = span("process", 200, "p", message_id="m2", queue_offset=7_000, **place)
    twice = [*reversed(many), one, one | {"message_id": "m3"}]
    found = [each.offset for each in places_to_look_at(twice)]
    assert found == [*range(PLACES_MAX), 7_000]


def test_frames_are_looked_for_around_a_message_s_own_spans():
    second = 1_000_000_000
    own = [
        span("process", 900 * second, "p", message_id="m1", duration_ns=100 * second),
        span("send", 800 * second, "s1", message_id="m1"),
        span("send", 8_000 * second, "s2", message_id="m2"),
        span("send", 1_100 * second, "s3", message_id="m3"),
        span("process", 850 * second, "q", message_id="m4", duration_ns=second),
    ]
    apart = round(CLOCKS_APART.total_seconds()) * second
    assert times_to_look_at(own) == [
        (800 * second - apart, 1_100 * second + apart + 5),  # of three, which overlap
        (8_000 * second - apart, 8_000 * second + apart + 5),
    ]
    assert times_to_look_at([]) == []
