"""Spark over DueMQ: topics and traces as DataFrames, and a report of the traces.

    options ─► client ─► plan ─► source          spark.read.format("duemq" | "duemq-spans")
                          │        └─ messages, spans    records → Arrow, column by column
    session ─► operations, end_to_end, lateness          DataFrame → DataFrame
                          └─ charts, report               Parquet, one HTML file

`schema` holds every table's columns.  README.md explains them.
"""

__version__ = "0.1.0"
