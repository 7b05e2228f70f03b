"""The numbers of a lane's batches, and what a refusal does to them.  Owned by the pump.

A lane is what a broker counts by: (broker, topic, queue asked for, with or without a due time).

A refused batch has not used up its sequence, so those behind it that were on their way come back
OUT_OF_SEQUENCE: not stored either.  The lane then drains: nothing is sent until every batch in
flight is answered.  After that the epoch goes up, and what came back is numbered anew, in its old
order.  Batches whose answer was lost are never renumbered: they may be stored, and only the same
numbers tell the broker so.

    OPEN ──refused, others in flight──► DRAINING ──last answer──► OPEN, epoch + 1

A lane that the broker does not know yet starts with whatever sequence arrives first.  So until
its first batch is stored, only one is in flight: were it refused, the next would become the start.
"""

from collections import deque
from dataclasses import dataclass, field

from duemq.errors import DuemqError, Fenced, InvariantError, OutOfSequence, Timeout
from duemq.producing.batch import Batch
from duemq.producing.batch_encoding import Numbers


@dataclass(slots=True, eq=False)
class SequenceLane:
    """Of one broker.  `queue_id` -1: any (with a due time only)."""

    producer_id: int
    broker: str
    topic: str
    queue_id: int
    timed: bool
    epoch: int = 0
    next_sequence: int = 0
    established: bool = False
    """A batch of this epoch was stored."""
    draining: bool = False
    in_flight: int = 0
    refusals: int = 0
    """Since the last batch was stored."""
    waiting: deque[Batch] = field(default_factory=deque)
    returned: list[Batch] = field(default_factory=list)
    doubted: set[int] = field(default_factory=set)
    """Sequences of this epoch of which nobody knows whether they are stored, or will be."""

    @property
    def sendable(self) -> bool:
        """A batch may be numbered now."""
        return not self.draining and (self.established or not self.in_flight)

    def undecided(self, batch: Batch, error: DuemqError) -> bool:
        """Whether this answer to a repeat leaves open what the earlier attempt did, or will do."""
        if isinstance(error, OutOfSequence):
            # A late copy of a batch in front of it, and so of this one, may be on its way.
            return missing_before(error) and self.doubtful_before(batch)
        return may_be_repeated(error)

    def number(self) -> Numbers:
        """The next batch's numbers; it is in flight from now on."""
        if not self.sendable:
            raise InvariantError(f"lane {self} numbers a batch while it must not send")
        numbers = Numbers(self.producer_id, self.epoch, self.next_sequence)
        self.next_sequence += 1
        self.in_flight += 1
        return numbers

    def stored(self, batch: Batch) -> None:
        """The broker has it."""
        self.refusals = 0
        if batch.epoch == self.epoch:
            self.established = True
            if self.doubted:  # those in front of it are stored as well
                self.doubted = {each for each in self.doubted if each > batch.sequence}
        self._answered()

    def refused(self, batch: Batch, *, again: bool) -> None:
        """The broker does not have it, for a reason of its own.

        `again`: it keeps its place and is sent anew.
        """
        self.refusals += 1
        self.doubted.discard(batch.sequence)
        if again:
            self.returned.append(batch)
        if self.in_flight == 1 and not self.draining:
            # Nothing behind it: the sequence is free again.
            self.next_sequence = batch.sequence
            self._answered()
            self._give_back()
            return
        self.draining = True
        self._answered()

    def out_of_sequence(self, batch: Batch) -> None:
        """The broker does not have it and will not take it under these numbers."""
        self.refusals += 1
        self.doubted.discard(batch.sequence)
        self.returned.append(batch)
        self.draining = True
        self._answered()

    def overtaken(self) -> None:
        """The broker has seen a higher epoch: start above ours, whatever it was."""
        self.draining = True
        self._answered()

    def doubt(self, batch: Batch) -> None:
        """A batch in flight may be stored, or not; it stays in flight."""
        if batch.epoch == self.epoch:
            self.doubted.add(batch.sequence)

    def doubtful_before(self, batch: Batch) -> bool:
        """Of a batch in front of it nobody knows."""
        return any(each < batch.sequence for each in self.doubted)

    def lost(self, batch: Batch) -> None:
        """A batch in flight is given up and its outcome unknown: it is not sent again.

        Those behind it may come back OUT_OF_SEQUENCE, which starts a new epoch.  Without any, the
        next batch begins one at once.
        """
        self.doubt(batch)
        if self.in_flight == 1:
            self.draining = True
        self._answered()

    def _answered(self) -> None:
        self.in_flight -= 1
        if self.in_flight < 0:
            raise InvariantError(f"lane {self} has more answers than batches")
        if self.draining and not self.in_flight:
            self.draining = False
            self.doubted.clear()
            self.established = False
            self.epoch += 1
            self.next_sequence = 0
            self._give_back()

    def _give_back(self) -> None:
        self.returned.sort(key=lambda batch: batch.sequence)
        self.waiting.extendleft(reversed(self.returned))
        self.returned.clear()


def may_be_repeated(error: DuemqError) -> bool:
    """The same batch can succeed later, under the same numbers."""
    return error.retryable and not isinstance(error, Timeout)


def missing_before(error: OutOfSequence) -> bool:
    """The broker does not have the batch, as it expects one in front of it.

    Otherwise it has it, and no longer knows where.
    """
    sequence, expected = error.value, error.limit
    return sequence.isdecimal() and expected.isdecimal() and int(sequence) > int(expected)


def doubted(error: DuemqError) -> DuemqError:
    """The refusal of a repeat, with what it does not tell."""
    if isinstance(error, Fenced):
        return Timeout(f"whether the message is stored is unknown: {error}")
    return type(error)(
        f"{error.message}; an earlier attempt may have been stored",
        field=error.field,
        value=error.value,
        limit=error.limit,
        retryable=error.retryable,
    )
