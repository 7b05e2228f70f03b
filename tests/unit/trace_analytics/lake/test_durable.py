"""What a commit names is on the disk before it: files, and the folders that they lie in."""

import os

import pyarrow as pa
import pytest

from duemq_analytics.lake.aggregates import Aggregates
from duemq_analytics.lake.checkpoints import drop_torn, make_durable, topic_ids_of
from duemq_analytics.lake.commits import Commits
from duemq_analytics.lake.parquet_files import ParquetFile
from duemq_analytics.lake.parquet_spans import ParquetSpans


@pytest.fixture
def synced(monkeypatch):
    """Says whether a path was made durable."""
    seen = set()
    fsync = os.fsync

    def noted(handle):
        fsync(handle)
        seen.add(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    return lambda path: path.stat().st_ino in seen


def test_a_commit_is_found_in_a_folder_that_it_is_the_first_in(tmp_path, synced):
    folder = tmp_path / "lake" / "_batches"
    Commits(folder).put("a", {})
    assert all(map(synced, (folder / "a.json", folder, folder.parent, tmp_path)))


def test_a_file_is_found_in_the_first_hour_of_its_day(tmp_path, synced):
    columns = pa.schema([("a", pa.int64())])
    path = tmp_path / "lake/spans/date=2026-01-01/hour=00/q-0-0.parquet"
    file = ParquetFile(path, columns)
    file.write(pa.table([[1]], schema=columns))
    file.finish()
    assert all(map(synced, (path, *list(path.parents)[:5])))


class Rows:
    """As many rows as Spark writes, in a file."""

    def __getattr__(self, name):
        return self if name == "write" else lambda *_: self

    def parquet(self, path):
        os.makedirs(path)
        for name in ("part-00000.zstd.parquet", "_SUCCESS"):
            with open(f"{path}/{name}", "wb") as file:
                file.write(b"rows")


def test_a_run_s_tables_are(tmp_path, synced):
    Aggregates(tmp_path, ParquetSpans(tmp_path))._write(Rows(), "minutes", 7)
    table = tmp_path / "minutes/run=0000000007"
    assert all(map(synced, (*table.iterdir(), table, table.parent, tmp_path)))
    assert len(list(table.iterdir())) == 2


def write(checkpoint, *names, content="v1"):
    """As Spark does, each with its checksum."""
    for name in names:
        path = checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        (path.parent / f".{path.name}.crc").write_text("crc")


def test_what_spark_has_planned_is(tmp_path, synced):
    write(tmp_path, "metadata", "offsets/9", "offsets/10", "commits/9")
    make_durable(tmp_path, 10)
    kept = ("metadata", ".metadata.crc", "offsets/10", "offsets/.10.crc", "commits/9")
    assert all(synced(tmp_path / name) for name in (*kept, "offsets", "commits", ""))


def test_a_first_micro_batch_has_none_before_it(tmp_path, synced):
    write(tmp_path, "metadata", "offsets/0")
    make_durable(tmp_path, 0)
    assert synced(tmp_path / "offsets/0")


TORN = pytest.mark.parametrize("torn", ["", "\0" * 99], ids=["empty", "zeros"])


@TORN
def test_what_a_power_failure_has_left_empty_is_planned_or_done_again(tmp_path, torn):
    drop_torn(tmp_path)  # there is nothing yet
    write(tmp_path, "offsets/9", "offsets/10", "commits/9")
    write(tmp_path, "commits/10", content=torn)
    drop_torn(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")}
    assert left == {
        *("offsets/9", "offsets/.9.crc", "offsets/10", "offsets/.10.crc"),
        *("commits/9", "commits/.9.crc"),
    }


def test_what_spark_had_begun_to_write_goes(tmp_path):
    write(tmp_path, "metadata", "offsets/9", "offsets/.10.5e.tmp", ".metadata.5e.tmp")
    drop_torn(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"metadata", ".metadata.crc", "offsets/9", "offsets/.9.crc"}


@TORN
def test_a_checkpoint_that_a_power_failure_has_left_without_its_query_is_lost(tmp_path, torn):
    """Before anything was landed, mostly; else a new query goes on where the commits end."""
    write(tmp_path / "_checkpoint", "offsets/0")
    write(tmp_path / "_checkpoint", "metadata", content=torn)
    drop_torn(tmp_path / "_checkpoint")
    assert not list(tmp_path.iterdir())


def test_of_which_topics_a_micro_batch_is(tmp_path):
    planned = '{"broker-0":{"topic_id":7,"queues":{"0":3}}}'
    write(tmp_path, "offsets/3", content=f'v1\n{{"batchWatermarkMs":0}}\n{planned}')
    assert topic_ids_of(tmp_path, 3) == {"broker-0": 7}
    write(tmp_path, "offsets/4", content='v2\n{"batchWatermarkMs":0}\n{"source-0":"unknown"}')
    assert topic_ids_of(tmp_path, 4) == topic_ids_of(tmp_path, 5) == {}
