"""How much of what happened, how fast, and how often it failed.

One row per bucket of time (of the span's start), topic, operation and consumer group.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from duemq_analytics.answers import definitions
from duemq_analytics.answers.buckets import MINUTE_S, bucketed
from duemq_analytics.answers.percentiles import approximate, named

_NS_PER_MS = 1_000_000


def operations(spans: DataFrame, lengths_s: Sequence[int] = (MINUTE_S,)) -> DataFrame:
    """Aggregates spans, once for each length of bucket.

    bucket_s, bucket_ts, topic, operation, consumer_group · spans, messages, errors, error_rate,
    retries, dead_letters · p50_ms, p95_ms, p99_ms, max_ms, curve of the spans' durations.
    """
    errors = F.sum("error")
    return (
        spans.where(definitions.has_duration())
        .select(
            bucketed(F.col("start_ts"), lengths_s),
            "topic",
            "operation",
            "consumer_group",
            definitions.counted(definitions.failed()).alias("error"),
            definitions.retry().alias("retry"),
            definitions.dead_letter().alias("dead_letter"),
            definitions.weight().alias("weight"),
            (F.col("duration_ns") / _NS_PER_MS).alias("ms"),
        )
        .groupBy("bucket_s", "bucket_ts", "topic", "operation", "consumer_group")
        .agg(
            F.count(F.lit(1)).alias("spans"),
            F.sum("weight").alias("messages"),
            errors.alias("errors"),
            (errors / F.count(F.lit(1))).alias("error_rate"),
            F.sum("retry").alias("retries"),
            F.sum("dead_letter").alias("dead_letters"),
            approximate(F.col("ms")),
            F.max("ms").alias("max_ms"),
        )
        .transform(named)
    )
