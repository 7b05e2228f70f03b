"""A clock that is wrong by years squeezes nobody else's charts, and is told of."""

from datetime import UTC, datetime, timedelta

import pytest

from duemq_analytics.page.document import Content, document
from duemq_analytics.page.years import GAP_MAX, charted
from tests.unit.trace_analytics.page.made_rows import MINUTE, delivery, lateness, operation

HOUR = timedelta(hours=1)
BOOT = datetime(1970, 1, 1, 0, 5, tzinfo=UTC)
NOW = MINUTE + HOUR


def year(first, last=None, spans=1, *, ahead=False):
    return {"ahead": ahead, "spans": spans, "first": first, "last": last or first}


def page(years, late=()):
    rows = {
        "operations": [operation("send", at) for at in (None, 0, 1)],
        "end_to_end": [],
        "lateness": [lateness(None, topic="orders"), *late],
        "delivery": [delivery()],
    }
    facts = charted(years) | {"undecodable": 0, "topics": ["orders"]}
    return document(Content(facts, rows, 60), NOW)


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [year(BOOT)],
        [year(MINUTE + 5 * GAP_MAX, ahead=True)],
        [year(BOOT, spans=2), year(MINUTE + 2 * HOUR, MINUTE + GAP_MAX, 3, ahead=True)],
    ],
)
def test_charts_are_of_the_years_that_follow_each_other_up_to_now(wrong):
    years = [year(MINUTE - GAP_MAX, spans=7), *wrong, year(MINUTE, NOW, 9)]
    facts = charted(years)
    assert facts["charted"] == (MINUTE - GAP_MAX, NOW)
    assert facts["outside"] == facts["spans"] - 16 == sum(each["spans"] for each in wrong)
    assert facts["first"] == min(each["first"] for each in years)
    assert facts["last"] == max(each["last"] for each in years)


def test_where_all_clocks_are_ahead_they_are_all_there_is():
    there = [year(MINUTE, NOW, 4, ahead=True)]
    assert charted(there)["charted"] == (MINUTE, NOW)
    assert charted([])["spans"] == charted(there)["outside"] == 0


def test_what_lies_outside_is_told_and_not_drawn():
    right = page([year(MINUTE, NOW, 9)])
    assert "Charts are over" not in right
    wrong = page([year(BOOT), year(MINUTE, NOW, 9)])
    assert "2026-01-01 12:00:00 to 2026-01-01 13:00:00 UTC" in wrong
    assert "1 span is years older, or ahead of the clock: tables have them" in wrong
    assert right.count("<svg") == wrong.count("<svg")


def test_due_times_of_another_time_are_in_the_tables_only():
    far = lateness(0, topic="orders") | {"bucket_ts": BOOT}
    near = lateness(1, topic="orders")
    right, wrong = (page([year(MINUTE, NOW, 9)], late) for late in ([near], [near, far]))
    drawings = [text[text.index("<h2>") : text.index("<table")] for text in (right, wrong)]
    assert drawings[0] == drawings[1]
    assert "some messages were sent or due more than a day before or after" in wrong
    assert "1970-01-01 00:05" in wrong
