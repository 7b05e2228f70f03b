"""Times as options take them, which say in the command line's words what is none.

Callbacks raise InvalidArgument.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click

from duemq.errors import InvalidArgument
from duemq.protocol import due, moments

MOMENT_RULE = (
    "RFC 3339 with a time zone, as 2030-01-31T09:00:00Z, epoch milliseconds, or how long ago:"
    " -1h, -2d; from 1970 to 9999"
)
DUE_RULE = (
    "RFC 3339 with a time zone, as 2030-01-31T09:00:00Z, or epoch milliseconds; from 1970 to 9999"
)
DELAY_RULE = f"250ms, 5s, 1h30m, 2d … up to {due.DUE_MS_MAX // 86_400_000}d"

Due = datetime | int
Callback = Callable[[click.Context, click.Parameter, str | None], str | None]


def moment(*words: str) -> Callback:
    """Checks a time for a look back, or one of `words`; it stays as it is written."""
    rule = ", ".join((*words, MOMENT_RULE))

    def check(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
        if value is None or value in words:
            return value
        try:
            moments.epoch_ms(value, time.time_ns() // 1_000_000, "")
        except InvalidArgument:
            raise _no(value, param, "time", rule) from None
        return value

    return check


def check_span(since: str | None, until: str | None) -> None:
    """Of --from and --to, each as `moment` checked it.  Raises InvalidArgument if nothing lies in
    between."""
    if since is None or until is None:
        return
    now_ms = time.time_ns() // 1_000_000
    if moments.epoch_ms(until, now_ms, "until") <= moments.epoch_ms(since, now_ms, "since"):
        raise InvalidArgument(
            f"--to {until} is not after --from {since}: nothing lies between",
            field="until",
            value=until,
            limit=f"after --from, {since}",
        )


def due_time(context: click.Context, param: click.Parameter, value: str | None) -> Due | None:
    """When to deliver; text stays a time, which is never taken for seconds."""
    if value is None:
        return None
    try:
        decimal = value.isascii() and value.isdecimal()
        moment = epoch_milliseconds(value) if decimal else datetime.fromisoformat(value)
        due.deliver_at_ms(moment)
    except (InvalidArgument, ValueError):
        raise _no(value, param, "time to deliver at", DUE_RULE, "deliver_at") from None
    return moment


def epoch_milliseconds(text: str) -> int:
    """Digits of a due time.  Raises InvalidArgument for what looks like seconds, a date, a year."""
    moment = int(text[:20])  # Python reads no number of thousands of digits; this is too large, too
    due.refuse_seconds(moment, "deliver_at", 1)
    return moment


def delay(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Checks how long to wait; it stays as it is written."""
    if value is None:
        return None
    try:
        due.delay_ms(value)
    except InvalidArgument:
        raise _no(value, param, "delay", DELAY_RULE) from None
    return value


def shift(context: click.Context, param: click.Parameter, value: str) -> str:
    """Checks how much later, or sooner; it stays as it is written."""
    try:
        if due.delay_ms(value.removeprefix("-").removeprefix("+")):
            return value
    except InvalidArgument:
        pass
    raise _no(value, param, "time to shift by", f"{DELAY_RULE}, or -5m for sooner; not zero")


def delay_level(context: click.Context, param: click.Parameter, value: int | None) -> int | None:
    """Checks the number of a level; brokers know how many there are."""
    if value is not None and not 1 <= value <= due.LEVEL_MAX:
        raise _no(str(value), param, "delay level", "1 to the broker's number of levels")
    return value


def _no(
    value: str, param: click.Parameter, what: str, rule: str, field: str | None = None
) -> InvalidArgument:
    written = param.opts[-1] if isinstance(param, click.Option) else param.human_readable_name
    return InvalidArgument(
        f"{written.strip('[]')} {value!r} is no {what}: {rule}",
        field=field or param.name or "",
        value=value,
        limit=rule,
    )


class Seconds(click.FloatRange):
    """A FloatRange that takes numbers alone: `nan` and `inf` would wait for ever."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Fails as click's types do."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number of seconds.", param, ctx)
        return number
