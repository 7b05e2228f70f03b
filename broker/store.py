"""The only door to the broker's messages, topics and offsets.

Owned by: the event loop, which alone calls it.  No clock, no socket, no waiting: a change is
appended to the log at once and takes effect in memory; what it answers names the log position that
must be durable before anybody is told (`settled`).  The log's writer thread reports that position,
the loop hands it to `durable`, and only then do consumers see the records.

    append ──► log (memory) ──► writer thread: write, fdatasync ──► durable ──► consume queues
       └─► lanes, topics, offsets

Everything here can be rebuilt from the log; `snapshot` and `restore` spare that (state.py).
"""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from broker import batch as batches
from broker import due, group_configs, journal, names, retry_record
from broker.batch import Batch, Columns, Limits
from broker.group_configs import GroupConfig, GroupConfigs, RetryPolicy
from broker.group_counts import GroupCounts
from broker.offsets import GroupQueue, Offsets, Progress
from broker.producers import (
    SERVICE_IDS_FROM,
    LaneKey,
    Producers,
    Stored,
    check_identity,
)
from broker.queues import Queue, QueueTable
from broker.state import State
from broker.topics import Topic, Topics
from duemq.errors import (
    Corrupt,
    DuemqError,
    GroupNotFound,
    Internal,
    InvalidArgument,
    InvariantError,
    OutOfSequence,
    Overloaded,
    PermissionDenied,
    QueueNotFound,
    ReadOnly,
    TopicNotFound,
)
from storage import consume_queue, frame
from storage.disk import Buffer, nbytes
from storage.errors import DiskFailed, DiskFull, LogFull, StorageError
from storage.log import SegmentedLog
from storage.record import Entry

DAY_MS = 86_400_000
ANY_QUEUE = -1
# Of what comes back from a retry: it was accepted before, whatever the limits are now.  A gRPC
# message is not larger.
_ACCEPTED_BEFORE = Limits(1 << 24, 1 << 24, 1 << 24)


@dataclass(frozen=True)
class Rules:
    """How the store treats what it is sent."""

    auto_create_topics: bool = True
    default_queues: int = 4
    limits: Limits = field(default_factory=Limits)
    delay_levels_ms: tuple[int, ...] = due.parse_levels(due.DEFAULT_LEVELS)
    timer_queues: int = 4
    lane_idle_ms: int = 7 * DAY_MS
    auto_create_groups: bool = True
    retry: RetryPolicy = group_configs.DEFAULT_POLICY


