import pytest

from duemq_analytics.page import tables
from tests.unit.trace_analytics.page.made_rows import end_to_end, lateness, operation


def test_the_worst_are_kept_in_the_order_of_time():
    rows = [end_to_end(number, p99=float(number % 300)) for number in range(600)]
    slots = {"operations": [], "end_to_end": rows, "lateness": []}
    (_, table, _) = tables.by_time(slots, "1 min", {})
    assert len(table.rows) == tables.ROWS_MAX
    assert min(row["p99_ms"] for row in table.rows) == pytest.approx(200)
    begins = [row["bucket_ts"] for row in table.rows]
    assert begins == sorted(begins)
    assert table.said == "Those with the largest p99; 400 more rows are left out."
    assert table.folded
    (_, table, _) = tables.by_time(slots, "1 min", {"end_to_end": 1_000})
    assert table.said == "Those with the largest p99; 800 more rows are left out."


def test_errors_by_time_are_those_that_happened():
    happened = [operation("send", 0), operation("process", 1, "g", messages=40, errors=3)]
    rows = {"operations": happened, "end_to_end": [], "lateness": [lateness(0)]}
    (errors, _, late) = tables.by_time(rows, "1 min", {})
    (row,) = errors.rows
    cells = [form(row[key]) for _, key, form in errors.columns]
    assert cells == ["2026-01-01 12:01", "orders", "process", "g", "40", "3", "7.5 %"]
    assert not errors.said
    assert not errors.folded
    assert len(late.rows) == 1


def test_early_is_what_was_stored_early_whatever_the_clocks_of_consumers_say():
    late = [lateness(None), lateness(None, "process", "g", early=7)]
    whole = {"operations": [], "end_to_end": [], "lateness": late, "delivery": []}
    assert dict(tables.tiles({"spans": 2, "undecodable": 0}, whole))["early"] == "0"
