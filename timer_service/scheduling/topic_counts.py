"""The ledger by topic: what each topic's timers have come to.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler.  No clock, no I/O.

    accepted = pending + fired + cancelled + replaced + dropped + lost, of each topic

Counted a batch at a time: a frame, a dispatch, a list of cancels, a load.  What lies in blocks is
counted, too, for memory does not know their timers: so `check` compares the ledger with what is
really held without reading the disk.  The first `TOPICS_MAX` topics are counted one by one, all
others together, under no name.  Beyond `KEPT_MAX` those that are gone, and have nothing left here,
are forgotten: what they came to counts with the others', and their places are free.  Not those that
metrics tell apart, the first ones: the next would leave the others' figure, which must not fall.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from duemq.errors import InvariantError
from duemq_server.timer_service.far.numbering import Numbering
from duemq_server.timer_service.scheduling.topic_lateness import SHOWN_MAX
from duemq_server.timer_service.timers.rows import Index, Rows

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler

TOPICS_MAX = 4_096
KEPT_MAX = 1_024  # if some of them are gone
FOLLOWED_MAX = 3_072  # by a replica that follows: it does not know which are
OTHERS = ""  # the name under which the rest is counted


@dataclasses.dataclass(slots=True)
class TopicLedger:
    """A topic's part of the ledger, and of what lies where memory does not see it."""

    accepted: int = 0
    fired: int = 0
    cancelled: int = 0
    lost: int = 0  # damaged on the disk, and set aside by an operator
    far: int = 0  # in blocks and not loaded, cancelled ones included
    unmet: int = 0  # cancelled or replaced, and still in a block or the memtable
    replaced: int = 0  # under their key, or rescheduled
    dropped: int = 0  # kept back by a hold that was resumed without them

    @property
    def left(self) -> bool:
        """Whether anything is pending, or lies in a block."""
        return bool(self.pending or self.far or self.unmet)

    @property
    def pending(self) -> int:
        """Accepted, and none of the rest."""
        gone = self.fired + self.cancelled + self.replaced + self.dropped
        return self.accepted - gone - self.lost


def mark_of(topic: str) -> int:
    """What the log calls a topic, in 32 bits; never 0."""
    return zlib.crc32(topic.encode()) or 1


