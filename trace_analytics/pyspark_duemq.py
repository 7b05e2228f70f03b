"""Lets `spark.read.format("duemq")` find its data source: Spark looks for modules `pyspark_*`."""

from duemq_analytics.source.duemq_source import MessageSource as DefaultSource

__all__ = ["DefaultSource"]
