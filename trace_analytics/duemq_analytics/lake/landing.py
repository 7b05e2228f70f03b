"""The landing job: a structured stream from the trace topic into a lake.

    offsets in LAKE/_checkpoint ─► micro-batch ─► files ─► commit in LAKE/_batches ─► checkpoint

Killed anywhere, the next run repeats the micro-batch whose checkpoint is missing, with the same
offsets: it replaces what was written without a commit, and what has one stays.  If the checkpoint
itself is lost, a new query begins where the commits of the same topic end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from duemq_analytics import options
from duemq_analytics.lake.checkpoints import (
    CHECKPOINT,
    any_done,
    drop_torn,
    make_durable,
    plan_of,
    query_of,
    topic_ids_of,
)
from duemq_analytics.lake.parquet_spans import ParquetSpans
from duemq_analytics.lake.span_table import NOT_TOLD, Batch, Ends, TopicEnds, merged_ends
from duemq_analytics.lake.span_writer import MESSAGES_SCHEMA
from duemq_analytics.options import Options
from duemq_analytics.source import stream_offsets
from duemq_analytics.source.client import QueueClient
from duemq_analytics.source.plan import QueueBounds

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
        plan, topic_ids = plan_of(checkpoint, number), topic_ids_of(checkpoint, number)
        said(table.land(key, messages.coalesce(tasks), plan, topic_ids))

    writer = (
        spark.readStream.format("duemq")
        .options(**_options(landing, table.topic_ends()))
        .schema(MESSAGES_SCHEMA)
        .load()
        .writeStream.queryName("duemq trace land")
        .option("checkpointLocation", str(checkpoint))
        .foreachBatch(land)
    )
    if landing.every_s is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{landing.every_s} seconds").start()


def _options(landing: Landing, ends: TopicEnds) -> dict[str, str]:
    given = {
        "nameserver": landing.nameserver,
        "topic": landing.topic,
        "maxOffsetsPerTrigger": str(landing.messages_per_trigger),
        "maxRecordsPerPartition": str(MESSAGES_PER_TASK),
        "failOnDataLoss": str(landing.fail_on_data_loss).lower(),
        "timeoutSeconds": str(landing.timeout_s),
    }
    # Until a micro-batch is done Spark asks where the query began, at a later start, too.
    if ends and not any_done(landing.lake / CHECKPOINT):
        settings = options.parse(given)
        with QueueClient.of(settings) as client:
            starts = starts_of(ends, client.queues(settings), settings)
        given["startingOffsets"] = json.dumps(starts)
    return given


def starts_of(ends: TopicEnds, queues: Sequence[QueueBounds], settings: Options) -> Ends:
    """Where a new query begins: how far the topic that is there was landed, else at its beginning.

    Raises TopicReplaced where only an earlier one of its name was: the end of that is gone, perhaps
    before it was landed.  With `failOnDataLoss=false` only warns.
    """
    of_any = merged_ends(ends.values())
    starts = {**of_any}
    for broker, topic_id in {queue.broker: queue.topic_id for queue in queues}.items():
        if topic_id and broker in of_any:
            starts[broker] = _landed(ends, broker, str(topic_id))
    for queue in queues:
        earlier = of_any.get(queue.broker, {}).get(str(queue.queue))
        if earlier is not None and not starts[queue.broker]:
            stream_offsets.lost(earlier, queue, settings, replaced=True)
    return starts


def _landed(ends: TopicEnds, broker: str, topic_id: str) -> dict[str, int]:
    """Of a topic on a broker, by queue; what is not told of any is of the only one that is."""
    told = {each for each, brokers in ends.items() if broker in brokers} - {NOT_TOLD}
    before = ends.get(NOT_TOLD, {}) if told <= {topic_id} else {}
    return before.get(broker, {}) | ends.get(topic_id, {}).get(broker, {})
