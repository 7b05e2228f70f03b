import pytest

from duemq_analytics.waterfall.places import Place, covers, places_of

HERE = Place("orders", False, "b", 2, 70)
IN_TIMER = HERE._replace(timed=True)
COLUMNS = ("links", "parent_span_id", "sampled_count", "batch_count", "due_ms", "attempt")
COLUMNS += ("attributes", "consumer_group")


def span(operation, **columns):
    row = dict.fromkeys(COLUMNS) | {"operation": operation, "trace_id": "t"}
    row |= {"topic": "orders", "broker": "b", "queue": 2, "queue_offset": 70}
    return row | columns


def frame(operation="store", offset=0, count=100, **columns):
    """A frame that names one of its messages."""
    return span(operation, parent_span_id="s", queue_offset=offset, batch_count=count, **columns)


@pytest.mark.parametrize(("offset", "count"), [(0, 71), (70, 2), (69, 2), (70, 100)])
def test_a_frame_covers_what_lies_between_its_ends(offset, count):
    assert covers(frame(offset=offset, count=count), {HERE: set()})


@pytest.mark.parametrize(("offset", "count"), [(0, 70), (71, 100), (60, 10)])
def test_what_lies_before_or_behind_is_of_another(offset, count):
    assert not covers(frame(offset=offset, count=count), {HERE: set()})


@pytest.mark.parametrize(
    "other", [{"topic": "paid"}, {"broker": "c"}, {"queue": 1}, {"queue_offset": None}]
)
def test_what_lies_elsewhere_is_of_another(other):
    assert not covers(frame() | other, {HERE: set()})


def test_a_frame_that_names_all_of_its_own_is_not_of_more():
    links = [{"trace_id": "t", "span_id": str(at)} for at in range(32)]
    assert not covers(frame(links=links, sampled_count=33), {HERE: set()})
    assert covers(frame(links=links, sampled_count=34), {HERE: set()})


def test_in_the_timer_s_queue_is_not_in_the_topic_s():
    timed = frame(attributes=[("duemq.timed", "true")])
    for each in (timed, frame("schedule")):
        assert covers(each, {IN_TIMER: set()})
        assert not covers(each, {HERE: set()})
    for each in (frame("fire"), frame("receive"), frame()):
        assert covers(each, {HERE: set()})
        assert not covers(each, {IN_TIMER: set()})


def test_a_pull_with_gaps_is_of_what_its_group_processed():
    pulled = frame("receive", attributes=[("duemq.last_offset", "70")], count=5)
    pulled["consumer_group"] = "g"
    assert covers(pulled, {HERE: {"g", "h"}})
    assert not covers(pulled, {HERE: {"h"}})
    assert not covers(pulled, {HERE._replace(offset=71): {"g"}})


@pytest.mark.parametrize("last", ["", "soon", "-1", "7e1", "[70]", "٧٠", "9" * 5_000])
def test_a_last_offset_that_is_none_stops_nothing(last):
    pulled = frame("receive", attributes=[("duemq.last_offset", last)])
    assert covers(pulled, {HERE: set()})
    assert not covers(pulled | {"batch_count": 70}, {HERE: set()})


def test_a_message_lay_where_its_spans_say():
    spans = [
        span("send", due_ms=5, queue_offset=3),
        span("process", consumer_group="g"),
        span("process", consumer_group="h", attempt=0),
        span("process", consumer_group="i", attempt=1, queue_offset=0),  # from its %RETRY% topic
        span("settle", consumer_group="g"),
    ]
    assert places_of(spans) == {IN_TIMER._replace(offset=3): set(), HERE: {"g", "h"}}


def test_what_was_not_stored_lay_nowhere():
    assert places_of([span("send", queue=None), span("send", broker=None)]) == {}
