from datetime import UTC, datetime

import pytest

from duemq.protocol.due import DUE_MS_MAX
from duemq.v1.message_pb2 import QueueRef, Record, Retry
from duemq_analytics.source import schema
from duemq_analytics.source.client import RecordRun
from duemq_analytics.source.messages_source import to_arrow
from duemq_analytics.source.plan import QueueRange

SOURCE = QueueRange("broker-0", "h:1", 3, 0, 10)


def test_messages_become_rows():
    full = Record(
        body=b"\x00body",
        message_id="m1",
        key="k",
        tag="red",
        ordering_key="o",
        properties={"b": "2", "a": "1"},
        born_ms=1_000,
        due_ms=3_000,
        attempt=2,
        retry=Retry(
            group="billing",
            origin=QueueRef(topic="orders", broker="broker-1", queue_id=7),
            origin_offset=9,
            first_failed_ms=4_000,
            last_failed_ms=5_000,
            error="no such customer",
        ),
        timer_key="order-7",
    )
    runs = [RecordRun(5, 2_000, [full]), RecordRun(6, 2_500, [Record(message_id="m2"), Record()])]
    rows = to_arrow("orders", SOURCE, runs, schema.MESSAGES).to_pylist()
    assert rows[0] == {
        "message_id": "m1",
        "topic": "orders",
        "broker": "broker-0",
        "queue": 3,
        "offset": 5,
        "key": "k",
        "tag": "red",
        "ordering_key": "o",
        "body": b"\x00body",
        "properties": [("a", "1"), ("b", "2")],
        "born_ts": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        "store_ts": datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC),
        "due_ts": datetime(1970, 1, 1, 0, 0, 3, tzinfo=UTC),
        "attempt": 2,
        "retry": {
            "group": "billing",
            "topic": "orders",
            "broker": "broker-1",
            "queue": 7,
            "offset": 9,
            "first_failed_ts": datetime(1970, 1, 1, 0, 0, 4, tzinfo=UTC),
            "last_failed_ts": datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC),
            "error": "no such customer",
        },
        "timer_key": "order-7",
    }
    assert rows[1]["timer_key"] is None
    assert rows[1]["retry"] is None
    assert [row["offset"] for row in rows] == [5, 6, 7]
    assert [rows[1][name] for name in ("key", "tag", "ordering_key", "born_ts", "due_ts")] == [
        None
    ] * 5


def test_only_the_columns_asked_for_are_made():
    chosen = schema.select(schema.MESSAGES, ["offset", "body"])
    batch = to_arrow("orders", SOURCE, [RecordRun(0, 1, [Record(body=b"x")])], chosen)
    assert batch.to_pylist() == [{"offset": 0, "body": b"x"}]


@pytest.mark.parametrize("ms", [1_700_000_000_000_000_000, DUE_MS_MAX + 1, -(2**63)])
def test_what_a_producer_writes_as_a_time_and_is_none_is_null_and_stops_no_read(ms):
    wrong = Record(born_ms=ms, due_ms=ms, retry=Retry(first_failed_ms=ms, last_failed_ms=ms))
    chosen = schema.select(schema.MESSAGES, ["born_ts", "due_ts", "retry"])
    right = Record(born_ms=DUE_MS_MAX)
    rows = to_arrow("orders", SOURCE, [RecordRun(0, 1, [wrong, right])], chosen).to_pylist()
    assert [rows[0][name] for name in ("born_ts", "due_ts")] == [None, None]
    assert [rows[0]["retry"][f"{name}_failed_ts"] for name in ("first", "last")] == [None, None]
    assert rows[1]["born_ts"].year == 9999
