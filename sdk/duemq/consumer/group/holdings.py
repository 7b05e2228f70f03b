"""The queues in a member's hands: which are taken over, consumed, given up.  Plain Python.

A queue's life here (HoldingState):

    ACQUIRING ──offset known──► ACTIVE ──no longer assigned──► RELEASING ──committed──► gone, told
        └──── no longer assigned ─────────────────────────────────────────────────────► gone, told
    any ──fenced: another member has it, or the session is over──► gone
    ACTIVE ──its position means nothing any more──► ACQUIRING

A queue that is assigned again while it is RELEASING is acquired anew once it is gone; not after
`close`, which has all of them RELEASING.  Queues that stay assigned are never touched.  Owner and
only caller: GroupShare on the event loop, which carries out each `HoldingStep`.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from duemq.consumer.settings import StartFrom, resolved
from duemq.errors import FencedMember

if TYPE_CHECKING:
    from duemq.consumer.fetching.fetcher import Source
    from duemq.protocol.balance import MessageQueue

# A broker's clock may be so far behind ours.
CLOCK_BEHIND_MS_MAX = 60_000


class HoldingState(enum.Enum):
    """A queue's life at a member; drawn above."""

    ACQUIRING = enum.auto()
    ACTIVE = enum.auto()
    RELEASING = enum.auto()


class Holding:
    """A queue that the coordinator thinks is ours."""

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.state = HoldingState.ACQUIRING
        self.source: Source | None = None
        """What is pulled, once ACTIVE."""
        self.committed = -1
        """The last offset that the broker confirmed."""
        self.settled: frozenset[int] = frozenset()
        """Offsets that were sent back before it was taken over: not to be delivered."""


@dataclass(slots=True)
class HoldingStep:
    """What is to be done, in this order."""

    dropped: list[Holding] = field(default_factory=list)
    """No pull and no callback of theirs begins any more; nothing is told."""
    rejoin: int | None = None
    """Ask the coordinator what is true; a broker has seen this generation (0: none)."""
    released: tuple[int, frozenset[MessageQueue]] | None = None
    """Tell the coordinator: the answer to this generation."""
    release: list[list[Holding]] = field(default_factory=list)
    """Stop, wait for callbacks, commit; each list by itself."""
    acquire: dict[str, list[Holding]] = field(default_factory=dict)
    """Ask the broker where to begin, until it answers or they are acquiring no more."""


