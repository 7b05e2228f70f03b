"""What `--keep` keeps: whole hours, of all tables."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from duemq_analytics.__main__ import _parser
from duemq_analytics.lake_commands import kept_from


@pytest.mark.parametrize(
    ("keep", "begin"),
    [
        (timedelta(hours=1), datetime(2026, 1, 2, 9, tzinfo=UTC)),
        (timedelta(minutes=30), datetime(2026, 1, 2, 10, tzinfo=UTC)),
        (timedelta(hours=1, minutes=30), datetime(2026, 1, 2, 9, tzinfo=UTC)),
    ],
)
def test_hours_that_have_not_ended_so_long_ago_are_kept_whole(keep, begin):
    now = datetime(2026, 1, 2, 10, 30, tzinfo=UTC)
    assert kept_from(now, keep) == begin
    half = timezone(timedelta(hours=5, minutes=30))
    assert kept_from(now.astimezone(half), keep) == begin


def test_hours_that_minutes_are_counted_again_of_cannot_be_dropped(capsys):
    given = ["compact", "--lake", "x", "--keep"]
    assert _parser().parse_args([*given, "3h"]).keep == timedelta(hours=3)
    with pytest.raises(SystemExit):
        _parser().parse_args([*given, "119m"])
    assert "argument --keep: '119m' is shorter than 3h" in capsys.readouterr().err
