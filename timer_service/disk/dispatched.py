"""Timers that the log behind a checkpoint dispatched: in which batch, and where they still lie.

Part of a start (recovery.py), run by the thread that does it.

A DISPATCH entry only notes which timers are in it (`Unseen`).  They are taken out wherever they are
met: at once if they are in memory, and from the blocks, which the checkpoint left where they were,
by loading what was due.  Timers of a batch that is not acknowledged give it their bodies: it will
be sent again, byte by byte the same, under the same number.

A log may name a timer in two DISPATCH entries (an earlier release could hand one out twice): the
first counts.  A dispatched timer that is nowhere is no loss if its batch is acknowledged, for a
broker has it; otherwise the start is refused.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from duemq.errors import Corrupt
from duemq_server.storage.record import Entry
from duemq_server.timer_service.far.far_block import REMEDY
from duemq_server.timer_service.far.loading import Load
from duemq_server.timer_service.scheduling.dispatch import NEVER
from duemq_server.timer_service.scheduling.fire_lane import FireBatch, FireLane, make_batch
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers import log_entries
from duemq_server.timer_service.timers.log_entries import Dispatched
from duemq_server.timer_service.timers.rows import Blob, Rows, concatenate, runs

log = logging.getLogger(__name__)

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

    def batches(self) -> set[int]:
        """Of which some timers were not met."""
        left = (table[1][~self._met[source]] for source, table in self._sorted.items())
        return {batch for each in left for batch in np.unique(each).tolist()}

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


class DispatchedTimers:
    """What Recovery, which is one, knows of them: entries about batches, and then all of them."""

    def __init__(
        self, scheduler: Scheduler, now_ms: int, fired_by: Callable[[int], int] | None = None
    ) -> None:
        """`fired_by`: when an entry of the log was there at the latest; None: by now."""
        self._scheduler = scheduler
        self._fired_by = fired_by or (lambda position: now_ms)
        self._now_ms = now_ms
        self._batches: list[Replayed] = []
        self._by_position: dict[int, Replayed] = {}
        self._of_lane: defaultdict[FireLane, list[Replayed]] = defaultdict(list)
        self._saved: dict[int, FireBatch] | None = None
        """Batches of the checkpoint that were on their way, by position; None: nobody asked yet."""
        self._unseen = Unseen()
        self._keys_changed: dict[int, int] = {}  # position of the last entry, by a key's hash

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
        self._of_lane[lane].append(batch)
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
        dispatcher = self._scheduler.dispatcher
        if self._saved is None:
            lanes = dispatcher.lanes()
            self._saved = {batch.position: batch for lane in lanes for batch in lane.unacked}
        batch = self._saved.pop(position, None)
        if batch is None:
            raise Corrupt(f"an acknowledged batch at {position} is unknown")
        batch.lane.forget(batch)
        dispatcher.stored(batch)
        self._scheduler.ledger.in_flight -= batch.count

    def _epoch(self, entry: Entry) -> None:
        restarted = log_entries.decode_epoch(entry.body)
        if restarted.epoch == log_entries.FORGOTTEN:
            self._scheduler.dispatcher.forget(restarted.lane)
            return
        lane = self._scheduler.dispatcher.lane(restarted.lane)
        lane.restart(restarted.epoch)
        for batch in self._of_lane[lane]:
            if not batch.acked:
                batch.sequence = lane.next_sequence
                lane.next_sequence += 1

    def _keys_change(self, hashes: Iterable[int], position: int) -> None:
        """The entry there names these keys."""
        self._keys_changed.update(dict.fromkeys(hashes, position))

    def _find(self) -> None:
        """All entries are known: takes their timers out of memory and blocks.  Raises Corrupt."""
        scheduler = self._scheduler
        self._unseen.seal()
        self._forget_repeats(self._unseen.again)
        self._sift_near()
        self._sift_memtable()
        while self._unseen.remaining and self._load_due():
            pass
        for horizon_ms in (self._now_ms + scheduler.limits.near_window_ms, NEVER):
            while self._unseen.remaining and self._load(horizon_ms):
                pass
        if self._unseen.remaining:
            self._not_found(self._unseen.remaining)
        for batch in self._batches:
            if not batch.acked and batch.count:
                self._rebuild(batch)

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

    def _load_due(self) -> bool:
        """Some of what was due and some of what was parked: it was dispatched in either order."""
        loaded = self._load(self._now_ms + 1)
        segments = self._scheduler.segments
        parked = segments.parked()
        unseen = self._unseen.batches() if parked else ()
        topics = {self._batches[number].lane.id.topic for number in unseen}
        for target in parked:
            if target.topic in topics:
                self._take(segments.load_parked([target], LOAD_ROWS, LOAD_BYTES))
                loaded = True
        return loaded

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


def _nowhere(directory: str, count: int, batches: list[Replayed]) -> str:
    places = ", ".join(f"{batch.position} ({batch.lane.id})" for batch in batches[:NAMED_MAX])
    more = "" if len(batches) <= NAMED_MAX else f" and {len(batches) - NAMED_MAX} more"
    return (
        f"{directory}: {count} timers were dispatched and are nowhere to be found, neither in"
        f" {directory}/log nor in {directory}/segments; not all are known to be stored by a broker:"
        f" the batches at {places}{more} of the log are not acknowledged."
        f" {REMEDY}"
    )
