"""Lets `spark.read.format("duemq-spans")` find its data source; see pyspark_duemq."""

from duemq_analytics.source.duemq_source import SpanSource as DefaultSource

__all__ = ["DefaultSource"]
