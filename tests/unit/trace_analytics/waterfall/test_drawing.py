import pytest

from duemq_analytics.waterfall import drawing
from duemq_analytics.waterfall.telling import told

MS = 1_000_000


def span(start_ms, took_ms, **columns):
    names = ("status", "error_type", "attempt", "lateness_ms", "queue", "queue_offset", "broker")
    names += ("batch_count", "operation", "consumer_group", "instance", "service")
    return dict.fromkeys(names) | {
        "operation": "store",
        "service": "duemq-broker",
        "start_ns": start_ms * MS,
        "duration_ns": took_ms * MS,
        **columns,
    }


@pytest.mark.parametrize(
    ("start", "took", "drawn"),
    [
        (0, 100, "██████████"),
        (0, 10, "█·········"),
        (50, 50, "·····█████"),
        (100, 0, "·········█"),
        (0, 0, "█·········"),
        (33, 34, "···████···"),
    ],
)
def test_a_bar_is_where_its_span_is(start, took, drawn):
    assert drawing.bar(span(start, took), 0, 100 * MS, 10) == drawn


def test_spans_without_a_length_are_drawn():
    (_, _, line) = drawing.lines([span(5, 0)], 80)
    assert "█" in line


def test_lines_fill_the_terminal():
    spans = [span(0, 40, operation="send"), span(40, 60, consumer_group="billing")]
    for width in (80, 120):
        found = drawing.lines(spans, width)
        assert max(map(len, found)) == width
    assert max(map(len, drawing.lines(spans, 20))) < 80
    send, store = drawing.lines(spans, 80)[2:]
    assert send.split()[:4] == ["send", "-", "duemq-broker", "0.000"]
    assert store.split()[:5] == ["store", "billing", "duemq-broker", "40.000", "60.000"]


def test_what_there_is_to_say():
    said = told(
        span(
            0,
            0,
            status="ERROR",
            error_type="ValueError",
            attempt=2,
            lateness_ms=7,
            broker="b0",
            queue=3,
            queue_offset=9,
            batch_count=1_001,
        )
    )
    assert said == "failed: ValueError, attempt 3, 7 ms late, b0/3 @ 9, with 1,000 others"
    assert told(span(0, 0)) == ""


def test_what_others_wrote_does_nothing_to_the_terminal():
    found = drawing.lines([span(0, 1, error_type="\x1b[2J", status="ERROR", instance="a\nb")], 80)
    assert "\x1b" not in "".join(found)
    assert len(found) == 3
