"""Which files a run reads besides the new ones."""

from collections import Counter
from random import Random

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


class Looked:
    """A file that counts how often somebody looks at its times."""

    def __init__(self, first_s, last_s, looks):
        self._times = {"first_us": first_s * 10**6, "last_us": last_s * 10**6}
        self._looks = looks

    def __getattr__(self, name):
        self._looks[name] += 1
        return self._times[name]


def test_each_of_many_files_is_looked_at_once_however_many_are_new():
    random, looks = Random(7), Counter()
    begins = [random.randrange(10**9) for _ in range(1_000)]
    new = [file(begin, begin + random.randrange(20_000)) for begin in begins]
    files = [Looked(i * 10**6, i * 10**6 + 300_000, looks) for i in range(1_000)]
    found = near(files, new)
    assert looks["first_us"] + looks["last_us"] <= 2 * len(files)
    reach_us = REACH_S * 10**6
    assert found == [
        each
        for each in files
        if any(
            one.first_us - reach_us <= each.last_us and each.first_us <= one.last_us + reach_us
            for one in new
        )
    ]
    assert 0 < len(found) < len(files)
