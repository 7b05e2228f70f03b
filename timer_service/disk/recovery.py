"""Start of a shard: from the checkpoint and the timer log to a scheduler.

Run by the thread that will own the scheduler, before anything else.  Reads and writes the disk
directly: it is the start of the process.

1. The checkpoint's state is taken over; bodies of timers in memory are read from where they lie.
2. The entries behind it are applied in order: ADD brings timers in as when they came; CANCEL, ACK,
   EPOCH, SCHEDULE, RECUR, HOLD, DROP and BULK as they say; a DISPATCH only notes which timers are
   in it.
3. The noted timers are then taken out wherever they are met: at once if they are in memory, and
   from the blocks, which the checkpoint left where they were, by loading what was due.  Timers of
   a batch that is not acknowledged give it their bodies: it will be sent again, byte by byte the
   same, under the same number.

A log may name a timer in two DISPATCH entries (an earlier release could hand one out twice): the
first counts.  A dispatched timer that is nowhere is no loss if its batch is acknowledged, for a
broker has it; otherwise the start is refused.

Time is bounded by the log since the last checkpoint, not by the number of pending timers.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from duemq.errors import Corrupt
from duemq_server.storage import record
from duemq_server.storage.record import Entry
from duemq_server.storage.replicas import epoch
from duemq_server.storage.tools.set_aside import GAP
from duemq_server.timer_service.disk.checkpoint_state import CheckpointState, Held
from duemq_server.timer_service.disk.topic_recount import recount
from duemq_server.timer_service.far.far_block import REMEDY
from duemq_server.timer_service.far.loading import Load
from duemq_server.timer_service.scheduling.bulk import entry as bulk_entry
from duemq_server.timer_service.scheduling.dispatch import NEVER
from duemq_server.timer_service.scheduling.fire_lane import FireBatch, FireLane, make_batch
from duemq_server.timer_service.scheduling.keyed import keyed_state
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.scheduling.schedules import changes as schedule_changes
from duemq_server.timer_service.timers import (
    hold_entry,
    intake,
    keyed_entry,
    log_entries,
    schedule_entry,
)
from duemq_server.timer_service.timers.limits import AHEAD_MS
from duemq_server.timer_service.timers.log_entries import Dispatched
from duemq_server.timer_service.timers.rows import Blob, Home, Rows, concatenate, keys_of, runs

log = logging.getLogger(__name__)

ReadBody = Callable[[Home, int], bytes]
LOAD_ROWS = 16_384  # loaded at once to find dispatched timers
LOAD_BYTES = 8 << 20
NAMED_MAX = 5  # batches that an error names


@dataclasses.dataclass(slots=True)
class Replayed:
    """A DISPATCH entry whose timers are being looked for."""

    lane: FireLane
    sequence: int
    position: int
    end: int
    count: int
    acked: bool = False
    found: list[tuple[npt.NDArray[np.int64], Rows, Blob]] = dataclasses.field(default_factory=list)


class Unseen:
    """Timers that the log says were dispatched and that were not yet met, sorted by source."""

    def __init__(self) -> None:
        self.remaining = 0
        self.again: Counter[int] = Counter()
        """Timers that an earlier batch has too, by batch."""
        self._parts: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._sorted: dict[int, npt.NDArray[np.int64]] = {}
        self._met: dict[int, npt.NDArray[np.bool_]] = {}

    def add(
        self, source: int, offsets: npt.NDArray[np.int64], batch: int, places: npt.NDArray[np.int64]
    ) -> None:
        """Timers of a source are at `places` of a batch."""
        table = np.empty((3, len(offsets)), dtype=np.int64)
        table[0], table[1], table[2] = offsets, batch, places
        self._parts.setdefault(source, []).append(table)
        self.remaining += len(offsets)

    def seal(self) -> None:
        """All are known; `meet` may be called."""
        for source, parts in self._parts.items():
            table = np.concatenate(parts, axis=1)
            table = table[:, np.argsort(table[0], kind="stable")]
            first = np.append(True, table[0][1:] != table[0][:-1])
            again = table[1][~first].tolist()
            self.again.update(again)
            self.remaining -= len(again)
            self._sorted[source] = table[:, first]
            self._met[source] = np.zeros(int(first.sum()), dtype=np.bool_)
        self._parts = {}

    def missing(self) -> dict[int, list[tuple[int, int]]]:
        """Timers that were not met, (source, offset), by batch."""
        missing: dict[int, list[tuple[int, int]]] = {}
        for source, table in self._sorted.items():
            offsets, batches, _ = table[:, ~self._met[source]].tolist()
            for offset, batch in zip(offsets, batches, strict=True):
                missing.setdefault(batch, []).append((source, offset))
        return missing

    def meet(self, rows: Rows) -> npt.NDArray[np.int64]:
        """For each row (batch, place), or (-1, -1): not dispatched.  Shape (2, rows)."""
        answer = np.full((2, len(rows)), -1, dtype=np.int64)
        if not self.remaining:
            return answer
        for source, table in self._sorted.items():
            of_source = np.flatnonzero(rows.source == source)
            if not len(of_source):
                continue
            offsets = rows.offset[of_source]
            at = np.minimum(np.searchsorted(table[0], offsets), table.shape[1] - 1)
            hit = table[0][at] == offsets
            if self._met[source][at[hit]].any():
                raise Corrupt("a dispatched timer was met twice")
            self._met[source][at[hit]] = True
            self.remaining -= int(hit.sum())
            answer[:, of_source[hit]] = table[1:, at[hit]]
        return answer


class Recovery:
    """Rebuilds a scheduler; made for one start."""

    def __init__(
        self,
        scheduler: Scheduler,
        read_body: ReadBody,
        now_ms: int,
        fired_by: Callable[[int], int] | None = None,
    ) -> None:
        """`fired_by`: when an entry of the log was there at the latest; None: by now."""
        self._scheduler = scheduler
        self._fired_by = fired_by or (lambda position: now_ms)
        self._read_body = read_body
        self._now_ms = now_ms
        self._batches: list[Replayed] = []
        self._by_position: dict[int, Replayed] = {}
        self._unseen = Unseen()
        self._keys_changed: dict[int, int] = {}  # position of the last entry, by a key's hash
        self.replayed = 0  # entries
        self.epochs: list[tuple[int, int]] = []
        """(epoch, start) of the EPOCH entries of replicas that were met."""

    def restore(self, state: CheckpointState) -> None:
        """Takes a checkpoint over."""
        scheduler = self._scheduler
        scheduler.ledger = dataclasses.replace(state.ledger)
        if not scheduler.topics.restore(state.topics) or (
            state.ledger.accepted and not state.topics
        ):
            scheduler.topics.in_doubt = scheduler.topics.in_doubt or "accepted"
        for source in state.sources:
            number = scheduler.numbers.number_source(source.id, source.broker, source.first_offset)
            scheduler.numbers.sources[number] = dataclasses.replace(source)
        for target in state.targets:
            scheduler.numbers.number_target(target)
        for lane in state.lanes:
            self._restore_lane(lane)
        scheduler.tombstones.gone.restore(state.replaced)
        if state.unmet is not None:
            scheduler.tombstones.left.restore(*state.unmet)
        for tombstone in state.tombstones:
            scheduler.tombstones.restore(*tombstone)
        scheduler.tombstones.forgot(state.forgotten_ms)
        scheduler.keyed.requests.restore(state.requests)
        scheduler.keyed.ended.restore(state.ended_keys)
        scheduler.schedules.apply(state.schedules)
        scheduler.bulk.restore(state.bulk)
        scheduler.holds.restore(state.holds, state.next_hold)
        scheduler.fires.restore(state.fired_until_ms, state.fired_late)
        scheduler.segments.recover(state.lengths, state.blocks)
        for held in state.held:
            rows = scheduler.tiers.drop_cancelled(held.rows, self._now_ms)
            if len(rows):
                self._admit_held(held, rows)
                self._make_room()

    def _admit_held(self, held: Held, rows: Rows) -> None:
        place = Home(held.home.file, held.home.position + held.start)
        data = self._read_body(place, held.length)
        if record.crc32c(0, data) != held.crc32c:
            raise Corrupt(f"bodies of timers at {place} are not what was written. {REMEDY}")
        self._scheduler.tiers.admit(rows, Blob(data, held.home, held.start), self._now_ms)

    def _restore_lane(self, saved: FireLane) -> None:
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
            elif entry.kind == GAP:
                raise Corrupt(
                    f"timer log, position {entry.position}: an entry was set aside that no"
                    " checkpoint contains; nobody knows what it said, so whatever is done now may"
                    " fire something twice or not at all: restore the directory from a copy"
                )
            elif entry.kind == epoch.KIND:
                self.epochs.append((epoch.decode(entry.body).epoch, entry.position))
            elif entry.kind < record.REPLICATION_KINDS:  # those say who led, not what is due
                raise Corrupt(f"timer log, position {entry.position}: unknown kind {entry.kind}")

    def finish(self) -> None:
        """Takes dispatched and cancelled timers out of memory and blocks.  Raises Corrupt."""
        scheduler = self._scheduler
        self._unseen.seal()
        self._forget_repeats(self._unseen.again)
        self._sift_near()
        self._sift_memtable()
        window_ms = scheduler.limits.near_window_ms
        for horizon_ms in (self._now_ms + 1, self._now_ms + window_ms, NEVER):
            while self._unseen.remaining and self._load(horizon_ms):
                pass
        for target in scheduler.segments.parked():
            while self._unseen.remaining and target in scheduler.segments.parked():
                self._take(scheduler.segments.load_parked(target, LOAD_ROWS, LOAD_BYTES))
        if self._unseen.remaining:
            self._not_found(self._unseen.remaining)
        for batch in self._batches:
            if not batch.acked and batch.count:
                self._rebuild(batch)
        scheduler.dispatcher.release_held(self._now_ms + AHEAD_MS)
        self._count_topics()
        scheduler.check()

    def _count_topics(self) -> None:
        """If neither checkpoint nor log says how many timers each topic has."""
        if self._scheduler.topics.in_doubt:
            recount(self._scheduler)

    def _forget_repeats(self, again: Counter[int]) -> None:
        """Timers that an earlier batch has too do not count, nor are they sent again."""
        ledger = self._scheduler.ledger
        for number, count in again.items():
            batch = self._batches[number]
            ledger.fired -= count
            self._scheduler.topics.of(batch.lane.id.topic).fired -= count
            if not batch.acked:
                ledger.in_flight -= count
                batch.count -= count
        if again:
            log.error(
                "%s: %d timers were dispatched twice, and may have been delivered twice",
                self._place(),
                again.total(),
            )

    def _not_found(self, count: int) -> None:
        missing = self._unseen.missing()
        lost = [self._batches[number] for number in sorted(missing)]
        lost = [batch for batch in lost if not batch.acked]
        if lost:
            self._refuse(count, lost)
        else:
            log.error(
                "%s: %d dispatched timers are nowhere to be found; brokers have stored all of them",
                self._place(),
                count,
            )
        # What had been counted before the checkpoint was counted again.
        scheduler = self._scheduler
        again = min(count, max(0, scheduler.tiers.held() - scheduler.ledger.pending))
        scheduler.ledger.fired -= again
        if again != sum(map(len, missing.values())):
            scheduler.topics.in_doubt = scheduler.topics.in_doubt or "fired"
            return
        for number, keys in missing.items():
            topic = self._batches[number].lane.id.topic
            scheduler.topics.of(topic).fired -= len(keys)

    def _refuse(self, count: int, lost: list[Replayed]) -> None:
        raise Corrupt(_nowhere(self._place(), count, lost))

    def _place(self) -> str:
        return os.path.dirname(self._scheduler.segments.directory)

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
                scheduler.topics.gone_marked(mark, unmet=unmet, count=count)
        scheduler.ledger.cancelled += len(table)

    def _bulk(self, entry: Entry) -> None:
        found, jobs = bulk_entry.decode(entry.body), self._scheduler.bulk
        if found.what == bulk_entry.ACCEPTED:
            jobs.open = bulk_entry.decode_job(found)
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
        self._keys_changed.update(dict.fromkeys(hashes, entry.position))
        self._make_room()

    def _dispatch(self, entry: Entry) -> None:
        scheduler = self._scheduler
        found = log_entries.decode_dispatch(entry.body)
        lane = scheduler.dispatcher.lane(found.lane)
        if (found.epoch, found.sequence) != (lane.epoch, lane.next_sequence):
            raise Corrupt(
                f"timer log, position {entry.position}: batch {found.epoch}/{found.sequence} of"
                f" {found.lane}, expected {lane.epoch}/{lane.next_sequence}"
            )
        count = len(found.offsets)
        batch = Replayed(lane, found.sequence, entry.position, entry.end, count)
        lane.next_sequence += 1
        self._note(found, len(self._batches))
        self._batches.append(batch)
        self._by_position[entry.position] = batch
        scheduler.ledger.fired += count
        scheduler.topics.of(found.lane.topic).fired += count
        scheduler.ledger.in_flight += count

    def _note(self, found: Dispatched, batch: int) -> None:
        for index, source_id in enumerate(found.sources):
            source = self._scheduler.numbers.source(source_id)
            if source is None:
                raise Corrupt(f"a timer of an unknown source {source_id} was dispatched")
            number = self._scheduler.numbers.number_source(source_id, source.broker, 0)
            places = np.flatnonzero(found.source_index == index).astype(np.int64)
            if self._scheduler.schedules.waits_from(source_id):
                self._scheduler.schedules.left(source_id, found.offsets[places].tolist())
            self._unseen.add(number, found.offsets[places], batch, places)

    def _recur(self, entry: Entry) -> None:
        changes, timers_at = schedule_entry.decode(entry.body)
        changed = keyed_entry.decode(entry.body[timers_at:])
        home = entry.position + record.HEADER_BYTES + timers_at + changed.frames_at
        schedule_changes.apply(self._scheduler, changes, changed, home, self._now_ms)
        self._make_room()

    def _ack(self, entry: Entry) -> None:
        for position in log_entries.decode_ack(entry.body):
            replayed = self._by_position.get(position)
            if replayed is not None:
                replayed.acked = True
                self._scheduler.ledger.in_flight -= replayed.count
            else:
                self._ack_saved(position)

    def _ack_saved(self, position: int) -> None:
        """A batch that was on its way when the checkpoint was made."""
        for lane in self._scheduler.dispatcher.lanes():
            for batch in lane.unacked:
                if batch.position == position:
                    lane.forget(batch)
                    self._scheduler.dispatcher.stored(batch)
                    self._scheduler.ledger.in_flight -= batch.count
                    return
        raise Corrupt(f"an acknowledged batch at {position} is unknown")

    def _epoch(self, entry: Entry) -> None:
        restarted = log_entries.decode_epoch(entry.body)
        lane = self._scheduler.dispatcher.lane(restarted.lane)
        lane.restart(restarted.epoch)
        for batch in self._batches:
            if batch.lane is lane and not batch.acked:
                batch.sequence = lane.next_sequence
                lane.next_sequence += 1

    # -- dispatched timers ------------------------------------------------

    def _sift_near(self) -> None:
        near = self._scheduler.near
        ids = near.pending_ids()
        rows = near.rows(ids)
        numbers = near.blobs_of(ids)
        met = self._unseen.meet(rows)
        dispatched = met[0] >= 0
        self._note_fired(met[0][dispatched], rows.take(dispatched))
        acked = np.array([batch.acked for batch in self._batches], dtype=np.bool_)
        waits = np.flatnonzero(dispatched)
        waits = waits[~acked[met[0][waits]]]
        waits = waits[np.argsort(numbers[waits], kind="stable")]
        for start, end in runs(numbers[waits]):
            blob, mine = near.blobs[int(numbers[waits[start]])], waits[start:end]
            if blob is not None:
                self._give(met[:, mine], rows.take(mine), blob)
        near.drop(ids[dispatched])

    def _sift_memtable(self) -> None:
        memtable = self._scheduler.tiers.memtable
        for rows, blob in memtable.take_before(NEVER):
            memtable.add(self._sift(rows, blob), blob)

    def _sift(self, rows: Rows, blob: Blob) -> Rows:
        """The rows that were not dispatched; the others give their bodies to their batches."""
        met = self._unseen.meet(rows)
        dispatched = met[0] >= 0
        if not dispatched.any():
            return rows
        met, fired = met[:, dispatched], rows.take(dispatched)
        self._note_fired(met[0], fired)
        self._give(met, fired, blob)
        return rows.take(~dispatched)

    def _give(self, met: npt.NDArray[np.int64], rows: Rows, blob: Blob) -> None:
        """Bodies for the batches that will be sent again."""
        for number in np.unique(met[0]).tolist():
            batch = self._batches[number]
            if not batch.acked:
                mine = met[0] == number
                batch.found.append((met[1][mine], rows.take(mine), blob))

    def _note_fired(self, batches: npt.NDArray[np.int64], fired: Rows) -> None:
        """They went with the batches of these numbers."""
        if not len(batches):
            return
        order = np.argsort(batches, kind="stable")
        batches, fired = batches[order], fired.take(order)
        fired_ms = np.empty(len(batches), dtype=np.int64)
        for start, end in runs(batches):
            position = self._batches[int(batches[start])].position
            fired_ms[start:end] = self._fired_by(position)
            if fired.timer_key is not None:
                self._note_ended(fired.timer_key[start:end].tolist(), position)
        self._scheduler.fires.note(fired, fired_ms)

    def _note_ended(self, hashes: list[int], position: int) -> None:
        """Keys that a later entry names are another timer's by now, or cancelled."""
        changed = self._keys_changed
        ended = (each for each in hashes if changed.get(each, 0) < position)
        self._scheduler.keyed.ended.note(ended, self._fired_by(position), fired=True)

    def _load(self, horizon_ms: int) -> bool:
        """Loads some timers that were due; False if there are none."""
        scheduler = self._scheduler
        load = scheduler.segments.load(horizon_ms, LOAD_ROWS, LOAD_BYTES)
        self._take(load)
        return bool(load.pieces)

    def _take(self, load: Load) -> None:
        scheduler = self._scheduler
        load.run()
        scheduler.segments.loaded(load)
        for piece in load.pieces:
            rows = scheduler.numbers.translate(piece.rows, piece.sources, piece.targets)
            scheduler.topics.loaded(rows)
            rows = scheduler.tiers.drop_cancelled(self._sift(rows, piece.blob), self._now_ms)
            if len(rows):
                scheduler.tiers.admit(rows, piece.blob, self._now_ms, force=True)

    def _rebuild(self, batch: Replayed) -> None:
        if sum(len(places) for places, _, _ in batch.found) != batch.count:
            raise Corrupt(f"timers of the batch at {batch.position} are missing")
        places = np.concatenate([places for places, _, _ in batch.found])
        rows = concatenate([rows for _, rows, _ in batch.found])
        blobs = [blob for places, _, blob in batch.found for _ in range(len(places))]
        order = np.argsort(places)
        built: FireBatch = make_batch(
            rows.take(order),
            [blobs[at] for at in order.tolist()],
            batch.lane,
            batch.sequence,
            batch.position,
            batch.end,
        )
        built.durable = True
        next_sequence = batch.lane.next_sequence
        self._scheduler.dispatcher.push(built)
        batch.lane.next_sequence = next_sequence

    def _make_room(self) -> None:
        """Flushes the memtable at once if it is full."""
        scheduler = self._scheduler
        if scheduler.tiers.memtable_full():
            flush = scheduler.tiers.begin_flush(self._now_ms)
            flush.run()
            scheduler.tiers.end_flush(flush)


def _nowhere(directory: str, count: int, batches: list[Replayed]) -> str:
    places = ", ".join(f"{batch.position} ({batch.lane.id})" for batch in batches[:NAMED_MAX])
    more = "" if len(batches) <= NAMED_MAX else f" and {len(batches) - NAMED_MAX} more"
    return (
        f"{directory}: {count} timers were dispatched and are nowhere to be found, neither in"
        f" {directory}/log nor in {directory}/segments; not all are known to be stored by a broker:"
        f" the batches at {places}{more} of the log are not acknowledged."
        f" {REMEDY}"
    )
