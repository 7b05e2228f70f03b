"""Which instants a cron expression means, in a time zone whose clocks go forward and back.  Pure.

The instants are whole seconds since 1970.  What becomes of the wall times of a change:

| policy  | does not exist (clocks go forward)             | exists twice (clocks go back) |
| ------- | ---------------------------------------------- | ----------------------------- |
| `once`  | once, as the clocks go forward                 | the first time                |
| `skip`  | never                                          | the first time                |
| `twice` | once, as the clocks go forward                 | both times                    |
| `shift` | as much later as the clocks go forward by      | the first time                |

All wall times that fall on the same instant are one occurrence.  An expression that names no hour
(`*/15 * * * *`) follows the time that passes, whatever the policy: at each instant whose wall time
it matches, so never in what does not exist, and in both of what exists twice.

    before, behind    seconds ahead of UTC, before and behind the change that a wall time is near;
                      zoneinfo's fold 0 and 1.  before > behind: it exists twice; <: not at all
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from duemq.protocol import checks
from duemq_recurring.cron import Cron

_EPOCH = datetime(1970, 1, 1)
_SECOND = timedelta(seconds=1)
_REACH_S = 26 * 3600  # no clock was ever set by more than a day
END_S = 253_402_214_400  # 9999-12-31: the calendar ends a day later, in any zone
_SOUGHT_S = 50 * 366 * 24 * 3600  # nothing for so long: nothing comes
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+){0,3}")
_NOT_OF_THE_WORLD = frozenset(("localtime", "posixrules", "Factory"))


class Dst(enum.StrEnum):
    """What becomes of wall times that do not exist, or exist twice: see the module."""

    ONCE = "once"
    SKIP = "skip"
    TWICE = "twice"
    SHIFT = "shift"


@functools.lru_cache(maxsize=1024)
def zone_of(name: str, field: str = "zone") -> ZoneInfo:
    """A time zone.  Raises InvalidArgument."""
    rule = "the name of an IANA time zone, as Europe/Berlin or UTC"
    if len(name) > 64 or name in _NOT_OF_THE_WORLD or not _ZONE.fullmatch(name):
        raise checks.wrong(field, name, rule)
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError) as error:
        raise checks.wrong(field, name, rule) from error


class WallClock:
    """Occurrences of an expression in a zone."""

    def __init__(self, cron: Cron, zone: ZoneInfo, dst: Dst) -> None:
        self._cron = cron
        self._zone = zone
        self._dst = dst

    def after(self, after_s: int) -> int | None:
        """The first instant after `after_s`; None: there is none for 50 years."""
        if after_s >= END_S:
            return None
        best = None
        start_s = after_s + self._offset_at(after_s) - self._margin(after_s)
        for earliest, instants in self._from(start_s):
            if best is not None and earliest >= best:
                break
            for instant in instants:
                if instant > after_s and (best is None or instant < best):
                    best = instant
            if best is not None and earliest >= best:
                break
        return best

    def _from(self, start_s: int) -> Iterator[tuple[int, Sequence[int]]]:
        """The instants of wall times, in their order; no later wall time comes before the first.

        What does not exist and is left out may be thousands of wall times, year after year.
        """
        end_s = min(start_s + _SOUGHT_S, END_S)
        gap = True
        while gap:
            gap = False
            for local in self._cron.local_times(_EPOCH + start_s * _SECOND):
                local_s = (local - _EPOCH) // _SECOND
                if local_s >= end_s:
                    return
                before, behind = (self._offset(local.replace(fold=fold)) for fold in (0, 1))
                instants = self._instants(local_s, before, behind)
                if not instants:
                    start_s = self._change(local_s - behind, local_s - before) + behind
                    gap = True
                    break
                yield local_s - max(before, behind), instants

    def _instants(self, local_s: int, before: int, behind: int) -> Sequence[int]:
        if before == behind:
            return (local_s - before,)
        twice = before > behind
        if self._cron.every_hour or self._dst is Dst.TWICE:
            if twice:
                return (local_s - before, local_s - behind)
            if self._cron.every_hour:
                return ()
        elif twice or self._dst is Dst.SHIFT:
            return (local_s - before,)
        elif self._dst is Dst.SKIP:
            return ()
        return (self._change(local_s - behind, local_s - before),)

    def _change(self, old_s: int, new_s: int) -> int:
        """When the clocks go forward, between two instants."""
        old = self._offset_at(old_s)
        while new_s - old_s > 1:
            middle = (old_s + new_s) // 2
            if self._offset_at(middle) == old:
                old_s = middle
            else:
                new_s = middle
        return new_s

    def _margin(self, after_s: int) -> int:
        """How far back wall times may lie that come after this instant: a change is near."""
        width = abs(self._offset_at(after_s - _REACH_S) - self._offset_at(after_s + _REACH_S))
        near = self._offset_at(after_s - width) != self._offset_at(after_s + width)
        return width if near else 0

    def _offset(self, local: datetime) -> int:
        return _seconds(local.replace(tzinfo=self._zone).utcoffset())

    def _offset_at(self, instant_s: int) -> int:
        instant = (_EPOCH + min(instant_s, END_S) * _SECOND).replace(tzinfo=UTC)
        return _seconds(instant.astimezone(self._zone).utcoffset())


def _seconds(offset: timedelta | None) -> int:
    assert offset is not None
    return offset // _SECOND
