"""What a broker knows: topics and their queues, producers, groups and how far they are.  Pure.

Owned by: Store; by Replay before there is one.  Mutated by: the event loop.

A change is an entry of the log first, and takes effect here: when it is appended (store.py and
changes/), and again at a start (replay.py).  So whatever an entry does to more than one table is
done by one method, which both call.  All of it can be rebuilt from the log; `snapshot` and
`restore` spare that (checkpoint_state.py).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from duemq.protocol import names
from duemq_server.broker.records.timer_claims import Service
from duemq_server.broker.records.timer_owners import TimerOwners
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.group_configs import GroupConfigs
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue, Offsets
from duemq_server.broker.store.producers import Producers
from duemq_server.broker.store.queues import Queue, QueueTable
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.broker.store.topics import Topic, Topics
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.storage import frame
from duemq_server.storage.errors import StorageError

# A clock that goes back by more was wrong before, or is now: times in between would be as wrong.
STORE_AHEAD_MAX_MS = 600_000


class NotNeeded(NamedTuple):
    """Files that no start would need."""

    folders: list[str]
    """Of topics."""
    purged: list[tuple[Queue, int]]
    """Of records before an offset."""


class Tables:
    """See the module."""

    def __init__(self, queues: QueueTable, settings: StoreSettings) -> None:
        self.queues = queues
        self.topics = Topics(
            settings.default_queues,
            settings.limits.message_bytes_max,
            auto_create=settings.auto_create_topics,
        )
        self.producers = Producers(settings.lane_idle_ms)
        self.offsets = Offsets()
        self.groups = GroupConfigs(settings.retry)
        self.timer_owners = TimerOwners()
        self.retries: dict[str, int] = {}
        """Records ever sent back for another delivery, by group."""
        self.memberships: dict[str, str] = {}
        """Of a log with replicas: what their coordinator keeps of the groups that it has."""
        self.store_ms = 0
        """When the newest frame was stored."""
        self._ahead_ms = 0  # of the newest frame that was stored ahead of its time
        self.epochs = Epochs()
        """Of a log with replicas: up to where these tables are it."""
        self.set_aside: list[tuple[int, int]] = []
        """Position and bytes of entries that nobody knows any more, until `skip_lost`."""
        self._purged: set[Queue] = set()  # whose files are still to go

    # -- what an entry of the log does -----------------------------------------------------------

    def put_topic(self, topic: Topic) -> None:
        """The topic was made."""
        for queue in self.queues.add(topic):
            queue.restart()  # files of its name are a crash's leftovers
        self.topics.put(topic)  # where they cannot go for want of space, it is made once more

    def remove_topic(self, name: str) -> None:
        """The topic was deleted; one that a checkpoint left out for that is no surprise."""
        if name in self.topics:
            self.queues.remove(self.topics.remove(name))
        self.producers.forget_topic(name)
        self.offsets.forget_topic(name)
        if names.is_retry(name):
            self.retries.pop(names.group_of(name), None)

    def remove_group(self, group: str) -> None:
        """The group was deleted, and its retry topic with it."""
        self.groups.remove(group)
        self.memberships.pop(group, None)
        self.offsets.forget_group(group)
        self.remove_topic(names.retry_topic(group))

    def put_membership(self, group: str, kept: str | None) -> None:
        """Generation or members of a group have changed; None: it has no coordinator here."""
        if kept is None:
            self.memberships.pop(group, None)
        else:
            self.memberships[group] = kept

    def claim_timers(
        self,
        service: Service,
        queues: Iterable[int],
        since_ms: int,
        begins: Sequence[tuple[int, int]] = (),
        epoch: int | None = None,
    ) -> None:
        """A timer service claimed queues of %TIMER%; `begins`: of queues that were given up."""
        self.timer_owners.begin(begins)
        for replaced in self.timer_owners.put(service, queues, since_ms, epoch):
            self.producers.forget_service(replaced)
        self.producers.trust_service(service.id)

    def hand_over_timers(self, service_id: int, ends: Sequence[tuple[int, int]]) -> None:
        """A timer service has taken over so much of queues that it has no more."""
        for queue_id, offset in ends:
            self.offsets.put(_taken_over_by(queue_id), GroupOffset(offset, 0))
        self.timer_owners.hand_over(service_id, ends)

    def timer_ends(self) -> dict[int, int]:
        """Where each queue of %TIMER% ends."""
        if names.TIMER_TOPIC not in self.topics:
            return {}
        queues = self.queues.of(names.TIMER_TOPIC)
        return {queue.queue_id: queue.next_offset for queue in queues}

    def note_timer_ends(self) -> None:
        """At a start: where queues of %TIMER% end, or did at one before, if nobody fetched since.

        In checkpoints, too: what came since a start with an older copy is so at the next one.  What
        is committed beyond it was fetched since the checkpoint.
        """
        unclaimed = self.timer_owners.unclaimed
        for queue_id, end in self.timer_ends().items():
            known = unclaimed.get(queue_id, end)
            unclaimed[queue_id] = end if self.timers_taken_over(queue_id) > known else known

    def timers_taken_over(self, queue_id: int) -> int:
        """The offset up to which the owners of a queue of %TIMER% have committed it."""
        found = self.offsets.find(_taken_over_by(queue_id))
        return found.offset if found is not None else 0

    def reset_offsets(self, changes: Iterable[tuple[GroupQueue, GroupOffset]]) -> None:
        """A group was moved; nothing is settled there any more."""
        for key, progress in changes:
            self.offsets.clear_settled(key)
            self.offsets.put(key, progress)

    def count_retries(self, group: str, count: int) -> None:
        """The group sent records back for another delivery."""
        self.retries[group] = self.retries.get(group, 0) + count

    def drop_before(self, position: int) -> list[tuple[str, Exception]]:
        """Forgets records that lie before a position of the log, which retention removes.

        And those that were purged: the files of the consume queues shrink by whole files.  Answers
        the queues where that failed, and why: they are unreadable, the others are not.
        """
        begins, failed = begins_at(self.queues.all(), position)
        self.forget_before(begins)
        return failed + free(begins)

    def forget_before(self, begins: Sequence[tuple[Queue, int]]) -> None:
        """Queues begin there, and behind what was purged; `free` removes the files."""
        for queue, offset in begins:
            if not queue.dropped:
                queue.drop_before(offset)
                purged = self.offsets.find(_purge_of(queue))
                if purged is not None:
                    self._purge(queue, purged.offset)

    def stamp(self, now_ms: int) -> int:
        """When a frame is stored: in the order of the log, even if the clock goes back a little."""
        if not 0 < self.store_ms - now_ms <= STORE_AHEAD_MAX_MS:
            self.store_ms = now_ms
        return self.store_ms

    def stamp_ahead(self, store_ms: int) -> None:
        """A frame is stored ahead of this time, which its queue must not go behind any more."""
        if not 0 < self._ahead_ms - store_ms <= STORE_AHEAD_MAX_MS:
            self._ahead_ms = store_ms

    def stamp_shown(self, due_ms: int) -> None:
        """What was stored ahead is seen by now, and what its queue gets does not wait for it."""
        self.store_ms = max(self.store_ms, min(self._newest_ms(), due_ms))

    def _newest_ms(self) -> int:
        """What the next start must not go behind."""
        ahead = 0 < self._ahead_ms - self.store_ms <= STORE_AHEAD_MAX_MS
        return self._ahead_ms if ahead else self.store_ms

    def reach(self, state: CheckpointState) -> None:
        """Queues that were rebuilt up to a checkpoint's position go on where it says.

        Their last offsets may have been left out for good, which no entry of the log says.
        """
        for row in state.topics["topics"]:
            name = row["name"]
            if name in self.topics and self.topics.find(name).id == row["id"]:
                ends = state.queues[name]
                for queue, end in zip(self.queues.of(name), ends, strict=False):
                    if queue.next_offset < end:
                        queue.skip_to(end)

    def skip_lost(
        self, state: CheckpointState | None, since_checkpoint: int, since_end: int
    ) -> list[tuple[Queue, int]]:
        """The log has lost its end: offsets that lay there are never given to anything new.

        Nor are those of what was `set_aside` behind a queue's last record.

        Who has consumed them would take the new for the old: groups, a timer shard, members in
        the middle of a queue.  `state`: a checkpoint from before the loss.  So many offsets of a
        queue may have been given out after it, and since the end.  Answers queues and where each
        went on before.  Raises DiskFull, DiskFailed.
        """
        rows = state.topics["topics"] if state else []
        ids = {row["name"]: row["id"] for row in rows}
        committed = self.offsets.ends()
        skipped = []
        for queue in self.queues.all():
            end = queue.next_offset + since_end
            if state and ids.get(queue.topic) == self.topics.find(queue.topic).id:
                ends = state.queues[queue.topic]
                known = ends[queue.queue_id] if queue.queue_id < len(ends) else 0
                end = max(queue.next_offset, known) + since_checkpoint
            if self.set_aside:
                end += _records_behind(queue, self.set_aside)
            end = max(end, committed.get(queue.key, 0))
            if end > queue.next_offset:
                skipped.append((queue, queue.next_offset))
                queue.skip_to(end)
        self.set_aside.clear()
        return skipped

    def purge(self, cuts: Iterable[tuple[GroupQueue, GroupOffset]]) -> None:
        """Forgets the records before the offsets of the group that purges."""
        for key, progress in cuts:
            self._purge(self.queues.of(key.topic)[key.queue_id], progress.offset)

    def _purge(self, queue: Queue, offset: int) -> None:
        queue.drop_before(offset)
        self._purged.add(queue)

    # -- the checkpoint --------------------------------------------------------------------------

    def snapshot(self, position: int, verify_from: int) -> CheckpointState:
        """All of it, as of a position of the log."""
        return self.freeze(position, verify_from)()

    def freeze(self, position: int, verify_from: int) -> Callable[[], CheckpointState]:
        """What makes the snapshot, as of now; any thread may call it: a large one takes long."""
        topics, lanes = self.topics.freeze(), self.producers.freeze()
        offsets, groups = self.offsets.freeze(), self.groups.freeze()
        begun = partial(
            CheckpointState,
            position=position,
            verify_from=verify_from,
            store_ms=self._newest_ms(),
            queues={
                topic.name: [queue.next_offset for queue in self.queues.of(topic.name)]
                for topic in self.topics
            },
            retries=dict(self.retries),
            timer_owners=self.timer_owners.encode(),
            epochs=self.epochs.begins,
            memberships=dict(self.memberships),
            set_aside=tuple(self.set_aside),
        )

        def whole() -> CheckpointState:
            rows, settled = offsets()
            return begun(
                topics=topics(), offsets=rows, settled=settled, lanes=lanes(), groups=groups()
            )

        return whole

    def without_deleted(self, state: CheckpointState) -> CheckpointState:
        """The snapshot without topics that were deleted since: their queues get no more entries.

        To be called when the log is durable up to its position.
        """
        rows = [
            row
            for row in state.topics["topics"]
            if row["name"] in self.topics and self.topics.find(row["name"]).id == row["id"]
        ]
        kept = {row["name"] for row in rows}
        queues = {name: offsets for name, offsets in state.queues.items() if name in kept}
        return state._replace(topics={**state.topics, "topics": rows}, queues=queues)

    def erase_deleted(self, saved: CheckpointState) -> None:
        """Removes what `not_needed` says.  Raises StorageError, OSError: a later call goes on."""
        not_needed = self.not_needed(saved)
        self.erase(not_needed)
        self.erased(not_needed)

    def not_needed(self, saved: CheckpointState) -> NotNeeded:
        """Files of topics that were deleted before the checkpoint of `saved`.

        And those of records that were purged before it: a later purge may not be durable yet.
        """
        rows, here = saved.topics["topics"], {topic.id for topic in self.topics}
        deleted_since = [Topic(**row) for row in rows if row["id"] not in here]
        folders = self.queues.unknown_folders([*self.topics, *deleted_since])
        if not self._purged:
            return NotNeeded(folders, [])  # `offsets` may be long, and this is the event loop
        known = {row["id"] for row in rows}
        offsets = {
            GroupQueue(*row[:3]): row[3] for row in saved.offsets if row[0] == names.PURGED_GROUP
        }
        self._purged = {queue for queue in self._purged if not queue.dropped}
        found = ((queue, offsets.get(_purge_of(queue))) for queue in self._purged)
        return NotNeeded(
            folders,
            [(each, offset) for each, offset in found if offset and each.topic_id in known],
        )

    def erase(self, not_needed: NotNeeded) -> None:
        """Removes them.  Any thread, one at a time.  Raises StorageError, OSError."""
        for folder in not_needed.folders:
            self.queues.erase(folder)
        for queue, offset in not_needed.purged:
            if not queue.dropped:
                queue.free(offset)

    def erased(self, not_needed: NotNeeded) -> None:
        """They are gone: what was purged so far needs no more looks."""
        for queue, offset in not_needed.purged:
            purged = self.offsets.find(_purge_of(queue))
            if purged is None or purged.offset == offset:
                self._purged.discard(queue)

    def restore(self, state: CheckpointState, *, rebuild: bool = False) -> None:
        """Takes a checkpoint over; with `rebuild` the queues are empty, to be filled from the log.

        Raises IndexError if a consume queue does not reach as far as the checkpoint says.
        """
        self.store_ms = state.store_ms
        self.epochs = Epochs(state.epochs)
        self.topics.load(state.topics)
        self.offsets.load(state.offsets, state.settled)
        self.groups.load(state.groups)
        self.retries = dict(state.retries)
        self.memberships = dict(state.memberships)
        self.set_aside = list(state.set_aside)
        self.timer_owners.load(state.timer_owners)
        for service_id in self.timer_owners.ids():
            self.producers.trust_service(service_id)
        for topic in self.topics:
            next_offsets = state.queues[topic.name]
            for queue, next_offset in zip(self.queues.add(topic), next_offsets, strict=True):
                if rebuild:
                    queue.restart(next_offset)  # if retention has left no frame of it
                else:
                    queue.rewind(next_offset)
        self.producers.load(state.lanes)


def _records_behind(queue: Queue, set_aside: Iterable[tuple[int, int]]) -> int:
    """How many may have lain there behind the queue's last one."""
    try:
        last = queue.last_frame()
    except (StorageError, OSError):
        last = -1
    return sum(size for at, size in set_aside if at > last) // frame.RECORD_BYTES_MIN


