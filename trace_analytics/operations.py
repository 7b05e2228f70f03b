"""How much of what happened, how fast, and how often it failed.

One row per bucket of time (of the span's start), topic, operation and consumer group.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

PERCENTILES = (0.5, 0.95, 0.99)

PERCENTILE_ACCURACY = 1_000
"""A percentile's rank is right to 1/1000 of the rows."""

MINUTE = "1 minute"

_NS_PER_MS = 1_000_000


def operations(spans: DataFrame, bucket: str | None = MINUTE) -> DataFrame:
    """Aggregates spans.

    bucket_ts, topic, operation, consumer_group · spans, messages, errors, error_rate ·
    p50_ms, p95_ms, p99_ms, max_ms of the spans' durations.
    """
    milliseconds = F.col("duration_ns") / _NS_PER_MS
    errors = F.sum((F.col("status") == "ERROR").cast("bigint"))
    return (
        spans.where(F.col("topic").isNotNull())
        .groupBy(
            bucket_of(F.col("start_ts"), bucket).alias("bucket_ts"),
            "topic",
            "operation",
            "consumer_group",
        )
        .agg(
            F.count(F.lit(1)).alias("spans"),
            F.sum(weight()).alias("messages"),
            errors.alias("errors"),
            (errors / F.count(F.lit(1))).alias("error_rate"),
            approximate(milliseconds).alias("_percentiles"),
            F.max(milliseconds).alias("max_ms"),
        )
        .transform(spread)
        .orderBy("bucket_ts", "topic", "operation", "consumer_group")
    )


def bucket_of(time: Column, bucket: str | None) -> Column:
    """The start of the bucket that a time falls into; null if all is one bucket (None)."""
    if bucket is None:
        return F.lit(None).cast("timestamp")
    return F.window(time, bucket)["start"]


def weight() -> Column:
    """How many messages a span stands for."""
    return F.coalesce(F.col("batch_count"), F.lit(1))


def approximate(value: Column) -> Column:
    """The percentiles as an array, for `spread`."""
    return F.percentile_approx(value, list(PERCENTILES), PERCENTILE_ACCURACY)


def exact(value: Column, frequency: Column) -> Column:
    """The percentiles of few distinct values, each counted `frequency` times."""
    return F.percentile(value, list(PERCENTILES), frequency)


def spread(frame: DataFrame) -> DataFrame:
    """The array `_percentiles` as columns p50_ms, p95_ms and p99_ms; max_ms goes last."""
    others = [name for name in frame.columns if name not in ("_percentiles", "max_ms")]
    named = [
        F.col("_percentiles")[i].cast("double").alias(f"p{round(q * 100)}_ms")
        for i, q in enumerate(PERCENTILES)
    ]
    return frame.select(*others, *named, F.col("max_ms").cast("double").alias("max_ms"))
