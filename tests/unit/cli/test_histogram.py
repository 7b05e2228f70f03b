"""The histogram of what falls due, as people see it."""

from duemq.descriptions import TimerBucket
from duemq_cli.histogram import BAR_CELLS, COLUMNS, histogram_rows


def test_the_fullest_has_the_longest_bar_and_no_bar_is_empty() -> None:
    rows = histogram_rows(
        [TimerBucket(0, 500, 500), TimerBucket(600, 60_600, 1_000), TimerBucket(1, 2, 1)], str
    )
    assert [len(row["share"]) for row in rows] == [BAR_CELLS // 2, BAR_CELLS, 1]
    assert [row["due"] for row in rows] == ["overdue", "600", "1"]
    assert [row["within"] for row in rows] == ["", "60 s", "1 ms"]
    assert all(set(row) == set(COLUMNS) for row in rows)


def test_nothing_is_due() -> None:
    assert histogram_rows([]) == []