class Holdings:
    """Of one member."""

    def __init__(
        self,
        start_from: StartFrom,
        older: Iterable[MessageQueue],
        now_ms: int,
        topic_id_of: Callable[[str, str], int],
        *,
        in_order: bool,
    ) -> None:
        """`older`: the queues that were there before this member, which begins now.

        Only there "latest" means the end of the queue.  `topic_id_of` a name and a broker tells
        which topic that is now; 0: not known.
        """
        self.generation = 0
        """Of the last assignment."""
        self._in_order = in_order
        self._start_from = resolved(start_from, now_ms)
        self._began_ms = now_ms
        self._topic_id_of = topic_id_of
        # Each with the id of its topic.
        self._older = {queue: topic_id_of(queue.topic, queue.broker) for queue in older}
        self._reads_since_ms: Mapping[str, int] = {}
        self._wanted: frozenset[MessageQueue] = frozenset()
        self._answered = False  # the last claim
        self._untold: set[MessageQueue] = set()  # given up since then
        self._held: dict[MessageQueue, Holding] = {}
        self._closing = False

    @property
    def all(self) -> list[Holding]:
        """What is held."""
        return list(self._held.values())

    @property
    def active(self) -> frozenset[MessageQueue]:
        """The queues that are consumed now.  From any thread."""
        held = tuple(self._held.values())
        return frozenset(each.queue for each in held if each.state is HoldingState.ACTIVE)

    def holds(self, holding: Holding) -> bool:
        """It is not gone."""
        return self._held.get(holding.queue) is holding

    def is_acquiring(self, holding: Holding) -> bool:
        """Its beginning is not known, and it is wanted still."""
        return self.holds(holding) and holding.state is HoldingState.ACQUIRING

    # --- what the group wants -----------------------------------------------------------------

    def claim(self) -> tuple[MessageQueue, ...]:
        """What is consumed or still being released; all else must be assigned anew.

        So nothing is taken over under an assignment of a session that may be over.
        """
        for holding in self.all:
            if holding.state is HoldingState.ACQUIRING:
                del self._held[holding.queue]
        self._wanted = self._wanted & self.active
        self._answered, self._untold = False, set()
        return tuple(self._held)

    def reads(self, since_ms: Mapping[str, int]) -> None:
        """Since when the group has read its topics, by this machine's clock."""
        self._reads_since_ms = since_ms

    def assigned(self, generation: int, queues: frozenset[MessageQueue]) -> HoldingStep:
        """A new assignment: the whole of what shall be held from now on."""
        self.generation, self._wanted = generation, queues
        self._answered = True
        untold = self._untold - queues
        # Closing, it takes none: they are told once an assignment is without them.
        self._untold = set(queues - self._held.keys()) if self._closing else set()
        step = self._reconcile()
        if untold:
            step.released = (generation, frozenset(untold))
        return step

    def fenced(self) -> HoldingStep:
        """The session is over: nothing is ours or wanted."""
        self._wanted = frozenset()
        return self.drop_all()

    def drop_all(self) -> HoldingStep:
        """Lets go of everything without telling."""
        dropped = self.all
        self._held.clear()
        return HoldingStep(dropped)

    def close(self) -> list[Holding]:
        """Nothing is wanted any more; answers what is to be stopped, committed and `released`."""
        self._closing = True
        for holding in self._held.values():
            holding.state = HoldingState.RELEASING
        return self.all

    # --- what became of them ------------------------------------------------------------------

    def starts(self, queues: Iterable[MessageQueue]) -> Mapping[StartFrom, list[MessageQueue]]:
        """Where the group begins in queues that it has no offset for; their broker is asked now.

        With "latest" a queue that came while this member was there (a new topic, also one made anew
        whose queues others had before; a queue or broker more) begins when the member did, and so
        does one that cannot be taken over at once: what was sent into it meanwhile would be left
        out otherwise.  Not at its beginning: it may be an old broker that was away for a moment.

        A group that read the topic long before this member has no offset in a queue that came
        while nobody was there: it begins when the group did.
        """
        starts: defaultdict[StartFrom, list[MessageQueue]] = defaultdict(list)
        for queue in queues:
            starts[self._start(queue)].append(queue)
        return starts

    def _start(self, queue: MessageQueue) -> StartFrom:
        if self._start_from != "latest":
            return self._start_from
        was_older = self._was_older(queue)
        member_ms = self._began_ms - CLOCK_BEHIND_MS_MAX
        group_ms = self._reads_since_ms.get(queue.topic, self._began_ms)
        if group_ms < member_ms:
            return max(0, group_ms - CLOCK_BEHIND_MS_MAX)
        return "latest" if was_older else max(0, member_ms)

    def _was_older(self, queue: MessageQueue) -> bool:
        """Once: it has an offset then, unless it could not be taken over, or is made anew."""
        then = self._older.pop(queue, None)
        if then is None:
            return False
        now = self._topic_id_of(queue.topic, queue.broker)
        return now == then or not (now and then)

    def acquired(self, holding: Holding, source: Source, settled: frozenset[int]) -> bool:
        """The broker answered where it begins; True: it is consumed from now on."""
        if self._closing or not self.is_acquiring(holding):
            return False
        holding.source, holding.committed = source, source.pending.commit_point
        holding.settled = settled
        holding.state = HoldingState.ACTIVE
        return True

    def released(self, holdings: Iterable[Holding]) -> HoldingStep:
        """They are committed, and others may have them."""
        gone = {holding.queue for holding in holdings if self.holds(holding)}
        for queue in gone:
            del self._held[queue]
        step = self._reconcile()
        if self._closing:
            self._untold |= gone & self._wanted
        if told := gone - self._wanted:  # the others were assigned again meanwhile: still ours
            if self._answered:
                step.released = (self.generation, frozenset(told))
            else:
                self._untold |= told  # it was claimed: only a newer assignment can be answered
        return step

    def lost(self, holding: Holding, error: FencedMember) -> HoldingStep:
        """Another member has taken it over."""
        step = self._drop(holding)
        if step.dropped:
            self._wanted -= {holding.queue}
            step.rejoin = int(error.limit) if error.limit.isdecimal() else 0
        return step

    def begin_anew(self, holding: Holding) -> HoldingStep:
        """Its next offset does not exist, or its topic is another one now: it is acquired anew.

        The broker knows where to begin.  One that is being given up goes on with that.
        """
        if holding.state is HoldingState.RELEASING:
            return HoldingStep()
        step = self._drop(holding)
        again = self._reconcile()
        again.dropped = step.dropped
        return again

    def _drop(self, holding: Holding) -> HoldingStep:
        if not self.holds(holding):
            return HoldingStep()
        del self._held[holding.queue]
        return HoldingStep([holding])

    def _reconcile(self) -> HoldingStep:
        """What leads from what is held to what is wanted."""
        step = HoldingStep()
        if self._closing:
            return step
        going: defaultdict[object, list[Holding]] = defaultdict(list)
        for queue, holding in self._held.items():
            if queue not in self._wanted and holding.state is not HoldingState.RELEASING:
                holding.state = HoldingState.RELEASING
                # In order each waits for its callbacks without limit: not for those of others.
                going[queue if self._in_order else queue.broker].append(holding)
        step.release = list(going.values())
        for queue in self._wanted - self._held.keys():
            holding = self._held[queue] = Holding(queue)
            step.acquire.setdefault(queue.broker, []).append(holding)
        return step
