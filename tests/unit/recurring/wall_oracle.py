"""What cron expressions mean, minute by minute: no cron library, no arithmetic on wall times."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
Matches = Callable[[datetime], bool]


def instants(
    zone: ZoneInfo, matches: Matches, every_hour: bool, dst: str, start: datetime, end: datetime
) -> list[datetime]:
    """Those in [start, end), both UTC; looks a day further back to know what was there before."""
    found: set[datetime] = set()
    seen: set[datetime] = set()
    now = start - timedelta(hours=25)
    before = now.astimezone(zone).replace(tzinfo=None) - MINUTE
    while now < end:
        local = now.astimezone(zone).replace(tzinfo=None)
        missing = before + MINUTE
        while missing < local and not every_hour:
            if matches(missing) and dst in ("once", "twice"):
                found.add(now)
            elif matches(missing) and dst == "shift":
                found.add(now + (missing - before - MINUTE))
            missing += MINUTE
        if matches(local) and (local not in seen or dst == "twice" or every_hour):
            found.add(now)
        seen.add(local)
        before = local
        now += MINUTE
    return sorted(each for each in found if start <= each < end)


def transitions(zone: ZoneInfo, first_year: int, last_year: int) -> Iterator[datetime]:
    """When the zone's offset changes, UTC."""
    step = timedelta(days=4)
    now, end = datetime(first_year, 1, 1, tzinfo=UTC), datetime(last_year + 1, 1, 1, tzinfo=UTC)
    while now < end:
        if _offset(zone, now) != _offset(zone, now + step):
            low, high = now, now + step
            while high - low > MINUTE:
                middle = low + (high - low) // 2 // MINUTE * MINUTE
                if _offset(zone, middle) == _offset(zone, low):
                    low = middle
                else:
                    high = middle
            yield high
        now += step


def _offset(zone: ZoneInfo, instant: datetime) -> timedelta | None:
    return instant.astimezone(zone).utcoffset()
