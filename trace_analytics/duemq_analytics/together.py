"""Spark's queries at the same time: while one is planned, another one has the cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyspark import inheritable_thread_target
from pyspark.sql import SparkSession


def together(spark: SparkSession, *queries: Callable[[], Any]) -> list[Any]:
    """Runs all to their end; answers their results in order, or raises the first one's error."""
    inheriting = inheritable_thread_target(spark)
    with ThreadPoolExecutor(len(queries)) as threads:
        running = [threads.submit(inheriting(query)) for query in queries]
    return [query.result() for query in running]
