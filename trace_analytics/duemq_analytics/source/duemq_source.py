"""Spark's data sources `duemq` (any topic) and `duemq-spans` (traces).

A partition is a range of one queue (`plan`); offsets are asked once per DataFrame, or per
micro-batch of a stream, whose reader (`stream_reader`) reads with the batch reader.

Deliberately without filter pushdown: in Spark 4.3 a pushed filter sticks to the DataFrame and
later queries of the same one answer wrongly.  Filters are options; columns are pruned by
`.schema("a …, b …")` at read, since Spark does not prune Python sources by itself.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.types import StructType

from duemq.errors import Corrupt, InvalidArgument
from duemq.protocol.names import TRACE_TOPIC
from duemq_analytics import options
from duemq_analytics.options import Options
from duemq_analytics.source import messages_source, plan, schema, spans
from duemq_analytics.source.client import PULL_BYTES, QueueClient, RecordRun
from duemq_analytics.source.plan import QueueRange
from duemq_analytics.source.schema import Column
from duemq_analytics.source.stream_reader import RangePartition, RangeStreamReader

BATCH_ROWS = 10_000
"""Rows gathered into one Arrow batch; more brings nothing."""

BATCH_BYTES = 64 * 1024 * 1024
"""The same in bytes, for rows that are large."""

_MANY = BATCH_ROWS * PULL_BYTES // BATCH_BYTES
"""Runs of so many messages fill a batch with rows before bytes: each is of one pull."""

_logger = logging.getLogger(__name__)


class RangeReader(DataSourceReader):
    """Plans on the driver, reads in the tasks; holds settings only, so that it can be pickled."""

    def __init__(self, settings: Options, columns: Sequence[Column]) -> None:
        self.settings = settings
        self.columns = tuple(columns)

    def partitions(self) -> Sequence[InputPartition]:
        """One a queue, or more for a long queue."""
        with QueueClient.of(self.settings) as client:
            queues = client.queues(self.settings)
        pieces = plan.partitions(
            plan.ranges(queues, self.settings), self.settings.records_per_partition
        )
        return [RangePartition(piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The partition's rows.  Spark passes a plain partition when there are none."""
        if not isinstance(partition, RangePartition):
            return
        with QueueClient.of(self.settings) as client:
            found = client.read(
                self.settings.topic,
                partition.piece,
                fail_on_data_loss=self.settings.fail_on_data_loss,
            )
            yield from self.batches(partition.piece, found)

    @abstractmethod
    def batches(self, piece: QueueRange, found: Iterator[RecordRun]) -> Iterator[pa.RecordBatch]:
        """Arrow batches of the runs."""


class MessageReader(RangeReader):
    """Reads messages as they are."""

    def batches(self, piece: QueueRange, found: Iterator[RecordRun]) -> Iterator[pa.RecordBatch]:
        """About BATCH_ROWS messages each, or fewer with BATCH_BYTES in them."""
        topic = self.settings.topic
        gathered: list[RecordRun] = []
        rows = size = 0
        for run in found:
            gathered.append(run)
            rows += len(run.records)
            if len(run.records) < _MANY:
                size += sum(map(_bytes_of, run.records))
            if rows >= BATCH_ROWS or size >= BATCH_BYTES:
                yield messages_source.to_arrow(topic, piece, gathered, self.columns)
                gathered, rows, size = [], 0, 0
        if gathered:
            yield messages_source.to_arrow(topic, piece, gathered, self.columns)


def _bytes_of(record: Any) -> int:
    """About what it holds; most messages have no properties, and to measure all would cost."""
    return record.ByteSize() if record.properties else len(record.body)


class SpanReader(RangeReader):
    """Reads the spans that the messages of the trace topic hold.

    Whoever may send may write to that topic: what cannot be decoded never fails a read.
    """

    def batches(self, piece: QueueRange, found: Iterator[RecordRun]) -> Iterator[pa.RecordBatch]:
        """About BATCH_ROWS spans each."""
        gathered: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in self._decoded(piece, found):
            gathered.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
            if rows >= BATCH_ROWS or size >= BATCH_BYTES:
                yield pa.concat_batches(gathered)
                gathered, rows, size = [], 0, 0
        if gathered:
            yield pa.concat_batches(gathered)

    def _decoded(self, piece: QueueRange, found: Iterator[RecordRun]) -> Iterator[pa.RecordBatch]:
        """A batch a message; those that are no spans as the option `undecodable` says."""
        undecodable = 0
        for run in found:
            for i, record in enumerate(run.records):
                offset = run.offset + i
                try:
                    yield spans.to_arrow(record.body, piece, offset, self.columns)
                except Corrupt as error:
                    undecodable += 1
                    if undecodable == 1:  # Said once a partition: there may be many.
                        _logger.warning("left out of the spans: %s", error.message)
                    if self.settings.undecodable == options.ROWS:
                        yield spans.undecodable(
                            record.body, error.message, piece, offset, self.columns
                        )
        if undecodable > 1:
            _logger.warning(
                "%d undecodable messages in %s/%d", undecodable, piece.broker, piece.queue
            )


class MessageSource(DataSource):
    """`spark.read.format("duemq").option("topic", …)`; `sink.topic_format` adds `df.write`."""

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

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """The same for `readStream`."""
        settings = options.parse(self.options)
        return RangeStreamReader(settings, MessageReader(settings, _columns(_MESSAGES, schema)))


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
        return schema.ddl(self._known())

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the columns asked for."""
        return SpanReader(self._parsed(), _columns(self._known(), schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """The same for `readStream`."""
        settings = self._parsed()
        return RangeStreamReader(settings, SpanReader(settings, _columns(self._known(), schema)))

    def _known(self) -> tuple[Column, ...]:
        return _SPANS + _UNDECODABLE if self._parsed().undecodable == options.ROWS else _SPANS

    def _parsed(self) -> Options:
        return options.parse(
            self.options,
            topic=TRACE_TOPIC,
            records_per_partition=options.TRACE_RECORDS_PER_PARTITION,
            names=options.SPAN_NAMES,
        )


# Under other names: `reader` must call its parameter `schema`.
_MESSAGES = schema.MESSAGES
_SPANS = schema.SPANS
_UNDECODABLE = schema.UNDECODABLE


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
