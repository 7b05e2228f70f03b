"""How far groups are, for people: offsets, lag, what is in flight.  Pure.

`Activity` is what the broker has seen groups do since it started: one dict entry a (group, queue),
written once a pull or commit of it.  Owned by: the event loop; read by any thread.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from duemq.errors import DuemqError
from duemq.protocol import names
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store

# Beyond it what is new is not noted: the place in queues that so many groups pull from is unknown.
ENTRIES_MAX = 200_000


class Activity:
    """The last pull and the last commit of each group in each queue."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._pulled: dict[GroupQueue, int] = {}
        self._committed_ms: dict[GroupQueue, int] = {}

    def pulled(self, key: GroupQueue, next_offset: int) -> None:
        """The group was given records; its next pull goes on from `next_offset`."""
        if len(self._pulled) < self._entries_max or key in self._pulled:
            self._pulled[key] = next_offset

    def committed(self, key: GroupQueue, now_ms: int) -> None:
        """The group has committed."""
        if len(self._committed_ms) < self._entries_max or key in self._committed_ms:
            self._committed_ms[key] = now_ms

    def pulled_to(self, key: GroupQueue) -> int:
        """Where the last pull went on; 0: none."""
        return self._pulled.get(key, 0)

    def committed_ms(self, key: GroupQueue) -> int:
        """When the last commit was; 0: none."""
        return self._committed_ms.get(key, 0)

    def behind(self, find: Callable[[GroupQueue], GroupOffset | None]) -> list[GroupQueue]:
        """Where groups were given more than they have committed, which `find` tells."""
        return [key for key in list(self._pulled) if self.is_behind(key, find(key))]

    def is_behind(self, key: GroupQueue, progress: GroupOffset | None) -> bool:
        """Whether the group has still to commit what it was given."""
        return progress is not None and progress.offset < self.pulled_to(key)

    def forget_pull(self, key: GroupQueue) -> None:
        """What was handed out does not count any more: the offset was moved."""
        self._pulled.pop(key, None)

    def forget(self, *, group: str = "", topic: str = "") -> None:
        """A group, or a topic, was deleted: one made anew begins anew."""
        self.prune(lambda key: key.group != group and key.topic != topic)

    def prune(self, is_known: Callable[[GroupQueue], bool]) -> None:
        """Forgets deleted topics and groups, and groups that never had an offset."""
        for noted in (self._pulled, self._committed_ms):
            for key in [key for key in noted if not is_known(key)]:
                del noted[key]


class QueueState(NamedTuple):
    """A group in one queue."""

    queue: Queue
    progress: GroupOffset
    settled: Sequence[int]
    pulled_offset: int

    @property
    def waiting_offset(self) -> int:
        """The oldest record that needs a delivery; `max_offset`: none."""
        offset = max(self.progress.offset, self.queue.min_offset)
        for settled in self.settled:
            if settled > offset:
                break
            if settled == offset:
                offset += 1
        return offset

    @property
    def lag(self) -> int:
        """Records not yet committed."""
        return self.queue.records_from(max(self.progress.offset, self.queue.min_offset))

    @property
    def in_flight(self) -> int:
        """Handed out, neither committed nor sent back."""
        pulled = self.pulled_offset
        done = sum(offset < pulled for offset in self.settled)
        return max(0, pulled - self.progress.offset - done)

    def lag_ms(self, now_ms: int) -> int:
        """How long the oldest record that needs a delivery has been stored; 0: there is none."""
        while (offset := self.waiting_offset) < self.queue.max_offset:
            try:
                entry = self.queue.entry_from(offset)
                return max(0, now_ms - entry[5]) if entry else 0
            except (IndexError, FileNotFoundError):
                if self.queue.dropped:
                    return 0
                if self.queue.min_offset <= offset:
                    raise
                # Retention has removed it meanwhile.
        return 0


def states_of(store: Store, activity: Activity, group: str) -> Iterable[QueueState]:
    """A group in every queue that it has an offset for.  Any thread; not exact then."""
    for topic, queue_id, progress in store.offsets.of_group(group):
        with suppress(DuemqError):  # the topic was deleted meanwhile
            yield state_of(store, activity, GroupQueue(group, topic, queue_id), progress)


def state_of(
    store: Store, activity: Activity, key: GroupQueue, progress: GroupOffset
) -> QueueState:
    """Raises TopicNotFound, QueueNotFound."""
    queue = store.queue(key.topic, key.queue_id)
    return QueueState(queue, progress, tuple(store.offsets.settled(key)), activity.pulled_to(key))


def lags(store: Store) -> dict[tuple[str, str], int]:
    """Records not yet committed, by group and topic.  Any thread; not exact then."""
    found: dict[tuple[str, str], int] = {}
    for group in store.offsets.groups():
        for topic, queue_id, progress in store.offsets.of_group(group):
            with suppress(DuemqError):  # the topic was deleted meanwhile
                lag = store.queue(topic, queue_id).records_from(progress.offset)
                found[group, topic] = found.get((group, topic), 0) + lag
    return found


def retries_waiting(store: Store, group: str) -> int:
    """Records that the group sent back here and that are not in its retry topic yet."""
    topic = names.retry_topic(group)
    queues = store.queues_of(topic) if topic in store.topics else []
    sent_back = store.tables.retries.get(group, 0)
    return max(0, sent_back - sum(queue.next_offset for queue in queues))


def dead_letters_kept(store: Store, group: str) -> int:
    """Messages in the group's dead-letter topic here."""
    topic = names.dead_letter_topic(group)
    if topic not in store.topics:
        return 0
    return sum(queue.records_from(queue.min_offset) for queue in store.queues_of(topic))
