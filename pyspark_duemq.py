"""Lets `spark.read.format("duemq")` find its data source: Spark looks for modules `pyspark_*`."""

from trace_analytics.source import MessageSource as DefaultSource

__all__ = ["DefaultSource"]
