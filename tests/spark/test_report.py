"""The page and the tables, from spans made up here."""

import re
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from duemq_analytics import report
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
    landed = report.land(spark, spans, output)
    return output, report.write(landed, output, now=NOW)


def test_the_tables_are_parquet_files(spark, made):
    output, summary = made
    assert {path.name for path in summary.tables} == {"operations", "end_to_end", "lateness"}
    assert spark.read.parquet(str(output / "spans")).count() == summary.spans == 103
    (row,) = spark.read.parquet(str(output / "end_to_end")).toArrow().to_pylist()
    assert (row["topic"], row["consumer_group"], row["messages"]) == ("orders", "<billing>", 50)
    assert (row["p50_ms"], row["max_ms"], row["repeated"]) == (3, 3, 0)


def test_the_page_is_whole_in_itself_and_well_formed(made):
    _, summary = made
    page = summary.html.read_text()
    assert not re.findall(r"(src|href)=\"(?!#)", page.replace("xlink:href", "href"))
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page
    Balanced().check(page)


def test_the_page_says_what_happened(made):
    _, summary = made
    page = summary.html.read_text()
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
    landed = report.land(spark, frame(spark, send("m", 0)).where("false"), tmp_path)
    summary = report.write(landed, tmp_path, now=NOW)
    assert summary.spans == 0
    assert "No spans were found" in summary.html.read_text()


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
