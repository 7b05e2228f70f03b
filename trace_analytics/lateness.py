"""How late delayed messages were, at two places that mean different things.

`fire`: the broker stored it in its topic, less its due time: what the timer service promises.
`process`: a consumer's callback began, less its due time: what the application feels; it holds
the consumer's own backlog too.  Negative would be early, which must not be.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from trace_analytics.operations import MINUTE, bucket_of, exact, spread, weight


def lateness(spans: DataFrame, bucket: str | None = MINUTE) -> DataFrame:
    """Aggregates the lateness that fire and process spans carry, by due time.

    bucket_ts, topic, stage (fire, process), consumer_group · messages, early ·
    p50_ms, p95_ms, p99_ms, max_ms.  A process span counts with the callback's first call only.
    """
    first = (F.col("operation") == "fire") | (F.coalesce(F.col("attempt"), F.lit(0)) == 0)
    due = F.timestamp_millis(F.col("due_ms"))
    early = F.when(F.col("lateness_ms") < 0, weight()).otherwise(0)
    return (
        spans.where(
            F.col("lateness_ms").isNotNull() & F.col("operation").isin("fire", "process") & first
        )
        .groupBy(
            bucket_of(due, bucket).alias("bucket_ts"),
            "topic",
            F.col("operation").alias("stage"),
            "consumer_group",
        )
        .agg(
            F.sum(weight()).alias("messages"),
            F.sum(early).alias("early"),
            exact(F.col("lateness_ms"), weight()).alias("_percentiles"),
            F.max("lateness_ms").alias("max_ms"),
        )
        .transform(spread)
        .orderBy("bucket_ts", "topic", "stage", "consumer_group")
    )
