"""The page and the tables, from spans made up here."""

import errno
import io
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pyarrow import parquet
from pyspark.sql import functions

from duemq_analytics import __main__ as command
from duemq_analytics import output, report
from duemq_analytics.page import document as page
from duemq_analytics.page import tables
from duemq_analytics.progress import StepProgress
from duemq_analytics.source import schema
from tests.spark.test_jobs import T0_MS, frame, process, send, span

pytestmark = pytest.mark.spark

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


TRACE, SENT = "0a" * 16, "00" * 7 + "01"
CHILD = {"trace_id": TRACE, "parent_span_id": SENT, "topic": "later"}
TIMED = [("duemq.timed", "true")]
LATER = [
    # A message with a due time, from its sending to its second call; the first one failed.
    {**send("<m>", 0, topic="later", kind="PRODUCER", due_ms=T0_MS + 1_000, duration_ns=2_500_000)}
    | {"trace_id": TRACE, "span_id": SENT, "service": "shop", "instance": "shop-1"}
    | {"broker": "b", "queue": 0, "queue_offset": 3},
    *(
        # Of frames that name others, those where it lay.
        span("store", 1, parent_span_id="ee" * 8, batch_count=4, instance="broker-0", **where)
        for where in (
            {"topic": "later", "broker": "b", "queue": 0, "attributes": TIMED, "queue_offset": 0},
            {"topic": "later", "broker": "b", "queue": 0, "queue_offset": 0},
            {"topic": "later", "broker": "b", "queue": 0, "attributes": TIMED, "queue_offset": 4},
        )
    ),
    span("schedule", 1, **CHILD, due_ms=T0_MS + 1_000, instance="timer-0"),
    span(
        "fire",
        1_004,
        topic="later",
        due_ms=T0_MS + 1_000,
        lateness_ms=4,
        batch_count=7,
        trace_id="0b" * 16,
        parent_span_id="ff" * 8,
        links=[{"trace_id": TRACE, "span_id": SENT}],
        instance="timer-0",
    ),
    process(
        "<m>",
        1_006,
        "g",
        **CHILD,
        due_ms=T0_MS + 1_000,
        status="ERROR",
        error_type="ValueError",
        lateness_ms=6,
    ),
    process("<m>", 11_006, "g", **CHILD, attempt=1, status="OK", instance="worker-2"),
    span("store", 2, trace_id=TRACE, parent_span_id="ee" * 8, topic="later"),  # of another message
]
NEWEST = [send("newest", 20 * 60_000, status="ERROR")]  # after which the rest is settled


