"""Which columns of a DataFrame become what of a message.  Pure but for Spark's types.

The names are those of the source, so that a DataFrame that was read can be written again: what
only says where a message lay, or when, is passed over then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql.types import DataType, DayTimeIntervalType, StructType

from duemq.errors import InvalidArgument
from duemq_analytics.source.schema import MESSAGES

TYPES: Mapping[str, Sequence[str]] = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "key": ("string",),
    "tag": ("string",),
    "ordering_key": ("string",),
    "properties": ("map<string,string>",),
    "deliver_at": ("timestamp", "bigint"),
    "delay": ("string", "int", "bigint", "double", "interval day to second"),
    "timer_key": ("string",),
}
"""Column → the Spark types that it may have."""

PASSED_OVER = frozenset(column.name for column in MESSAGES) - frozenset(TYPES)
"""Of a DataFrame that was read: the broker gives a message new ones."""


def check(schema: StructType, topic: str | None) -> tuple[str, ...]:
    """The columns that are used.  `topic`: the option.

    Raises InvalidArgument naming a column that is missing, unknown or of another type.
    """
    types = {field.name: _name_of(field.dataType) for field in schema.fields}
    for name, spark_type in types.items():
        if name in PASSED_OVER:
            continue
        if name not in TYPES:
            raise _wrong(
                name, spark_type, f"one of {', '.join(TYPES)}: drop it, or put it into body"
            )
        if spark_type not in TYPES[name]:
            raise _wrong(name, spark_type, f"of type {' or '.join(TYPES[name])}")
    if "body" not in types:
        raise _wrong("body", "missing", "a column that there must be")
    if topic is None and "topic" not in types:
        raise _wrong("topic", "missing", "an option or a column: one must say where to")
    used = [name for name in TYPES if name in types]
    if topic is not None and "topic" in used:
        used.remove("topic")  # the option decides, as with Spark's Kafka sink
    if "timer_key" in used and not {"deliver_at", "delay"} & set(used):
        used.remove("timer_key")  # of messages that were read: their time is over
    return tuple(used)


def _name_of(kind: DataType) -> str:
    """What SQL calls `interval hour` and the like are the same values."""
    if isinstance(kind, DayTimeIntervalType):
        kind = DayTimeIntervalType()
    return kind.simpleString()


def _wrong(name: str, value: str, limit: str) -> InvalidArgument:
    return InvalidArgument(
        f"column {name} ({value}) is not {limit}", field=name, value=value, limit=limit
    )