class TopicCounts:
    """Every topic's ledger."""

    def __init__(self, numbers: Numbering) -> None:
        self.in_doubt = ""
        """Not empty: counts are not whole, and this column takes up what a recount finds."""
        self.forgotten = TopicLedger()
        """What became of topics that were forgotten."""
        self._numbers = numbers
        self._ledgers: dict[str, TopicLedger] = {OTHERS: TopicLedger()}
        self._names = [OTHERS]
        self._free: list[int] = []  # slots of topics that were forgotten
        self._slots = np.empty(0, dtype=np.int64)  # by target: place in `_names`; -1: to be learnt
        self._marks = np.empty(0, dtype=np.uint32)  # by target, too
        self._slot_of = {OTHERS: 0}
        self._marked: dict[int, str | None] = {}  # None: of several topics

    def __iter__(self) -> Iterator[tuple[str, TopicLedger]]:
        """Topics that had a timer; others, and forgotten ones, under `OTHERS` if there are any."""
        empty, others = TopicLedger(), _sum(self._ledgers[OTHERS], self.forgotten)
        for name, each in self._ledgers.items():
            if name or others != empty:
                yield name, each if name else others

    @property
    def mixed(self) -> bool:
        """Whether some topics are, or were, counted together from their first timer on."""
        return self._ledgers[OTHERS] != TopicLedger()

    def slot(self, topic: str) -> int:
        """The slot that a topic is counted in; made when new."""
        slot = self._slot_of.get(topic)
        if slot is None:
            if len(self._slot_of) > TOPICS_MAX or self._ledgers[OTHERS].left:
                return 0  # what is left of the others may be this one's
            if not self._free:
                self._free.append(len(self._names))
                self._names.append("")
            slot = self._slot_of[topic] = self._free.pop()
            self._names[slot] = topic
            self._ledgers[topic] = TopicLedger()
            self._slots[self._slots == 0] = -1
        return slot

    def forget(self, served: Callable[[str], bool] | None = None) -> None:
        """The oldest ones beyond `KEPT_MAX` of which nothing is left, and that are not served.

        None: it is not known which are.  Then any of which nothing is left, beyond `FOLLOWED_MAX`.
        """
        self._learn()  # or what was renamed would pile up where nobody asks for slots
        most = len(self._slot_of) - 1 - (KEPT_MAX if served else FOLLOWED_MAX)
        if most <= 0:
            return
        later = itertools.islice(self._ledgers.items(), 1 + SHOWN_MAX, None)
        idle = (name for name, each in later if not each.left)
        gone = [name for name in idle if served is None or not served(name)][:most]
        for name in gone:
            self.forgotten = _sum(self.forgotten, self._ledgers.pop(name))
        free = [self._slot_of.pop(name) for name in gone]
        self._free += free
        self._slots[np.isin(self._slots, free)] = -1

    def slot_of_left(self, topic: str) -> int:
        """The slot of one of which something is left; also for other threads."""
        return self._slot_of.get(topic, 0)

    def counted(self, topic: str) -> bool:
        """Whether the topic has a ledger of its own."""
        return topic in self._slot_of

    def may_be_left(self, topic: str) -> bool:
        """Whether anything may be pending of a topic, or lie in a block."""
        return self.counted(topic) or self._ledgers[OTHERS].left

    def of(self, topic: str) -> TopicLedger:
        """The ledger that a topic is counted in."""
        return self._ledgers[self._names[self.slot(topic)]]

    def of_target(self, target: int) -> TopicLedger:
        """As `of`, by the number of a target."""
        return self.of(self._numbers.targets[target].topic)

    def slots(self, target: Index) -> Index:
        """The slot of each of these numbers of targets."""
        self._learn()
        found = self._slots[target]
        while (found < 0).any():
            for number in np.unique(np.asarray(target)[found < 0]).tolist():
                self._slots[number] = self.slot(self._numbers.targets[number].topic)
            found = self._slots[target]
        return found

    def _learn(self) -> None:
        if self._numbers.renamed:
            self._rename()
        new = self._numbers.targets[len(self._slots) :]
        if not new:
            return
        self._slots = np.append(self._slots, np.full(len(new), -1))
        marks = np.array([mark_of(each.topic) for each in new], dtype=np.uint32)
        self._marks = np.append(self._marks, marks)
        for each in new:
            found = self._marked.setdefault(mark_of(each.topic), each.topic)
            if found != each.topic:
                self._marked[mark_of(each.topic)] = None

    def _rename(self) -> None:
        """Only a start asks whose a mark is, and a start gives up no number."""
        while self._numbers.renamed:
            number = self._numbers.renamed.pop()
            if number < len(self._slots):
                self._marked.pop(int(self._marks[number]), None)
                self._slots[number] = -1
                self._marks[number] = mark_of(self._numbers.targets[number].topic)

    def marks(self, target: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """What the log calls the topics of these numbers of targets."""
        self._learn()
        return self._marks[target]

    def split(self, target: Index) -> list[tuple[TopicLedger, int]]:
        """How many of these numbers of targets are of each topic."""
        if not len(target):
            return []
        counts = np.bincount(self.slots(target))
        return [
            (self._ledgers[self._names[slot]], int(counts[slot]))
            for slot in np.flatnonzero(counts).tolist()
        ]

    # -- what happens to many at once

    def cancelled(self, target: Index, *, unmet: bool) -> None:
        """Timers of these targets were cancelled; `unmet`: where memory does not see them."""
        for ledger, count in self.split(target):
            ledger.cancelled += count
            ledger.unmet += count if unmet else 0

    def gone(
        self, which: str | int, *, unmet: bool, replaced: bool = False, count: int = 1
    ) -> None:
        """Timers of a topic were cancelled or replaced; `unmet` as `cancelled`.

        `which`: its name, or, at a start, what the log calls it: that may be several topics' name.
        """
        topic: str | None
        if isinstance(which, str):
            topic = which
        else:
            self._learn()
            topic = self._marked.get(which)
        if topic is None:
            self.in_doubt = self.in_doubt or ("replaced" if replaced else "cancelled")
            return
        ledger = self.of(topic)
        ledger.cancelled += 0 if replaced else count
        ledger.replaced += count if replaced else 0
        ledger.unmet += count if unmet else 0

    def dropped_marked(self, mark: int) -> None:
        """One that `gone` counted as cancelled was dropped."""
        topic = self._marked.get(mark)
        if topic is not None:
            self.of(topic).cancelled -= 1
            self.of(topic).dropped += 1

    def met(self, target: Index) -> None:
        """Cancelled timers were met, and are gone."""
        for ledger, count in self.split(target):
            ledger.unmet -= count

    def written(self, pieces: Iterable[Rows]) -> None:
        """Timers are in blocks now."""
        for rows in pieces:
            for ledger, count in self.split(rows.target):
                ledger.far += count

    def loaded(self, rows: Rows) -> None:
        """Timers were loaded from a block."""
        for ledger, count in self.split(rows.target):
            ledger.far -= count

    # -- checkpoint, check

    def saved(self) -> dict[str, list[int]]:
        """For a checkpoint: the columns of each topic; none while they are in doubt."""
        if self.in_doubt:
            return {}
        ledgers = ((n, each) for n, each in self._ledgers.items() if n or self.mixed)
        return {name: list(dataclasses.astuple(each)) for name, each in ledgers}

    def restore(self, saved: Mapping[str, Sequence[int]], forgotten: Sequence[int] = ()) -> None:
        """Takes over what a checkpoint has."""
        for name in saved:  # all first: once something is left of the others no topic gets a slot
            self.slot(name)
        for name, columns in saved.items():
            self._ledgers[name] = TopicLedger(*columns)
        self.forgotten = TopicLedger(*forgotten)

    def check(self, scheduler: Scheduler) -> None:
        """Raises InvariantError unless each topic's pending timers are what is held."""
        if self.in_doubt:
            return
        held = self.held(scheduler)
        for name, slot in self._slot_of.items():
            ledger = self._ledgers[name]
            if held[slot] != ledger.pending:
                raise InvariantError(
                    f"{held[slot]} timers of topic {name!r} are held, its ledger says {ledger}"
                )

    def recount(self) -> None:
        """Nothing is known of what lies in blocks: it is counted anew."""
        for ledger in self._ledgers.values():
            ledger.far = ledger.unmet = 0

    def settle(self, scheduler: Scheduler) -> None:
        """All is counted: whatever the ledgers lack goes into the column in doubt."""
        held = self.held(scheduler)
        for name, slot in self._slot_of.items():
            ledger = self._ledgers[name]
            lacks = ledger.pending - int(held[slot])
            if self.in_doubt == "accepted":
                ledger.accepted -= lacks
            else:
                setattr(ledger, self.in_doubt, getattr(ledger, self.in_doubt) + lacks)
        self.in_doubt = ""

    def held(self, scheduler: Scheduler) -> Index:
        """Pending timers where they lie, by slot."""
        near = scheduler.near
        pieces = scheduler.tiers.pieces()
        parts = [near.table.target[near.pending_ids()], *(rows.target for rows, _ in pieces)]
        slots = self.slots(np.concatenate(parts))
        counts = np.bincount(slots, minlength=len(self._names))
        for name, slot in self._slot_of.items():
            counts[slot] += self._ledgers[name].far - self._ledgers[name].unmet
        return counts


def _sum(first: TopicLedger, second: TopicLedger) -> TopicLedger:
    columns = zip(dataclasses.astuple(first), dataclasses.astuple(second), strict=True)
    return TopicLedger(*map(sum, columns))
