"""Lets `spark.read.format("duemq")` find its data source: Spark looks for modules `pyspark_*`."""

from duemq_analytics.sink.topic_format import TopicFormat as DefaultSource

__all__ = ["DefaultSource"]
