"""The landing job: a structured stream from the trace topic into a lake.

    offsets in LAKE/_checkpoint ─► micro-batch ─► files ─► commit in LAKE/_batches ─► checkpoint

Killed anywhere, the next run repeats the micro-batch whose checkpoint is missing, with the same
offsets: it replaces what was written without a commit, and what has one stays.  If the checkpoint
itself is lost, a new query begins where the commits end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from duemq_analytics.lake.checkpoints import (
    CHECKPOINT,
    drop_torn,
    make_durable,
    plan_of,
    query_of,
)
from duemq_analytics.lake.parquet_spans import ParquetSpans
from duemq_analytics.lake.span_table import Batch
from duemq_analytics.lake.span_writer import MESSAGES_SCHEMA

MESSAGES_PER_TRIGGER = 10_000
"""Of the trace topic in one micro-batch; each holds up to 512 spans."""

MESSAGES_PER_TASK = 1_000


@dataclass(frozen=True)
class Landing:
    """What to land and how."""

    nameserver: str
    topic: str
    lake: Path
    every_s: float | None = None
    """None: what is there now, then it ends."""
    messages_per_trigger: int = MESSAGES_PER_TRIGGER
    fail_on_data_loss: bool = True
    timeout_s: int = 60


def start(spark: SparkSession, landing: Landing, said: Callable[[Batch], None]) -> StreamingQuery:
    """Starts the query; `said` is told each batch that was landed.

    Hold the lock `landing` of the lake as long as it runs.
    """
    table = ParquetSpans(landing.lake)
    table.drop_unfinished()
    tasks = spark.sparkContext.defaultParallelism
    checkpoint = landing.lake / CHECKPOINT
    drop_torn(checkpoint)

    def land(messages: DataFrame, number: int) -> None:
        make_durable(checkpoint, number)
        # A file a task and hour: few tasks make few files.
        key = f"{query_of(checkpoint)}-{number:010}"
        said(table.land(key, messages.coalesce(tasks), plan_of(checkpoint, number)))

    writer = (
        spark.readStream.format("duemq")
        .options(**_options(landing, table))
        .schema(MESSAGES_SCHEMA)
        .load()
        .writeStream.queryName("duemq trace land")
        .option("checkpointLocation", str(checkpoint))
        .foreachBatch(land)
    )
    if landing.every_s is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{landing.every_s} seconds").start()


def _options(landing: Landing, table: ParquetSpans) -> dict[str, str]:
    ends = table.ends()
    return {
        "nameserver": landing.nameserver,
        "topic": landing.topic,
        # Only a new query looks at it: see above.
        "startingOffsets": json.dumps(ends) if ends else "earliest",
        "maxOffsetsPerTrigger": str(landing.messages_per_trigger),
        "maxRecordsPerPartition": str(MESSAGES_PER_TASK),
        "failOnDataLoss": str(landing.fail_on_data_loss).lower(),
        "timeoutSeconds": str(landing.timeout_s),
    }
