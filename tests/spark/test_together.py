"""Queries at the same time: all end, results in order, the first error is told."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from pyspark.sql import SparkSession

from duemq_analytics.together import together


def test_all_run_at_once_and_results_are_in_order(spark: SparkSession) -> None:
    meet = threading.Barrier(3, timeout=60)

    def query(number: int) -> int:
        meet.wait()
        return number

    assert together(spark, *(partial(query, n) for n in range(3))) == [0, 1, 2]


def test_an_error_is_raised_when_all_have_ended(spark: SparkSession) -> None:
    failed = threading.Event()
    ended: list[bool] = []

    def bad() -> None:
        failed.set()
        raise ValueError("bad")

    def good() -> None:
        assert failed.wait(60)
        ended.append(True)

    with pytest.raises(ValueError, match="bad"):
        together(spark, bad, good)
    assert ended == [True]
