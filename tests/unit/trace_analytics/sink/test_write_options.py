import pytest

from duemq.errors import InvalidArgument
from duemq_analytics.sink.write_options import WriteOptions, parse


def test_nothing_need_be_said():
    assert parse({}) == WriteOptions(topic=None)


def test_everything_can_be_said_in_any_case():
    given = {
        "TOPIC": "alerts",
        "nameServer": "a:1,b:2",
        "writeid": "job-7",
        "RowIdProperty": "",
        "timeoutSeconds": "7",
        "checkpointLocation": "/x",
    }
    assert parse(given) == WriteOptions("alerts", ("a:1", "b:2"), "job-7", "", 7)


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("topic", "a/b", "topic"),
        ("nameserver", "nowhere", "nameserver"),
        ("writeId", "x" * 129, "writeId"),
        ("rowIdProperty", "x" * 256, "rowIdProperty"),
        ("timeoutSeconds", "0", "timeoutSeconds"),
        ("startingOffsets", "earliest", "startingoffsets"),
    ],
)
def test_what_is_wrong_is_named(name, value, field):
    with pytest.raises(InvalidArgument) as raised:
        parse({name: value})
    assert (raised.value.field, raised.value.value) == (field, value)
    assert raised.value.limit
