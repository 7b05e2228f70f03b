"""Start of a shard: from the checkpoint and the timer log to a scheduler.

Run by the thread that will own the scheduler, before anything else.  Reads and writes the disk
directly: it is the start of the process.

1. The checkpoint's state is taken over; bodies of timers in memory are read from where they lie.
2. The entries behind it are applied in order: ADD brings timers in as when they came; CANCEL,
   SCHEDULE, RECUR, HOLD, DROP, LEFT and BULK as they say; DISPATCH, ACK and EPOCH are of batches
   (dispatched.py): a DISPATCH only notes which timers are in it.
3. The noted timers are then taken out wherever they are met (dispatched.py), and batches that are
   not acknowledged are made anew.

Time is bounded by the log since the last checkpoint, not by the number of pending timers; so is
memory, where the disk has no space for a full memtable.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

import numpy as np

from duemq.errors import Corrupt
from duemq_server.storage import record
from duemq_server.storage.errors import DiskFull
from duemq_server.storage.record import Entry
from duemq_server.storage.replicas import epoch
from duemq_server.storage.tools.set_aside import GAP
from duemq_server.timer_service.disk.checkpoint_state import CheckpointState, Held, SavedLane
from duemq_server.timer_service.disk.dispatched import DispatchedTimers
from duemq_server.timer_service.disk.topic_recount import recount
from duemq_server.timer_service.far.far_block import REMEDY
from duemq_server.timer_service.scheduling.bulk import entry as bulk_entry
from duemq_server.timer_service.scheduling.keyed import keyed_state
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.scheduling.schedules import changes as schedule_changes
from duemq_server.timer_service.scheduling.topic_counts import OTHERS, TopicLedger
from duemq_server.timer_service.timers import (
    hold_entry,
    intake,
    keyed_entry,
    log_entries,
    schedule_entry,
)
from duemq_server.timer_service.timers.limits import AHEAD_MS
from duemq_server.timer_service.timers.rows import Blob, Home, Rows, keys_of

log = logging.getLogger(__name__)

ReadBody = Callable[[Home, int], bytes]


def check_no_gap_at(entry: Entry, position: int) -> None:
    """Raises Corrupt for what was set aside on both sides of a checkpoint's position: entries side
    by side were damaged, and one gap stands for all of them."""
    if entry.kind == GAP and entry.position < position < entry.end:
        raise unknown_gap(entry)


def unknown_gap(entry: Entry) -> Corrupt:
    """Of what was set aside, and no checkpoint contains."""
    return Corrupt(
        f"timer log, position {entry.position}: an entry was set aside that no"
        " checkpoint contains; nobody knows what it said, so whatever is done now may"
        " fire something twice or not at all: restore the directory from a copy"
    )


class Recovery(DispatchedTimers):
    """Rebuilds a scheduler; made for one start."""

    def __init__(
        self,
        scheduler: Scheduler,
        read_body: ReadBody,
        now_ms: int,
        fired_by: Callable[[int], int] | None = None,
    ) -> None:
        """`fired_by`: when an entry of the log was there at the latest; None: by now."""
        super().__init__(scheduler, now_ms, fired_by)
        self._read_body = read_body
        self._has_space = True  # the disk, as far as is known
        self.replayed = 0  # entries
        self.epochs: list[tuple[int, int]] = []
        """(epoch, start) of the EPOCH entries of replicas that were met."""

    def restore(self, state: CheckpointState) -> None:
        """Takes a checkpoint over."""
        scheduler = self._scheduler
        scheduler.ledger = dataclasses.replace(state.ledger)
        scheduler.topics.restore(state.topics, state.topics_forgotten)
        if state.ledger.accepted and not state.topics:
            scheduler.topics.in_doubt = scheduler.topics.in_doubt or "accepted"
        for source in state.sources:
            number = scheduler.numbers.number_source(source.id, source.broker, source.first_offset)
            scheduler.numbers.sources[number] = dataclasses.replace(source)
        held = self._restore_targets(state)
        for lane in state.lanes:
            self._restore_lane(lane)
        scheduler.dispatcher.epoch_forgotten = state.epoch_forgotten
        scheduler.tombstones.gone.restore(state.replaced, state.dropped)
        if state.unmet is not None:
            scheduler.tombstones.left.restore(*state.unmet)
        for tombstone in state.tombstones:
            scheduler.tombstones.restore(*tombstone)
        scheduler.tombstones.forgot(state.expired_ms)
        scheduler.keyed.requests.restore(state.requests)
        scheduler.keyed.ended.restore(state.ended_keys)
        scheduler.schedules.apply(state.schedules)
        scheduler.bulk.restore(state.bulk)
        scheduler.holds.restore(state.holds, state.next_hold)
        scheduler.holds.left = state.left
        scheduler.fires.restore(state.fired_until_ms, state.fired_late)
        scheduler.segments.recover(state.lengths, state.blocks)
        for each in held:
            rows = scheduler.tiers.drop_cancelled(each.rows, self._now_ms)
            if len(rows):
                self._admit_held(each, rows)
                self._make_room()

    def _restore_targets(self, state: CheckpointState) -> list[Held]:
        """Timers in memory, with the numbers that their targets have from now on.

        Targets of which nothing waits are left out.  If anything waits of a topic, all of its own
        stay: the log may go on to name what goes by the topic's mark (TopicCounts.gone).
        """
        used = {number for each in state.held for number in np.unique(each.rows.target).tolist()}
        numbers = np.zeros(len(state.targets), dtype=np.uint32)
        for number, target in enumerate(state.targets):
            if number in used or _may_wait(state, target.topic):
                numbers[number] = self._scheduler.numbers.number_target(target)
        held = []
        for each in state.held:
            narrow = each.rows.narrow.copy()
            narrow[1] = numbers[narrow[1]]
            rows = dataclasses.replace(each.rows, narrow=narrow)
            held.append(dataclasses.replace(each, rows=rows))
        return held

    def _admit_held(self, held: Held, rows: Rows) -> None:
        place = Home(held.home.file, held.home.position + held.start)
        try:
            data = self._read_body(place, held.length)
        except IndexError as error:
            raise Corrupt(f"bodies of timers in memory: {error}. {REMEDY}") from error
        if record.crc32c(0, data) != held.crc32c:
            raise Corrupt(f"bodies of timers at {place} are not what was written. {REMEDY}")
        self._scheduler.tiers.admit(rows, Blob(data, held.home, held.start), self._now_ms)

    def _restore_lane(self, saved: SavedLane) -> None:
        lane = self._scheduler.dispatcher.lane(saved.id)
        lane.epoch = saved.epoch
        for batch in saved.unacked:
            self._scheduler.dispatcher.push(dataclasses.replace(batch, lane=lane))
        lane.next_sequence = saved.next_sequence

    def replay(self, found: Iterable[Entry]) -> None:
        """Applies the entries behind the checkpoint.  Raises Corrupt."""
        for entry in found:
            self.replayed += 1
            if entry.kind == log_entries.ADD:
                self._add(entry)
            elif entry.kind == log_entries.CANCEL:
                self._cancel(entry)
            elif entry.kind == log_entries.DISPATCH:
                self._dispatch(entry)
            elif entry.kind == log_entries.ACK:
                self._ack(entry)
            elif entry.kind == log_entries.EPOCH:
                self._epoch(entry)
            elif entry.kind == log_entries.SCHEDULE:
                self._schedule(entry)
            elif entry.kind == log_entries.RECUR:
                self._recur(entry)
            elif entry.kind == log_entries.BULK:
                self._bulk(entry)
            elif entry.kind == log_entries.DROP:
                self._drop(entry)
            elif entry.kind == log_entries.HOLD:
                self._scheduler.holds.apply(hold_entry.decode(entry.body))
            elif entry.kind == log_entries.LEFT:
                self._scheduler.holds.left = log_entries.decode_left(entry.body)
            elif entry.kind == GAP:
                raise unknown_gap(entry)
            elif entry.kind == epoch.KIND:
                self.epochs.append((epoch.decode(entry.body).epoch, entry.position))
            elif entry.kind < record.REPLICATION_KINDS:  # those say who led, not what is due
                raise Corrupt(f"timer log, position {entry.position}: unknown kind {entry.kind}")

    def finish(self) -> None:
        """Takes dispatched and cancelled timers out of memory and blocks.  Raises Corrupt."""
        scheduler = self._scheduler
        for source in scheduler.numbers.sources:  # a start reads what is durable, and no more
            source.durable_offset = source.next_offset
        self._find()
        for lane in scheduler.dispatcher.lanes():
            for batch in lane.unacked:
                batch.repeated = True
        scheduler.dispatcher.release_held(self._now_ms + AHEAD_MS)
        self._count_topics()
        scheduler.check()

    def _count_topics(self) -> None:
        """If neither checkpoint nor log says how many timers each topic has."""
        if self._scheduler.topics.in_doubt:
            recount(self._scheduler)

    # -- entries ----------------------------------------------------------

    def _add(self, entry: Entry) -> None:
        added = log_entries.decode_add(entry.body)
        data = bytes(added.frames)
        fetched = list(intake.frames_in(data))
        home = entry.position + record.HEADER_BYTES + added.frames_at
        self._scheduler.apply_add(added.source, added.broker, fetched, data, home, self._now_ms)
        self._make_room()

    def _cancel(self, entry: Entry) -> None:
        self._cancelled(entry.body)

    def _cancelled(self, body: memoryview) -> None:
        """Timers that a CANCEL body names go."""
        scheduler, table = self._scheduler, log_entries.decode_cancelled(body)
        sources = keyed_state.number_sources(scheduler, table)
        rows = scheduler.near.find_all(keys_of(sources, table["offset"]))
        met = rows >= 0
        scheduler.near.drop(rows[met])
        since_ms = np.maximum(table["due_ms"], self._now_ms)
        for unmet in (True, False):
            mine = met != unmet
            scheduler.tombstones.add_all(
                sources[mine], table["offset"][mine], since_ms[mine], unmet=unmet
            )
            marks, counts = np.unique(table["topic"][mine], return_counts=True)
            for mark, count in zip(marks.tolist(), counts.tolist(), strict=True):
                scheduler.topics.gone(mark, unmet=unmet, count=count)
        scheduler.ledger.cancelled += len(table)

    def _bulk(self, entry: Entry) -> None:
        found, jobs = bulk_entry.decode(entry.body), self._scheduler.bulk
        if found.what == bulk_entry.ACCEPTED:
            jobs.begin(bulk_entry.decode_job(found))
            return
        if jobs.open is None or jobs.open.id != found.job:
            raise Corrupt(f"timer log, position {entry.position}: a job that was not accepted")
        if found.what == bulk_entry.OVER:
            jobs.finish(found.at_ms, bytes(found.body).decode())
            return
        jobs.open.count += found.timers
        if found.what == bulk_entry.CANCELLED:
            self._cancelled(found.body)
        else:
            self._changed(found.body, entry, bulk_entry.HEADER.size, in_columns=True)

    def _drop(self, entry: Entry) -> None:
        self._cancel(entry)
        marks = log_entries.decode_cancel_topics(entry.body)
        for mark in marks:
            self._scheduler.topics.dropped_marked(mark)
        self._scheduler.ledger.cancelled -= len(marks)
        self._scheduler.ledger.dropped += len(marks)

    def _schedule(self, entry: Entry) -> None:
        self._changed(entry.body, entry, 0)

    def _changed(
        self, body: memoryview, entry: Entry, start: int, *, in_columns: bool = False
    ) -> None:
        """What a SCHEDULE body says that begins there in the entry's."""
        changed = keyed_entry.decode(body, in_columns=in_columns)
        home = entry.position + record.HEADER_BYTES + start + changed.frames_at
        keyed_state.apply(self._scheduler, changed, home, self._now_ms)
        hashes = (*changed.cancelled_hashes.tolist(), *changed.hashes.tolist())
        self._keys_change(hashes, entry.position)
        self._make_room()

    def _recur(self, entry: Entry) -> None:
        changes, timers_at = schedule_entry.decode(entry.body)
        changed = keyed_entry.decode(entry.body[timers_at:])
        home = entry.position + record.HEADER_BYTES + timers_at + changed.frames_at
        schedule_changes.apply(self._scheduler, changes, changed, home, self._now_ms)
        self._make_room()

    def _make_room(self) -> None:
        """Flushes the memtable at once if it is full, and as long as the disk has space.

        Else a start, which makes space by what it fires, would fail for want of some.
        """
        if self._has_space and self._scheduler.tiers.memtable_full():
            self._has_space = flush_now(self._scheduler, self._now_ms)


def _may_wait(state: CheckpointState, topic: str) -> bool:
    """Whether anything is left of a topic, as far as a checkpoint tells."""
    ledger = state.topics.get(topic, state.topics.get(OTHERS))
    return not state.topics or (ledger is not None and TopicLedger(*ledger).left)


def flush_now(scheduler: Scheduler, now_ms: int) -> bool:
    """Writes the memtable out; False: the disk has no space, and it is as it was.

    Raises DiskFailed.
    """
    flush = scheduler.tiers.begin_flush(now_ms)
    try:
        flush.run()
    except DiskFull as error:
        scheduler.tiers.undo_flush()
        log.warning("%s; the log keeps what was to be written", error)
        return False
    scheduler.tiers.end_flush(flush)
    return True
