"""The data source `duemq`, for reading and for writing."""

from __future__ import annotations

from pyspark.sql.datasource import DataSourceStreamArrowWriter, DataSourceWriter
from pyspark.sql.types import StructType

from duemq_analytics.sink import write_options
from duemq_analytics.source.duemq_source import MessageSource


class TopicFormat(MessageSource):
    """Reads as its base does; `df.write.format("duemq").option("topic", …)` sends rows.

    The writers are imported where they are wanted: each process that only reads needs this class,
    and a producer costs it a quarter of its start.
    """

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Rows as messages."""
        from duemq_analytics.sink.topic_writer import BatchWriter

        return BatchWriter(write_options.parse(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """The same for `writeStream`."""
        from duemq_analytics.sink.topic_writer import StreamWriter

        return StreamWriter(write_options.parse(self.options), schema, overwrite=overwrite)
