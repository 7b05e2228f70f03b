"""Lets `spark.read.format("duemq")` find the data sources."""
