"""How late delayed messages were, at two places that mean different things.

`fire`: the broker stored it in its topic, less its due time: what the timer service promises.
`process`: a consumer's callback began, less its due time: what the application feels; it holds
the consumer's own backlog too.  Negative would be early, which must not be.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from duemq_analytics.answers import definitions
from duemq_analytics.answers.buckets import MINUTE_S, bucketed
from duemq_analytics.answers.percentiles import exact, named


def lateness(spans: DataFrame, lengths_s: Sequence[int] = (MINUTE_S,)) -> DataFrame:
    """Aggregates the lateness that fire and process spans carry, by due time.

    bucket_s, bucket_ts, topic, stage (fire, process), consumer_group · messages, early ·
    p50_ms, p95_ms, p99_ms, max_ms, curve.  Of a message's process spans the first call counts.
    """
    return (
        spans.where(definitions.has_lateness())
        .select(
            bucketed(F.timestamp_millis(F.col("due_ms")), lengths_s),
            "topic",
            F.col("operation").alias("stage"),
            "consumer_group",
            "lateness_ms",
            definitions.weight().alias("weight"),
        )
        .groupBy("bucket_s", "bucket_ts", "topic", "stage", "consumer_group")
        .agg(
            F.sum("weight").alias("messages"),
            F.sum(definitions.early(F.col("weight"))).alias("early"),
            exact(F.col("lateness_ms"), F.col("weight")),
            F.max("lateness_ms").alias("max_ms"),
        )
        .transform(named)
    )
