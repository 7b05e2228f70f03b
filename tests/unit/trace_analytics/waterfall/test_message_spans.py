from duemq.v1.trace_pb2 import SpanBatch
from duemq_analytics.waterfall import message_spans
from duemq_analytics.waterfall.message_spans import MessageSpans
from duemq_analytics.waterfall.places import PLACES_MAX
from tests.unit.trace_analytics.waterfall.made_spans import TRACE, body, span

SENT = span(1, "send", kind="PRODUCER", message_id="m1")
OTHER = span(2, "send", kind="PRODUCER", message_id="m2")
CHILD = {"parent_span_id": SENT["span_id"]}
LINKED = {"parent_span_id": OTHER["span_id"], "links": [(TRACE, SENT["span_id"])]}


def of_message(*bodies, message_id="m1"):
    gathered = MessageSpans(message_id)
    for look in (gathered.look_for_id, gathered.look_for_frames):
        for offset, each in enumerate(bodies):
            look(each, "broker-0", 0, offset)
    return gathered


def operations(gathered):
    return [(row["operation"], row["start_ns"]) for row in gathered.in_order()]


def test_a_message_s_spans_are_its_own_and_those_of_its_frames():
    stored = span(3, "store", **CHILD)
    received = span(4, "receive", **LINKED)
    processed = span(5, "process", message_id="m1", **CHILD)
    other = span(6, "process", message_id="m2", parent_span_id=OTHER["span_id"])
    unrelated = span(7, "store", parent_span_id=OTHER["span_id"])
    # Frames are told of by other processes, so perhaps before.
    gathered = of_message(
        body(received, stored), body(SENT, OTHER), body(unrelated, other, processed)
    )
    assert operations(gathered) == [("send", 1), ("store", 3), ("receive", 4), ("process", 5)]
    assert (gathered.looked_at, gathered.undecodable) == (7, set())


def test_a_message_whose_send_span_is_gone_is_found_by_its_callback():
    processed = span(5, "process", message_id="m1", **CHILD)
    gathered = of_message(body(span(3, "store", **CHILD)), body(processed))
    assert operations(gathered) == [("store", 3), ("process", 5)]


def test_a_span_id_of_another_trace_is_another():
    stranger = span(3, "store", trace_id="0b" * 16, **CHILD)
    assert operations(of_message(body(SENT, stranger))) == [("send", 1)]


def test_a_message_that_carries_its_application_s_trace():
    """Its own span is not the creation context then."""
    sent = span(1, "send", kind="CLIENT", message_id="m1", parent_span_id="aa" * 8)
    gathered = of_message(body(sent, span(3, "store", parent_span_id="aa" * 8)))
    assert operations(gathered) == [("send", 1), ("store", 3)]


def test_what_is_no_batch_is_counted():
    damaged = body(SENT)[:-3]
    gathered = of_message(b"\xff", damaged, body(SENT, OTHER))
    assert operations(gathered) == [("send", 1)]
    assert gathered.undecodable == {("broker-0", 0, 0), ("broker-0", 0, 1)}


def test_a_frame_that_does_not_name_it_is_known_by_its_place():
    at = {"broker": "b", "queue": 1, "topic": "orders"}
    sent = SENT | at | {"queue_offset": 70}
    others = {"parent_span_id": OTHER["span_id"], "batch_count": 100} | at
    store = span(3, "store", **others, queue_offset=0)
    later = span(4, "store", **others, queue_offset=100)
    gaps = {"queue_offset": 10, "attributes": '{"duemq.last_offset": 300}', "consumer_group": "g"}
    receive = span(5, "receive", **others | gaps)
    process = span(6, "process", message_id="m1", consumer_group="g", **CHILD, **at)
    process["queue_offset"] = 70
    frames = body(later), body(store), body(receive)
    assert operations(of_message(*frames, body(sent))) == [("send", 1), ("store", 3)]
    found = operations(of_message(*frames, body(sent), body(process)))
    assert found == [("send", 1), ("store", 3), ("receive", 5), ("process", 6)]


def test_frames_that_all_begin_at_0_have_no_column_of_offsets():
    at = {"broker": "b", "queue": 1, "topic": "orders"}
    store = span(3, "store", parent_span_id=OTHER["span_id"], batch_count=100, **at)
    batch = SpanBatch.FromString(body(store))
    batch.ClearField("queue_offset")
    sent = SENT | at | {"queue_offset": 70}
    found = of_message(body(sent), batch.SerializeToString())
    assert operations(found) == [("send", 1), ("store", 3)]


def test_ids_of_zeros_are_no_contexts():
    """Whoever may send writes such spans to the trace topic."""
    none = {"trace_id": "00" * 16}
    sent, linked = SENT | none, span(5, "process", message_id="m1", links=[("00" * 16, "00" * 8)])
    found = of_message(body(sent, linked), body(span(3, "store", **none)))
    assert operations(found) == [("send", 1), ("process", 5)]
    assert found.contexts == set()


def test_an_unknown_message_has_none():
    assert operations(of_message(body(SENT, span(3, "store", **CHILD)), message_id="m9")) == []


def test_spans_of_a_message_are_bounded(monkeypatch):
    monkeypatch.setattr(message_spans, "SPANS_MAX", 3)
    again = [span(5 + i, "process", message_id="m1", **CHILD) for i in range(9)]
    assert len(of_message(body(SENT, *again)).in_order()) == 3


def test_a_message_whose_id_others_have_too_is_looked_for_by_its_first_places():
    """Each place is looked for in every frame of the topic."""
    at = {"broker": "b", "queue": 1, "topic": "orders"}
    sent = [SENT | at | {"queue_offset": 2 * i} for i in range(PLACES_MAX + 1)]
    others = {"parent_span_id": OTHER["span_id"], "batch_count": 2} | at
    stored = [span(3 + i, "store", **others, queue_offset=2 * i) for i in range(PLACES_MAX + 1)]
    found = operations(of_message(*(body(each) for each in sent), *(body(each) for each in stored)))
    assert found[PLACES_MAX + 1 :] == [("store", 3 + i) for i in range(PLACES_MAX)]
