"""Lets `spark.read.format("duemq-spans")` find its data source; see pyspark_duemq."""

from trace_analytics.source import SpanSource as DefaultSource

__all__ = ["DefaultSource"]
