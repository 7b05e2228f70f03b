"""One schedule: what it says, how far it has come, and which of its messages wait.  Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from duemq.protocol.record_bytes import property_entry, varint
from duemq_recurring.occurrences import (
    END_MS,
    CatchUp,
    Occurrence,
    Occurrences,
    Recurrence,
)

Source = tuple[int, int]
"""Whose timer it is: store and queue, as in its handle."""

NAME_PROPERTY = "duemq.schedule"
AT_PROPERTY = "duemq.scheduled_ms"
"""Of each message: when it was to come, before jitter."""
MADE, MOVED, DELETED = 1, 2, 3
"""What becomes of a schedule: made or changed, moved on, gone."""
OVERHEAD_BYTES = 1_000
"""What a schedule costs in memory, beside its name and its message."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a schedule says."""

    topic: str
    recurrence: Recurrence
    record: bytes  # a Record without message_id and born_ms
    tag_hash: int = 0  # record_bytes.text_hash
    key_hash: int = 0
    from_given: bool = True  # else it begins when it was made, or changed

    def same(self, other: Plan) -> bool:
        """Whether both ask for the same."""
        if self.from_given or other.from_given:
            return self == other
        from_ms = self.recurrence.from_ms
        recurrence = dataclasses.replace(other.recurrence, from_ms=from_ms)
        return self == dataclasses.replace(other, recurrence=recurrence)


class PendingMessage(NamedTuple):
    """A message of a schedule that waits, as a timer of the shard's own."""

    source: Source
    offset: int
    at_ms: int
    due_ms: int


class ScheduleState(NamedTuple):
    """How far a schedule has come."""

    paused: bool
    cursor_ms: int  # occurrences up to then wait, were stored, or are left out
    stored: int  # messages since the last change of its plan, those that wait among them
    left_ms: int = 0  # of the last one that was dispatched, or cancelled by its handle
    left_out: tuple[int, ...] = ()
    """Occurrences after the cursor that do not come any more: they left before others did."""
    all_until_ms: int = 0
    """It was resumed then, so that all that was missed comes, whatever its own policy; or 0."""


@dataclasses.dataclass(slots=True)
class Schedule:
    """A schedule.  Owned by: Schedules, which alone changes it."""

    name: str
    plan: Plan
    state: ScheduleState
    pending: tuple[PendingMessage, ...] = ()
    wake_ms: int = 0  # while something waits: when to look whether it is late

    _occurrences: Occurrences | None = None

    @property
    def occurrences(self) -> Occurrences:
        """Raises InvalidArgument if this machine cannot read its cron, or has not its zone."""
        if self._occurrences is None:
            self._occurrences = Occurrences(self.name, self.plan.recurrence)
        return self._occurrences

    def catch_up(self, at_ms: int) -> CatchUp:
        """The policy that counts for an occurrence."""
        missed = at_ms <= self.state.all_until_ms
        return CatchUp.ALL if missed else self.plan.recurrence.catch_up

    def following(self, after_ms: int) -> Iterator[Occurrence]:
        """All that come after a time, in order, as far as no count ends them."""
        left_out = self.state.left_out
        return (o for o in self.occurrences.following(after_ms) if o.at_ms not in left_out)

    def latest(self, after_ms: int, until_ms: int) -> Occurrence | None:
        """The last one of these that is not after `until_ms`; None: there is none."""
        found = self.occurrences.latest(after_ms, until_ms)
        while found is not None and found.at_ms in self.state.left_out:
            found = self.occurrences.latest(after_ms, found.at_ms - 1)
        return found

    def to_come(self, now_ms: int) -> Iterator[Occurrence]:
        """What waits, and what is to come behind it; of a paused one from now on."""
        for each in self.pending:
            yield Occurrence(each.at_ms, each.due_ms)
        state, count = self.state, self.plan.recurrence.count
        after_ms = state.cursor_ms if self.pending else max(state.cursor_ms, now_ms)
        following = self.following(after_ms)
        yield from itertools.islice(following, count - state.stored) if count else following

    @property
    def size(self) -> int:
        """What it costs in memory, about."""
        return size_of(self.name, self.plan)

    @property
    def ended(self) -> bool:
        """Whether no other message comes, of those that do not wait yet."""
        count = self.plan.recurrence.count
        return self.state.cursor_ms >= END_MS or bool(count and self.state.stored >= count)


class ScheduleChange(NamedTuple):
    """What becomes of a schedule."""

    name: str
    what: int  # MADE, MOVED, DELETED
    state: ScheduleState = ScheduleState(False, 0, 0)
    came: Sequence[PendingMessage] = ()
    plan: Plan | None = None  # if it is MADE


def size_of(name: str, plan: Plan) -> int:
    """What a schedule costs in memory, about."""
    return OVERHEAD_BYTES + len(name) + len(plan.record)


def entry_of(name: str, plan: Plan, occurrence: Occurrence) -> bytes:
    """The entry of a RecordBatch for an occurrence: the same for the same one, its id too."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    message_id = b"schedule-%b-%d" % (digest.encode(), occurrence.at_ms)
    record = b"".join(
        (
            plan.record,
            b"\x12" + varint(len(message_id)) + message_id,
            property_entry(NAME_PROPERTY.encode(), name.encode()),
            property_entry(AT_PROPERTY.encode(), b"%d" % occurrence.at_ms),
            b"\x38" + varint(occurrence.due_ms),
        )
    )
    return b"\x0a" + varint(len(record)) + record
