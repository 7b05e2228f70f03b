"""The page made of a lake, and the commands over one."""

import json
import re
from argparse import ArgumentTypeError
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from duemq_analytics import __main__ as command
from duemq_analytics import lake_commands, lake_report, output
from duemq_analytics.lake.aggregates import Aggregates
from duemq_analytics.lake.commits import lock
from duemq_analytics.lake.parquet_spans import ParquetSpans
from duemq_analytics.lake.span_writer import MESSAGES_SCHEMA
from tests.spark.test_aggregates import landed
from tests.spark.test_jobs import T0_MS, process, send, span
from tests.spark.test_report import drawn, many_topics

pytestmark = [pytest.mark.long, pytest.mark.spark]

MINUTE_MS = 60_000
NOW = datetime.fromtimestamp((T0_MS + 20 * MINUTE_MS) / 1_000, UTC)


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    """Two batches: the answer to a message of the first one comes with the second."""
    folder = tmp_path_factory.mktemp("lake")
    due = {"topic": "later", "due_ms": T0_MS + 1_000}
    landed(
        folder,
        "q-0",
        [
            *[send(f"m{i}", i * 100) for i in range(50)],
            *[process(f"m{i}", i * 100 + 3, "<billing>") for i in range(49)],
            send("lost", 40),
            span("fire", 1_004, lateness_ms=4, batch_count=7, **due),
        ],
    )
    landed(
        folder,
        "q-1",
        [
            process("m49", 7_900, "<billing>", attempt=1),
            span("settle", 5_000, consumer_group="g", attributes=[("duemq.dead_letter", "true")]),
            send("fresh", 19 * MINUTE_MS),
        ],
    )
    return folder


def made(spark, lake, folder, **options):
    return lake_report.write(spark, lake, str(folder), now=NOW, **options)


def text_of(summary):
    page = Path(summary.html).read_text()
    return page, text_of_html(page)