class Accepted(NamedTuple):
    """A batch that is stored as soon as the log is durable up to `settled`.

    `due_ms` are its due times as packed i64; None for a batch without, and for a duplicate (see
    `due_of`).
    """

    stored: Stored
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

    def __init__(self, log: SegmentedLog, queues: QueueTable, rules: Rules) -> None:
        self.log = log
        self.rules = rules
        self.topics = Topics(rules.default_queues, rules.limits.message_bytes_max)
        self.producers = Producers(rules.lane_idle_ms)
        self.offsets = Offsets()
        self.groups = GroupConfigs(rules.retry)
        self.retries: dict[str, int] = {}
        """Records ever sent back for another delivery, by group."""
        self.sent_back = GroupCounts()
        self.dead_letters = GroupCounts()
        self.read_only = False
        """Space is running out: nothing is accepted."""
        self.on_visible: Callable[[Queue], None] = lambda queue: None
        """Called for each queue that got records that consumers may see."""
        self.on_report: Callable[[], None] = lambda: None
        """Called when what nameservers are told has changed: topics, or whether it is writable."""
        self._queues = queues
        self._unindexed: deque[_Unindexed] = deque()
        self._held: dict[Queue, list[bytes]] = {}
        self._store_ms = 0
        # A rebuild replays what the checkpoint's counts have in them.
        self._retries_counted_to = 0
        self._counts_retries = True
        self.messages_in = 0
        self.bytes_in = 0
        self.frames_in = 0
        self.timers_in = 0
        self.duplicates = 0

    # -- sending ----------------------------------------------------------------------------------

    def send(
        self, batch: Batch, now_ms: int, checked: Columns | DuemqError | None = None
    ) -> Accepted:
        """Stores a batch, or finds that it was stored before.

        `checked`: what `batches.check` said, if it was asked before.  Raises the errors of
        Broker.Send for a batch, by which nothing is changed.
        """
        self.check_writable()
        producer_id, epoch, sequence = batch.producer_id, batch.producer_epoch, batch.sequence
        check_identity(producer_id, epoch, sequence)
        topic = self._topic_to_send(batch.topic, producer_id)
        timed = due.is_timed(batch)
        queue_id = batch.queue_id
        self._check_queue(topic, queue_id, timed)
        key = LaneKey(producer_id, topic.name, queue_id, timed)
        if producer_id:
            stored = self.producers.check(key, epoch, sequence, now_ms)
            if stored is not None:
                self.duplicates += 1
                return Accepted(stored, stored.position + 1, timed, duplicate=True)
        if isinstance(checked, DuemqError):
            raise checked
        columns = checked or batches.check(batch, *self.limits_of(topic.name))
        due_ms = (
            due.resolve(batch, columns.count, now_ms, self.rules.delay_levels_ms).tobytes()
            if timed
            else None
        )
        if topic.name not in self.topics:
            self.create_topic(topic.name)
        accepted = self.append_frame(
            self._home(key),
            columns,
            now_ms,
            producer=(producer_id, epoch, sequence),
            target=(key.topic, key.queue_id) if timed else None,
            due_ms=due_ms,
        )
        if producer_id:
            self.producers.record(key, epoch, sequence, accepted.stored)
        return accepted

    def limits_of(self, topic: str) -> tuple[Limits, int]:
        """The limits of a batch, and of a body, for a topic that may not be there yet."""
        if names.is_retry(topic):
            return _ACCEPTED_BEFORE, _ACCEPTED_BEFORE.message_bytes_max
        limits = self.rules.limits
        if topic in self.topics:
            return limits, self.topics.limit(self.topics.find(topic))
        return limits, limits.message_bytes_max

    def _topic_to_send(self, name: str, producer_id: int) -> Topic:
        """The topic, or the one that the first good batch will make."""
        if producer_id < SERVICE_IDS_FROM and names.group_of(name):
            raise PermissionDenied(
                f"topic: {name} holds what a group sent back: only brokers write to it",
                field="topic",
                value=name,
            )
        if name in self.topics:
            if name == names.TIMER_TOPIC:
                raise InvalidArgument(
                    f"topic: {name} is the broker's own: send to a topic, with a due time",
                    field="topic",
                    value=name,
                    limit="not %TIMER%",
                )
            return self.topics.find(name)
        if not self.rules.auto_create_topics:
            raise TopicNotFound(
                f"topic: {name!r} is not here, and auto_create_topics is off",
                field="topic",
                value=name,
            )
        return self.topics.plan(name)

    def _check_queue(self, topic: Topic, queue_id: int, timed: bool) -> None:
        lowest = ANY_QUEUE if timed else 0
        if not lowest <= queue_id < topic.queues:
            raise QueueNotFound(
                f"queue_id: {queue_id} is not a queue of topic {topic.name}:"
                f" {lowest} to {topic.queues - 1}",
                field="queue_id",
                value=queue_id,
                limit=f"{lowest} to {topic.queues - 1}",
            )

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
    ) -> Accepted:
        """Appends records that were checked; with due times to %TIMER%, for a topic's queue.

        `producer`: id, epoch and sequence.  Raises ReadOnly, Overloaded.
        """
        store_ms = self._store_ms = max(now_ms, self._store_ms)
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
        )
        position, end = self._append(frame.KIND, parts)
        payload_at = sum(map(nbytes, parts[:-1]))
        entries = consume_queue.encode(
            position, payload_at, columns.sizes, columns.tag_hashes, columns.key_hashes, store_ms
        )
        self._unindexed.append(_Unindexed(end, queue, entries))
        stored = Stored(position, queue.next_offset, store_ms, queue.queue_id, columns.count)
        queue.next_offset += columns.count
        self.frames_in += 1
        self.messages_in += columns.count
        self.bytes_in += len(columns.records)
        timed = due_ms is not None
        if timed:
            self.timers_in += columns.count
        return Accepted(stored, end, timed, due_ms=due_ms)

    def _home(self, key: LaneKey) -> Queue:
        """The queue that a lane's batches go to: the one named, or one of %TIMER%."""
        if not key.timed:
            return self._queues.of(key.topic)[key.queue_id]
        timer_queues = self._queues.of(names.TIMER_TOPIC)
        number = key.queue_id
        if number == ANY_QUEUE:
            number = zlib.crc32(f"{key.topic}|{key.producer_id}".encode())
        return timer_queues[number % len(timer_queues)]

    def due_of(self, stored: Stored) -> bytes:
        """Due times of a stored batch as packed i64, for its repeat.

        Any thread, once the batch is durable.  Raises OutOfSequence if retention has removed it.
        """
        try:
            entry = self.log.read_entry(stored.position)
        except IndexError as error:
            raise OutOfSequence(
                "sequence: the batch was stored, but is no longer kept; its due times are unknown",
                field="sequence",
            ) from error
        except (StorageError, OSError) as error:
            raise Corrupt(f"{type(error).__name__}: {error}") from error
        return frame.decode(entry.body).due_ms.tobytes()

    # -- the log ----------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether anything is accepted."""
        return not (self.read_only or self.log.disk_full or self._held)

    def check_writable(self) -> None:
        """Raises ReadOnly."""
        if not self.writable:
            raise ReadOnly("this broker's disk is full: nothing is stored until there is space")

    def _append(self, kind: int, parts: Sequence[Buffer]) -> tuple[int, int]:
        try:
            return self.log.append(kind, parts)
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
            try:
                queue.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            except DiskFull:
                self._held[queue] = pieces  # shown as soon as there is space
            else:
                self.on_visible(queue)

    def check_shown(self) -> None:
        """Raises DiskFull while consume queues lack what the log has: no checkpoint may be made."""
        if self._held:
            raise DiskFull(f"{len(self._held)} consume queues wait for space")

    # -- topics -----------------------------------------------------------------------------------

    def queue(self, topic: str, queue_id: int) -> Queue:
        """Raises TopicNotFound, QueueNotFound."""
        self.topics.queue(topic, queue_id)
        return self._queues.of(topic)[queue_id]

    def queues_of(self, topic: str) -> list[Queue]:
        """Raises TopicNotFound."""
        self.topics.find(topic)
        return self._queues.of(topic)

    def create_topic(
        self, name: str, queues: int = 0, message_bytes_max: int = 0
    ) -> tuple[Topic, int]:
        """(The topic, settled).  Raises InvalidArgument, TopicExists, ReadOnly, Overloaded."""
        self.check_writable()
        topic = self.topics.plan(name, queues, message_bytes_max)
        _, settled = self._append(journal.TOPIC_CREATED, [journal.topic_created(topic)])
        self._put_topic(topic)
        self.on_report()
        return topic, settled

    def delete_topic(self, name: str) -> int:
        """Settled.  Raises TopicNotFound, InvalidArgument, ReadOnly, Overloaded."""
        self.check_writable()
        self.topics.check_deletable(name)
        _, settled = self._append(journal.TOPIC_DELETED, [journal.topic_deleted(name)])
        self._remove_topic(name)
        self.on_report()
        return settled

    def _put_topic(self, topic: Topic) -> None:
        self.topics.put(topic)
        for queue in self._queues.add(topic):
            queue.restart()  # files of its name are a crash's leftovers

    def _remove_topic(self, name: str) -> None:
        self._queues.remove(self.topics.remove(name))
        self._forget_topic(name)

    def _forget_topic(self, name: str) -> None:
        self.producers.forget_topic(name)
        self.offsets.forget_topic(name)
        if names.is_retry(name) and self._counts_retries:
            self.retries.pop(names.group_of(name), None)

    # -- groups -----------------------------------------------------------------------------------

    def knows_group(self, group: str) -> bool:
        """Whether the group was put, or has offsets here."""
        return group in self.groups or group in self.offsets or group == names.TIMER_GROUP

    def check_group_known(self, group: str) -> None:
        """Raises GroupNotFound for an unknown group where groups must be put first."""
        if not (self.rules.auto_create_groups or self.knows_group(group)):
            raise group_configs.not_found(group)

    def group_names(self) -> list[str]:
        """The groups that were put."""
        return sorted(self.groups)

    def group_config(self, group: str) -> GroupConfig:
        """What is in force for a group, also for one that is not known."""
        return self.groups.effective(group)

    def put_group(self, config: GroupConfig) -> int:
        """Settled.  Raises InvalidArgument, ReadOnly, Overloaded."""
        self.check_writable()
        self.groups.check(config)
        _, settled = self._append(journal.GROUP_PUT, [journal.group_put(config)])
        self.groups.put(config)
        return settled

    def delete_group(self, group: str) -> int:
        """Forgets a group's settings and offsets and deletes its retry topic.

        Settled.  Raises GroupNotFound, InvalidArgument, ReadOnly, Overloaded.
        """
        names.check_own_group(group)
        if not self.knows_group(group):
            raise GroupNotFound(f"group: {group!r} is not here", field="group", value=group)
        self.check_writable()
        _, settled = self._append(journal.GROUP_DELETED, [journal.group_deleted(group)])
        self._remove_group(group)
        self.on_report()
        return settled

    def _remove_group(self, group: str) -> None:
        self.groups.remove(group)
        self.offsets.forget_group(group)
        topic = names.retry_topic(group)
        if topic in self.topics:
            self._remove_topic(topic)
        else:  # deleted while the checkpoint was made, which left it out
            self._forget_topic(topic)

    def retries_waiting(self, group: str) -> int:
        """Records that the group sent back here and that are not in its retry topic yet."""
        topic = names.retry_topic(group)
        queues = self._queues.of(topic) if topic in self.topics else []
        return max(0, self.retries.get(group, 0) - sum(queue.next_offset for queue in queues))

    # -- offsets of groups ------------------------------------------------------------------------

    def put_offsets(self, group: str, changes: list[tuple[GroupQueue, Progress]]) -> int:
        """Settled; 0 if nothing is to be waited for.  Raises ReadOnly, Overloaded."""
        fresh = [(key, new) for key, new in changes if self.offsets.find(key) != new]
        if not fresh:
            # Equal to what is known, which may still be on its way to the disk.
            return self.log.end_position if changes else 0
        self.offsets.check_room(key for key, _ in fresh)
        _, settled = self._append(journal.OFFSETS, [journal.offsets(group, fresh)])
        for key, progress in fresh:
            self.offsets.put(key, progress)
        return settled

    def reset_offsets(self, group: str, offsets: list[tuple[GroupQueue, int]]) -> int:
        """Moves a group; members lose these queues, and nothing is settled there any more.

        The caller has checked that the offsets are kept.  Settled.  Raises ReadOnly, Overloaded.
        """
        if not offsets:
            return 0
        self.offsets.check_room(key for key, _ in offsets)
        changes = [(key, self.offsets.reset(key, offset)) for key, offset in offsets]
        _, settled = self._append(journal.OFFSETS_RESET, [journal.offsets(group, changes)])
        self._apply_reset(changes)
        return settled

    def _apply_reset(self, changes: list[tuple[GroupQueue, Progress]]) -> None:
        for key, progress in changes:
            self.offsets.clear_settled(key)
            self.offsets.put(key, progress)

    def lags(self) -> dict[tuple[str, str], int]:
        """Records not yet committed, by group and topic.  Any thread; not exact then."""
        lags: dict[tuple[str, str], int] = {}
        for group in self.offsets.groups():
            for topic, queue_id, progress in self.offsets.of_group(group):
                with suppress(DuemqError):
                    lag = self.queue(topic, queue_id).max_offset - progress.offset
                    lags[group, topic] = lags.get((group, topic), 0) + lag
        return lags

    # -- start and checkpoint ---------------------------------------------------------------------

    def snapshot(self) -> State:
        """The state as of everything appended so far.

        It must not be saved before the log is durable up to its position.
        """
        position = self.log.end_position
        return State(
            position=position,
            verify_from=self.log.recovery_start(position),
            store_ms=self._store_ms,
            topics=self.topics.encode(),
            offsets=self.offsets.encode(),
            queues={
                topic.name: [queue.next_offset for queue in self._queues.of(topic.name)]
                for topic in self.topics
            },
            lanes=self.producers.encode(),
            settled=self.offsets.encode_settled(),
            groups=self.groups.encode(),
            retries=dict(self.retries),
        )

    def without_deleted(self, state: State) -> State:
        """The snapshot without topics that were deleted since: their queues get no more entries.

        To be called when the log is durable up to its position.
        """
        kept = {
            row["name"]
            for row in state.topics["topics"]
            if row["name"] in self.topics and self.topics.find(row["name"]).id == row["id"]
        }
        rows = [row for row in state.topics["topics"] if row["name"] in kept]
        queues = {name: offsets for name, offsets in state.queues.items() if name in kept}
        return state._replace(topics={**state.topics, "topics": rows}, queues=queues)

    def restore(self, state: State, *, rebuild: bool = False) -> None:
        """Takes a checkpoint over; with `rebuild` only what the log cannot tell again.

        Raises IndexError if a consume queue does not reach as far as the checkpoint says.
        """
        self._store_ms = state.store_ms
        self.topics.load(state.topics)
        self.offsets.load(state.offsets, state.settled)
        self.groups.load(state.groups)
        self.retries = dict(state.retries)
        self._retries_counted_to = state.position
        for topic in self.topics:
            for queue, next_offset in zip(
                self._queues.add(topic), state.queues[topic.name], strict=True
            ):
                if rebuild:
                    queue.restart(next_offset)  # if retention has left no frame of it
                else:
                    queue.rewind(next_offset)
        if not rebuild:
            self.producers.load(state.lanes)

    def replay(self, entry: Entry) -> None:
        """Applies an entry of the log, at start."""
        self._counts_retries = entry.position >= self._retries_counted_to
        self._apply(entry)
        self._counts_retries = True

    def _apply(self, entry: Entry) -> None:
        if entry.kind == frame.KIND:
            self._replay_frame(entry)
        elif entry.kind == journal.TOPIC_CREATED:
            topic = journal.read_topic_created(entry.body)
            if topic.name not in self.topics or self.topics.find(topic.name) != topic:
                self._put_topic(topic)
        elif entry.kind == journal.TOPIC_DELETED:
            name = journal.read_topic_deleted(entry.body)
            if name in self.topics:
                self._remove_topic(name)
            else:  # deleted while the checkpoint was made, which left it out
                self._forget_topic(name)
        elif entry.kind == journal.OFFSETS:
            for key, progress in self._read_offsets(entry):
                self.offsets.put(key, progress)
        elif entry.kind == journal.OFFSETS_RESET:
            self._apply_reset(self._read_offsets(entry))
        elif entry.kind == journal.GROUP_PUT:
            self.groups.put(journal.read_group_put(entry.body))
        elif entry.kind == journal.GROUP_DELETED:
            self._remove_group(journal.read_group_deleted(entry.body))
        else:
            raise InvariantError(f"log position {entry.position}: unknown kind {entry.kind}")

    def _read_offsets(self, entry: Entry) -> list[tuple[GroupQueue, Progress]]:
        changes = journal.read_offsets(entry.body)
        return [(key, progress) for key, progress in changes if key.topic in self.topics]

    def _replay_frame(self, entry: Entry) -> None:
        stored_frame = frame.decode(entry.body)
        self._store_ms = max(self._store_ms, stored_frame.store_ms)
        queue = self._queue_to_replay(stored_frame.topic, stored_frame.queue_id)
        if stored_frame.base_offset != queue.next_offset:
            if queue.max_offset > queue.min_offset:
                raise InvariantError(
                    f"log position {entry.position}: frame begins at offset"
                    f" {stored_frame.base_offset} of {queue.key}, {queue.next_offset} is next"
                )
            queue.restart(stored_frame.base_offset)
        queue.append(consume_queue.encode_frame(entry.position, stored_frame))
        queue.next_offset = stored_frame.end_offset
        if stored_frame.send_back:
            self._replay_send_back(entry, stored_frame)
        if stored_frame.producer_id:
            timed = stored_frame.timed
            key = LaneKey(
                stored_frame.producer_id,
                stored_frame.target_topic if timed else stored_frame.topic,
                stored_frame.target_queue_id if timed else stored_frame.queue_id,
                timed,
            )
            self.producers.record(
                key,
                stored_frame.producer_epoch,
                stored_frame.sequence,
                Stored(
                    entry.position,
                    stored_frame.base_offset,
                    stored_frame.store_ms,
                    stored_frame.queue_id,
                    stored_frame.count,
                ),
            )

    def _replay_send_back(self, entry: Entry, sent_back: frame.Frame) -> None:
        group_topic = sent_back.target_topic or sent_back.topic
        group = names.group_of(group_topic)
        if group_topic not in self.topics:  # as in _queue_to_replay
            self._put_topic(self.topics.plan(group_topic))
        offsets: dict[GroupQueue, list[int]] = {}
        for topic, queue_id, offset in retry_record.sources(sent_back.payload, sent_back.sizes):
            offsets.setdefault(GroupQueue(group, topic, queue_id), []).append(offset)
        for key, settled in offsets.items():
            if key.topic in self.topics:
                self.offsets.settle(key, settled)
        if sent_back.timed and self._counts_retries:
            self.retries[group] = self.retries.get(group, 0) + sent_back.count

    def _queue_to_replay(self, name: str, queue_id: int) -> Queue:
        """The queue of a frame.

        In a rebuild without a checkpoint, retention may have removed the entry that made the topic:
        then it has at least the queues that there are frames of.  If it was deleted, the entry
        that says so comes after the frames.
        """
        known = self.topics.find(name) if name in self.topics else None
        if known is None:
            queues = max(self.rules.default_queues, queue_id + 1)
            self._put_topic(self.topics.plan(name, queues))
        elif queue_id >= known.queues:
            grown = replace(known, queues=queue_id + 1)
            self.topics.put(grown)
            self._queues.grow(grown)
        return self._queues.of(name)[queue_id]

    def ensure_timer_topic(self) -> None:
        """Makes %TIMER% on the first start; its number of queues never changes."""
        if names.TIMER_TOPIC not in self.topics:
            self.create_topic(names.TIMER_TOPIC, self.rules.timer_queues)

    def all_queues(self) -> list[Queue]:
        """Every queue of every topic."""
        return self._queues.all()

    def erase_deleted(self, saved: State) -> None:
        """Removes the files of topics that were deleted before the checkpoint of `saved`."""
        of_checkpoint = [Topic(**row) for row in saved.topics["topics"]]
        self._queues.erase_unknown([*self.topics, *of_checkpoint])

    def drop_before(self, position: int) -> None:
        """Forgets records that lie before a position, which retention has removed."""
        for queue in self._queues.all():
            queue.drop_before(position)

    def close(self) -> None:
        """Closes the files."""
        for queue in self._queues.all():
            with suppress(DiskFull):  # the next start makes up for it, from the log
                queue.close()
        self.log.close()


def first_error(outcomes: Sequence[Accepted | DuemqError]) -> DuemqError | None:
    """The first error if there is nothing else: then the whole call fails with it."""
    if outcomes and all(isinstance(outcome, DuemqError) for outcome in outcomes):
        first = outcomes[0]
        return first if isinstance(first, DuemqError) else None
    return None
