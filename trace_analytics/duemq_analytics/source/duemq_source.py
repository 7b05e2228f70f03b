"""Spark's data sources `duemq` (any topic) and `duemq-spans` (traces).

Batch reads.  A partition is a range of one queue (`plan`); offsets are asked once per DataFrame.
A stream reader belongs in `streamReader` here: `plan.ranges` between two maps of offsets and
`_read` below are what it needs.

Deliberately without filter pushdown: in Spark 4.3 a pushed filter sticks to the DataFrame and
later queries of the same one answer wrongly.  Filters are options; columns are pruned by
`.schema("a …, b …")` at read, since Spark does not prune Python sources by itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from duemq.errors import InvalidArgument
from duemq.protocol.names import TRACE_TOPIC
from duemq_analytics import options
from duemq_analytics.options import Options
from duemq_analytics.source import messages_source, plan, schema, spans
from duemq_analytics.source.client import QueueClient, Run
from duemq_analytics.source.plan import QueueRange
from duemq_analytics.source.schema import Column

TRACE_RECORDS_PER_PARTITION = 1_000
"""Each holds up to 512 spans."""

BATCH_ROWS = 10_000
"""Rows gathered into one Arrow batch; more brings nothing."""


class RangePartition(InputPartition):
    """What one task reads."""

    def __init__(self, piece: QueueRange) -> None:
        super().__init__(piece)
        self.piece = piece


class RangeReader(DataSourceReader):
    """Plans on the driver, reads in the tasks; holds settings only, so that it can be pickled."""

    def __init__(self, settings: Options, columns: Sequence[Column]) -> None:
        self.settings = settings
        self.columns = tuple(columns)

    def partitions(self) -> Sequence[InputPartition]:
        """One a queue, or more for a long queue."""
        with QueueClient(self.settings.nameservers, self.settings.timeout_s) as client:
            queues = client.queues(self.settings)
        pieces = plan.partitions(
            plan.ranges(queues, self.settings), self.settings.records_per_partition
        )
        return [RangePartition(piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The partition's rows.  Spark passes a plain partition when there are none."""
        if not isinstance(partition, RangePartition):
            return
        with QueueClient(self.settings.nameservers, self.settings.timeout_s) as client:
            found = client.read(
                self.settings.topic,
                partition.piece,
                fail_on_data_loss=self.settings.fail_on_data_loss,
            )
            yield from self.batches(partition.piece, found)

    @abstractmethod
    def batches(self, piece: QueueRange, found: Iterator[Run]) -> Iterator[pa.RecordBatch]:
        """Arrow batches of the runs."""


class MessageReader(RangeReader):
    """Reads messages as they are."""

    def batches(self, piece: QueueRange, found: Iterator[Run]) -> Iterator[pa.RecordBatch]:
        """About BATCH_ROWS messages each."""
        topic = self.settings.topic
        gathered: list[Run] = []
        rows = 0
        for run in found:
            gathered.append(run)
            rows += len(run.records)
            if rows >= BATCH_ROWS:
                yield messages_source.to_arrow(topic, piece, gathered, self.columns)
                gathered, rows = [], 0
        if gathered:
            yield messages_source.to_arrow(topic, piece, gathered, self.columns)


class SpanReader(RangeReader):
    """Reads the spans that the messages of the trace topic hold."""

    def batches(self, piece: QueueRange, found: Iterator[Run]) -> Iterator[pa.RecordBatch]:
        """About BATCH_ROWS spans each."""
        gathered: list[pa.RecordBatch] = []
        rows = 0
        for run in found:
            for i, record in enumerate(run.records):
                batch = spans.to_arrow(record.body, piece, run.offset + i, self.columns)
                gathered.append(batch)
                rows += batch.num_rows
                if rows >= BATCH_ROWS:
                    yield pa.concat_batches(gathered)
                    gathered, rows = [], 0
        if gathered:
            yield pa.concat_batches(gathered)


class MessageSource(DataSource):
    """`spark.read.format("duemq").option("topic", …)`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "duemq"

    def schema(self) -> str:
        """All columns."""
        return schema.ddl(schema.MESSAGES)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the columns asked for."""
        return MessageReader(options.parse(self.options), _columns(_MESSAGES, schema))


class SpanSource(DataSource):
    """`spark.read.format("duemq-spans")`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "duemq-spans"

    def schema(self) -> str:
        """All columns."""
        return schema.ddl(schema.SPANS)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the columns asked for."""
        parsed = options.parse(
            self.options, topic=TRACE_TOPIC, records_per_partition=TRACE_RECORDS_PER_PARTITION
        )
        return SpanReader(parsed, _columns(_SPANS, schema))


# Under other names: `reader` must call its parameter `schema`.
_MESSAGES = schema.MESSAGES
_SPANS = schema.SPANS


def _columns(known: Sequence[Column], asked: Any) -> tuple[Column, ...]:
    """The columns of a `.schema(…)`; raises InvalidArgument naming what does not exist or fit."""
    types = {column.name: column.spark_type for column in known}
    for field in asked.fields:
        name, spark_type = field.name, field.dataType.simpleString()
        if types.get(name) != spark_type:
            raise InvalidArgument(
                f"schema: no column {name} {spark_type}; it is {types.get(name, 'unknown')}",
                field=name,
                value=spark_type,
                limit=types.get(name, ", ".join(types)),
            )
    return schema.select(known, asked.fieldNames())
