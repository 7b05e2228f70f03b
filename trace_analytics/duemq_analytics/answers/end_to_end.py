"""How long a message was under way: start of its send span to start of its first process span.

Messages with a due time are left out: their waiting is wanted; see `lateness`.  A retry has a due
time too, its own; it says nothing about the message.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from duemq_analytics.answers import definitions
from duemq_analytics.answers.buckets import MINUTE_S, bucketed
from duemq_analytics.answers.percentiles import approximate, named

_NS_PER_MS = 1_000_000


def journeys(spans: DataFrame) -> DataFrame:
    """One row a message and group that processed it, in broadcast a row a member.

    message_id, topic, consumer_group · sent_ts, sent_ns, due_ms, first_ns (first call of the
    callback), processed_ms (its longest call), calls, retries, failed (whether a call failed).

    One exchange, by message: calls are grouped, then a window brings what the send says to each
    row.  Nothing of a message is gathered in memory: whoever sends chooses its id, and any number
    of calls may have it.  `calls` above 1: the message came again.
    """
    rows = (
        spans.where(F.col("message_id").isNotNull() & F.col("operation").isin("send", "process"))
        .select(
            *("message_id", "topic", "consumer_group"),
            *("start_ts", "start_ns", "duration_ns", "attempt"),
            (F.col("operation") == "send").alias("sent"),
            definitions.member().alias("member"),
            definitions.own_due_ms().alias("due_ms"),
            definitions.failed().alias("failed"),
        )
        .repartition("message_id", "topic")
    )
    sent, called = F.col("sent"), ~F.col("sent")
    calls = rows.groupBy("message_id", "topic", "consumer_group", "member").agg(
        F.min(F.when(sent, F.col("start_ts"))).alias("sent_ts"),
        F.min(F.when(sent, F.col("start_ns"))).alias("sent_ns"),
        F.max("due_ms").alias("due_ms"),
        F.min(F.when(called, F.col("start_ns"))).alias("first_ns"),
        (F.max(F.when(called, F.col("duration_ns"))) / _NS_PER_MS).alias("processed_ms"),
        F.count_if(called).alias("calls"),
        F.max(F.when(called, F.col("attempt"))).alias("retries"),
        F.max(F.when(called, F.col("failed"))).alias("failed"),
    )
    message = Window.partitionBy("message_id", "topic")
    whole = {"sent_ts": F.min("sent_ts"), "sent_ns": F.min("sent_ns"), "due_ms": F.max("due_ms")}
    found = calls.withColumns({name: of.over(message) for name, of in whole.items()})
    return found.where(F.col("sent_ns").isNotNull() & (F.col("calls") > 0)).drop("member")


def end_to_end(journeys: DataFrame, lengths_s: Sequence[int] = (MINUTE_S,)) -> DataFrame:
    """Aggregates journeys of messages without a due time, by the time of their sending.

    bucket_s, bucket_ts, topic, consumer_group · messages, repeated (the callback had it more than
    once) · p50_ms, p95_ms, p99_ms, max_ms, curve.
    """
    return (
        journeys.where(F.col("due_ms").isNull())
        .select(
            bucketed(F.col("sent_ts"), lengths_s),
            "topic",
            "consumer_group",
            ((F.col("first_ns") - F.col("sent_ns")) / _NS_PER_MS).alias("ms"),
            definitions.repeated(F.col("calls")).alias("repeated"),
        )
        .groupBy("bucket_s", "bucket_ts", "topic", "consumer_group")
        .agg(
            F.count(F.lit(1)).alias("messages"),
            F.sum("repeated").alias("repeated"),
            approximate(F.col("ms")),
            F.max("ms").alias("max_ms"),
        )
        .transform(named)
    )
