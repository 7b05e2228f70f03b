"""How far groups are, and which generation of each may say so.  Pure.

Owned by: Tables.  Mutated by: the event loop.

A queue's *fence* is the highest generation that has acquired it.  Pulls and commits of a lower
generation are refused, so that a member which lost a queue without noticing moves nothing.
Under one generation an offset never goes back: a commit may be overtaken by a later one.
So are a generation's commits and send-backs where nothing was acquired: the group was deleted; and
what acquires under a generation of before a group was deleted, which counts its fence on by one.
Generation 0 means no membership (a consumer that assigns its queues itself, an administrator): it
is never fenced, and says where the group is, back or forth; back only from where it is, if the
commit says from where.  Changes are entries of the commit log (journal.py), answered when durable.

An offset is *settled* when the group sent that record back: it lies in %RETRY% or %DLQ% now, and
needs no delivery from here.  Kept are those from the committed offset on; a commit drops what it
passes.  They are rebuilt from the send-back frames themselves (send_back.py).
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from duemq.errors import FencedMember, OffsetOutOfRange, Overloaded
from duemq.protocol import checks
from duemq.protocol.names import HIDDEN_GROUPS

ENTRIES_MAX = 200_000
# Of one queue, and of all: more than that past one commit means that nobody commits.
SETTLED_QUEUE_MAX = 65_536
SETTLED_MAX = 1_000_000
# Of a row of the checkpoint.
SETTLED_ROW = 1_000
# The last groups that were deleted, remembered for their fences, by this process.
DELETED_MAX = 1_000
# A generation is a time in ms, times this, and the mark of the coordinator that made it: two that
# do not know of each other never make the same.
GENERATION_MARKS = 256
# A greater one than this could not be counted on from.
GENERATION_MAX = 1 << 62
# A generation is believed up to so far ahead of the clock, nearly nine years: the clock of the
# coordinator that made it may be wrong.
GENERATION_AHEAD_MS = 1 << 38
# A clock that says less is wrong.
CLOCK_MS_MIN = 1_790_000_000_000


def check_generation(generation: int) -> None:
    """Raises InvalidArgument unless a member may have got this generation; 0: no membership."""
    checks.between("generation", generation, 0, GENERATION_MAX)


def newest_generation(now_ms: int) -> int:
    """The greatest generation that is believed now.

    Whoever claims it fences a group out, but not for long: the bound moves with the clock, and the
    coordinator counts on from what it hears of.  To keep one from claiming it again and again, or
    from acquiring queues in a member's name, takes authentication.
    """
    return (max(now_ms, CLOCK_MS_MIN) + GENERATION_AHEAD_MS) * GENERATION_MARKS


def check_claim(generation: int, now_ms: int) -> None:
    """Raises InvalidArgument for a generation that no coordinator can have given by now."""
    check_generation(generation)
    newest = newest_generation(now_ms)
    if generation > newest:
        raise checks.wrong("generation", generation, f"0 to {newest}: it is far ahead of the clock")


class GroupQueue(NamedTuple):
    """A queue of this broker as one group sees it."""

    group: str
    topic: str
    queue_id: int


class GroupOffset(NamedTuple):
    """`offset`: the next record to consume.  `generation`: the fence."""

    offset: int
    generation: int


class Offsets:
    """The committed offsets of all groups on this broker."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._groups: dict[str, dict[tuple[str, int], GroupOffset]] = {}
        self._entries = 0
        # Ascending, never empty.  Their groups are in _groups, perhaps without progress.
        self._settled: dict[GroupQueue, array[int]] = {}
        self._settled_count = 0
        self._deleted: dict[str, int] = {}

    def find(self, key: GroupQueue) -> GroupOffset | None:
        """None: the group never was there."""
        queues = self._groups.get(key.group)
        return queues.get((key.topic, key.queue_id)) if queues else None

    def check_fence(
        self, key: GroupQueue, generation: int, progress: GroupOffset | None = None
    ) -> None:
        """Raises FencedMember for an overtaken generation, InvalidArgument for an illegal one.

        `progress`: if it is known already.
        """
        check_generation(generation)
        progress = progress or self.find(key)
        if progress is not None and 0 < generation < progress.generation:
            raise FencedMember(
                f"generation: {generation} of group {key.group} was replaced by"
                f" {progress.generation} for topic {key.topic}, queue {key.queue_id}",
                field="generation",
                value=generation,
                limit=progress.generation,
            )

    def check_acquired(
        self, key: GroupQueue, generation: int, progress: GroupOffset | None = None
    ) -> None:
        """As `check_fence`, of who says what the group has done.

        A member has acquired the queue before.  Where nobody has, the group was deleted since: a
        word of the old one that was late must not make it anew.
        """
        progress = progress or self.find(key)
        self.check_fence(key, generation, progress)
        if generation and progress is None:
            raise FencedMember(
                f"generation: {generation} of group {key.group} has not acquired topic"
                f" {key.topic}, queue {key.queue_id}, or the group was deleted since",
                field="generation",
                value=generation,
                limit=0,
            )

    def acquire(
        self, key: GroupQueue, generation: int, start: int, min_offset: int, max_offset: int
    ) -> GroupOffset:
        """What the queue's progress becomes when `generation` takes it over; `put` makes it so.

        `start` is where a group begins that was never there.  A member of a group that was deleted
        since must not make it anew.  Raises FencedMember.
        """
        known = self.find(key)
        self.check_fence(key, generation, known)
        if known is None:
            self._check_not_deleted(key, generation)
            return GroupOffset(start, generation)
        offset = min(max(known.offset, min_offset), max_offset)
        return GroupOffset(offset, max(known.generation, generation))

    def _check_not_deleted(self, key: GroupQueue, generation: int) -> None:
        """Raises FencedMember.

        It names a later generation, as after a reset: a group that lived on elsewhere gets one.
        """
        fence = self._deleted.get(key.group, 0)
        if 0 < generation < fence:
            raise FencedMember(
                f"generation: {generation} of group {key.group}: the group was deleted since",
                field="generation",
                value=generation,
                limit=fence,
            )

    def commit(
        self,
        key: GroupQueue,
        generation: int,
        offset: int,
        max_offset: int,
        was: int | None = None,
        known: GroupOffset | None = None,
    ) -> GroupOffset:
        """What the progress becomes by a commit; raises FencedMember, OffsetOutOfRange.

        `known`: what it is to be by an earlier commit of the same request.
        Within a generation a queue has one member, whose offsets only grow: a lower one was late on
        its way.  To go back is for resets, and for who is no member; one who said from which
        offset (`was`) meant that one.
        """
        known = known or self.find(key)
        self.check_acquired(key, generation, known)
        if not 0 <= offset <= max_offset:
            raise OffsetOutOfRange(
                f"offset: {offset} cannot be committed for topic {key.topic},"
                f" queue {key.queue_id}: 0 to {max_offset}",
                field="offset",
                value=offset,
                limit=f"0 to {max_offset}",
            )
        if known is None:
            return GroupOffset(offset, generation)
        if 0 < generation == known.generation or was not in (None, known.offset):
            offset = max(offset, known.offset)
        return GroupOffset(offset, max(generation, known.generation))

    def reset(self, key: GroupQueue, offset: int) -> GroupOffset:
        """What the progress becomes when an operator moves it: members lose the queue."""
        known = self.find(key)
        return GroupOffset(offset, known.generation + 1 if known else 0)

    def check_room(self, keys: Iterable[GroupQueue]) -> None:
        """Raises Overloaded when there is no room for those of the keys that are new."""
        new = sum(self.find(key) is None for key in keys)
        if new and self._entries + new > self._entries_max:
            raise Overloaded(
                f"group: {self._entries} offsets are kept here, the most allowed",
                field="group",
                value=self._entries,
                limit=self._entries_max,
            )

    def put(self, key: GroupQueue, progress: GroupOffset) -> None:
        """Makes the progress so; the caller has checked that there is room."""
        queues = self._groups.setdefault(key.group, {})
        place = (key.topic, key.queue_id)
        if place not in queues:
            self._entries += 1
        queues[place] = progress
        if key in self._settled:
            self._keep_settled(key, progress.offset)

    def settled(self, key: GroupQueue) -> Sequence[int]:
        """The offsets from the committed one on that the group has sent back, ascending."""
        return self._settled.get(key, ())

    def sent_back_from(self, group: str) -> Iterator[tuple[str, int]]:
        """(topic, queue id) of the queues with settled offsets of a group, in no order."""
        return ((key.topic, key.queue_id) for key in self._settled if key.group == group)

    def is_done(self, key: GroupQueue, offset: int) -> bool:
        """Whether the group needs no delivery of a record: committed, or sent back."""
        progress = self.find(key)
        if progress is not None and offset < progress.offset:
            return True
        settled = self._settled.get(key)
        if settled is None:
            return False
        at = bisect_left(settled, offset)
        return at < len(settled) and settled[at] == offset

    def check_settled_room(self, key: GroupQueue, more: int) -> None:
        """Raises Overloaded when there is no room for more settled offsets of a queue."""
        count = len(self.settled(key))
        for known, limit in ((count, SETTLED_QUEUE_MAX), (self._settled_count, SETTLED_MAX)):
            if known + more > limit:
                raise Overloaded(
                    f"offset: group {key.group} has sent back {count} records of topic {key.topic},"
                    f" queue {key.queue_id} past what it has committed: commit first",
                    field="offset",
                    value=known,
                    limit=limit,
                )

    def settle(self, key: GroupQueue, offsets: Iterable[int]) -> None:
        """The group has sent these records back; the caller has checked that there is room."""
        self._groups.setdefault(key.group, {})
        progress = self.find(key)
        committed = progress.offset if progress else 0
        settled = self._settled.setdefault(key, array("q"))
        before = len(settled)
        for offset in offsets:
            at = len(settled)
            if settled and offset <= settled[-1]:
                at = bisect_left(settled, offset)
            if offset >= committed and (at == len(settled) or settled[at] != offset):
                settled.insert(at, offset)
        self._settled_count += len(settled) - before
        if not settled:
            del self._settled[key]

    def clear_settled(self, key: GroupQueue) -> None:
        """What was sent back from the queue may be delivered from there again."""
        self._settled_count -= len(self._settled.pop(key, ()))

    def _keep_settled(self, key: GroupQueue, offset: int) -> None:
        """Drops what lies before a committed offset."""
        settled = self._settled[key]
        passed = bisect_left(settled, offset)
        if passed == len(settled):
            self.clear_settled(key)
        elif passed:
            del settled[:passed]
            self._settled_count -= passed

    def groups(self) -> list[str]:
        """The groups that have offsets here, but for those that are the broker's own notes."""
        return sorted(self._groups.keys() - HIDDEN_GROUPS)

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def generation_of(self, group: str) -> int:
        """The newest generation that has taken over a queue of this broker; 0: none."""
        queues = self._groups.get(group, {})
        return max((progress.generation for progress in queues.values()), default=0)

    def of_group(self, group: str, topic: str = "") -> Iterator[tuple[str, int, GroupOffset]]:
        """(topic, queue id, progress) of a group, of one topic or of all."""
        # A copy first: metrics are read in another thread.
        queues = list(self._groups.get(group, {}).items())
        for (name, queue_id), progress in sorted(queues):
            if not topic or topic == name:
                yield name, queue_id, progress

    def forget_topic(self, topic: str) -> None:
        """The topic is deleted: its offsets mean nothing any more."""
        for key in [key for key in self._settled if key.topic == topic]:
            self.clear_settled(key)
        with_settled = {key.group for key in self._settled}
        for group in list(self._groups):
            queues = self._groups[group]
            for place in [place for place in queues if place[0] == topic]:
                del queues[place]
                self._entries -= 1
            if not queues and group not in with_settled:
                del self._groups[group]

    def forget_group(self, group: str) -> None:
        """The group is deleted."""
        if generation := self.generation_of(group):
            self._deleted.pop(group, None)
            self._deleted[group] = generation + 1
            if len(self._deleted) > DELETED_MAX:
                del self._deleted[next(iter(self._deleted))]
        self._entries -= len(self._groups.pop(group, ()))
        for key in [key for key in self._settled if key.group == group]:
            self.clear_settled(key)

    def ends(self) -> dict[tuple[str, int], int]:
        """How far a queue must have reached for what groups have committed or sent back."""
        ends: dict[tuple[str, int], int] = {}
        for queues in self._groups.values():
            for place, progress in queues.items():
                ends[place] = max(ends.get(place, 0), progress.offset)
        for (_, topic, queue_id), settled in self._settled.items():
            place = (topic, queue_id)
            ends[place] = max(ends.get(place, 0), settled[-1] + 1)
        return ends

    def freeze(self) -> Callable[[], tuple[list[Any], list[Any]]]:
        """What makes its part of the checkpoint, as of now; any thread may call it.

        Rows of group, topic, queue id, offset, generation; and of group, topic, queue id, settled
        offsets, several where these are many.
        """
        groups = {group: dict(queues) for group, queues in self._groups.items()}
        settled = {key: offsets[:] for key, offsets in self._settled.items()}
        return lambda: (
            [
                [group, topic, queue_id, *progress]
                for group, queues in groups.items()
                for (topic, queue_id), progress in queues.items()
            ],
            [
                [*key, offsets[start : start + SETTLED_ROW].tolist()]
                for key, offsets in settled.items()
                for start in range(0, len(offsets), SETTLED_ROW)
            ],
        )

    def load(self, rows: list[Any], settled_rows: Sequence[Any] = ()) -> None:
        """Puts back what `freeze` gave."""
        self._groups.clear()
        self._entries = 0
        self._settled.clear()
        self._settled_count = 0
        for group, topic, queue_id, offset, generation in rows:
            self.put(GroupQueue(group, topic, queue_id), GroupOffset(offset, generation))
        for group, topic, queue_id, offsets in settled_rows:
            self.settle(GroupQueue(group, topic, queue_id), offsets)
