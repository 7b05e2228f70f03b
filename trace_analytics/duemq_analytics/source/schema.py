"""The columns of every table, once, for Spark and for Arrow.

Spark checks a Python source's Arrow batches against its schema exactly: order, type, time zone,
nullability.  Both are therefore made from one list.  All columns are nullable; new ones are
appended, never put between, so that old Parquet files stay readable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

_LINK = pa.struct([("trace_id", pa.string()), ("span_id", pa.string())])

_TIME = pa.timestamp("us", tz="UTC")
# Of a message that a group sent back: its %RETRY% and %DLQ% topics have it.
_RETRY = pa.struct(
    [
        ("group", pa.string()),
        ("topic", pa.string()),
        ("broker", pa.string()),
        ("queue", pa.int32()),
        ("offset", pa.int64()),
        ("first_failed_ts", _TIME),
        ("last_failed_ts", _TIME),
        ("error", pa.string()),
    ]
)
RETRY = (
    "struct<group:string,topic:string,broker:string,queue:int,offset:bigint,"
    "first_failed_ts:timestamp,last_failed_ts:timestamp,error:string>"
)

_ARROW_TYPES: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": _TIME,
    "map<string,string>": pa.map_(pa.string(), pa.string()),
    "array<struct<trace_id:string,span_id:string>>": pa.list_(_LINK),
    RETRY: _RETRY,
}


@dataclass(frozen=True)
class Column:
    """One column: its name, its Spark type and what it means."""

    name: str
    spark_type: str
    meaning: str

    @property
    def arrow_type(self) -> pa.DataType:
        """The Arrow type that Spark takes for it."""
        return _ARROW_TYPES[self.spark_type]


MESSAGES: tuple[Column, ...] = (
    Column("message_id", "string", "unique, chosen by the producer"),
    Column("topic", "string", "where it lies"),
    Column("broker", "string", "which broker stores it"),
    Column("queue", "int", "queue of the topic on that broker"),
    Column("offset", "bigint", "position in the queue"),
    Column("key", "string", "for look-up"),
    Column("tag", "string", "for filtering"),
    Column("ordering_key", "string", "messages of one key share a queue"),
    Column("body", "binary", "payload"),
    Column("properties", "map<string,string>", "set by the application and by tracing"),
    Column("born_ts", "timestamp", "when the producer made it; null: what it says is no time"),
    Column("store_ts", "timestamp", "when the broker stored it"),
    Column("due_ts", "timestamp", "when it was due; null: not delayed"),
    Column("attempt", "int", "deliveries before this one"),
    Column("retry", RETRY, "where it lay first, when it failed and why; null: never sent back"),
    Column("timer_key", "string", "its owner's name for it while it was delayed"),
)

SPANS: tuple[Column, ...] = (
    Column("trace_id", "string", "32 hex digits"),
    Column("span_id", "string", "16 hex digits"),
    Column("parent_span_id", "string", "null: root"),
    Column("links", "array<struct<trace_id:string,span_id:string>>", "other creation contexts"),
    Column("name", "string", "operation and topic"),
    Column("kind", "string", "PRODUCER, CONSUMER, CLIENT, SERVER, INTERNAL"),
    Column("start_ts", "timestamp", "start, to the microsecond"),
    Column("start_ns", "bigint", "start, Unix nanoseconds"),
    Column("duration_ns", "bigint", "end - start"),
    Column("status", "string", "OK, ERROR, UNSET"),
    Column("error_type", "string", "DueMQ error code or exception class"),
    Column("service", "string", "service.name of the process"),
    Column("instance", "string", "service.instance.id"),
    Column("operation", "string", "send, store, schedule, fire, receive, process, settle"),
    Column("topic", "string", "the topic that the producer named"),
    Column("broker", "string", "broker that answered"),
    Column("queue", "int", "queue (in %TIMER% while a message waits)"),
    Column("queue_offset", "bigint", "offset of the (first) message"),
    Column("message_id", "string", "send and process only"),
    Column("key", "string", "of the message"),
    Column("tag", "string", "of the message"),
    Column("consumer_group", "string", "receive, process and settle only"),
    Column("client_id", "string", "producer or group member"),
    Column("body_bytes", "bigint", "payload of the message, or of the frame"),
    Column("batch_count", "bigint", "messages that the span stands for; null: one"),
    Column("due_ms", "bigint", "when it is due; null: not delayed"),
    Column("lateness_ms", "bigint", "fire: stored - due; process: started - due"),
    Column("attempt", "int", "calls of the callback before this one"),
    Column("attributes", "map<string,string>", "what has no column; JSON unless a string"),
    Column("schema_version", "int", "of the batch that carried it"),
    Column("trace_broker", "string", "where the batch lies in %TRACE%: broker,"),
    Column("trace_queue", "int", "queue,"),
    Column("trace_offset", "bigint", "offset,"),
    Column("trace_row", "int", "and row in the batch: unique together"),
    Column("sampled_count", "bigint", "those of batch_count that are sampled; null: all"),
)

UNDECODABLE: tuple[Column, ...] = (
    Column("undecodable_reason", "string", "why a message is no spans; null: it is"),
    Column("undecodable_body", "binary", "its bytes as they lie there"),
)
"""Further columns of the spans with the option `undecodable=rows`."""

PLACE = ("trace_broker", "trace_queue", "trace_offset")


def ddl(columns: Iterable[Column]) -> str:
    """The Spark schema, as SQL."""
    return ", ".join(f"`{column.name}` {column.spark_type}" for column in columns)


def arrow_schema(columns: Iterable[Column], dictionaries: Collection[str] = ()) -> pa.Schema:
    """The Arrow schema of the batches; strings of `dictionaries` are indexes into a table."""
    coded = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            pa.field(column.name, coded if column.name in dictionaries else column.arrow_type)
            for column in columns
        ]
    )


def select(columns: Iterable[Column], names: Iterable[str]) -> tuple[Column, ...]:
    """The columns of these names, in that order; KeyError names one that does not exist."""
    by_name = {column.name: column for column in columns}
    return tuple(by_name[name] for name in names)
