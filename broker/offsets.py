"""How far groups are, and which generation of each may say so.  Pure.

Owned by: Store.  Mutated by: the event loop.

A queue's *fence* is the highest generation that has acquired it.  Pulls and commits of a lower
generation are refused, so that a member which lost a queue without noticing moves nothing.
Generation 0 means no membership (a consumer that assigns its queues itself, an administrator): it
is never fenced.  Changes are entries of the commit log (journal.py), answered when durable.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from duemq.errors import FencedMember, InvalidArgument, OffsetOutOfRange, Overloaded

ENTRIES_MAX = 200_000
# Generations are near the time in ms.  A greater one than this could not be counted on from.
GENERATION_MAX = 1 << 62


def check_generation(generation: int) -> None:
    """Raises InvalidArgument unless a member may have got this generation; 0: no membership."""
    if not 0 <= generation <= GENERATION_MAX:
        raise InvalidArgument(
            f"generation: {generation} was never given to a member",
            field="generation",
            value=generation,
            limit=f"0 to {GENERATION_MAX}",
        )


class GroupQueue(NamedTuple):
    """A queue of this broker as one group sees it."""

    group: str
    topic: str
    queue_id: int


class Progress(NamedTuple):
    """`offset`: the next record to consume.  `generation`: the fence."""

    offset: int
    generation: int


class Offsets:
    """The committed offsets of all groups on this broker."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._groups: dict[str, dict[tuple[str, int], Progress]] = {}
        self._entries = 0

    def find(self, key: GroupQueue) -> Progress | None:
        """None: the group never was there."""
        queues = self._groups.get(key.group)
        return queues.get((key.topic, key.queue_id)) if queues else None

    def check_fence(self, key: GroupQueue, generation: int) -> None:
        """Raises FencedMember for an overtaken generation, InvalidArgument for an illegal one."""
        check_generation(generation)
        progress = self.find(key)
        if progress is not None and 0 < generation < progress.generation:
            raise FencedMember(
                f"generation: {generation} of group {key.group} was replaced by"
                f" {progress.generation} for topic {key.topic}, queue {key.queue_id}",
                field="generation",
                value=generation,
                limit=progress.generation,
            )

    def acquire(
        self, key: GroupQueue, generation: int, start: int, min_offset: int, max_offset: int
    ) -> Progress:
        """What the queue's progress becomes when `generation` takes it over; `put` makes it so.

        `start` is where a group begins that was never there.  Raises FencedMember.
        """
        self.check_fence(key, generation)
        known = self.find(key)
        if known is None:
            return Progress(start, generation)
        offset = min(max(known.offset, min_offset), max_offset)
        return Progress(offset, max(known.generation, generation))

    def commit(self, key: GroupQueue, generation: int, offset: int, max_offset: int) -> Progress:
        """What the progress becomes by a commit; raises FencedMember, OffsetOutOfRange."""
        self.check_fence(key, generation)
        if not 0 <= offset <= max_offset:
            raise OffsetOutOfRange(
                f"offset: {offset} cannot be committed for topic {key.topic},"
                f" queue {key.queue_id}: 0 to {max_offset}",
                field="offset",
                value=offset,
                limit=f"0 to {max_offset}",
            )
        known = self.find(key)
        return Progress(offset, max(generation, known.generation if known else 0))

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

    def put(self, key: GroupQueue, progress: Progress) -> None:
        """Makes the progress so; the caller has checked that there is room."""
        queues = self._groups.setdefault(key.group, {})
        place = (key.topic, key.queue_id)
        if place not in queues:
            self._entries += 1
        queues[place] = progress

    def groups(self) -> list[str]:
        """The groups that have offsets here."""
        return sorted(self._groups)

    def generation_of(self, group: str) -> int:
        """The newest generation that has taken over a queue of this broker; 0: none."""
        queues = self._groups.get(group, {})
        return max((progress.generation for progress in queues.values()), default=0)

    def of_group(self, group: str, topic: str = "") -> Iterator[tuple[str, int, Progress]]:
        """(topic, queue id, progress) of a group, of one topic or of all."""
        # A copy first: metrics are read in another thread.
        queues = list(self._groups.get(group, {}).items())
        for (name, queue_id), progress in sorted(queues):
            if not topic or topic == name:
                yield name, queue_id, progress

    def forget_topic(self, topic: str) -> None:
        """The topic is deleted: its offsets mean nothing any more."""
        for group in list(self._groups):
            queues = self._groups[group]
            for place in [place for place in queues if place[0] == topic]:
                del queues[place]
                self._entries -= 1
            if not queues:
                del self._groups[group]

    def encode(self) -> list[Any]:
        """For the checkpoint: rows of group, topic, queue id, offset, generation."""
        return [
            [group, topic, queue_id, *progress]
            for group, queues in self._groups.items()
            for (topic, queue_id), progress in queues.items()
        ]

    def load(self, rows: list[Any]) -> None:
        """Puts back what `encode` gave."""
        self._groups.clear()
        self._entries = 0
        for group, topic, queue_id, offset, generation in rows:
            self.put(GroupQueue(group, topic, queue_id), Progress(offset, generation))
