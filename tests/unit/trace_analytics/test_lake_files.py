"""Which files of a lake the spans of single messages are looked for in."""

from datetime import UTC, datetime

import pytest

from duemq_analytics.lake.measures import HORIZON_S
from duemq_analytics.lake.span_table import File
from duemq_analytics.lake_report import files_of

SENT_S = 1_000_000
CALLED_S = 30
LAST_S = SENT_S + CALLED_S + 2 * HORIZON_S  # delayed by an hour, and tried for another one
MESSAGE = {"sent_ts": datetime.fromtimestamp(SENT_S, UTC), "us": CALLED_S * 1_000_000}


def file(first_s, last_s):
    return File("spans/date=2026-01-01/hour=00/x.parquet", 1, 1, first_s * 10**6, last_s * 10**6)


@pytest.mark.parametrize(
    ("first_s", "last_s", "has"),
    [
        (0, SENT_S - 61, False),
        (0, SENT_S - 60, True),  # clocks differ
        (SENT_S, SENT_S, True),
        (LAST_S, LAST_S + 9, True),
        (LAST_S + 1, LAST_S + 9, False),
        (0, LAST_S + 9, True),
    ],
)
def test_files_of_the_time_in_which_a_message_was_under_way(first_s, last_s, has):
    one = file(first_s, last_s)
    assert files_of([one], [MESSAGE]) == ([one] if has else [])
    assert files_of([one], []) == []
