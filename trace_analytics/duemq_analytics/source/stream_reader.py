"""`readStream` of both data sources.

Of what pyspark 4.3 has for Python streams this uses admission control (`latestOffset` with a read
limit) and Trigger.AvailableNow.  What it does not give, and nothing here relies on:

- `commit` comes a batch late and not at all for a run's last one, and `stop` not in every case:
  only the checkpoint says what is done.
- Limits are Spark's own classes only; rows here are messages of the topic, not spans.
- One limit a query: no composite ones, no smallest batch with a longest delay (ReadMinRows waits
  for ever under AvailableNow).
- No pruning of columns and no filters: `.schema(…)` and options say what is read.
- `simpleStreamReader` reads on the driver, one process for all queues: not used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from duemq.errors import TopicNotFound
from duemq_analytics.options import Options
from duemq_analytics.source import plan, stream_offsets
from duemq_analytics.source.client import QueueClient
from duemq_analytics.source.plan import QueueBounds, QueueRange
from duemq_analytics.source.stream_offsets import Offsets

if TYPE_CHECKING:
    import pyarrow as pa

    from duemq_analytics.source.duemq_source import RangeReader


_logger = logging.getLogger(__name__)

SILENCE_S = 0.5
"""In silence: between two looks at the cluster.  Without a trigger Spark wants a hundred a second,
and each connects to a nameserver and to all brokers of the topic."""


class RangePartition(InputPartition):
    """What one task reads."""

    def __init__(self, piece: QueueRange) -> None:
        super().__init__(piece)
        self.piece = piece


class RangeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches in a process beside the driver; tasks read as in a batch read."""

    def __init__(self, settings: Options, reader: RangeReader) -> None:
        self._settings = settings
        self._reader = reader
        self._target: list[QueueBounds] | None = None
        """What was there when a run with Trigger.AvailableNow began: it ends there."""
        self._silent_at: float | None = None
        """When the last look found nothing new, by the steady clock; None: it found something."""

    def initialOffset(self) -> Offsets:
        """Where a new query begins: option startingOffsets."""
        return stream_offsets.initial(self._queues(), self._settings)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Option maxOffsetsPerTrigger."""
        limit = self._settings.offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fixes the end of this run."""
        self._target = self._queues_left()

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """The end of the next micro-batch; `start` itself if there is nothing new."""
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if self._target is not None:
            return stream_offsets.latest(start, self._target, rows, self._settings)
        if self._silent_at is not None:
            time.sleep(max(0.0, self._silent_at + SILENCE_S - time.monotonic()))
        found = stream_offsets.latest(start, self._queues_left(), rows, self._settings)
        self._silent_at = time.monotonic() if found == start else None
        return found

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        """One a queue, or more for a long range."""
        planned = {broker for broker, _ in stream_offsets.planned(start, end)}
        queues = self._queues_left(planned)
        ranges = stream_offsets.between(start, end, queues, self._settings)
        pieces = plan.partitions(ranges, self._settings.records_per_partition)
        return [RangePartition(piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The partition's rows."""
        return self._reader.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: brokers keep no offsets of readers."""

    def stop(self) -> None:
        """Nothing: connections last for a call only."""

    def _queues_left(self, planned: Collection[str] = ()) -> list[QueueBounds]:
        """Of a stream that has begun: none where its topic was deleted, if that may be."""
        try:
            return self._queues(planned)
        except TopicNotFound as error:
            if self._settings.fail_on_data_loss:
                raise
            _logger.warning("%s; it may be made anew", error.message)
            return []

    def _queues(self, planned: Collection[str] = ()) -> list[QueueBounds]:
        with QueueClient.of(self._settings) as client:
            return client.queues(self._settings, planned)
