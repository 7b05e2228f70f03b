"""From trace messages to files, without Spark."""

from datetime import UTC, datetime

import numpy as np
import pytest
from pyarrow import parquet

from duemq.v1.trace_pb2 import SpanBatch
from duemq_analytics.lake import parquet_files, span_writer
from duemq_analytics.lake.span_writer import hour_folder, write_messages
from duemq_analytics.source import schema

HOUR_NS = 3_600_000_000_000
T0_NS = 1_767_225_600_000_000_000  # 2026-01-01 00:00 UTC
STORED = datetime(2026, 1, 1, 5, 30, tzinfo=UTC)


def body(*starts_ns):
    rows = len(starts_ns)
    ids = np.random.default_rng(rows).bytes(8 * rows)
    return SpanBatch(rows=rows, span_ids=ids, start_ns=list(starts_ns)).SerializeToString()


def written(tmp_path, *bodies, task=0):
    messages = [("b", 2, 40 + i, each, STORED) for i, each in enumerate(bodies)]
    return list(write_messages(tmp_path, "k", task, messages))


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_spans_lie_by_the_hour_of_their_start(tmp_path):
    rows = written(tmp_path, body(T0_NS, T0_NS + 25 * HOUR_NS), body(T0_NS + HOUR_NS - 1))
    spans = {row["path"]: (row["rows"], row["first_us"], row["last_us"]) for row in rows[:-1]}
    assert spans == {
        "spans/date=2026-01-01/hour=00/k-00000-0.parquet": (
            2,
            T0_NS // 1_000,
            (T0_NS + HOUR_NS - 1) // 1_000,
        ),
        "spans/date=2026-01-02/hour=01/k-00000-1.parquet": (
            1,
            (T0_NS + 25 * HOUR_NS) // 1_000,
            (T0_NS + 25 * HOUR_NS) // 1_000,
        ),
    }
    assert rows[-1] == {"kind": "read", "broker": "b", "queue": 2, "past": 42}
    assert files(tmp_path) == sorted(spans)
    table = parquet.read_table(tmp_path / next(iter(spans)), partitioning=None)
    assert table.schema.names == [column.name for column in schema.SPANS]
    assert table.column("trace_offset").to_pylist() == [40, 41]


def test_what_cannot_be_decoded_lies_by_the_hour_of_its_storing(tmp_path):
    rows = written(tmp_path, b"\xff", body(T0_NS), b"")
    (refused,) = [row for row in rows if row["kind"] == "quarantine"]
    assert refused["path"] == "quarantine/date=2026-01-01/hour=05/k-00000-0.parquet"
    found = parquet.read_table(tmp_path / refused["path"], partitioning=None).to_pylist()
    assert [(row["trace_offset"], row["undecodable_body"]) for row in found] == [
        (40, b"\xff"),
        (42, b""),
    ]
    assert found[0]["undecodable_reason"].startswith("trace message b/2/40 is no SpanBatch")


def test_a_repeated_task_writes_the_same_files(tmp_path):
    bodies = [body(T0_NS + i) for i in range(3)]
    first = written(tmp_path, *bodies)
    contents = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    assert written(tmp_path, *bodies) == first
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == contents


def test_random_times_hold_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(span_writer, "HOURS_OPEN_MAX", 2)
    monkeypatch.setattr(span_writer, "_ROWS", 2)
    hours = (0, 1, 2, 0, 2**63 // HOUR_NS, 1)
    rows = written(tmp_path, *[body(T0_NS * bool(h < 9) + h * HOUR_NS) for h in hours])
    assert sum(row["rows"] for row in rows[:-1]) == len(hours)
    assert len(files(tmp_path)) == len(rows) - 1


@pytest.mark.parametrize("hours", [(-25, 25), (-24 * 365 * 50, 24 * 365 * 200)])
def test_times_that_cannot_be_right_make_no_hours_of_their_own(tmp_path, hours):
    """Whoever may send can claim any."""
    stored_ns = int(STORED.timestamp()) * 10**9
    near = (-23, 0, 24)
    claimed = [stored_ns + hour * HOUR_NS for hour in (*hours, *near)]
    rows = written(tmp_path, body(*claimed), body(claimed[0]))[:-1]
    assert [(row["path"], row["rows"]) for row in rows] == [
        ("spans/date=2025-12-31/hour=06/k-00000-0.parquet", 1),
        ("spans/date=2026-01-01/hour=05/k-00000-1.parquet", 1),
        ("spans/date=2026-01-02/hour=05/k-00000-2.parquet", 1),
        ("spans/date=2026-01-01/hour=05/k-00000-stray-0.parquet", 3),
    ]
    assert [row["first_us"] for row in rows[:3]] == [ns // 1_000 for ns in claimed[2:]]
    assert (rows[-1]["first_us"], rows[-1]["last_us"]) == (claimed[0] // 1_000, claimed[1] // 1_000)
    table = parquet.read_table(tmp_path / rows[-1]["path"], partitioning=None)
    assert table.column("start_ns").to_pylist() == [*claimed[:2], claimed[0]]


def test_a_task_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(span_writer, "_ROWS", 1)  # written at once

    def messages():
        yield "b", 0, 0, body(T0_NS), STORED
        yield "b", 0, 1, b"\xff", STORED
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(write_messages(tmp_path, "k", 0, messages()))
    assert files(tmp_path) == []


@pytest.mark.parametrize("times", [1, 4, 5])
def test_an_hour_that_a_compaction_just_removes_is_made_again(tmp_path, monkeypatch, times):
    left = [times]

    def made(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if left[0]:
            left[0] -= 1
            folder.rmdir()

    monkeypatch.setattr(parquet_files, "make_folder", made)
    if times == 5:  # not for ever
        with pytest.raises(FileNotFoundError):
            written(tmp_path, body(T0_NS))
    else:
        assert [row["kind"] for row in written(tmp_path, body(T0_NS))] == ["spans", "read"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    close, full = parquet.ParquetWriter.close, [True]

    def footer(writer):
        if full:
            raise OSError(28, "No space left on device")
        close(writer)

    monkeypatch.setattr(parquet.ParquetWriter, "close", footer)
    with pytest.raises(OSError, match="No space left") as refused:
        written(tmp_path, body(T0_NS, T0_NS + HOUR_NS), b"\xff")
    assert files(tmp_path) == []
    full.clear()  # its writers end with the error
    del refused


def test_hours_have_names():
    assert hour_folder(0) == "date=1970-01-01/hour=00"
    assert hour_folder(2**63 // 3_600).startswith("date=9999-12-31/")
