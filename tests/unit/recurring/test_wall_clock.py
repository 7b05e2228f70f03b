"""Occurrences of expressions around changes of clocks, against an oracle that walks by minutes.

DST_TRANSITIONS=all: all that differ, of all zones, 2000 to 2040.
"""

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import pytest

from duemq.errors import InvalidArgument
from duemq_recurring.cron import Cron
from duemq_recurring.wall_clock import Dst, WallClock, zone_of
from tests.unit.recurring import wall_oracle

# (expression, whether a wall time is of it, whether it names no hour)
EXPRESSIONS: list[tuple[str, wall_oracle.Matches, bool]] = [
    ("*/10 * * * *", lambda at: at.minute % 10 == 0, True),
    ("30 * * * *", lambda at: at.minute == 30, True),
    ("*/20 0-3 * * *", lambda at: at.minute % 20 == 0 and at.hour <= 3, False),
    ("15,45 */2 * * *", lambda at: at.minute in (15, 45) and at.hour % 2 == 0, False),
    ("0 0 * * *", lambda at: (at.hour, at.minute) == (0, 0), False),
    ("30 1 * * SUN", lambda at: (at.hour, at.minute, at.isoweekday()) == (1, 30, 7), False),
    ("0 23,0,1,2,3 * * *", lambda at: at.minute == 0 and at.hour in (23, 0, 1, 2, 3), False),
]
# A change each: an hour and half an hour, at noon and midnight, a whole day, two hours, backwards
# in summer, for good; one of each kind of 2000 to 2040.
SAMPLE = [
    ("America/New_York", "2026-03-08T07:00"),
    ("America/New_York", "2026-11-01T06:00"),
    ("Europe/Berlin", "2027-03-28T01:00"),
    ("Europe/Berlin", "2027-10-31T01:00"),
    ("Europe/Dublin", "2026-10-25T01:00"),
    ("Australia/Lord_Howe", "2026-04-04T15:00"),
    ("Australia/Lord_Howe", "2026-10-03T15:30"),
    ("America/Sao_Paulo", "2018-11-04T03:00"),
    ("America/Sao_Paulo", "2019-02-17T02:00"),
    ("Asia/Beirut", "2026-03-28T22:00"),
    ("Pacific/Apia", "2011-12-30T10:00"),
    ("Antarctica/Troll", "2026-03-29T01:00"),
    ("Antarctica/Troll", "2026-10-25T01:00"),
    ("Africa/Casablanca", "2026-02-15T02:00"),
    ("Africa/Casablanca", "2026-03-22T02:00"),
    ("Asia/Pyongyang", "2018-05-04T15:00"),
    ("America/Caracas", "2016-05-01T07:00"),
    ("UTC", "2026-03-29T01:00"),
]


def changes() -> list[tuple[str, datetime]]:
    if os.environ.get("DST_TRANSITIONS") != "all":
        return [(zone, datetime.fromisoformat(at).replace(tzinfo=UTC)) for zone, at in SAMPLE]
    found: dict[tuple[object, ...], tuple[str, datetime]] = {}
    for name in sorted(available_timezones()):
        zone = ZoneInfo(name)
        for at in wall_oracle.transitions(zone, 2000, 2040):
            offsets = [
                (at + timedelta(minutes=each)).astimezone(zone).utcoffset() for each in (-1, 0)
            ]
            found.setdefault((at, *offsets), (name, at))
    return list(found.values())


def occurrences(clock: WallClock, start: datetime, end: datetime) -> list[datetime]:
    found = []
    at_s: int | None = int(start.timestamp()) - 1
    while at_s is not None and (at_s := clock.after(at_s)) is not None and at_s < end.timestamp():
        found.append(datetime.fromtimestamp(at_s, UTC))
    return found


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dst", list(Dst))
def test_around_changes_of_clocks(dst: Dst) -> None:
    tried = 0
    for name, at in changes():
        zone = zone_of(name)
        start, end = at - timedelta(hours=26), at + timedelta(hours=26)
        for text, matches, every_hour in EXPRESSIONS:
            expected = wall_oracle.instants(zone, matches, every_hour, dst, start, end)
            clock = WallClock(Cron(text), zone, dst)
            assert occurrences(clock, start, end) == expected, (name, at, text)
            tried += 1
    assert tried >= len(SAMPLE) * len(EXPRESSIONS)


@pytest.mark.parametrize("dst", list(Dst))
def test_an_answer_does_not_depend_on_where_the_question_begins(dst: Dst) -> None:
    """From any minute on the next occurrence is the one that a walk through all of them finds."""
    zone = zone_of("Antarctica/Troll")  # by two hours
    clock = WallClock(Cron("*/7 0-3 * * *"), zone, dst)
    for at in (datetime(2026, 3, 29, 1, tzinfo=UTC), datetime(2026, 10, 25, 1, tzinfo=UTC)):
        start, end = at - timedelta(hours=5), at + timedelta(hours=5)
        walked = occurrences(clock, start, end)
        now = start
        while now < walked[-1]:
            after_s = clock.after(int(now.timestamp()))
            assert after_s == min(each for each in walked if each > now).timestamp()
            now += timedelta(minutes=1)


def test_the_four_policies_where_clocks_go_forward_and_back() -> None:
    zone = zone_of("America/New_York")

    def found(text: str, day: datetime, dst: Dst) -> list[str]:
        start = day.replace(tzinfo=zone).astimezone(UTC)
        all_day = occurrences(WallClock(Cron(text), zone, dst), start, start + timedelta(hours=23))
        return [each.astimezone(zone).strftime("%H:%M%z") for each in all_day]

    spring, autumn = datetime(2026, 3, 8), datetime(2026, 11, 1)
    assert {dst: found("15,30 2 * * *", spring, dst) for dst in Dst} == {
        Dst.ONCE: ["03:00-0400"],
        Dst.SKIP: [],
        Dst.TWICE: ["03:00-0400"],
        Dst.SHIFT: ["03:15-0400", "03:30-0400"],
    }
    first, second = "01:30-0400", "01:30-0500"
    assert {dst: found("30 1 * * *", autumn, dst) for dst in Dst} == {
        Dst.ONCE: [first],
        Dst.SKIP: [first],
        Dst.TWICE: [first, second],
        Dst.SHIFT: [first],
    }


NOW_S = 1_780_000_000


class Counted(Cron):
    """Says how many wall times were looked at."""

    looked_at = 0

    def local_times(self, start: datetime) -> Iterator[datetime]:
        for each in super().local_times(start):
            self.looked_at += 1
            yield each


def test_that_nothing_ever_comes_is_known_soon() -> None:
    """Each of these is in the hour that the clocks leave out; all wait for who asks."""
    cron = Counted("*/20 2 * 3 7L")
    assert WallClock(cron, zone_of("Europe/Berlin"), Dst.SKIP).after(NOW_S) is None
    assert cron.looked_at < 100


def test_six_fields_count_seconds() -> None:
    clock = WallClock(Cron("*/20 59 23 * * *"), zone_of("UTC"), Dst.ONCE)
    start = datetime(2026, 12, 31, tzinfo=UTC)
    found = occurrences(clock, start, start + timedelta(days=1))
    assert [each.second for each in found] == [0, 20, 40]


@pytest.mark.parametrize("name", ["", "Mars/Olympus", "../etc/passwd", "localtime", "a" * 65])
def test_a_zone_that_is_none(name: str) -> None:
    with pytest.raises(InvalidArgument, match="IANA"):
        zone_of(name)
