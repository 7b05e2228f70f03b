"""Wire, Arrow and Spark must say the same."""

from pathlib import Path

import pyarrow as pa
import pytest
from google.protobuf.descriptor import FieldDescriptor

from duemq.telemetry import columns
from duemq.v1.message_pb2 import Record
from duemq.v1.trace_pb2 import SpanBatch
from duemq_analytics import options
from duemq_analytics.source import schema

# Field of the wire → column, where the names differ or several make one.
RENAMED = {
    "trace_ids": "trace_id",
    "span_ids": "span_id",
    "parent_span_ids": "parent_span_id",
    "queue_id": "queue",
    "link_counts": "links",
    "link_trace_ids": "links",
    "link_span_ids": "links",
}
# Columns that the source adds.
ADDED = {"start_ts", "trace_broker", "trace_queue", "trace_offset", "trace_row"}
INTEGERS = {
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_FIXED64,
}


def test_every_wire_column_is_a_table_column_and_back():
    wire = {field.name for field in SpanBatch.DESCRIPTOR.fields} - {"rows"}
    assert {RENAMED.get(name, name) for name in wire} | ADDED == {c.name for c in schema.SPANS}


def test_types_of_the_table_are_those_of_the_wire():
    types = {column.name: column.spark_type for column in schema.SPANS}
    for field in SpanBatch.DESCRIPTOR.fields:
        name = RENAMED.get(field.name, field.name)
        if field.name in ("rows", "attributes") or name == "links":
            continue
        if field.message_type is not None or field.type == FieldDescriptor.TYPE_BYTES:
            assert types[name] == "string", name
        else:
            assert types[name] == ("bigint" if field.type in INTEGERS else "int"), name


def test_the_exporter_fills_every_attribute_column():
    filled = {*columns.STRING_ATTRIBUTES, *columns.INTEGER_ATTRIBUTES}
    assert filled <= {field.name for field in SpanBatch.DESCRIPTOR.fields}


def test_every_field_of_a_record_is_a_column():
    of_record = {field.name.replace("_ms", "_ts") for field in Record.DESCRIPTOR.fields}
    where = {"topic", "broker", "queue", "offset", "store_ts"}
    assert of_record | where == {column.name for column in schema.MESSAGES}


def test_columns_are_chosen_by_name_in_the_asked_order():
    chosen = schema.select(schema.SPANS, ["topic", "start_ts"])
    assert schema.arrow_schema(chosen) == pa.schema(
        [("topic", pa.string()), ("start_ts", pa.timestamp("us", tz="UTC"))]
    )
    with pytest.raises(KeyError, match="nope"):
        schema.select(schema.SPANS, ["nope"])


README = (Path(__file__).parents[4] / "trace_analytics" / "README.md").read_text()


@pytest.mark.parametrize("column", [*schema.MESSAGES, *schema.SPANS], ids=lambda c: c.name)
def test_the_readme_says_what_every_column_is(column):
    assert f"| `{column.name}` | {column.spark_type} | {column.meaning} |" in README


def test_the_readme_names_every_option():
    assert all(f"| `{name}` |" in README for name in options.NAMES)
