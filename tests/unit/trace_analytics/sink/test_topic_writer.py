"""Which row a task's error names; without Spark's tasks and without a cluster."""

from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow as pa
import pytest

from duemq.errors import DuemqError, NotAllSent, TooLarge
from duemq.protocol.names import check_topic
from duemq_analytics.sink.row_messages import RowIds
from duemq_analytics.sink.topic_writer import TopicRows
from duemq_analytics.sink.write_options import WriteOptions

ROWS = {"topic": ["x", "a b", "x", "a b"], "body": [b"0", b"1", b"2", b"3"]}


def send_many(topic, messages):
    """As a producer: of two messages or more a broker refuses the second."""
    check_topic(topic)
    if len(list(messages)) > 1:
        refused = TooLarge("body has 9 bytes", field="body", value=9, limit=8)
        raise NotAllSent("1 of 2 messages not stored", failures={1: refused})


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (range(4), "1 rows of partition 3 not stored; the first is row 42: body has 9 bytes"),
        (range(2), "column topic of row 41 of partition 3: topic: 'a b' "),
        (range(1, 2), "column topic of row 40 of partition 3: topic: 'a b' "),
    ],
    ids=["refused by a broker", "a wrong topic", "wrong topics alone"],
)
def test_the_row_is_named_whoever_refuses_it(rows, said):
    batch = pa.RecordBatch.from_pydict({name: [ROWS[name][i] for i in rows] for name in ROWS})
    fields = [
        SimpleNamespace(name=name, dataType=SimpleNamespace(simpleString=lambda: "string"))
        for name in ROWS
    ]
    sender = TopicRows(WriteOptions(topic=None), SimpleNamespace(fields=fields), overwrite=False)
    producer = Mock(send_many=send_many)
    with pytest.raises(DuemqError) as raised:
        sender._send_batch(producer, batch, RowIds.of("", "w", 3), 3, 40)
    assert raised.value.message.startswith(said)
