"""Points in time as callers write them.  Pure."""

from datetime import UTC, datetime, timedelta

from duemq.errors import InvalidArgument
from duemq.protocol import checks, due

Moment = datetime | int | str
"""See `epoch_ms`."""

MOMENT_MS_MAX = due.DUE_MS_MAX

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_RULE = (
    "an aware datetime, epoch milliseconds, RFC 3339 text with a time zone, 'now', or how long ago:"
    " -1h, -2d, -1h30m"
)


def epoch_ms(moment: Moment, now_ms: int, field: str) -> int:
    """A moment → epoch milliseconds; `-1h` counts back from `now_ms`.

    Raises InvalidArgument, naming `field`, for what is unreadable, has no time zone, looks like
    seconds, or lies before 1970 or after the year 9999.
    """
    if isinstance(moment, str):
        found = _text_ms(moment.strip(), now_ms, field)
    elif isinstance(moment, datetime):
        found = _datetime_ms(moment)
    else:
        due.refuse_seconds(moment, field)
        found = moment if type(moment) is int else None
    if found is None or not 0 <= found <= MOMENT_MS_MAX:
        raise checks.wrong(field, moment, f"a moment from 1970 to 9999: {_RULE}")
    return found


def span_ms(since: Moment | None, until: Moment | None, now_ms: int) -> tuple[int, int | None]:
    """From when on, and before when; None: without end.  Raises InvalidArgument."""
    from_ms = 0 if since is None else epoch_ms(since, now_ms, "since")
    return from_ms, None if until is None else epoch_ms(until, now_ms, "until")


def _text_ms(text: str, now_ms: int, field: str) -> int | None:
    if text == "now":
        return now_ms
    if text.isascii() and text.isdecimal():
        if len(text) > len(str(MOMENT_MS_MAX)):
            return None
        due.refuse_seconds(int(text), field, 1)
        return int(text)
    if text.startswith("-"):
        try:
            return now_ms - due.delay_ms(text[1:])
        except InvalidArgument:
            return None
    try:
        return _datetime_ms(datetime.fromisoformat(text))
    except ValueError:
        return None


def _datetime_ms(moment: datetime) -> int | None:
    if moment.utcoffset() is None:
        return None
    # Rounded down: what was stored in that millisecond belongs to it.
    return (moment - _EPOCH) // _MILLISECOND
