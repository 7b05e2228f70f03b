"""A start: the entries of the log take their effect on the tables once more.  Pure.

Owned by: recovery.Opening; by Standby, for whom a start never ends.  What a frame says by itself is
read off it: where its records lie, its producer's lane, and, of a send-back, what it settles for
which group.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace

from duemq.errors import InvariantError
from duemq.protocol import names
from duemq_server.broker.records import retry_record
from duemq_server.broker.store import journal
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.producers import LaneKey, StoredPlace
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.broker.store.tables import Tables
from duemq_server.storage import frame, record
from duemq_server.storage.errors import DiskFull
from duemq_server.storage.indexes import consume_queue
from duemq_server.storage.record import Entry
from duemq_server.storage.replicas import epoch
from duemq_server.storage.tools import set_aside

log = logging.getLogger(__name__)


class Replay:
    """Up to `known_to` of the log the tables know all but what lies in the queues.

    `position`: where the next entry lies.
    """

    def __init__(
        self, tables: Tables, settings: StoreSettings, position: int = 0, known_to: int = 0
    ) -> None:
        self._tables = tables
        self._settings = settings
        self.position = position
        """The tables are the log up to here."""
        self._known_to = known_to
        # Whose frames are of a topic that was deleted since, or made anew.
        self._gone: set[str] = set()
        self._may_hold_bytes = 0
        self._full = False

    def run(self, entries: Iterable[Entry], *, may_hold_bytes: int = 0) -> int:
        """Applies entries in their order; how many there were.

        `may_hold_bytes`: of queues' entries that find no space, in memory.  Raises DiskFull: may be
        run again with the entries from `position` on.
        """
        self._may_hold_bytes, self._full = may_hold_bytes, False
        replayed = 0
        for entry in entries:
            if entry.end <= self._known_to:
                self._fill(entry)
            else:
                self._apply(entry)
            self.position = entry.end
            replayed += 1
        return replayed

    # -- what is known but for the queues ---------------------------------------------------------

    def _fill(self, entry: Entry) -> None:
        match entry.kind:
            case frame.KIND:
                found = frame.decode(entry.body)
                name, tables = found.topic, self._tables
                if name in self._gone or name not in tables.topics:
                    return
                if found.queue_id < tables.topics.find(name).queues:
                    self._index(entry.position, found, tables.queues.of(name)[found.queue_id])
            case journal.TOPIC_CREATED:
                topic = journal.read_topic_created(entry.body)
                self._empty(topic.name, topic.id)
            case journal.TOPIC_DELETED:
                self._empty(journal.read_topic_deleted(entry.body))
            case journal.GROUP_DELETED:
                self._empty(names.retry_topic(journal.read_group_deleted(entry.body)))

    def _empty(self, name: str, made: int | None = None) -> None:
        """What came so far was of another topic of that name; what comes is of `made`."""
        if name not in self._tables.topics:
            return
        for queue in self._tables.queues.of(name):
            queue.restart()
        if made == self._tables.topics.find(name).id:
            self._gone.discard(name)
        else:
            self._gone.add(name)

    # -- what is new ------------------------------------------------------------------------------

    def _apply(self, entry: Entry) -> None:
        tables = self._tables
        match entry.kind:
            case frame.KIND:
                self._frame(entry.position, frame.decode(entry.body))
            case set_aside.GAP:
                # The next frame of its queue leaves out its offsets; if there is one.
                tables.set_aside.append((entry.position, entry.end - entry.position))
            case journal.TOPIC_CREATED:
                topic = journal.read_topic_created(entry.body)
                if topic.name not in tables.topics or tables.topics.find(topic.name) != topic:
                    tables.put_topic(topic)
            case journal.TOPIC_DELETED:
                tables.remove_topic(journal.read_topic_deleted(entry.body))
            case journal.OFFSETS:
                for key, progress in self._offsets(entry):
                    tables.offsets.put(key, progress)
            case journal.OFFSETS_RESET:
                tables.reset_offsets(self._offsets(entry))
            case journal.SETTLED:
                for group_queue, settled in journal.read_settled(entry.body):
                    if self._knows(group_queue):
                        tables.offsets.settle(group_queue, settled)
            case journal.GROUP_PUT:
                tables.groups.put(journal.read_group_put(entry.body))
            case journal.GROUP_DELETED:
                tables.remove_group(journal.read_group_deleted(entry.body))
            case journal.MEMBERSHIP:
                tables.put_membership(*journal.read_membership(entry.body))
            case journal.TIMER_CLAIMED:
                tables.claim_timers(*journal.read_timer_claimed(entry.body))
            case journal.TIMER_HANDED_OVER:
                tables.hand_over_timers(*journal.read_timer_handed_over(entry.body))
            case journal.TIMER_RELEASED:
                tables.timer_owners.release(journal.read_timer_released(entry.body))
            case epoch.KIND:
                tables.epochs.note(epoch.decode(entry.body).epoch, entry.position)
            case kind if kind >= record.REPLICATION_KINDS:
                pass  # says who holds the log, not what is stored
            case kind:
                raise InvariantError(f"log position {entry.position}: unknown kind {kind}")

    def _offsets(self, entry: Entry) -> list[tuple[GroupQueue, GroupOffset]]:
        changes = journal.read_offsets(entry.body)
        return [(key, progress) for key, progress in changes if self._knows(key)]

    def _knows(self, key: GroupQueue) -> bool:
        """Whether the topic is known; then it has that queue, as in _queue_of."""
        known = key.topic in self._tables.topics
        if known:
            self._queue_of(key.topic, key.queue_id)
        return known

    def _frame(self, position: int, found: frame.Frame) -> None:
        self._tables.stamp(found.store_ms)
        self._index(position, found, self._queue_of(found.topic, found.queue_id))
        if found.send_back:
            self._send_back(found)
        if found.producer_id:
            self._lane(position, found)

    def _index(self, position: int, found: frame.Frame, queue: Queue) -> None:
        if found.base_offset > queue.next_offset and queue.max_offset > queue.min_offset:
            queue.skip_to(found.base_offset)
        elif found.base_offset != queue.next_offset:
            if queue.max_offset > queue.min_offset:
                raise InvariantError(
                    f"log position {position}: frame begins at offset {found.base_offset}"
                    f" of {queue.key}, {queue.next_offset} is next"
                )
            queue.restart(found.base_offset)
        self._append(queue, consume_queue.encode_frame(position, found))
        queue.next_offset = found.end_offset

    def _append(self, queue: Queue, entries: bytes) -> None:
        if not self._full:
            try:
                queue.append(entries)
            except DiskFull as error:
                if not self._may_hold_bytes:
                    raise
                log.error("what lies in the queues waits in memory: %s", error)
                self._full = True
            else:
                return
        # Without a start nobody could read, and nothing would ever be removed.
        self._may_hold_bytes -= len(entries)
        if self._may_hold_bytes < 0:
            raise DiskFull(f"no space for what lies in the queues, {queue.key} and others")
        queue.hold(entries)

    def _queue_of(self, name: str, queue_id: int) -> Queue:
        """The queue of a frame.

        In a rebuild without a checkpoint, retention may have removed the entry that made the topic:
        then it has as many queues as one that is made now, and at least those that there are frames
        of, or a group's offsets.  If it was deleted, the entry that says so comes after these.
        """
        tables = self._tables
        known = tables.topics.find(name) if name in tables.topics else None
        if known is None:
            own = self._settings.timer_queues if name == names.TIMER_TOPIC else 0
            topic = tables.topics.plan(name, own)
            tables.put_topic(replace(topic, queues=max(topic.queues, queue_id + 1)))
        elif queue_id >= known.queues:
            grown = replace(known, queues=queue_id + 1)
            tables.queues.grow(grown)
            tables.topics.put(grown)
        return tables.queues.of(name)[queue_id]

    def _send_back(self, found: frame.Frame) -> None:
        tables = self._tables
        group_topic = found.target_topic or found.topic
        group = names.group_of(group_topic)
        if group_topic not in tables.topics:  # as in _queue_of
            tables.put_topic(tables.topics.plan(group_topic))
        offsets: dict[GroupQueue, list[int]] = {}
        for topic, queue_id, offset in retry_record.sources(found.payload, found.sizes):
            offsets.setdefault(GroupQueue(group, topic, queue_id), []).append(offset)
        for key, settled in offsets.items():
            if self._knows(key):
                tables.offsets.settle(key, settled)
        if found.timed:
            tables.count_retries(group, found.count)

    def _lane(self, position: int, found: frame.Frame) -> None:
        topic, queue_id = found.topic, found.queue_id
        if found.target_topic:
            topic, queue_id = found.target_topic, found.target_queue_id
        self._tables.producers.record(
            LaneKey(found.producer_id, topic, queue_id, found.timed),
            found.producer_epoch,
            found.sequence,
            StoredPlace(position, found.base_offset, found.store_ms, found.queue_id, found.count),
        )
