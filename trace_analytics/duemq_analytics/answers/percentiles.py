"""Percentiles as columns: p50_ms, p95_ms, p99_ms, and `curve` for a drawing."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

CURVE = (*range(0, 90, 5), 90, 92, 94, 95, 96, 97, 98, 99, 99.5, 99.9)
"""The percentiles that `curve` has the values of."""

NAMED = (50, 95, 99)

ACCURACY = 10_000
"""An approximate percentile's rank is right to 1/10,000 of the rows."""

_FRACTIONS = [percentile / 100 for percentile in CURVE]


def approximate(value: Column) -> Column:
    """For `agg`, then `named`; for values that differ from row to row."""
    return F.percentile_approx(value, _FRACTIONS, ACCURACY).alias("curve")


def exact(value: Column, frequency: Column) -> Column:
    """For `agg`, then `named`; for few distinct values, each counted `frequency` times."""
    return F.percentile(value, _FRACTIONS, frequency).alias("curve")


def named(frame: DataFrame) -> DataFrame:
    """Adds p50_ms, p95_ms and p99_ms; max_ms and curve go last."""
    others = [name for name in frame.columns if name not in ("curve", "max_ms")]
    columns = [
        F.col("curve")[CURVE.index(percentile)].cast("double").alias(f"p{percentile}_ms")
        for percentile in NAMED
    ]
    return frame.select(*others, *columns, F.col("max_ms").cast("double").alias("max_ms"), "curve")