def text_of_html(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


def test_the_page_of_a_lake_says_what_happened(spark, lake, tmp_path):
    summary = made(spark, lake, tmp_path)
    page, text = text_of(summary)
    assert (summary.spans, summary.undecodable) == (104, 0)
    assert summary.topics == ("orders", "later")
    assert "52 messages sent" in text
    assert "1 sent, never received" in text  # `fresh` is too new to be a suspect
    assert "0 processed twice 1 retries 1 dead letters" in text
    assert "4 ms / 4 ms fire lateness p50 / p99" in text
    assert "orders &lt;billing&gt; 50 0 3 ms" in text
    assert "orders m49 &lt;billing&gt; 2023-11-14 22:14:04.900 3,000 ms" in text
    assert "orders lost 2023-11-14 22:14:00.040" in text
    assert "orders fresh" not in text
    assert "<script" not in page
    journeys = re.findall(r'<details class="journey".*?</details>', page, re.DOTALL)
    assert len(journeys) == 10
    assert "3,000 ms from its sending to &lt;billing&gt;: orders, m49" in journeys[0].replace(
        "</b>", ""
    )
    bars = [text_of_html(each) for each in re.findall(r"<li.*?</li>", journeys[0], re.DOTALL)]
    assert bars == [
        "send at 0.000 ms, took 1.000 ms",
        "process &lt;billing&gt; at 3,000.000 ms, took 1.000 ms attempt 2",
    ]


def test_a_report_shows_the_time_and_topics_that_were_asked_for(spark, lake, tmp_path):
    since = made(spark, lake, tmp_path, since=timedelta(minutes=5))
    assert (since.spans, since.topics) == (1, ("orders",))
    only = made(spark, lake, tmp_path, topics=["later"])
    assert (only.spans, only.topics) == (1, ("later",))
    nothing = made(spark, lake, tmp_path, topics=["nowhere"])
    assert "No spans were found" in text_of(nothing)[0]


def test_of_many_topics_a_report_keeps_what_its_page_shows(spark, tmp_path, monkeypatch):
    contents = drawn(lake_report, monkeypatch)
    landed(tmp_path / "lake", "q-0", many_topics())
    _, text = text_of(made(spark, tmp_path / "lake", tmp_path))
    (content,) = contents
    assert len(content.rows["operations"]) == 9 + sum(range(4, 10)) + 3  # sums, charts, table
    assert "Those with the most errors; 42 more rows are left out." in text


def test_a_report_that_fails_keeps_nothing_in_memory(spark, lake, tmp_path, monkeypatch):
    monkeypatch.setattr(lake_report, "page_rows", lambda *_: 1 / 0)
    spark.catalog.clearCache()  # of what tests before this one have kept
    with pytest.raises(ZeroDivisionError):
        made(spark, lake, tmp_path)
    assert spark._jsparkSession.sharedState().cacheManager().isEmpty()


def test_undecodable_messages_are_those_of_the_time_that_was_asked_for(spark, tmp_path):
    times = [NOW - timedelta(hours=2), NOW]
    rows = [("broker-0", 0, i, b"\xff", stored) for i, stored in enumerate(times)]
    messages = spark.createDataFrame(rows, MESSAGES_SCHEMA)
    ParquetSpans(tmp_path / "lake").land("q-0", messages)
    since = timedelta(minutes=5)
    found = [made(spark, tmp_path / "lake", tmp_path, since=each) for each in (None, since)]
    assert [summary.undecodable for summary in found] == [2, 1]
    assert "1 message of the trace topic could not be decoded" in text_of(found[1])[1]


def test_a_clock_that_is_years_ahead_makes_no_suspects_and_squeezes_no_chart(spark, tmp_path):
    lake = tmp_path / "lake"
    ahead = span("store", 100 * 365 * 24 * 60 * MINUTE_MS)
    landed(lake, "q-0", [send("fresh", 19 * MINUTE_MS), ahead])
    _, text = text_of(made(spark, lake, tmp_path))
    assert "0 sent, never received" in text
    said = "Charts are over 2023-11-14 22:33:00 to 2023-11-14 22:34:00 UTC; 1 span is years older"
    assert said in text


def test_counted_again_it_says_the_same(spark, lake, tmp_path):
    first = text_of(made(spark, lake, tmp_path / "a"))
    assert text_of(made(spark, lake, tmp_path / "b", recompute=True)) == first
    assert Aggregates(lake, ParquetSpans(lake)).update(spark).number > 1


@pytest.mark.parametrize("name", ["report", "compact"])
def test_a_lake_must_be_there(tmp_path, name, capsys):
    arguments = [name, "--lake", str(tmp_path / "none"), "--json"]
    arguments += ["--output", str(tmp_path)] if name == "report" else []
    assert command.main(arguments) == 2
    said = json.loads(capsys.readouterr().out)["error"]["message"]
    assert said.startswith("--lake: nothing was landed in")


def test_one_job_at_a_time_and_the_second_is_told(tmp_path, capsys):
    with lock(tmp_path, "landing"):
        assert command.main(["land", "--once", "--output", str(tmp_path)]) == 1
    assert "another process is landing there" in capsys.readouterr().err


def test_what_goes_only_with_a_lake_is_refused_without(tmp_path, capsys):
    assert command.main(["report", "--output", str(tmp_path), "--recompute"]) == 2
    assert "--recompute goes with --lake" in capsys.readouterr().err


def test_an_object_store_is_no_folder():
    with pytest.raises(lake_commands.InvalidArgument, match="s3a://b/x is no folder"):
        lake_commands.folder("output", "s3a://b/x")
    assert lake_commands.folder("output", "file:///a/b") == Path("/a/b")
    assert output.is_uri("s3a://b/x")


@pytest.mark.parametrize("text", ["", "1", "x", "-1s", "999ms"])
def test_times_have_units(text):
    with pytest.raises(ArgumentTypeError):
        lake_commands.every_s(text)
