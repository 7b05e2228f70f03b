"""When a message repeats: the occurrences of a recurrence, one after another.  Pure."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from duemq.protocol import checks
from duemq_recurring.cron import Cron
from duemq_recurring.wall_clock import END_S, Dst, WallClock, zone_of

EVERY_MS_MIN = 1_000
EVERY_MS_MAX = 366 * 24 * 3_600_000 * 100
END_MS = END_S * 1000
COUNT_MAX = 1 << 53
LATE_MS = 60_000
"""With CatchUp.NONE: what is later by so much is left out."""


class CatchUp(enum.StrEnum):
    """What becomes of occurrences that could not be stored when they were due."""

    ALL = "all"
    LATEST = "latest"
    NONE = "none"


class Occurrence(NamedTuple):
    """Once.  `due_ms` is `at_ms` and what the jitter adds."""

    at_ms: int
    due_ms: int


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """How a message repeats; Unix ms and ms.  One of `every_ms` and `cron` is there."""

    every_ms: int = 0
    cron: str = ""
    zone: str = "UTC"  # of cron
    dst: Dst = Dst.ONCE
    catch_up: CatchUp = CatchUp.LATEST
    from_ms: int = 0  # the first one is then or later; `every` counts from it
    until_ms: int = END_MS  # the last one is then or sooner
    count: int = 0  # at most so many are stored; 0: no bound
    jitter_ms: int = 0  # each is due up to so much later

    def check(self) -> None:
        """Raises InvalidArgument, with the field, its value and what is allowed."""
        if self.cron and self.every_ms:
            raise checks.wrong("every_ms", self.every_ms, "one of every_ms and cron is needed")
        if not self.cron:
            checks.whole("every_ms", self.every_ms, EVERY_MS_MIN, EVERY_MS_MAX)
        checks.whole("from_ms", self.from_ms, 0, END_MS)
        checks.whole("until_ms", self.until_ms, 0, END_MS)
        checks.whole("count", self.count, 0, COUNT_MAX)
        checks.whole("jitter_ms", self.jitter_ms, 0, EVERY_MS_MAX)
        if self.until_ms < self.from_ms:
            raise checks.wrong("until_ms", self.until_ms, f"from_ms ({self.from_ms}) or later")


class Occurrences:
    """Those of a recurrence that was checked."""

    def __init__(self, name: str, recurrence: Recurrence) -> None:
        """`name`: jitter depends on it.  Raises InvalidArgument for its cron and zone."""
        self._name = name.encode()
        self._of = recurrence
        self._clock = None
        if recurrence.cron:
            zone = zone_of(recurrence.zone)
            self._clock = WallClock(Cron(recurrence.cron), zone, recurrence.dst)

    def after(self, at_ms: int) -> Occurrence | None:
        """The first one after a time, as far as no count ends them; None: there is none."""
        found = self._next(at_ms)
        if found is None:
            return None
        return Occurrence(found, found + self._jitter(found))

    def latest(self, after_ms: int, now_ms: int) -> Occurrence | None:
        """The last one after `after_ms` that is not after `now_ms`; None: there is none."""
        low, high = after_ms, now_ms  # one comes after `low` and by now, none after `high`
        found = self._next(low)
        if found is None or found > now_ms:
            return None
        while low < high:
            after = self._next(found)
            if after is None or after > now_ms:
                break
            found = after
            middle = (found + high) // 2
            after = self._next(middle)
            if after is None or after > now_ms:
                high = middle
            else:
                low = found = after
        return Occurrence(found, found + self._jitter(found))

    def following(self, after_ms: int) -> Iterator[Occurrence]:
        """All after a time, in order."""
        while (found := self.after(after_ms)) is not None:
            yield found
            after_ms = found.at_ms

    def _next(self, at_ms: int) -> int | None:
        of = self._of
        at_ms = max(at_ms, of.from_ms - 1)
        if self._clock is not None:
            instant_s = self._clock.after(at_ms // 1000)
            found = None if instant_s is None else instant_s * 1000
        else:
            found = of.from_ms + ((at_ms - of.from_ms) // of.every_ms + 1) * of.every_ms
        return found if found is not None and found <= of.until_ms else None

    def _jitter(self, at_ms: int) -> int:
        """The same for the same occurrence; never so late as the next one, or the end."""
        window = min(self._of.jitter_ms, END_MS - at_ms)
        if not window:
            return 0
        following = self._next(at_ms)
        if following is not None:
            window = min(window, following - at_ms - 1)
        text = b"%b\0%d" % (self._name, at_ms)
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(digest, "little") % (window + 1)
