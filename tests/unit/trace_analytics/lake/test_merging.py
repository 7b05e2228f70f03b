"""Small files of an hour become one, of spans and of what cannot be decoded."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet

from duemq.errors import Corrupt
from duemq_analytics.lake import parquet_files
from duemq_analytics.lake.parquet_files import ParquetFile, merged
from duemq_analytics.lake.parquet_spans import ParquetSpans
from tests.unit.trace_analytics.lake.test_parquet_spans import Messages


class Spark:
    """As far as a merger wants it: all tasks here, one after the other."""

    def __init__(self):
        self.sparkContext = self

    def parallelize(self, jobs, tasks):
        def mapped(task):
            return SimpleNamespace(collect=lambda: list(task(iter(jobs))))

        return SimpleNamespace(mapPartitions=mapped)


@pytest.fixture
def landed(tmp_path):
    """Three messages in quarantine and three spans, each in a file; all may be taken up."""
    table = ParquetSpans(tmp_path)
    keys = [table.land(f"q-{i}", Messages(i, body=b"\xff%d" % i)).key for i in range(3)]
    keys += [table.land(f"q-{i}", Messages(i)).key for i in range(3, 6)]
    (tmp_path / "_checkpoint").mkdir()
    (tmp_path / "_checkpoint/metadata").write_text(json.dumps({"id": "new"}))
    return table, keys


def test_what_cannot_be_decoded_is_in_one_file_an_hour(landed, tmp_path):
    table, keys = landed
    done = table.compact(Spark(), keys, None)
    assert (done.files_before, done.files_after, done.expired) == (6, 2, 0)
    (refused,) = tmp_path.glob("quarantine/*/*/*.parquet")
    rows = parquet.read_table(refused, partitioning=None).to_pylist()
    assert sorted((row["trace_offset"], row["undecodable_body"]) for row in rows) == [
        (i, b"\xff%d" % i) for i in range(3)
    ]
    assert table.undecodable(None) == 3
    assert [file.rows for file in table.files()] == [3]
    assert table.compact(Spark(), keys, None).files_after == 2
    assert refused.exists()


def test_what_somebody_has_seen_and_deleted_is_not_missed(landed, tmp_path):
    table, keys = landed
    next(tmp_path.glob("quarantine/*/*/*.parquet")).unlink()
    table.compact(Spark(), keys, None)
    assert table.undecodable(None) == 2


def test_a_file_that_cannot_be_read_is_named_and_nothing_is_lost(landed, tmp_path):
    table, keys = landed
    torn = next(tmp_path.glob("quarantine/*/*/*.parquet"))
    whole = torn.read_bytes()
    torn.write_bytes(whole[:-1])
    with pytest.raises(Corrupt, match=torn.name):
        table.compact(Spark(), keys, None)
    torn.write_bytes(whole)
    assert table.undecodable(None) == 3
    table.compact(Spark(), keys, None)
    assert len(list(tmp_path.glob("quarantine/*/*/*"))) == 1


def test_a_small_file_with_many_bytes_is_not_in_memory_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "BYTES_PER_GROUP", 1_500)
    columns = pa.schema([("body", pa.binary())])
    file = ParquetFile(tmp_path / "x.parquet", columns)
    for _ in range(4):
        file.write(pa.table({"body": [bytes(1_000)]}, schema=columns))
    file.finish()
    assert [table.num_rows for table in merged([tmp_path / "x.parquet"], columns)] == [2, 2]


def test_files_of_an_hour_stay_of_that_hour_where_a_clock_is_years_off(tmp_path):
    """So that a run passes over those that are not of its time."""
    table = ParquetSpans(tmp_path)
    years_ns = 10**18
    stored_ns = int(Messages.STORED.timestamp()) * 10**9
    for i, start_ns in enumerate([stored_ns, years_ns] * 2):
        table.land(f"q{i}-0", Messages(i, start_ns=start_ns))
    (tmp_path / "_checkpoint").mkdir()
    (tmp_path / "_checkpoint/metadata").write_text(json.dumps({"id": "new"}))
    for _ in range(2):
        table.compact(Spark(), [batch.key for batch in table.batches()], None)
        times = sorted((file.rows, file.first_us, file.last_us) for file in table.files())
        assert times == [(2, ns // 1_000, ns // 1_000) for ns in (years_ns, stored_ns)]
    assert len(list(tmp_path.glob("spans/*/*"))) == 1
