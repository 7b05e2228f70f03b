"""Which files a run reads besides the new ones."""

import pytest

from duemq_analytics.lake.aggregates import near
from duemq_analytics.lake.measures import HORIZON_S
from duemq_analytics.lake.span_table import File

REACH_S = 2 * HORIZON_S + 60


def file(first_s, last_s):
    return File("spans/date=2026-01-01/hour=00/x.parquet", 1, 1, first_s * 10**6, last_s * 10**6)


NEW = [file(100_000, 100_500), file(900_000, 900_001)]


@pytest.mark.parametrize(
    ("first_s", "last_s", "is_near"),
    [
        (100_100, 100_200, True),
        (0, 100_000 - REACH_S, True),
        (0, 100_000 - REACH_S - 1, False),
        (100_500 + REACH_S, 500_000, True),
        (100_501 + REACH_S, 500_000, False),
        (900_000, 900_000, True),
        (0, 999_999, True),
    ],
)
def test_files_around_the_new_ones_are_near(first_s, last_s, is_near):
    one = file(first_s, last_s)
    assert near([one], NEW) == ([one] if is_near else [])
