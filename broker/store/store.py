"""The only door to the broker's messages, topics and offsets.

What is sent, and topics, come in here; other changes are decisions that take the store (changes/).

Owned by: the event loop, which alone calls it.  No clock, no socket, no waiting: a change is
appended to the log at once and takes effect in memory (tables.py); what it answers names the log
position that must be durable before anybody is told (`settled`).  The log's writer thread reports
that position, the loop hands it to `durable`, and only then do consumers see the records.

    append ──► log (memory) ──► writer thread: write, fdatasync ──► durable ──► consume queues
       └─► tables
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from duemq.errors import DuemqError, Internal, Overloaded, ReadOnly, Rejected
from duemq.protocol import limits, names
from duemq_server.broker.group_counts import GroupCounts
from duemq_server.broker.records import batch as batches
from duemq_server.broker.records import due_times, refused_fires, timer_queues
from duemq_server.broker.records.batch import BatchLimits, Columns, IncomingBatch
from duemq_server.broker.store import journal
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.hidden import Hidden
from duemq_server.broker.store.producers import LaneKey, StoredPlace, check_identity
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.broker.store.tables import Tables
from duemq_server.broker.store.topics import Topic, no_queue
from duemq_server.storage import frame
from duemq_server.storage.disk import Buffer, nbytes
from duemq_server.storage.errors import DiskFailed, DiskFull, LogFull
from duemq_server.storage.indexes import consume_queue
from duemq_server.storage.log import SegmentedLog

log = logging.getLogger(__name__)

ANY_QUEUE = -1
ALL_DUE_MS = 1 << 62
# Of what comes back from a retry, or is due: it was accepted before, whatever the limits are now.
# A gRPC message is not larger.
_ACCEPTED_BEFORE = BatchLimits(1 << 24, 1 << 24, 1 << 24)
# More than an entry has around the records of its frame, and than its arrays have for each.
_FRAME_BYTES, _RECORD_BYTES = 1_024, 20
_DISK_FULL = "this broker's disk is full: nothing is stored until there is space"


class Accepted(NamedTuple):
    """A batch that is stored as soon as the log is durable up to `settled`.

    `due_ms` are its due times as packed i64; None for a batch without, and for a duplicate
    (broker/reading/repeats.py).
    """

    stored: StoredPlace
    settled: int
    timed: bool = False
    duplicate: bool = False
    due_ms: bytes | None = None


class _Unindexed(NamedTuple):
    """A frame on its way to the disk, and its consume-queue entries."""

    end: int
    queue: Queue
    entries: bytes


class Store:
    """See the module.  Made by recovery.open_store."""

    def __init__(
        self, log: SegmentedLog, tables: Tables, settings: StoreSettings, next_start: int = 0
    ) -> None:
        """`next_start`: where a start would begin now (recovery.Opening.next_start)."""
        self.log = log
        self.settings = settings
        self.tables = tables
        # To be read by all; they are changed by the methods below, and what is built on them.
        self.topics = tables.topics
        self.producers = tables.producers
        self.offsets = tables.offsets
        self.groups = tables.groups
        self.timer_owners = tables.timer_owners
        self.timers_given = tables.timer_ends()  # up to there, by queue, to owners
        self.sent_back, self.dead_letters = GroupCounts(), GroupCounts()
        self.read_only = False
        """Space is running out: nothing is accepted."""
        self.refusal = ""
        """Why else nothing is accepted, for those who send."""
        self.on_visible: Callable[[Queue], None] = lambda queue: None
        """Called for each queue that got records that consumers may see."""
        self.on_report: Callable[[], None] = lambda: None
        """Called when what nameservers are told has changed: topics, or whether it is writable."""
        self.checkpoint_position = 0
        """Where this process took its last checkpoint; 0: it took none."""
        self.next_start = next_start
        """Where another start begins to replay, by a checkpoint on the disk; retention keeps what
        follows."""
        self._unindexed: deque[_Unindexed] = deque()
        self._held: dict[Queue, list[bytes]] = {}
        self.hidden = Hidden()
        self.messages_in = 0
        self.bytes_in = 0
        self.frames_in = 0
        self.timers_in = 0
        self.duplicates = 0
        self.refused_fires = 0

    # -- sending ----------------------------------------------------------------------------------

    def send(
        self,
        batch: IncomingBatch,
        now_ms: int,
        checked: Columns | DuemqError | None = None,
        due_ms: int = ALL_DUE_MS,
    ) -> Accepted:
        """Stores a batch, or finds that it was stored before.

        `checked`: what `batches.check` said, if it was asked before, or why nothing new is taken.
        `due_ms`: the caller's clock; a batch that is ahead of it is hidden (`show_due`).
        What was stored is looked up before anything may refuse the batch: who hears of a refusal
        may send it elsewhere.  Raises the errors of Broker.Send for a batch, by which nothing is
        changed.
        """
        producer_id, epoch, sequence = batch.producer_id, batch.producer_epoch, batch.sequence
        check_identity(producer_id, epoch, sequence)
        self.timer_owners.check_not_fenced(producer_id)
        timed = due_times.is_timed(batch)
        fires = self.fires(batch)
        queue_id = batch.queue_id
        key = LaneKey(producer_id, batch.topic, queue_id, timed)
        if producer_id:
            stored = self.producers.find(key, epoch, sequence)
            if stored is not None:
                self.duplicates += 1
                return Accepted(stored, stored.position + 1, timed, duplicate=True)
        self.check_writable()
        topic = self.topics.to_send(batch.topic, producer_id)
        lowest = ANY_QUEUE if timed else 0
        # The topic may have been made anew with fewer queues since the message was accepted.
        if not lowest <= queue_id < topic.queues and not (fires and queue_id >= 0):
            raise no_queue(topic, queue_id, lowest)
        if producer_id:
            self.producers.check_next(key, epoch, sequence)
        queue_of = key
        try:
            if isinstance(checked, DuemqError):
                raise checked
            columns = checked or batches.check(batch, *self.limits_of(batch))
        except Rejected as error:
            if not fires:
                raise
            columns = refused_fires.letters_of(batch, error, now_ms)
            topic = self.topics.to_send(refused_fires.TOPIC, producer_id)
            queue_of = LaneKey(producer_id, topic.name, 0, timed=False)
            self.refused_fires += columns.count
            log.error("due messages for %s cannot be stored, see %s: %s", key, topic.name, error)
        due_times_ms, latest_ms = None, 0
        if timed:
            levels_ms = self.settings.delay_levels_ms
            due = due_times.resolve(batch, columns.count, now_ms, levels_ms)
            due_times_ms, latest_ms = due.tobytes(), int(due.max())
        if topic.name not in self.topics:
            room = len(columns.records) + columns.count * _RECORD_BYTES + _FRAME_BYTES
            self.create_topic(topic.name, room=room)
        queue = self._timer_queue(key, latest_ms, now_ms) if timed else self._home(queue_of)
        accepted = self.append_frame(
            queue,
            columns,
            now_ms,
            producer=(producer_id, epoch, sequence),
            target=None if queue.key == (key.topic, key.queue_id) else (key.topic, key.queue_id),
            due_ms=due_times_ms,
            untraced=batch.untraced,
            seen_later=batches.seen_later(batch, due_ms) if queue_of is key else (),
        )
        if producer_id:
            self.producers.record(key, epoch, sequence, accepted.stored)
        return accepted

    def fires(self, batch: IncomingBatch) -> bool:
        """Whether a timer service sends what this or another broker accepted before."""
        return self.timer_owners.knows(batch.producer_id) and not due_times.is_timed(batch)

    def limits_of(self, batch: IncomingBatch) -> tuple[BatchLimits, int]:
        """The limits of a batch, and of a body; its topic may not be there yet."""
        topic = batch.topic
        if names.is_retry(topic) or self.fires(batch):
            return _ACCEPTED_BEFORE, _ACCEPTED_BEFORE.message_bytes_max
        limits = self.settings.limits
        if topic in self.topics:
            return limits, self.topics.limit(self.topics.find(topic))
        return limits, limits.message_bytes_max

    def append_frame(
        self,
        queue: Queue,
        columns: Columns,
        now_ms: int,
        *,
        producer: tuple[int, int, int] = (0, 0, 0),
        target: tuple[str, int] | None = None,
        due_ms: bytes | None = None,
        send_back: bool = False,
        untraced: bool = False,
        seen_later: Sequence[tuple[int, int]] = (),
    ) -> Accepted:
        """Appends records that were checked; with due times to %TIMER%, for a topic's queue.

        `producer`: id, epoch and sequence.  `target`: what was asked for, if it is not `queue`.
        `untraced`: no record carries a trace.  `seen_later`: records seen later.
        Raises ReadOnly, Overloaded.
        """
        stamp_ms = self.tables.stamp(now_ms)
        store_ms = max(stamp_ms, self.hidden.until_ms(queue), *(at_ms for _, at_ms in seen_later))
        target_topic, target_queue_id = target or ("", frame.NO_TARGET_QUEUE)
        producer_id, epoch, sequence = producer
        parts = frame.encode_parts(
            topic=queue.topic,
            queue_id=queue.queue_id,
            base_offset=queue.next_offset,
            store_ms=store_ms,
            sizes=columns.sizes,
            tag_hashes=columns.tag_hashes,
            key_hashes=columns.key_hashes,
            payload=columns.records,
            producer_id=producer_id,
            producer_epoch=epoch,
            sequence=sequence,
            target_topic=target_topic,
            target_queue_id=target_queue_id,
            due_ms=due_ms,
            send_back=send_back,
            untraced=untraced,
        )
        position, end = self.append(frame.KIND, parts)
        payload_at = sum(map(nbytes, parts[:-1]))
        entries = consume_queue.encode(
            position, payload_at, columns.sizes, columns.tag_hashes, columns.key_hashes, store_ms
        )
        self._unindexed.append(_Unindexed(end, queue, entries))
        stored = StoredPlace(position, queue.next_offset, store_ms, queue.queue_id, columns.count)
        if seen_later:
            self.hidden.hide(queue, queue.next_offset, seen_later)
            self.tables.stamp_ahead(store_ms)
        queue.next_offset += columns.count
        self.frames_in += 1
        self.messages_in += columns.count
        self.bytes_in += len(columns.records)
        if due_ms is not None:
            self.timers_in += columns.count
            if timer_queues.at_once(due_ms, now_ms):
                queue.at_once_end = queue.next_offset
        return Accepted(stored, end, due_ms is not None, due_ms=due_ms)

    def _home(self, key: LaneKey) -> Queue:
        """The queue that a lane's batches go to."""
        queues = self.tables.queues.of(key.topic)
        return queues[key.queue_id % len(queues)]

    def _timer_queue(self, key: LaneKey, latest_ms: int, now_ms: int) -> Queue:
        """The queue of %TIMER% that a lane's batch waits in."""
        queues = self.tables.queues.of(names.TIMER_TOPIC)
        if key.queue_id != ANY_QUEUE:
            return queues[timer_queues.ordered(key.queue_id, len(queues))]
        sender = f"{key.topic}|{key.producer_id}"
        return queues[timer_queues.unordered(sender, len(queues), latest_ms, now_ms)]

    # -- the log ----------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether anything is accepted."""
        return not (self.read_only or self.log.disk_full or self._held or self.refusal)

    def check_writable(self) -> None:
        """Raises ReadOnly."""
        self.check_changeable()
        if self.read_only:
            raise ReadOnly(_DISK_FULL)

    def check_changeable(self) -> None:
        """For what takes little space and lets others go: it is what the last space is kept for.

        Raises ReadOnly.
        """
        if self.refusal:
            raise ReadOnly(self.refusal)
        if self.log.disk_full or self._held:
            raise ReadOnly(_DISK_FULL)

    def append(self, kind: int, parts: Sequence[Buffer], room: int = 0) -> tuple[int, int]:
        """An entry: where it begins and ends.  Raises ReadOnly, Overloaded, Internal."""
        try:
            return self.log.append(kind, parts, room)
        except LogFull as error:
            raise Overloaded(f"the disk is behind: {error}") from error
        except DiskFull as error:
            raise ReadOnly(str(error)) from error
        except DiskFailed as error:
            raise Internal(f"the disk failed: {error}") from error

    def durable(self, position: int) -> None:
        """The log is durable up to `position`: shows what lies before it to consumers."""
        gathered, self._held = self._held, {}
        while self._unindexed and self._unindexed[0].end <= position:
            _, queue, entries = self._unindexed.popleft()
            if not queue.dropped:
                gathered.setdefault(queue, []).append(entries)
        for queue, pieces in gathered.items():
            if queue.dropped:
                continue
            before = queue.max_offset
            try:
                queue.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            except DiskFull:
                self._held[queue] = pieces  # shown as soon as there is space
            else:
                if queue.max_offset > before:
                    self.on_visible(queue)

    def show_due(self, due_ms: int) -> None:
        """Shows consumers what was hidden until now, as far as it is durable."""
        self.tables.stamp_shown(due_ms)
        for queue in self.hidden.show(due_ms):
            if not queue.dropped:
                self.on_visible(queue)

    def clock_was_set(self, was_ms: int, back_ms: int) -> None:
        """What is hidden is shown after the time that it would have taken; `was_ms`: if not set."""
        self.tables.stamp_shown(was_ms + limits.FIRE_AHEAD_MS_MAX)
        self.hidden.shift(-back_ms)

    # -- topics -----------------------------------------------------------------------------------

    def queue(self, topic: str, queue_id: int, topic_id: int = 0) -> Queue:
        """`topic_id`: as in Topics.queue.  Raises TopicNotFound, TopicReplaced, QueueNotFound."""
        self.topics.queue(topic, queue_id, topic_id)
        return self.tables.queues.of(topic)[queue_id]

    def queues_of(self, topic: str) -> list[Queue]:
        """Raises TopicNotFound."""
        self.topics.find(topic)
        return self.tables.queues.of(topic)

    def all_queues(self) -> list[Queue]:
        """Every queue of every topic."""
        return self.tables.queues.all()

    def create_topic(
        self, name: str, queues: int = 0, message_bytes_max: int = 0, room: int = 0
    ) -> tuple[Topic, int]:
        """(The topic, settled).  `room`: not unless so many bytes can follow.

        Raises InvalidArgument, TopicExists, ReadOnly, Overloaded.
        """
        self.check_writable()
        topic = self.topics.plan(name, queues, message_bytes_max)
        _, settled = self.append(journal.TOPIC_CREATED, [journal.topic_created(topic)], room)
        self.tables.put_topic(topic)
        self.on_report()
        return topic, settled

    def delete_topic(self, name: str, topic_id: int = 0) -> int:
        """Settled.  Raises TopicNotFound, TopicReplaced, InvalidArgument, ReadOnly, Overloaded."""
        self.check_changeable()
        self.topics.check_deletable(name, topic_id)
        _, settled = self.append(journal.TOPIC_DELETED, [journal.topic_deleted(name)])
        self.tables.remove_topic(name)
        self.on_report()
        return settled

    def ensure_timer_topic(self) -> None:
        """Makes %TIMER% on the first start; its number of queues never changes."""
        if names.TIMER_TOPIC not in self.topics:
            self.create_topic(names.TIMER_TOPIC, self.settings.timer_queues)

    # -- checkpoint and stop ----------------------------------------------------------------------

    def freeze(self) -> Callable[[], CheckpointState]:
        """As Tables.freeze, of the state as of everything appended so far.

        It must not be saved before the log is durable up to its position.
        """
        position = self.log.end_position
        self.tables.epochs.drop_before(self.log.start_position)
        return self.tables.freeze(position, self.log.recovery_start(position))

    def check_shown(self) -> None:
        """Raises DiskFull while consume queues lack what the log has: no checkpoint may be made."""
        if self._held:
            raise DiskFull(f"{len(self._held)} consume queues wait for space")

    def checkpointed(self, position: int) -> None:
        """A checkpoint that was taken at `position` is on the disk."""
        self.checkpoint_position = self.next_start = position

    def close(self) -> None:
        """Closes the files."""
        for queue in self.all_queues():
            with suppress(DiskFull, DiskFailed):  # the next start makes up for it, from the log
                queue.close()
        self.log.close()
