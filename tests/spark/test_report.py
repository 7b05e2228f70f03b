"""The page and the tables, from spans made up here."""

import io
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pyarrow import parquet
from pyspark.sql import functions

from duemq_analytics import __main__ as command
from duemq_analytics import report
from duemq_analytics.progress import Progress
from duemq_analytics.source import schema
from tests.spark.test_jobs import T0_MS, frame, process, send, span

pytestmark = pytest.mark.spark

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture(scope="module")
def made(spark, tmp_path_factory):
    output = tmp_path_factory.mktemp("report")
    due = T0_MS + 1_000
    spans = frame(
        spark,
        *[send(f"m{i}", i * 100) for i in range(50)],
        *[process(f"m{i}", i * 100 + 3, "<billing>") for i in range(50)],
        process("m0", 9_000, "<billing>", status="ERROR", attempt=1),
        span("fire", 1_004, topic="later", due_ms=due, lateness_ms=4, batch_count=7),
        process("x", 1_005, topic="later", due_ms=due, lateness_ms=5),
    )
    landed = report.land(spark, as_read(spans), str(output))
    return output, report.write(landed, str(output), now=NOW)


def as_read(spans):
    """As `duemq-spans` answers with `undecodable=rows`."""
    added = {c.name: functions.lit(None).cast(c.spark_type) for c in schema.UNDECODABLE}
    return spans.withColumns(added)


def test_the_tables_are_parquet_files(spark, made):
    output, summary = made
    names = ("operations", "end_to_end", "lateness")
    assert summary.tables == tuple(str(output / name) for name in names)
    assert spark.read.parquet(str(output / "spans")).count() == summary.spans == 103
    (row,) = spark.read.parquet(str(output / "end_to_end")).toArrow().to_pylist()
    assert (row["topic"], row["consumer_group"], row["messages"]) == ("orders", "<billing>", 50)
    assert (row["p50_ms"], row["max_ms"], row["repeated"]) == (3, 3, 1)


def test_timestamps_have_statistics(made):
    output, _ = made
    for table, name in (("spans", "start_ts"), ("operations", "bucket_ts")):
        (file,) = [file for file in (output / table).glob("*.parquet") if rows_of(file)][:1]
        group = parquet.ParquetFile(file).metadata.row_group(0)
        columns = [group.column(i) for i in range(group.num_columns)]
        (column,) = [column for column in columns if column.path_in_schema == name]
        assert column.physical_type == "INT64"
        assert column.statistics.has_min_max


def rows_of(file):
    return parquet.ParquetFile(file).metadata.num_rows


def test_the_page_is_whole_in_itself_and_well_formed(made):
    _, summary = made
    page = Path(summary.html).read_text()
    assert not re.findall(r"(src|href)=\"(?!#)", page.replace("xlink:href", "href"))
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page
    Balanced().check(page)


def test_the_page_says_what_happened(made):
    _, summary = made
    page = Path(summary.html).read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert "2026-01-02 03:04:05 UTC" in text
    assert "50 messages sent" in text
    assert "4 ms / 4 ms fire lateness p50 / p99" in text
    assert "orders process &lt;billing&gt; 51 51 1" in text
    assert "later fire – 7 0 4 ms" in text
    assert summary.topics == ("orders", "later")
    titles = re.findall(r"<figcaption>([^<]+)", page)
    assert titles.count("Messages per second") == 2
    assert {"Errors", "Lateness, distribution", "End to end, distribution"} <= set(titles)


def test_no_spans_make_a_page_that_says_so(spark, tmp_path):
    nothing = as_read(frame(spark, send("m", 0)).where("false"))
    landed = report.land(spark, nothing, str(tmp_path))
    summary = report.write(landed, str(tmp_path), now=NOW)
    assert summary.spans == 0
    assert "No spans were found" in Path(summary.html).read_text()


def test_page_and_tables_lie_in_one_place_whatever_it_is_called(spark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    landed = report.Landed(frame(spark, send("m", 0)))
    summary = report.write(landed, f"file:{tmp_path}/deep/er", now=NOW)
    assert summary.html == f"file:{tmp_path}/deep/er/report.html"
    found = {path.name for path in (tmp_path / "deep/er").iterdir()}
    assert found == {"report.html", "operations", "end_to_end", "lateness"}
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_steps_are_said(spark, tmp_path):
    said = io.StringIO()
    landed = report.Landed(frame(spark, send("m", 0)))
    report.write(landed, str(tmp_path), now=NOW, progress=Progress(stream=said))
    assert said.getvalue().splitlines() == [
        "counting spans …",
        "aggregating operations …",
        "aggregating end_to_end …",
        "aggregating lateness …",
        "drawing …",
    ]


def failure(spark, spans, tmp_path, capsys):
    """What the command says of these Parquet files."""
    arguments = ["report", "--spans", str(spans), "--output", str(tmp_path / "out")]
    code = command._write(command._parser().parse_args(arguments), spark)
    lines = capsys.readouterr().err.splitlines()
    return code, [line for line in lines if not line.endswith("…")]


def test_damaged_files_are_one_line(spark, tmp_path, capsys):
    damaged = tmp_path / "spans"
    frame(spark, *[send(f"m{i}", i) for i in range(500)]).coalesce(1).write.parquet(str(damaged))
    (file,) = damaged.glob("*.parquet")
    contents = bytearray(file.read_bytes())
    contents[100 : len(contents) // 2] = bytes(len(contents) // 2 - 100)  # the footer is whole
    file.write_bytes(contents)
    for checksum in damaged.glob(".*.crc"):
        checksum.unlink()
    code, said = failure(spark, damaged, tmp_path, capsys)
    assert (code, len(said)) == (1, 1)
    assert said[0].startswith("trace report: [FAILED_READ_FILE")
    assert file.name in said[0]


def test_an_output_that_cannot_be_is_one_line(spark, tmp_path, capsys):
    frame(spark, send("m", 0)).write.parquet(str(tmp_path / "spans"))
    elsewhere = ["report", "--spans", str(tmp_path / "spans"), "--output", "nosuch://x/y"]
    assert command._write(command._parser().parse_args(elsewhere), spark) == 1
    assert 'No FileSystem for scheme "nosuch"' in capsys.readouterr().err.splitlines()[-1]


class Balanced(HTMLParser):
    """Every element that is opened is closed, in order."""

    VOID = frozenset({"meta", "br", "link"})

    def check(self, page):
        self.open = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
