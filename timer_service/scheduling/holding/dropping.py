"""A hold ends without some of its timers: which those are, and how they go.

Run by: the thread that owns the scheduler; `Sifting.make` by any.  No clock, no waiting.  What fell
due while it was held is listed page by page (timer_service/views/listing.py), in due order.  All is
held until the last one is dropped, so that a crash in between leaves nothing out: whoever begins
anew drops the rest, and the newest of a key is the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from duemq_server.timer_service.scheduling.cancelling import Cancelling, ToCancel
from duemq_server.timer_service.timers import log_entries
from duemq_server.timer_service.timers.hold_entry import NEWEST, Hold
from duemq_server.timer_service.timers.key_hash import key_in, message_key_in
from duemq_server.timer_service.timers.log_entries import Cancelled

KEYS_MAX = 200_000
"""Remembered at once: of more keys each pass over the backlog is about a part."""


class Dropping(Cancelling):
    """Handles of timers of a topic, being dropped: as a cancel, but counted apart."""

    kind = log_entries.DROP

    def _cancel(self, wanted: ToCancel, now_ms: int) -> None:
        scheduler, count = self._scheduler, len(wanted.row)
        topic = scheduler.topics.of_target(int(self._targets(wanted)[0]))
        super()._cancel(wanted, now_ms)
        topic.cancelled -= count
        topic.dropped += count
        scheduler.ledger.cancelled -= count
        scheduler.ledger.dropped += count


class Backlogged(NamedTuple):
    """A timer of the backlog."""

    handle: Cancelled
    key: str  # that it shares with others


class Sifting:
    """Finds those of a backlog that do not go, a page at a time."""

    def __init__(self, hold: Hold, others: tuple[str, ...] = ()) -> None:
        self.hold = hold
        self.over = False
        self.others = others
        """Prefixes of longer keys that are held, too (Holds.within): theirs stay."""
        self._newest: dict[str, Cancelled] = {}
        self._pass, self._passes = 0, 1

    @property
    def to_ms(self) -> int:
        """Only what is due before is looked at."""
        if self.hold.policy == NEWEST:
            return self.hold.asked_ms + 1
        return self.hold.asked_ms - self.hold.older_ms

    def make(self, entry: bytes | memoryview) -> str | None:
        """The key of a record that may have to go; None: it has not."""
        if self.hold.prefix or self.others:
            key = key_in(entry)
            if not key.startswith(self.hold.prefix) or key.startswith(self.others):
                return None
        return (message_key_in(entry) or None) if self.hold.policy == NEWEST else ""

    def take(self, page: Sequence[Backlogged], *, last: bool) -> list[Cancelled]:
        """Those of a page, or of pages before, that do not go.  The next page follows this one.

        After the last one of a pass it is over, or begins anew.
        """
        if self.hold.policy != NEWEST:
            self.over = last
            return [each.handle for each in page]
        gone = []
        for each in page:
            if hash(each.key) % self._passes != self._pass:
                continue
            older = self._newest.get(each.key)
            if older is not None:
                gone.append(older)
            elif len(self._newest) >= KEYS_MAX:
                self._passes *= 2  # the rest of this pass is about fewer of them
                self._newest = {
                    key: newest
                    for key, newest in self._newest.items()
                    if hash(key) % self._passes == self._pass
                }
                if hash(each.key) % self._passes != self._pass:
                    continue
            self._newest[each.key] = each.handle
        if last:
            self._newest = {}
            self._pass += 1
            self.over = self._pass >= self._passes
        return gone
