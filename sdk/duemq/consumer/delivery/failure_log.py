"""Which failures are worth a line with a traceback.  Pure.

What fails once may fail thousands of times a second: a database that is away fails every message
alike.  Of failures of one kind one a minute is told, with the number of those that were not.
"""

import logging
from collections import deque
from collections.abc import Hashable
from traceback import walk_tb
from typing import NamedTuple

from duemq.outcomes import DeadLetter, RetryLater

TELL_EVERY_S = 60.0
KINDS_MAX = 64
"""Told in TELL_EVERY_S; of further ones nothing is told until there is room."""
PLACES_MAX = 16
"""Of a traceback, the innermost ones, that tell one way from another."""


class Line(NamedTuple):
    """How a failure of the callback is logged."""

    level: int
    traceback: BaseException | None
    more: str
    """The end of the line: how many like it are not in the log, if any."""


class _Kind:
    def __init__(self, told_s: float) -> None:
        self.told_s = told_s
        self.untold = 0


class FailureLog:
    """Of one consumer."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}  # the one that was told last comes last

    def line(self, error: BaseException, now_s: float) -> Line:
        """For what a callback raised; `now_s` as below."""
        untold = self.tell(kind_of(error), now_s)
        if untold is None:
            return Line(logging.DEBUG, None, "")
        if isinstance(error, RetryLater | DeadLetter):
            return Line(logging.INFO, None, and_more(untold))
        return Line(logging.WARNING, error, and_more(untold))

    def tell(self, kind: Hashable, now_s: float) -> int | None:
        """How many of its kind were not told since the last that was; None: do not tell this one.

        `now_s`: of a monotonic clock.
        """
        known = self._kinds.get(kind)
        if known is not None and now_s < known.told_s + TELL_EVERY_S:
            known.untold += 1
            return None
        if known is None and not self._make_room(now_s):
            return None
        self._kinds.pop(kind, None)
        self._kinds[kind] = _Kind(now_s)
        return known.untold if known else 0

    def _make_room(self, now_s: float) -> bool:
        if len(self._kinds) < KINDS_MAX:
            return True
        oldest, kind = next(iter(self._kinds.items()))
        if now_s < kind.told_s + TELL_EVERY_S:
            return False
        del self._kinds[oldest]
        return True


def kind_of(error: BaseException) -> Hashable:
    """The same for errors of one type that were raised at one place, by the same way.

    However often the way passes a line: in a recursion, or because one error is raised repeatedly.
    """
    trace = error.__traceback__
    if trace is None and error.__cause__ is not None:
        trace = error.__cause__.__traceback__
    places = dict.fromkeys((frame.f_code.co_filename, line) for frame, line in walk_tb(trace))
    return type(error).__module__, type(error).__qualname__, tuple(deque(places, PLACES_MAX))


def and_more(untold: int | None) -> str:
    """The end of a line: how many are not in the log, if any."""
    return f" ({untold} more like it since the last one here)" if untold else ""
