"""Accepting the loss of timers that are damaged on the disk, and of no others.

`duemq-timer-service set-aside DIRECTORY`, while no service runs on it.  A shard that meets
damage stops, and does not start again: it serves nothing damaged and skips nothing in silence.
This opens the data directory as a start does, takes what it cannot read out of the blocks and into
the ledger (`lost`), reads every block to its end, and saves a checkpoint; before that nothing has
changed.  Files with damage are copied to DIRECTORY/set-aside.  Every lost timer is named by where
it came from and when it was due; where even that is damaged, the block is, which is lost whole.

Damage in the timer log is not mended here: see `duemq-storage check`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

import google_crc32c
import numpy as np
import numpy.typing as npt

from duemq.errors import Corrupt
from duemq_server.storage.disk import Disk, DiskFile, write_whole
from duemq_server.storage.errors import CorruptFile, StorageError
from duemq_server.timer_service.disk.checkpoint_state import Held
from duemq_server.timer_service.disk.data_directory import open_directory, save_now
from duemq_server.timer_service.disk.dispatched import Replayed
from duemq_server.timer_service.disk.recovery import ReadBody, Recovery
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.far_segments import FarSegments
from duemq_server.timer_service.far.loading import (
    Load,
    Piecewise,
    Taken,
    Window,
    Windows,
    cut_piece,
)
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.log_entries import SourceId
from duemq_server.timer_service.timers.rows import KEY_BITS, Blob, Home, Rows, new_rows

FOLDER = "set-aside"
COPY_BYTES = 4 << 20
SECTOR_BYTES = 4_096
NO_LIMIT = 1 << 62


@dataclasses.dataclass
class Damage:
    """Timers of a block, or of a stretch of memory at the checkpoint, that cannot be read."""

    why: str
    first_due_ms: int
    last_due_ms: int
    count: int
    rows: Rows | None = None
    """Which they are, if that is known; numbered as their block does, or as the shard."""
    piece: Piecewise | None = None


class TolerantLoad(Load):
    """A load that leaves out what it cannot read."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.damage: list[Damage] = []
        self._passed: list[Piecewise] = []

    def run(self) -> None:
        """See Load.run; raises no CorruptFile."""
        self.damage, self._passed = [], []
        super().run()
        self.pieces = [*self._passed, *self.pieces]

    def _window(self, each: Block, until_ms: int = 0) -> Window | None:
        try:
            return super()._window(each, until_ms)
        except CorruptFile as error:
            count = each.count - each.cursor
            self.damage.append(Damage(str(error), each.next_due_ms, each.last_due_ms, count))
            nothing = Blob(b"", Home(each.file, each.position))
            due_ms, rows = each.last_due_ms, new_rows(0)
            self._passed.append(Piecewise(each, each.count, due_ms, rows, [], [], nothing))
            return None

    def _piece(self, taken: Taken, rows: Rows, crcs: npt.NDArray[np.uint32]) -> Piecewise:
        try:
            return super()._piece(taken, rows, crcs)
        except CorruptFile as error:
            return self._what_is_left(taken, rows, crcs, str(error))

    def _what_is_left(
        self, taken: Taken, rows: Rows, crcs: npt.NDArray[np.uint32], why: str
    ) -> Piecewise:
        places = zip(rows.home.tolist(), rows.size.tolist(), strict=True)
        bodies = [self._body(taken, *each) for each in places]
        piece = cut_piece(taken, rows, b"".join(bodies))
        good = np.array(list(map(google_crc32c.value, bodies))) == crcs
        lost = rows.take(~good)
        if len(lost):
            due = lost.due_ms
            self.damage.append(Damage(why, int(due.min()), int(due.max()), len(lost), lost, piece))
        return piece._replace(rows=rows.take(good))

    def _body(self, taken: Taken, at: int, size: int) -> bytes:
        """As it lies there; zeros where that cannot be read."""
        try:
            data = self._files.read(taken.window.block.file, taken.position + at, size)
        except CorruptFile:
            data = b""
        return data.ljust(size, b"\0")


class TolerantSegments(FarSegments):
    """Far timers, without those that cannot be read."""

    def __init__(self, directory: str, disk: Disk) -> None:
        super().__init__(directory, disk)
        self.damaged_files: set[str] = set()
        self.lost: list[str] = []
        """What was lost, a line each."""
        self.lost_timers = 0

    def _load(
        self, blocks: Sequence[Block], horizon_ms: int, rows_max: int, bytes_max: int
    ) -> Load:
        place = self.directory, self._disk
        return TolerantLoad(*place, blocks, horizon_ms, rows_max, bytes_max, self._windows)

    def _cut(self, name: str, length: int) -> None:
        try:
            super()._cut(name, length)
        except CorruptFile:
            self.damaged_files.add(name)  # what is missing of it is damage of its blocks
            self._disk.open(self.path(name), create=True).close()

    def damaged(self) -> Iterator[Block]:
        """Blocks that cannot be read to their end."""
        for each in self.blocks():
            everything = [each], each.last_due_ms + 1, NO_LIMIT, NO_LIMIT
            try:
                Load(self.directory, self._disk, *everything, Windows()).run()
            except CorruptFile:
                yield each

    def load_whole(self, each: Block) -> Load:
        """The rest of a block, as far as it can be read."""
        return self._load([each], each.last_due_ms + 1, NO_LIMIT, NO_LIMIT)


