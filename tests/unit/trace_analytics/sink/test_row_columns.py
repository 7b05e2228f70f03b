from types import SimpleNamespace

import pytest
from pyspark.sql.types import DayTimeIntervalType, StringType, StructField, StructType

from duemq.errors import InvalidArgument
from duemq_analytics.sink import row_columns
from duemq_analytics.source import schema


def check(types, topic="orders"):
    """With a schema of these types, as Spark names them: parsing DDL would start Java."""
    fields = [
        SimpleNamespace(name=name, dataType=SimpleNamespace(simpleString=lambda told=told: told))
        for name, told in types.items()
    ]
    return row_columns.check(SimpleNamespace(fields=fields), topic)


def test_a_frame_that_was_read_can_be_written():
    read = {column.name: column.spark_type for column in schema.MESSAGES}
    assert check(read, None) == ("body", "topic", "key", "tag", "ordering_key", "properties")
    assert check(read) == ("body", "key", "tag", "ordering_key", "properties")
    assert check(read | {"delay": "string"})[-2:] == ("delay", "timer_key")


@pytest.mark.parametrize(
    ("column", "told"),
    [(name, told) for name, types in row_columns.TYPES.items() for told in types],
)
def test_types_that_may_be(column, told):
    assert column in check(
        {"body": "binary", "delay": "string"} | {column: told}, None if column == "topic" else "t"
    )


@pytest.mark.parametrize("units", [(0, 3), (1, 1), (2, 3)])
def test_a_delay_may_be_an_interval_of_any_units_up_to_days(units):
    """`INTERVAL 1 HOUR` is one of hours."""
    delay = StructField("delay", DayTimeIntervalType(*units))
    schema = StructType([StructField("body", StringType()), delay])
    assert row_columns.check(schema, "orders") == ("body", "delay")


@pytest.mark.parametrize(
    ("types", "topic", "column", "value"),
    [
        ({"key": "string"}, "orders", "body", "missing"),
        ({"body": "binary"}, None, "topic", "missing"),
        ({"body": "int"}, "orders", "body", "int"),
        ({"body": "binary", "price": "double"}, "orders", "price", "double"),
        ({"body": "binary", "deliver_at": "date"}, "orders", "deliver_at", "date"),
        ({"body": "binary", "key": "int"}, "orders", "key", "int"),
    ],
)
def test_what_is_wrong_is_named(types, topic, column, value):
    with pytest.raises(InvalidArgument, match=f"column {column} ") as raised:
        check(types, topic)
    assert (raised.value.field, raised.value.value) == (column, value)
    assert raised.value.limit
