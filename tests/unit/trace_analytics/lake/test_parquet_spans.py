"""What a lake's folder has after a job was killed; no Spark where there is nothing to merge."""

import errno
import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from duemq.errors import Corrupt
from duemq.v1.trace_pb2 import SpanBatch
from duemq_analytics import __main__ as command
from duemq_analytics import lake_commands
from duemq_analytics.lake.aggregates import Aggregates
from duemq_analytics.lake.checkpoints import plan_of
from duemq_analytics.lake.commits import Commits
from duemq_analytics.lake.parquet_spans import ParquetSpans
from duemq_analytics.lake.span_table import Compacted

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
    refused = tmp_path / "quarantine/date=2026-01-01/hour=00" / killed.name
    refused.parent.mkdir(parents=True)
    refused.touch()
    landed = put(tmp_path, "q-0000000002-00000-0.parquet")
    assert table.compact(None, (), None).files_after == 1
    assert (counted.exists(), killed.exists(), landed.exists()) == (True, False, True)
    assert not refused.exists()


def test_a_compaction_ends_though_a_power_failure_has_left_a_checkpoint_without_its_query(tmp_path):
    """As long as no landing job has been started since."""
    table = ParquetSpans(tmp_path)
    key = table.land("q-0000000001", Messages(0)).key
    (tmp_path / "_checkpoint").mkdir()
    (tmp_path / "_checkpoint/metadata").touch()
    table.compact(None, {key}, None)
    assert [batch.key for batch in table.batches()] == [key]


class Messages:
    """A DataFrame of trace messages with a span each, of which one task is made."""

    STORED = datetime(2026, 1, 1, tzinfo=UTC)

    def __init__(self, *offsets, body=None, start_ns=10**18):
        spans = SpanBatch(rows=1, span_ids=b"12345678", start_ns=[start_ns])
        body = body or spans.SerializeToString()
        self.rdd = self
        self.rows = [("b", 0, offset, body, self.STORED) for offset in offsets]

    def mapPartitionsWithIndex(self, write):
        return SimpleNamespace(collect=lambda: list(write(0, iter(self.rows))))


def spans_of(table):
    return sum(file.rows for file in table.files())


def test_what_a_killed_run_has_landed_stays_when_the_topic_has_it_no_more(tmp_path):
    landed = ParquetSpans(tmp_path).land("q-0000000001", Messages(0, 1), plan="offsets 0 to 2")
    again = ParquetSpans(tmp_path)
    assert again.land("q-0000000001", Messages(), plan="offsets 0 to 2") == landed
    assert again.land("q-0000000002", Messages(2), plan="offsets 2 to 3").spans == 1
    table = ParquetSpans(tmp_path)
    assert (spans_of(table), table.undecodable(None)) == (3, 0)
    assert table.topic_ends() == {"0": {"b": {"0": 3}}}
    assert all((tmp_path / file.path).exists() for file in table.files())


def test_what_a_killed_run_has_written_without_a_commit_is_dropped_by_the_next_one(tmp_path):
    table = ParquetSpans(tmp_path)
    (kept,) = table.land("q-0000000001", Messages(0)).files
    (refused,) = table.land("q-0000000002", Messages(1, body=b"\xff")).quarantine
    begun = [put(tmp_path, f".{name}.parquet.5e") for name in ("q-0000000003", "compacted-7")]
    done = [put(tmp_path, f"{name}-00000-0.parquet") for name in ("q-0000000003", "compacted-7")]
    ParquetSpans(tmp_path).drop_unfinished()
    assert [path.exists() for path in (*begun, *done)] == [False, True, False, True]
    assert all((tmp_path / path).exists() for path in (kept.path, refused))


def test_where_the_commits_are_gone_nothing_of_what_they_named_is_dropped(tmp_path):
    (kept,) = ParquetSpans(tmp_path).land("q-0000000001", Messages(0)).files
    (tmp_path / "_checkpoint/commits").mkdir(parents=True)
    (tmp_path / "_checkpoint/commits/1").write_text("v1")
    ParquetSpans(tmp_path).drop_unfinished()
    shutil.rmtree(tmp_path / "_batches")
    with pytest.raises(Corrupt, match="_batches"):
        ParquetSpans(tmp_path).drop_unfinished()
    assert (tmp_path / kept.path).exists()


def test_what_was_copied_without_its_commits_and_its_checkpoint_is_not_dropped(tmp_path):
    """Many tools pass over folders whose names begin with an underscore."""
    (refused,) = ParquetSpans(tmp_path).land("q-0", Messages(0, body=b"\xff")).quarantine
    (kept,) = ParquetSpans(tmp_path).land("q-1", Messages(1)).files
    shutil.rmtree(tmp_path / "_batches")
    for path in (refused, kept.path):
        with pytest.raises(Corrupt, match="_batches"):
            ParquetSpans(tmp_path).drop_unfinished()
        assert (tmp_path / path).exists()
        (tmp_path / path).unlink()
    ParquetSpans(tmp_path).drop_unfinished()


def test_what_a_first_batch_that_was_killed_has_left_is_dropped(tmp_path):
    (tmp_path / "_checkpoint/offsets").mkdir(parents=True)
    left = put(tmp_path, "q-0000000000-00000-0.parquet")
    ParquetSpans(tmp_path).drop_unfinished()
    assert not left.exists()


