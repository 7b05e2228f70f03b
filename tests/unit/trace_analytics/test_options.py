import pytest

from duemq.errors import InvalidArgument
from duemq_analytics.options import Options, parse


def test_the_topic_alone_is_enough():
    assert parse({"topic": "orders"}) == Options(topic="orders")


def test_everything_can_be_said_in_any_case():
    assert parse(
        {
            "TOPIC": "orders",
            "nameServer": "a:1, b:2",
            "startingoffsets": '{"b0": {"0": 12, "1": -2}}',
            "endingOffsets": "Latest",
            "maxRecordsPerPartition": "5",
            "failOnDataLoss": "FALSE",
            "timeoutSeconds": "7",
        }
    ) == Options(
        topic="orders",
        nameservers=("a:1", "b:2"),
        starting={"b0": {0: 12, 1: "earliest"}},
        ending="latest",
        records_per_partition=5,
        fail_on_data_loss=False,
        timeout_s=7,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nameserver", "localhost"),
        ("nameserver", "localhost:0"),
        ("nameserver", "localhost:65536"),
        ("nameserver", " , "),
        ("startingOffsets", "yesterday"),
        ("startingOffsets", "[1]"),
        ("startingOffsets", '{"b0": 3}'),
        ("startingOffsets", '{"b0": {"x": 3}}'),
        ("startingOffsets", '{"b0": {"0": -3}}'),
        ("endingOffsets", '{"b0": {"0": 1.5}}'),
        ("endingOffsets", '{"b0": {"0": true}}'),
        ("maxRecordsPerPartition", "0"),
        ("maxRecordsPerPartition", "many"),
        ("failOnDataLoss", "perhaps"),
        ("timeoutSeconds", "-1"),
        ("startingTimestamp", "1"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_is_allowed(name, value):
    with pytest.raises(InvalidArgument) as refused:
        parse({"topic": "orders", name: value})
    assert refused.value.field.lower() == name.lower()
    assert refused.value.value.strip() or not value.strip(" ,")
    assert refused.value.limit


def test_a_topic_must_be_named():
    with pytest.raises(InvalidArgument, match="topic"):
        parse({})