class TolerantRecovery(Recovery):
    """A start that goes on without what it cannot read, and counts it."""

    def __init__(
        self,
        scheduler: Scheduler,
        read_body: ReadBody,
        now_ms: int,
        fired_by: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(scheduler, read_body, now_ms, fired_by)
        self._held_damage: list[Damage] = []
        self._unknown = 0  # lost, and nobody knows which
        self._fired_before = 0  # of what is missing of batches: not lost
        scheduler.topics.in_doubt = "lost"  # a lost block's topics nobody knows
        self._missing: dict[int, list[str]] = {}
        """Names of the timers that are missing of a batch, by its position."""

    @property
    def _segments(self) -> TolerantSegments:
        segments = self._scheduler.segments
        assert isinstance(segments, TolerantSegments)
        return segments

    def _admit_held(self, held: Held, rows: Rows) -> None:
        try:
            super()._admit_held(held, rows)
        except (Corrupt, StorageError, OSError, IndexError) as error:
            due = rows.due_ms
            damage = Damage(str(error), int(due.min()), int(due.max()), len(rows), rows)
            self._held_damage.append(damage)

    def finish(self) -> None:
        """See Recovery.finish; then every block is read, and nothing damaged is left in one."""
        self._unseen.seal()
        for each in self._held_damage:
            self._lose(each)
        super().finish()
        for block in list(self._segments.damaged()):
            self._take(self._segments.load_whole(block))
            self._make_room()
        if self._unknown:
            self._meet_cancelled()
        self._tell_schedules()
        super()._count_topics()
        self._scheduler.check()

    def _count_topics(self) -> None:
        """Not before all that is damaged is out of the way."""

    def _tell_schedules(self) -> None:
        """Those go on whose message is lost."""
        scheduler, near = self._scheduler, self._scheduler.near
        pending = {
            (scheduler.numbers.number_source(SourceId(*each.source), "", 0), each.offset): each
            for schedule in scheduler.schedules
            for each in schedule.pending
        }
        lost = {place for place in pending if near.find(*place) < 0}
        for found in self._far() if lost else ():
            lost -= found
        for place in lost:
            scheduler.schedules.left(pending[place].source, (pending[place].offset,))

    def _far(self) -> Iterator[set[tuple[int | None, int]]]:
        """What lies in the memtable and in blocks: numbers of sources, and offsets."""
        scheduler = self._scheduler
        for piece, _ in scheduler.tiers.memtable.pieces:
            yield {(source, offset) for source, offset, _ in _keys(piece)}
        for each in self._segments.blocks():
            index = self._segments.index_of(each)
            numbers = [scheduler.numbers.find_source(source) for source in index.sources]
            rows = index.rows[each.cursor :]
            found = zip(rows["source"].tolist(), rows["offset"].tolist(), strict=True)
            yield {(numbers[source], offset) for source, offset in found}

    def _meet_cancelled(self) -> None:
        """Cancelled timers that are in no block any more were in one that is lost."""
        scheduler = self._scheduler
        keys = scheduler.tombstones.left.keys().tolist()
        left = {(key >> KEY_BITS, key & (1 << KEY_BITS) - 1) for key in keys}
        for found in self._far():
            left -= found
        cancelled = new_rows(len(left))
        cancelled.narrow[1] = 0  # topics are counted after this
        cancelled.narrow[0] = [source for source, _ in left]
        cancelled.wide[1] = [offset for _, offset in left]
        cancelled.wide[0] = self._now_ms
        scheduler.tombstones.meet(cancelled, self._now_ms)
        self._not_lost(len(left))

    def _take(self, load: Load) -> None:
        super()._take(load)
        assert isinstance(load, TolerantLoad)
        for each in load.damage:
            self._lose(each)
        if load.damage:
            self._segments.damaged_files |= {piece.block.file for piece in load.pieces}

    def _lose(self, damage: Damage) -> None:
        scheduler, segments, rows = self._scheduler, self._segments, damage.rows
        count, names = damage.count, []
        if rows is None:
            self._unknown += count
        else:
            if damage.piece is not None:
                piece = damage.piece
                rows = scheduler.numbers.translate(rows, piece.sources, piece.targets)
            batches = self._unseen.meet(rows)[0]
            for batch, key in zip(batches.tolist(), _keys(rows), strict=True):
                if batch >= 0:
                    self._miss(batch, self._name(*key))
            rows = scheduler.tiers.drop_cancelled(rows.take(batches < 0), self._now_ms)
            count = len(rows)
            names = [self._name(*key) for key in _keys(rows)]
        scheduler.ledger.lost += count
        segments.lost_timers += count
        segments.lost += [
            f"{count} timers, of {damage.count} due {damage.first_due_ms} to"
            f" {damage.last_due_ms}: {damage.why}",
            *names,
        ]

    def _not_found(self, count: int) -> None:
        of_lost_blocks = min(count, self._unknown)
        self._not_lost(of_lost_blocks)
        missing = self._unseen.missing()
        for batch, keys in missing.items():
            for source, offset in keys:
                self._miss(batch, self._name(source, offset))
        if count > of_lost_blocks:
            fired = self._scheduler.ledger.fired
            super()._not_found(count - of_lost_blocks)
            stored = sum(len(keys) for batch, keys in missing.items() if self._batches[batch].acked)
            counted_twice = fired - self._scheduler.ledger.fired
            self._fired_before = max(0, counted_twice - stored)

    def _refuse(self, count: int, lost: list[Replayed]) -> None:
        """What is missing of them is counted and named as they are rebuilt."""

    def _miss(self, batch: int, name: str) -> None:
        replayed = self._batches[batch]
        if not replayed.acked:
            self._missing.setdefault(replayed.position, []).append(name)

    def _name(self, source: int, offset: int, due_ms: int | None = None) -> str:
        store_id, queue_id = self._scheduler.numbers.sources[source].id
        place = f"  store {store_id:016x}, queue {queue_id} of %TIMER%, offset {offset}"
        return place if due_ms is None else f"{place}, due {due_ms}"

    def _not_lost(self, count: int) -> None:
        """Of a block that is lost whole: dispatched or cancelled before."""
        if count:
            self._unknown -= count
            self._scheduler.ledger.lost -= count
            self._segments.lost_timers -= count
            self._segments.lost.append(f"of these, {count} had been fired or cancelled before")

    def _rebuild(self, batch: Replayed) -> None:
        found = sum(len(places) for places, _, _ in batch.found)
        if found < batch.count:
            self._lose_of(batch, batch.count - found)
            batch.count = found
        if found:
            super()._rebuild(batch)

    def _lose_of(self, batch: Replayed, missing: int) -> None:
        """Its lane goes on, under a new epoch if its broker misses a batch that is lost whole."""
        ledger, segments = self._scheduler.ledger, self._segments
        before = min(missing, self._fired_before)
        self._fired_before -= before
        lost = missing - before
        ledger.in_flight -= missing
        ledger.fired -= lost
        self._scheduler.topics.of(batch.lane.id.topic).fired -= lost
        ledger.lost += lost
        segments.lost_timers += lost
        segments.lost += [
            f"{missing} of {batch.count} timers of the batch at {batch.position} of the log, for"
            f" {batch.lane.id}, on their way when the service stopped: whether they were stored"
            " only their topic tells",
            *self._missing.get(batch.position, ()),
        ]
        if before:
            segments.lost.append(f"of these, {before} had been fired before")


def _keys(rows: Rows) -> Iterator[tuple[int, int, int]]:
    return zip(rows.source.tolist(), rows.offset.tolist(), rows.due_ms.tolist(), strict=True)


def set_aside(directory: str, disk: Disk, limits: Limits, now_ms: int) -> Iterator[str]:
    """Does it; what was lost, line by line.  The caller has locked the directory.

    Raises Corrupt, StorageError for what cannot be mended here; then nothing has changed.
    """
    opened = open_directory(
        directory,
        disk,
        limits,
        now_ms,
        segments_type=TolerantSegments,
        recovery_type=TolerantRecovery,
    )
    segments = opened.scheduler.segments
    assert isinstance(segments, TolerantSegments)
    for name in sorted(segments.damaged_files):
        yield f"kept aside: {_copy(directory, segments.path(name), disk)}"
    yield from segments.lost
    if segments.damaged_files:
        opened.scheduler.tiers.evict(0)  # a checkpoint must not need what lies beside damage
    if opened.scheduler.tiers.memtable.rows:
        flush = opened.scheduler.tiers.begin_flush(now_ms)
        flush.run()
        opened.scheduler.tiers.end_flush(flush)
    save_now(opened.log, opened.housekeeper, now_ms)
    opened.log.close()
    yield f"{segments.lost_timers} timers lost; {opened.scheduler.ledger.pending} are pending"


def _copy(directory: str, path: str, disk: Disk) -> str:
    """A whole one, beside those of earlier damage: a period's file may come anew."""
    folder = os.path.join(directory, FOLDER)
    disk.makedirs(folder)
    first = os.path.join(folder, os.path.basename(path))
    names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(2)))
    copy_path = next(name for name in names if not disk.exists(name))
    with contextlib.closing(disk.open(path)) as source:
        write_whole(copy_path, _chunks(source), disk)
    disk.fsync_dir(folder)
    return copy_path


def _chunks(file: DiskFile) -> Iterator[bytes]:
    size = file.size()
    for at in range(0, size, COPY_BYTES):
        yield _readable(file, at, min(COPY_BYTES, size - at))


def _readable(file: DiskFile, at: int, size: int) -> bytes:
    """Bytes of a file; zeros for sectors that cannot be read."""
    try:
        return bytes(file.pread(size, at))
    except OSError:
        if size <= SECTOR_BYTES:
            return bytes(size)
    half = size // 2
    return _readable(file, at, half) + _readable(file, at + half, size - half)
