import re
from datetime import UTC, datetime, timedelta

import pytest

from duemq_analytics import charts
from duemq_analytics.page import figures
from duemq_analytics.page.figures import Period, figures_of
from duemq_analytics.page.strips import Strips
from tests.unit.trace_analytics.page.made_rows import MINUTE, end_to_end, lateness, operation

PERIOD = Period(MINUTE, MINUTE + timedelta(minutes=10), 60)


def drawn(groups, monkeypatch):
    """Figures by title, and the lines of those that have some."""
    lines = {}
    over_time = charts.over_time

    def noted(title, topic, unit, series, **options):
        lines[title] = {line.label: (list(line.x), list(line.y)) for line in series}
        return over_time(title, topic, unit, series, **options)

    monkeypatch.setattr(charts, "over_time", noted)
    names = [f"g{number:02}" for number in range(groups)]
    happened = [
        operation("process", at, name, errors=3 if at in (None, 2) else 0)
        for name in names
        for at in (None, 0, 2, 9)
    ]
    way = [end_to_end(at, n, p99=10.0 + i) for i, n in enumerate(names) for at in (None, 0, 9)]
    rows = {"operations": happened, "end_to_end": way, "lateness": []}
    return {figure.title: figure for figure in figures_of("orders", rows, PERIOD)}, lines


def test_a_minute_without_messages_is_a_zero_and_not_a_slope(monkeypatch):
    _, lines = drawn(1, monkeypatch)
    times, rates = lines["Messages per second"]["process g00"]
    assert times == [MINUTE + timedelta(minutes=n) for n in range(10)]
    assert rates == [1.0, 0, 1.0, 0, 0, 0, 0, 0, 0, 1.0]
    assert lines["Errors in 1 min"]["process g00"][1] == [0, 0, 3, 0, 0, 0, 0, 0, 0, 0]
    assert lines["Error rate"]["process g00"][1] == [0, 5.0, 0]


def test_how_many_lines_there_are_follows_how_many_can_be_told_apart(monkeypatch):
    title = "End to end: send to callback"
    few, lines = drawn(4, monkeypatch)
    assert len(lines[title]) == 12
    more, lines = drawn(8, monkeypatch)
    assert len(lines[f"{title}, p99"]) == 8
    many, lines = drawn(16, monkeypatch)
    assert f"{title}, p99" not in lines
    assert title in few
    assert f"{title}, p99" in more
    strips = many[f"{title}, p99"]
    assert isinstance(strips, Strips)
    assert [strip.label for strip in strips.strips][:2] == ["g15", "g14"]  # the worst first
    assert strips.strips[0].value == "25 ms"
    curves = many["End to end, distribution: the 8 with the largest p99"]
    assert set(re.findall(r">(g\d\d)<", curves.svg)) == {f"g{n:02}" for n in range(8, 16)}


@pytest.mark.parametrize("year", [9800, 9999])
@pytest.mark.parametrize("groups", [1, 9])
@pytest.mark.parametrize("known", [True, False])
def test_due_times_that_no_axis_can_have_stop_no_figure(year, groups, known):
    late = [lateness(at, "process", f"g{n}") for n in range(groups) for at in (None, 0, 1)]
    far = datetime(year, 12, 31, 23, 59, tzinfo=UTC)
    lies = [row | {"bucket_ts": far} for row in late if row["bucket_ts"] is not None]
    shown = late if known else [row for row in late if row["bucket_ts"] is None]
    rows = {"operations": [], "end_to_end": [], "lateness": [*shown, *lies]}
    with_lies = figures_of("later", rows, PERIOD)
    assert len(with_lies) == 2
    if known:
        assert with_lies == figures_of("later", rows | {"lateness": late}, PERIOD)


@pytest.mark.parametrize(("seconds", "said"), [(5, "5 s"), (120, "2 min"), (7_200, "2 h")])
def test_lengths_are_for_people(seconds, said):
    assert Period(MINUTE, MINUTE, seconds).called == said


def test_buckets_begin_at_whole_multiples():
    period = Period(MINUTE + timedelta(seconds=59), MINUTE + timedelta(seconds=121), 60)
    assert period.buckets() == {MINUTE + timedelta(minutes=n) for n in range(3)}
    assert figures.Period(MINUTE, MINUTE, 60).buckets() == set()
