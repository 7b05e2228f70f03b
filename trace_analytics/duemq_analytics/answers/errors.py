"""What failed, by the kind of error: how often, when last, and a message that it happened to."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from duemq_analytics.answers import definitions
from duemq_analytics.answers.buckets import MINUTE_S, bucketed

KINDS_MAX = 50
"""Of a bucket: the rarest beyond these are one, OTHERS.  An exception's name can be anything."""

KIND_CHARACTERS = 120
OTHERS = "(others)"

_OF = ("topic", "operation", "consumer_group", "error_type")
KEY = ("bucket_s", "bucket_ts", *_OF)


def errors(spans: DataFrame, lengths_s: Sequence[int] = (MINUTE_S,)) -> DataFrame:
    """Spans that failed, by the time of their start.

    bucket_s, bucket_ts, topic, operation, consumer_group, error_type (null: none was given) ·
    errors, last_ts, message_id (of the last one that has an id).
    """
    failed = spans.where(definitions.has_duration() & definitions.failed())
    rows = failed.select(
        bucketed(F.col("start_ts"), lengths_s),
        *_OF[:-1],
        F.left(F.col("error_type"), F.lit(KIND_CHARACTERS)).alias("error_type"),
        F.lit(1).cast("bigint").alias("errors"),
        F.col("start_ts").alias("last_ts"),
        "message_id",
    )
    return added_up(rows)


def added_up(rows: DataFrame) -> DataFrame:
    """Rows of `errors`, those of one key together."""
    kinds = _together(rows)
    order = Window.partitionBy("bucket_s", "bucket_ts").orderBy(F.desc("errors"), *_OF)
    ranked = kinds.withColumn("rank", F.row_number().over(order))
    kind = F.when(F.col("rank") <= KINDS_MAX, F.col("error_type")).otherwise(OTHERS)
    return _together(ranked.withColumn("error_type", kind).drop("rank"))


def _together(rows: DataFrame) -> DataFrame:
    when = F.when(F.col("message_id").isNotNull(), F.col("last_ts"))
    return rows.groupBy(*KEY).agg(
        F.sum("errors").alias("errors"),
        F.max("last_ts").alias("last_ts"),
        F.max_by("message_id", when).alias("message_id"),
    )
