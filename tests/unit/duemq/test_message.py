import pickle

from duemq.administering.letters.resending import Letter
from duemq.message import (
    Message,
    Origin,
    Outgoing,
    messages_of,
    note_traceparents,
    traceparents,
)
from duemq.v1 import message_pb2
from duemq.v1.message_pb2 import Record, RecordBatch
from duemq.v1.view_pb2 import QueueRecordsView

FULL = Record(
    body=b"body",
    message_id="id",
    key="k",
    tag="t",
    ordering_key="o",
    properties={"a": "b"},
    born_ms=1,
    due_ms=2,
    attempt=3,
)


def pulled(offsets, counts, store_ms):
    records = RecordBatch(records=[Record(body=b"%d" % index) for index in range(sum(counts))])
    return QueueRecordsView(
        topic="t",
        queue_id=3,
        records=records.SerializeToString(),
        run_offsets=offsets,
        run_counts=counts,
        run_store_ms=store_ms,
    )


def test_all_fields():
    message = Message(FULL, Origin("topic", "broker", 1), 42, 7)
    assert (message.topic, message.broker, message.queue) == ("topic", "broker", 1)
    assert (message.offset, message.store_ms, message.body) == (42, 7, b"body")
    assert (message.message_id, message.key, message.tag) == ("id", "k", "t")
    assert (message.ordering_key, dict(message.properties)) == ("o", {"a": "b"})
    assert (message.born_ms, message.due_ms, message.deliveries) == (1, 2, 3)
    assert message.attempt == 4
    assert "topic broker/1@42" in repr(message)


def test_a_retry_shows_where_it_came_from():
    story = message_pb2.Retry(
        group="g",
        origin=message_pb2.QueueRef(topic="orders", broker="b7", queue_id=5),
        origin_offset=99,
        first_failed_ms=1_000,
        last_failed_ms=2_000,
        error="ValueError: no",
    )
    record = Record(message_id="id", attempt=2, retry=story)
    message = Message(record, Origin("%RETRY%g", "b1", 0), 4, 7)
    assert message.topic == "orders"
    assert (message.stored_topic, message.broker, message.queue) == ("%RETRY%g", "b1", 0)
    assert (message.offset, message.deliveries) == (4, 2)
    assert message.retry == ("orders", "b7", 5, 99, 1_000, 2_000, "ValueError: no", "g")
    assert message.retry.origin_offset == 99
    assert "%RETRY%g b1/0@4" in repr(message)


def test_a_first_delivery_has_no_story():
    message = Message(Record(), Origin("%TRACE%", "b1", 0), 0, 0)
    assert message.retry is None
    assert message.topic == message.stored_topic == "%TRACE%"


def test_attempts_in_place_count():
    message = Message(Record(attempt=1), Origin("topic", "broker", 1), 0, 0)
    message.again()
    assert message.deliveries == 2


def test_absent_is_none():
    message = Message(Record(), Origin("topic", "broker", 1), 0, 0)
    assert (message.key, message.tag, message.ordering_key, message.due_ms) == (None,) * 4
    assert message.body == b""
    assert message.properties == {}


def test_one_run():
    messages = messages_of(pulled([100], [3], [9]), "b")
    assert [message.offset for message in messages] == [100, 101, 102]
    assert [message.body for message in messages] == [b"0", b"1", b"2"]
    assert {message.store_ms for message in messages} == {9}


def test_several_runs():
    messages = messages_of(pulled([5, 9, 20], [2, 1, 2], [1, 2, 3]), "b")
    assert [message.offset for message in messages] == [5, 6, 9, 20, 21]
    assert [message.store_ms for message in messages] == [1, 1, 2, 3, 3]


def test_nothing():
    assert messages_of(pulled([], [], []), "b") == []


def test_identity_is_queue_and_offset():
    one = Message(FULL, Origin("topic", "broker", 1), 42, 7)
    same = Message(Record(), Origin("topic", "broker", 1), 42, 8)
    other = Message(FULL, Origin("topic", "broker", 2), 42, 7)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != "one"


def test_pickling():
    message = Message(FULL, Origin("topic", "broker", 1), 42, 7)
    again = pickle.loads(pickle.dumps(message))
    assert again == message
    assert (again.body, again.store_ms, again.tag) == (b"body", 7, "t")
    letter = Letter(FULL, Origin("%DLQ%g", "broker", 1), 42, 7, resent=True)
    assert pickle.loads(pickle.dumps(letter)).resent


def test_outgoing_has_the_arguments_of_send():
    assert Outgoing(b"x", delay="5s") == Outgoing(b"x", delay="5s")
    assert Outgoing(b"x").key is None


def traced(offsets, counts, texts):
    records = [Record(properties={"traceparent": text} if text else {}) for text in texts]
    answer = pulled(offsets, counts, [0] * len(counts))
    answer.records = RecordBatch(records=records).SerializeToString()
    return messages_of(answer, "b")


def test_what_a_pull_carries_is_looked_for_once():
    texts = ["", "x", "", "", "y", ""]
    messages = traced([5, 20], [3, 3], texts)
    assert note_traceparents(messages) == ["x", "y"]
    messages[0]._record.properties["traceparent"] = "nobody looks"
    assert traceparents(messages) == {1: "x", 4: "y"}
    assert traceparents(messages[1:5:3]) == {0: "x", 1: "y"}
    assert traceparents(messages[2:4]) == {}


def test_messages_of_several_pulls_are_looked_at_one_by_one():
    noted, others = traced([5], [2], ["", "x"]), traced([5], [2], ["y", ""])
    note_traceparents(noted)
    assert traceparents([*noted, *others]) == {1: "x", 2: "y"}
    assert traceparents([*others, *noted]) == {0: "y", 3: "x"}
