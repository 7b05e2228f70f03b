"""`df.write` and `df.writeStream` to topics: each task sends the rows of its partition.

What a task has sent cannot be taken back: nothing of a message waits for the others of its write.
So rows arrive at least once.  Within one attempt at a task a row is stored once, as for every
producer; another attempt is another producer, to the brokers, and how its messages fall into frames
depends on the time, so that brokers cannot know its rows again.  Whoever reads can: by the row's
id, a property (`write_id`), the same in every attempt as long as the partition has the same rows
in the same order.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from duemq import Producer
from duemq.errors import InvalidArgument, InvariantError, NotAllSent, TooLarge
from duemq.settings import ClientSettings, ProducerSettings
from duemq_analytics.sink import row_columns
from duemq_analytics.sink.row_messages import RowIds, by_topic, located, outgoing
from duemq_analytics.sink.write_options import WriteOptions

if TYPE_CHECKING:
    import pyarrow as pa

# What Spark tells the tasks of a micro-batch.
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"

_logger = logging.getLogger(__name__)


@dataclass
class Written(WriterCommitMessage):
    """What a task has sent."""

    messages: int


class TopicRows:
    """Sends a partition's rows; holds settings only, so that it can be pickled."""

    def __init__(self, settings: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        """Raises InvalidArgument for a mode or a schema that cannot be written."""
        if overwrite:
            raise InvalidArgument(
                "a topic can only be appended to: use mode('append') or outputMode('append')",
                field="mode",
                value="overwrite",
                limit="append",
            )
        self.settings = settings
        self.columns = row_columns.check(schema, settings.topic)
        self.made_up_id = uuid.uuid4().hex

    def send(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Sends them, a batch after another: one is stored before the next is taken.

        Raises InvalidArgument or TooLarge, naming row, column, value and limit; NotAllSent, naming
        the first row that is not stored.
        """
        settings = self.settings
        partition, write_id = self._identity()
        ids = RowIds.of(settings.row_id_property, write_id, partition)
        sent = 0
        with _producer(settings) as producer:
            for batch in batches:
                self._send_batch(producer, batch, ids, partition, sent)
                sent += batch.num_rows
        return Written(sent)

    def _send_batch(
        self, producer: Producer, batch: pa.RecordBatch, ids: RowIds, partition: int, first: int
    ) -> None:
        taken: Sequence[int] = range(batch.num_rows)
        by_column = "topic" in self.columns
        try:
            topics = by_topic(batch, self.settings.topic)
            messages = outgoing(batch, self.columns, first, ids)
            if len(topics) == 1:
                producer.send_many(topics[0][0], messages)
                return
            kept = list(messages)
            for topic, taken in topics:
                producer.send_many(topic, (kept[row] for row in taken))
        except (InvalidArgument, TooLarge, NotAllSent) as error:
            raise located(error, taken, partition, first, topics=by_column) from None

    def _identity(self) -> tuple[int, str]:
        """The partition's number, and what the ids of this write begin with."""
        task = TaskContext.get()
        if task is None:
            raise InvariantError("rows are sent in tasks of Spark only")
        return task.partitionId(), self._write_id(task)

    def _write_id(self, task: TaskContext) -> str:
        return self.settings.write_id or self.made_up_id


class BatchWriter(DataSourceArrowWriter):
    """`df.write`."""

    def __init__(self, settings: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        self._rows = TopicRows(settings, schema, overwrite=overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """In a task: sends its rows."""
        return self._rows.send(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing: what was sent is stored."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What was sent stays."""
        _say_what_stays(messages)


class StreamRows(TopicRows):
    """Of micro-batches, whose rows get the same ids when one is run again."""

    def _write_id(self, task: TaskContext) -> str:
        query = self.settings.write_id or task.getLocalProperty(_QUERY_ID)
        number = task.getLocalProperty(_BATCH_ID)
        if query is None or number is None:
            raise InvariantError("Spark does not say which query and micro-batch a task is of")
        return f"{query}-{number}"


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream`."""

    def __init__(self, settings: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        self._rows = StreamRows(settings, schema, overwrite=overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """In a task: sends its rows."""
        return self._rows.send(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing: what was sent is stored, and the checkpoint says what is done."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """What was sent stays, and comes again with the micro-batch."""
        _say_what_stays(messages)


def _say_what_stays(messages: Sequence[WriterCommitMessage | None]) -> None:
    stays = sum(each.messages for each in messages if isinstance(each, Written))
    _logger.warning(
        "the write failed; %d messages of its partitions that were done stay in their topics, and "
        "those of others that were sent before",
        stays,
    )


def _producer(settings: WriteOptions) -> Producer:
    timeout_s = float(settings.timeout_s)
    return Producer(
        settings.nameservers,
        settings=ProducerSettings(
            send_timeout_s=timeout_s,
            close_timeout_s=timeout_s,
            client=ClientSettings(tls=settings.tls),
        ),
    )
