"""Due times as callers write them: delays, absolute times, delay levels.  Pure.

Fractions of a millisecond are rounded up, so that nothing is delivered early.  A delay is sent as
a delay: the broker resolves it with its own clock, so that a skewed clock here does no harm.
"""

import re
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, Context, Decimal, InvalidOperation
from typing import NamedTuple, Self

from duemq.errors import InvalidArgument
from duemq.protocol import checks

DUE_MS_MAX = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z."""
FAR_MS = DUE_MS_MAX - 2**42  # a delay up to this is due before, until the year 2109

UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
MINUTE_MS, HOUR_MS, DAY_MS = (UNITS_MS[unit] for unit in "mhd")
LEVEL_MAX = 2**32 - 1
# Numbers in between are taken for seconds where milliseconds are expected, or for dates (20300131).
SECONDS_FROM = 10**7
SECONDS_BEFORE = 10**11

_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# Whatever context the application has set.
_UP = Context(28, ROUND_CEILING, traps=[])

# Field numbers of duemq.v1.Batch: which of its three arrays says when.
DELAYS_MS = 10
DUE_MS = 11
DELAY_LEVELS = 12


DEFAULT_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
"""As brokers are set by default; level 1 is the first."""
LEVELS_MAX = 256
_LEVEL = re.compile(rf"(\d{{1,9}})({'|'.join(UNITS_MS)})", re.ASCII)


class Due(NamedTuple):
    """When to deliver: `value` goes into the batch's array of number `field`."""

    field: int
    value: int

    @property
    def way(self) -> int:
        """What shares a batch, beside the field: what a broker may refuse goes apart."""
        apart = self.field == DELAY_LEVELS or self.value > FAR_MS
        return self.value << 8 | self.field if apart else self.field


def due_of(
    delay: float | timedelta | str | None,
    deliver_at: datetime | int | str | None,
    delay_level: int | None,
) -> Due | None:
    """At most one of the three; None: at once.  Raises InvalidArgument."""
    given = (delay is not None) + (deliver_at is not None) + (delay_level is not None)
    if not given:
        return None
    if given > 1:
        checks.at_most_one(deliver_at=deliver_at, delay_level=delay_level, delay=delay)
    if delay is not None:
        return Due(DELAYS_MS, delay_ms(delay))
    if deliver_at is not None:
        return Due(DUE_MS, deliver_at_ms(deliver_at))
    if type(delay_level) is not int or not 1 <= delay_level <= LEVEL_MAX:
        raise checks.wrong("delay_level", delay_level, "1 to the broker's number of levels")
    return Due(DELAY_LEVELS, delay_level)


def delay_ms(delay: float | timedelta | str, field: str = "delay") -> int:
    """Seconds, a timedelta, or text as `250ms`, `5s`, `1.5h`, `1h30m` → milliseconds.

    Raises InvalidArgument, naming `field`, for what is negative, not finite, unreadable or beyond
    the year 9999.
    """
    if isinstance(delay, timedelta):
        milliseconds = _ceiling(_UP.divide(delay // _MICROSECOND, 1000))
    elif isinstance(delay, str):
        milliseconds = _text_ms(delay, field)
    elif isinstance(delay, int | float) and not isinstance(delay, bool):
        try:
            milliseconds = _ceiling(_UP.multiply(Decimal(str(delay)), 1000))
        except (InvalidOperation, OverflowError, ValueError):
            raise _bad_delay(delay, field) from None
    else:
        raise _bad_delay(delay, field)
    if not 0 <= milliseconds <= DUE_MS_MAX:
        raise _bad_delay(delay, field)
    return milliseconds


def deliver_at_ms(deliver_at: datetime | int | str) -> int:
    """An aware datetime, epoch milliseconds or RFC 3339 text → epoch milliseconds.

    Raises InvalidArgument for a time without zone, before 1970 or after the year 9999, and for a
    number that looks like seconds.
    """
    refuse_seconds(deliver_at, "deliver_at")
    moment = deliver_at
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError:
            raise _bad_moment(deliver_at) from None
    if isinstance(moment, datetime):
        if moment.utcoffset() is None:
            raise _bad_moment(deliver_at, "it has no time zone")
        moment = -(-((moment - _EPOCH) // _MICROSECOND) // 1_000)
    if type(moment) is not int or not 0 <= moment <= DUE_MS_MAX:
        raise _bad_moment(deliver_at)
    return moment


def refuse_seconds(moment: object, field: str, least: int = SECONDS_FROM) -> None:
    """Raises InvalidArgument, naming `field`, for a number from `least` to the seconds of 5138.

    As milliseconds it would be one of the years 1970 to 1973, which nobody means.
    """
    if type(moment) is int and least <= moment < SECONDS_BEFORE:
        raise checks.wrong(
            field,
            moment,
            f"milliseconds since 1970 are expected; {moment} looks like seconds or a date",
        )


def _text_ms(text: str, field: str) -> int:
    total, position = Decimal(0), 0
    stripped = text.strip()
    while position < len(stripped):
        part = _PART.match(stripped, position)
        if part is None:
            raise _bad_delay(text, field)
        total = _UP.fma(Decimal(part[1]), UNITS_MS[part[2]], total)
        position = part.end()
    if not stripped:
        raise _bad_delay(text, field)
    return _ceiling(total)


def _ceiling(milliseconds: Decimal) -> int:
    """Rounded up; what is negative stays so, however little it is."""
    return int(milliseconds.to_integral_value(ROUND_CEILING)) if milliseconds >= 0 else -1


def _bad_delay(delay: object, field: str) -> InvalidArgument:
    return checks.wrong(
        field,
        delay,
        "seconds, a timedelta, or text as 250ms, 5s, 1h30m; from 0 on, and due before the year"
        " 10000",
    )


def _bad_moment(moment: object, reason: str = "") -> InvalidArgument:
    return checks.wrong(
        "deliver_at",
        moment,
        "an aware datetime, epoch milliseconds or RFC 3339 text, from 1970 to 9999"
        + (f"; {reason}" if reason else ""),
    )


def parse_levels(text: str, field: str = "delay_levels") -> tuple[int, ...]:
    """Milliseconds of each delay of a table.  Raises InvalidArgument."""
    words = text.split()
    checks.count(field, len(words), 1, LEVELS_MAX, "delays")
    levels = []
    for word in words:
        match = _LEVEL.fullmatch(word)
        if not match:
            raise checks.wrong(field, word, "a number and one of ms, s, m, h, d")
        levels.append(int(match[1]) * UNITS_MS[match[2]])
    return tuple(levels)


class Edges(NamedTuple):
    """Up to where a histogram of due times goes by minutes, and by hours; beyond, by days."""

    minutes_ms: int
    hours_ms: int

    @classmethod
    def at(cls, now_ms: int) -> Self:
        """A day of minutes and a month of hours, to the end of the last hour and day."""
        return cls(
            -(-(now_ms + DAY_MS) // HOUR_MS) * HOUR_MS,
            -(-(now_ms + 30 * DAY_MS) // DAY_MS) * DAY_MS,
        )

    def step_ms(self, begin_ms: int) -> int:
        """How wide the bucket is that begins there, or has it."""
        if begin_ms < self.minutes_ms:
            return MINUTE_MS
        return HOUR_MS if begin_ms < self.hours_ms else DAY_MS
