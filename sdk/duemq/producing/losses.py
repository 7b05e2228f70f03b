"""What was not stored and nobody was told of: the end of fire and forget.

A caller is told by a receipt that is waited for or looked at, or by its done-callback.  Of the rest
`on_error` is told at once.  Without one it is kept for `close`, which raises, and logged: an ERROR
a topic and minute while the producer runs, and one a topic at its end.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from duemq.errors import DuemqError, NotAllSent
from duemq.protocol import checks
from duemq.sent import call

if TYPE_CHECKING:
    from duemq.producing.batch import Batch

log = logging.getLogger("duemq.producer")

# Batches kept for `close`; of more, the oldest are counted only.
KEPT_MAX = 1_024
LOG_EVERY_S = 60.0

ReceiptOf = Callable[["Batch", int], Any]
OnError = Callable[[Any, DuemqError], object]


class Losses:
    """One producer's.  Owned by the event loop."""

    def __init__(self, receipt_of: ReceiptOf, on_error: OnError | None) -> None:
        """`receipt_of`: makes what `on_error` is given, of a batch and an index.

        Raises InvalidArgument for what cannot be called, or of which nothing would run.
        """
        if on_error is not None:
            checks.plain_function("on_error", on_error, "a receipt and an error")
        self._receipt_of = receipt_of
        self._on_error = on_error
        self._kept: deque[tuple[Batch, DuemqError]] = deque()
        self._dropped: Counter[str] = Counter()
        self._log_at: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def add(self, batch: Batch, error: DuemqError, *, logged: bool = True) -> None:
        """The batch has failed.  `logged`: callers had the time to ask for its receipts."""
        untold = _lost(batch)
        if not untold:
            return
        if self._on_error is not None:
            for index in untold:
                failed = f"on_error failed for message {batch.message_id(index)}"
                receipt, why = self._receipt_of(batch, index), batch.error_of(index) or error
                call(failed, self._on_error, receipt, why)
            return
        if len(self._kept) == KEPT_MAX:
            oldest, _ = self._kept.popleft()
            self._dropped[oldest.topic] += len(_lost(oldest))
        self._kept.append((batch, error))
        if not logged:
            return
        self._unlogged[batch.topic] += len(untold)
        now = time.monotonic()
        if now >= self._log_at.get(batch.topic, 0.0):
            self._log_at[batch.topic] = now + LOG_EVERY_S
            _log_lost(batch.topic, self._unlogged.pop(batch.topic), error)

    def at_the_end(self) -> None:
        """Raises NotAllSent if there are any of which still nobody was told; logs how many."""
        counts = self._dropped.copy()
        causes: dict[str, DuemqError] = {}
        unsent: list[Any] = []
        failures: dict[int, DuemqError] = {}
        for batch, error in self._kept:
            untold = _lost(batch)
            failures.update(dict.fromkeys(range(len(unsent), len(unsent) + len(untold)), error))
            unsent += [self._receipt_of(batch, index) for index in untold]
            counts[batch.topic] += len(untold)
            causes[batch.topic] = error
        if not counts.total():
            return
        for topic, count in sorted((+counts).items()):
            _log_lost(topic, count, causes.get(topic, "see above"))
        of_topics = ", ".join(f"{count} to {topic!r}" for topic, count in sorted((+counts).items()))
        last = next(reversed(failures.values()), "see the log")
        raise NotAllSent(
            f"{_messages(counts.total())} not acknowledged ({of_topics}); the last: {last}",
            failures=failures,
            unsent=unsent,
        )


def _lost(batch: Batch) -> list[int]:
    """The messages that are not stored, and of whose outcome nobody knows."""
    return [index for index in batch.untold() if batch.error_of(index) is not None]


def log_unanswered(*gathered: Iterable[Batch]) -> None:
    """For a producer that nobody closed: what it had not done when it went."""
    for topic, count in sorted(_counts(each for some in gathered for each in some).items()):
        log.error(
            "%s to topic %s not acknowledged when the producer ended, which nobody closed",
            _messages(count),
            topic,
        )


def _counts(batches: Iterable[Batch]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for batch in batches:
        if not batch.done:
            counts[batch.topic] += batch.count
    return counts


def _log_lost(topic: str, count: int, why: object) -> None:
    log.error("%s to topic %s not acknowledged: %s", _messages(count), topic, why)


def _messages(count: int) -> str:
    return f"{count} message{'' if count == 1 else 's'}"