@pytest.fixture(scope="module")
def made(spark, tmp_path_factory):
    output = tmp_path_factory.mktemp("report")
    spans = frame(
        spark,
        *[send(f"m{i}", i * 100) for i in range(50)],
        *[process(f"m{i}", i * 100 + 3, "<billing>") for i in range(49)],
        process("m49", 4_900 + 57, "<billing>"),
        process("m0", 9_000, "<billing>", status="ERROR", attempt=1),
        process("m1", 9_000, "<billing>"),
        span(
            "settle", 9_100, consumer_group="<billing>", attributes=[("duemq.dead_letter", "true")]
        ),
        send("lost", 7_000),
        *LATER,
        *NEWEST,
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
    assert spark.read.parquet(str(output / "spans")).count() == summary.spans == 114
    (row,) = spark.read.parquet(str(output / "end_to_end")).toArrow().to_pylist()
    assert (row["topic"], row["consumer_group"], row["messages"]) == ("orders", "<billing>", 50)
    assert (row["p50_ms"], row["max_ms"], row["repeated"]) == (3, 57, 2)


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


def text_of(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


def test_the_page_says_what_happened(made):
    _, summary = made
    page = Path(summary.html).read_text()
    text = text_of(page)
    assert "2026-01-02 03:04:05 UTC" in text
    assert "53 messages sent" in text
    assert "4 ms / 4 ms fire lateness p50 / p99" in text
    assert "1 sent, never received 1 processed twice 2 retries 1 dead letters" in text
    assert "orders process &lt;billing&gt; 52 52 1" in text
    assert "later fire – 7 0 4 ms" in text
    assert summary.topics == ("orders", "later")
    titles = re.findall(r"<figcaption>([^<]+)", page)
    assert titles.count("Messages per second") == 2
    drawn = {"Errors in 15 s", "Error rate", "Lateness, distribution", "End to end, distribution"}
    assert drawn <= set(titles)


def test_the_page_says_what_happened_in_each_minute(made):
    _, summary = made
    text = text_of(Path(summary.html).read_text())
    assert "2023-11-14 22:14 orders process &lt;billing&gt; 52 1 1.92 %" in text  # errors
    assert "2023-11-14 22:34 orders send – 1 1 100 %" in text
    assert "2023-11-14 22:14 orders &lt;billing&gt; 50 3 ms 3 ms 57 ms 57 ms" in text  # end to end
    assert "2023-11-14 22:14 later process g 1 6 ms 6 ms 6 ms 6 ms" in text  # lateness


def test_the_page_says_what_the_errors_were(made):
    _, summary = made
    text = text_of(Path(summary.html).read_text())
    assert "later process g ValueError 1 2023-11-14 22:14:01.006 &lt;m&gt;" in text
    assert "orders process &lt;billing&gt; – 1 2023-11-14 22:14:09.000 m0" in text


def test_suspects_have_ids_and_the_command_that_shows_them(made):
    _, summary = made
    text = text_of(Path(summary.html).read_text())
    show = "duemq trace show --since 2023-11-14T22:13:"
    assert f"orders lost 2023-11-14 22:14:07.000 {show}07Z lost" in text
    assert f"orders m1 &lt;billing&gt; 2023-11-14 22:14:00.100 2 {show}00Z m1" in text
    assert f"orders m49 &lt;billing&gt; 2023-11-14 22:14:04.900 57 ms {show}04Z m49" in text
    assert f"later &lt;m&gt; g 2023-11-14 22:14:00.000 6 ms {show}00Z &#39;&lt;m&gt;&#39;" in text


def test_a_waterfall_has_the_spans_of_its_message_alone(made):
    _, summary = made
    page = Path(summary.html).read_text()
    journeys = re.findall(r'<details class="journey".*?</details>', page, re.DOTALL)
    assert len(journeys) == 11  # the ten slowest, and one with a due time
    assert [text_of(each).partition(" ms")[0] for each in journeys] == ["57", *["3"] * 9, "6"]
    told = journeys[-1]
    assert "6 ms past its due time to g: later, &lt;m&gt;" in text_of(told)
    bars = [text_of(each) for each in re.findall(r"<li.*?</li>", told, re.DOTALL)]
    assert bars == [
        "send shop shop-1 at 0.000 ms, took 2.500 ms b/0 @ 3",
        "store broker-0 at 1.000 ms, took 1.000 ms b/0 @ 0, with 3 others",
        "schedule timer-0 at 1.000 ms, took 1.000 ms",
        "fire timer-0 at 1,004.000 ms, took 1.000 ms 4 ms late, with 6 others",
        "process g at 1,006.000 ms, took 1.000 ms failed: ValueError, 6 ms late",
        "process g worker-2 at 11,006.000 ms, took 1.000 ms attempt 2",
    ]
    assert re.findall(r'<li class="failed">.*?<b>(\w+)', told, re.DOTALL) == ["process"]
    whole = 11_007
    places = [float(left) for left in re.findall(r"left:min\(([0-9.]+)%", told)]
    wanted = [100 * at / whole for at in (0, 1, 1, 1_004, 1_006, 11_006)]
    assert places == pytest.approx(wanted, abs=0.006)


def test_no_spans_make_a_page_that_says_so(spark, tmp_path):
    nothing = as_read(frame(spark, send("m", 0)).where("false"))
    landed = report.land(spark, nothing, str(tmp_path))
    summary = report.write(landed, str(tmp_path), now=NOW)
    assert summary.spans == 0
    assert "No spans were found" in Path(summary.html).read_text()


def test_clocks_that_are_wrong_by_years_squeeze_no_chart(spark):
    spans = frame(spark, send("m", 0), send("m", 9), send("m", -T0_MS), send("m", T0_MS))
    sent = datetime.fromtimestamp(T0_MS / 1_000, UTC)
    assert report.facts_of(spans, "start_ts", functions.count("*"), NOW) == {
        "spans": 4,
        "first": datetime(1970, 1, 1, tzinfo=UTC),
        "last": sent + timedelta(milliseconds=T0_MS),
        "charted": (sent, sent + timedelta(milliseconds=9)),
        "outside": 2,
    }


def many_topics():
    """Nine with a failing send a minute: the first one for a minute, the last one for nine."""
    return [
        send(f"{topic}-{minute}", minute * 60_000, topic=f"t{topic}", status="ERROR")
        for topic in range(9)
        for minute in range(topic + 1)
    ]


def drawn(module, monkeypatch):
    """What the pages will be made of; tables have three rows."""
    contents = []

    def document(content, now):
        contents.append(content)
        return page.document(content, now)

    monkeypatch.setattr(module, "document", document)
    monkeypatch.setattr(tables, "ROWS_MAX", 3)
    monkeypatch.setattr(report, "ROWS_MAX", 3)
    return contents


def test_of_many_topics_a_report_keeps_what_its_page_shows(spark, tmp_path, monkeypatch):
    contents = drawn(report, monkeypatch)
    landed = report.Landed(frame(spark, *many_topics()))
    text = text_of(Path(report.write(landed, str(tmp_path), now=NOW).html).read_text())
    (content,) = contents
    assert len(content.rows["operations"]) == 9 + sum(range(4, 10)) + 3  # sums, charts, table
    assert "Those with the most errors; 42 more rows are left out." in text
    assert "3 more topics have no charts here" in text


def test_rows_without_a_topic_hide_no_others(spark):
    minute = datetime.fromtimestamp(T0_MS // 60_000 * 60, UTC)
    rows = [(60, minute, topic, errors) for topic, errors in ((None, 2), ("a", 1), ("b", 3))]
    columns = "bucket_s int, bucket_ts timestamp, topic string, errors int"
    table = spark.createDataFrame(rows, columns).coalesce(1)
    worst = {"operations": report.Worst("errors")}
    found, counted = report.page_rows(table, 60, [None], worst)
    assert sorted(row["errors"] for row in found) == [1, 2, 3]
    assert counted == {"operations": 3}
    sums = spark.createDataFrame(
        [(0, "a", 1), (0, None, 1)], "bucket_s int, topic string, messages int"
    )
    assert report.busiest(sums) == [None, "a"]


@pytest.mark.long
def test_a_message_of_the_end_is_a_suspect_once_more_was_read_than_it(spark, tmp_path):
    lost = as_read(frame(spark, send("lost", 0)))
    sent = datetime.fromtimestamp(T0_MS / 1_000, UTC)
    for minutes, found in ((None, "0"), (5, "0"), (7, "1")):
        read_at = None if minutes is None else sent + timedelta(minutes=minutes)
        landed = report.land(spark, lost, str(tmp_path), read_at)
        text = text_of(Path(report.write(landed, str(tmp_path), now=NOW).html).read_text())
        assert f"{found} sent, never received" in text


def test_page_and_tables_lie_in_one_place_whatever_it_is_called(spark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    landed = report.Landed(frame(spark, send("m", 0)))
    summary = report.write(landed, f"file:{tmp_path}/deep/er", now=NOW)
    assert summary.html == f"file:{tmp_path}/deep/er/report.html"
    found = {path.name for path in (tmp_path / "deep/er").iterdir()}
    assert found == {"report.html", "operations", "end_to_end", "lateness"}
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_a_page_that_cannot_be_written_leaves_the_one_before(spark, tmp_path, monkeypatch):
    page = tmp_path / "report.html"
    output.write_text(spark, str(page), "before")

    def full(path, content):
        with path.open("wb") as file:
            file.write(content[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        output.write_text(spark, str(page), "afterwards")
    assert page.read_text() == "before"
    assert list(tmp_path.iterdir()) == [page]


def test_a_page_goes_to_any_file_system_of_hadoop_s(spark, tmp_path):
    link = "fs.viewfs.mounttable.lake.link./pages"
    settings = spark._jsc.hadoopConfiguration()
    settings.set(link, tmp_path.as_uri())
    try:
        for text in ("before", "afterwards"):
            output.write_text(spark, "viewfs://lake/pages/deep/report.html", text)
    finally:
        settings.unset(link)
    assert (tmp_path / "deep" / "report.html").read_text() == "afterwards"


def test_steps_are_said(spark, tmp_path):
    said = io.StringIO()
    landed = report.Landed(frame(spark, send("m", 0)))
    report.write(landed, str(tmp_path), now=NOW, progress=StepProgress(stream=said))
    assert said.getvalue().splitlines() == [
        "counting spans …",
        "aggregating operations …",
        "aggregating end_to_end …",
        "aggregating lateness …",
        "looking for kinds of error …",
        "looking for suspects and slow messages …",
        "finding their spans …",
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