def _taken_over_by(queue_id: int) -> GroupQueue:
    return GroupQueue(names.TIMER_GROUP, names.TIMER_TOPIC, queue_id)


def _purge_of(queue: Queue) -> GroupQueue:
    return GroupQueue(names.PURGED_GROUP, *queue.key)


def begins_at(
    queues: Iterable[Queue], position: int
) -> tuple[list[tuple[Queue, int]], list[tuple[str, Exception]]]:
    """Where each queue begins, of a log that begins at `position`; those that say nothing, and why.

    Any thread: it reads what was not read for long.
    """
    begins: list[tuple[Queue, int]] = []
    failed: list[tuple[str, Exception]] = []
    for queue in queues:
        try:
            begins.append((queue, queue.first_from(position)))
        except IndexError:
            pass  # a purge was faster; the next time
        except (StorageError, OSError) as error:
            if not queue.dropped:
                failed.append((f"{queue.topic}/{queue.queue_id}", error))
    return begins, failed


def free(begins: Iterable[tuple[Queue, int]]) -> list[tuple[str, Exception]]:
    """Removes the files of records before these offsets; those that stay, and why.  Any thread."""
    failed: list[tuple[str, Exception]] = []
    for queue, offset in begins:
        try:
            if not queue.dropped:
                queue.free(offset)
        except (StorageError, OSError) as error:
            failed.append((f"{queue.topic}/{queue.queue_id}", error))
    return failed
