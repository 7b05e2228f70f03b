"""What a lake's folder has after a job was killed; no Spark where there is nothing to merge."""

from duemq_analytics.lake.commits import Commits
from duemq_analytics.lake.parquet_spans import ParquetSpans

HOUR = "spans/date=2026-01-01/hour=00"


def put(lake, name):
    path = lake / HOUR / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def test_a_compaction_drops_the_files_of_one_that_was_killed_before_its_commit(tmp_path):
    table = ParquetSpans(tmp_path)
    assert table.compact(None, (), None).files_after == 0
    counted = put(tmp_path, "compacted-0000000001-00000.parquet")
    base = Commits(tmp_path / "_batches").get("base")
    file = {"path": f"{HOUR}/{counted.name}", "rows": 1, "bytes": 1, "first_us": 0, "last_us": 0}
    Commits(tmp_path / "_batches").put("base", base | {"files": [file]})
    killed = put(tmp_path, "compacted-0000000002-00007.parquet")
    landed = put(tmp_path, "q-0000000002-00000-0.parquet")
    assert table.compact(None, (), None).files_after == 1
    assert (counted.exists(), killed.exists(), landed.exists()) == (True, False, True)
