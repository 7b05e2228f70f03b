from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from duemq import Outgoing
from duemq.errors import InvalidArgument, NotAllSent, TooLarge, Unavailable
from duemq_analytics.sink.row_messages import RowIds, by_topic, located, outgoing

NO_IDS = RowIds.of("", "w", 0)


def batch(**columns):
    return pa.RecordBatch.from_pydict(columns)


def messages(rows, ids=NO_IDS, first=0):
    return list(outgoing(rows, rows.schema.names, first, ids))


def test_bodies_alone_stay_bodies():
    assert messages(batch(body=[b"a", b"b"])) == [b"a", b"b"]
    assert messages(batch(body=["ä", ""])) == ["ä".encode(), b""]


def test_a_row_s_options():
    rows = batch(body=[b"a", b"b"], key=["k", None], tag=[None, "t"], delay=["5s", None])
    assert messages(rows) == [Outgoing(b"a", key="k", delay="5s"), Outgoing(b"b", tag="t")]
    rows = batch(body=[b"a"], delay=pa.array([timedelta(seconds=2)], pa.duration("us")))
    assert messages(rows) == [Outgoing(b"a", delay=timedelta(seconds=2))]


def test_a_time_is_never_early():
    us = 1_800_000_000_000_001
    times = pa.array([us, us - 1, None], pa.timestamp("us", tz="UTC"))
    found = messages(batch(body=[b"a"] * 3, deliver_at=times))
    assert [each.deliver_at for each in found] == [1_800_000_000_001, 1_800_000_000_000, None]
    assert datetime.fromtimestamp(1_800_000_000, UTC).year == 2027


def test_a_row_s_id_counts_on_and_replaces_that_of_an_earlier_write():
    kinds = pa.map_(pa.string(), pa.string())
    properties = pa.array([[("a", "1"), ("id", "old")], None], kinds)
    found = messages(batch(body=[b"a", b"b"], properties=properties), RowIds.of("id", "w", 3), 40)
    assert [each.properties for each in found] == [{"a": "1", "id": "w-3-40"}, {"id": "w-3-41"}]


def test_rows_go_to_the_topic_of_the_option_or_of_their_column():
    rows = batch(body=[b"a", b"b", b"c"], topic=["x", "y", "x"])
    assert by_topic(rows, "z") == [("z", range(3))]
    assert by_topic(rows, None) == [("x", [0, 2]), ("y", [1])]


@pytest.mark.parametrize(
    ("column", "use"), [("body", messages), ("topic", lambda rows: by_topic(rows, None))]
)
def test_null_is_named(column, use):
    rows = batch(**{"body": [b"a"] * 3, "topic": ["x"] * 3} | {column: ["a", None, "a"]})
    with pytest.raises(InvalidArgument) as raised:
        use(rows)
    error = located(raised.value, range(3), 2, 100)
    assert error.message == f"column {column} of row 101 of partition 2: null is not allowed"
    assert (error.field, error.value, error.limit) == (column, "null", "a value")


def test_a_producer_s_error_is_about_the_row():
    told = TooLarge(
        "message 1: body has 9 bytes; those in front of it are sent",
        field="messages[1].body",
        value=9,
        limit=8,
    )
    error = located(told, [0, 5], 2, 100)
    assert type(error) is TooLarge
    assert error.message == "column body of row 105 of partition 2: body has 9 bytes"
    assert (error.field, error.value, error.limit) == ("body", "9", "8")
    other = Unavailable("nobody is there", field="nameserver")
    assert located(other, [0], 2, 100) is other


def test_a_wrong_topic_is_of_the_first_row_that_has_it():
    told = InvalidArgument("topic: 'a b' is not a name", field="topic", value="a b", limit="a name")
    error = located(told, [4, 5], 2, 100, topics=True)
    assert error.message == "column topic of row 104 of partition 2: topic: 'a b' is not a name"
    assert (error.field, error.value) == ("topic", "a b")
    assert located(told, [4, 5], 2, 100) is told  # of all rows: an option


def test_rows_that_brokers_refuse_are_named_by_their_place_in_the_partition():
    refused = TooLarge("body has 9 bytes", field="body", value=9, limit=8)
    told = NotAllSent("2 of 3 messages not stored", failures={1: refused, 2: refused})
    error = located(told, [0, 5, 7], 2, 100)
    assert type(error) is NotAllSent
    assert error.message.startswith(
        "2 rows of partition 2 not stored; the first is row 105: body has 9 bytes"
    )
    assert set(error.failures) == {5, 7}
