"""What a lake's runs need; no Spark where nothing is read."""

from unittest.mock import Mock

import pytest

from duemq.errors import Corrupt
from duemq_analytics.lake.aggregates import Aggregates
from duemq_analytics.lake.commits import Commits
from duemq_analytics.lake.parquet_spans import ParquetSpans


def test_a_run_whose_figures_are_gone_is_not_taken_for_one_without_any(tmp_path):
    run = {"batches": ["q-0"], "whole": True, "spans": 1, "newest_us": 1, "counted": 1}
    Commits(tmp_path / "_runs").put("0000000001", run)
    aggregates, spark = Aggregates(tmp_path, ParquetSpans(tmp_path)), Mock()
    for table in (aggregates.minutes, aggregates.examples):
        with pytest.raises(Corrupt, match="report --recompute"):
            table(spark)
    assert aggregates.errors(spark) is spark.createDataFrame.return_value  # an older version's run