@pytest.mark.parametrize("plans", [("offsets 0 to 2", "offsets 0 to 3"), ("", "")])
def test_a_batch_that_is_planned_anew_takes_the_place_of_the_earlier_one(tmp_path, plans):
    ParquetSpans(tmp_path).land("q-0000000001", Messages(0, 1), plans[0])
    ParquetSpans(tmp_path).land("q-0000000001", Messages(0, 1, 2), plans[1])
    assert spans_of(ParquetSpans(tmp_path)) == 3
    assert ParquetSpans(tmp_path).topic_ends() == {"0": {"b": {"0": 3}}}


def test_what_a_commit_names_is_there_until_another_takes_its_place(tmp_path, monkeypatch):
    """A job that ends in between leaves the commit before: readers want its files."""
    table = ParquetSpans(tmp_path)
    (refused,) = table.land("q-0000000001", Messages(0, body=b"\xff"), "offsets 0 to 1").quarantine
    again = ParquetSpans(tmp_path)
    monkeypatch.setattr(again._commits, "put", Mock(side_effect=OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        again.land("q-0000000001", Messages(0), "offsets 0 to 2")
    assert (tmp_path / refused).exists()
    ParquetSpans(tmp_path).land("q-0000000001", Messages(0), "offsets 0 to 2")
    assert not (tmp_path / refused).exists()


def test_a_plan_is_what_spark_has_written_down(tmp_path):
    assert plan_of(tmp_path, 7) == ""
    (tmp_path / "offsets").mkdir()
    for number in (7, 8):
        (tmp_path / "offsets" / str(number)).write_text(f"v1\n{{}}\n{number}")
    assert plan_of(tmp_path, 7) == plan_of(tmp_path, 7) != plan_of(tmp_path, 8)


@pytest.mark.parametrize(
    ("checkpoint", "left"), [("new", ["new-1"]), (None, ["new-1", "old-1"])], ids=str
)
def test_the_last_batch_of_a_lost_checkpoint_expires_too(tmp_path, checkpoint, left):
    table = ParquetSpans(tmp_path)
    landed = [
        table.land(key, Messages(i)) for i, key in enumerate(["old-0", "old-1", "new-0", "new-1"])
    ]
    if checkpoint:
        (tmp_path / "_checkpoint").mkdir()
        (tmp_path / "_checkpoint/metadata").write_text(json.dumps({"id": checkpoint}))
    settled = {batch.key for batch in landed}
    done = table.compact(None, settled, datetime(2100, 1, 1, tzinfo=UTC))
    assert done.expired == 4 - len(left)
    assert [batch.key for batch in table.batches()] == left
    assert len(list(tmp_path.glob("spans/*/*/*.parquet"))) == len(left)


def test_commits_that_a_compaction_is_removing_are_passed_over(tmp_path, monkeypatch):
    """Of many, some are gone each time that they are looked at."""
    table = ParquetSpans(tmp_path)
    keys = [table.land(f"{query}-0", Messages(0)).key for query in ("old", "new")]
    (tmp_path / "_checkpoint").mkdir()
    (tmp_path / "_checkpoint/metadata").write_text(json.dumps({"id": "new"}))
    table.compact(None, keys, None)
    monkeypatch.setattr(table._commits, "names", lambda: ["base", *sorted(keys)])
    assert [batch.key for batch in table.batches()] == ["new-0"]
    assert spans_of(table) == 2


def test_a_landing_job_starts_while_a_compaction_removes_empty_hours(tmp_path, monkeypatch):
    left = put(tmp_path, ".q-0000000003.parquet.5e")
    empty = tmp_path / "spans/date=2026-01-01/hour=01"
    empty.mkdir()
    scandir = os.scandir

    def just_removed(path):
        if Path(path) == empty and empty.exists():
            empty.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", just_removed)
    ParquetSpans(tmp_path).drop_unfinished()
    assert not left.exists()


def test_on_a_full_disk_a_compaction_drops_what_is_old_before_it_needs_space(
    tmp_path, monkeypatch, capsys
):
    table = ParquetSpans(tmp_path)
    old, newest = (table.land(f"q-{i}", Messages(i)) for i in range(2))
    counted = {"batches": [old.key], "whole": True, "counted": 1, "spans": 1, "newest_us": 0}
    Commits(tmp_path / "_runs").put("0000000001", counted)
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(Aggregates, "update", full)

    def with_spark(name, scratch, run, said, **how):
        return run(Mock())

    monkeypatch.setattr(lake_commands, "with_spark", with_spark)
    assert command.main(["compact", "--lake", str(tmp_path), "--keep", "30d"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert ParquetSpans(tmp_path).files() == list(newest.files)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.glob("spans/*/*/*")] == [
        newest.files[0].path
    ]


def test_files_of_two_compactions_are_told_as_of_one():
    assert Compacted(9, 4, 6) + Compacted(7, 3, 1) == Compacted(12, 3, 7)


def test_undecodable_messages_are_those_of_the_time_that_are_still_there(tmp_path):
    """Messages() are stored at 2026-01-01 00:00."""
    table = ParquetSpans(tmp_path)
    keys = [table.land(f"q-{i}", Messages(i, 10 + i, body=b"\xff")).key for i in range(3)]
    first, second, after = (datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in (0, 1, 2))
    assert [table.undecodable(since) for since in (None, first, second)] == [6, 6, 0]
    (tmp_path / table.batches()[0].quarantine[0]).unlink()  # somebody has seen them
    assert table.undecodable(first) == 4
    torn = tmp_path / table.batches()[1].quarantine[0]
    whole = torn.read_bytes()
    torn.write_bytes(whole[:-1])
    with pytest.raises(Corrupt, match=torn.name):
        table.undecodable(first)
    torn.write_bytes(whole)
    table.compact(None, keys, after)  # but for the newest one, which may be landed again
    assert table.undecodable(None) == 2
