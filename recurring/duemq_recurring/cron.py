"""Cron expressions: five fields, or six with seconds in front.  Pure.

What they say of wall clocks only: which instants these are is wall_clock.py's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta

from cronsim import CronSim, CronSimError

from duemq.protocol import checks

CHARACTERS_MAX = 255
_WRITTEN = re.compile(rf"[0-9A-Za-z*/,#@ -]{{1,{CHARACTERS_MAX}}}")
_SHORT = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_FIELDS = {
    "second": "0-59",
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31 (not beyond its months), L (the last day), LW (the last weekday)",
    "month": "1-12 or JAN-DEC",
    "day-of-week": "0-7 or SUN-SAT, as 5L (the last Friday) or 5#2 (the second)",
}
_SHAPE = (
    "[second] minute hour day-of-month month day-of-week, each *, a number, a-b, a,b or */n;"
    f" or one of {', '.join(_SHORT)}"
)
_SECOND = timedelta(seconds=1)
_ANY_TIME = datetime(2000, 1, 1)


class Cron:
    """An expression that can be read."""

    def __init__(self, text: str, field: str = "cron") -> None:
        """Raises InvalidArgument, which names the field of the expression that is wrong."""
        checks.matches(field, text, _WRITTEN, _SHAPE)
        self._text = _SHORT.get(text.strip().lower(), text)
        try:
            parsed = CronSim(self._text, _ANY_TIME)
        except CronSimError as error:
            raise checks.wrong(field, text, _told(str(error))) from error
        self.every_hour = len(parsed.hours) == 24
        """It names no hour: what it means has nothing to do with clocks that change."""

    def local_times(self, start: datetime) -> Iterator[datetime]:
        """Wall times from `start` on, in order; ends where there is none for 50 years."""
        try:
            yield from CronSim(self._text, start - _SECOND)
        except (OverflowError, ValueError):  # the calendar ends with the year 9999
            return


def _told(error: str) -> str:
    name = error.removeprefix("Bad ")
    if name in _FIELDS:
        return f"its {name} must be of {_FIELDS[name]}"
    return f"it must be {_SHAPE}"
