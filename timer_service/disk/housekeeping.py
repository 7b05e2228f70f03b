"""Work on the disk that takes long: flushing, loading and checkpoints, one job at a time.

Owned by the thread that owns the scheduler.  `next_job` says what to do; `job.run` is called in a
worker thread and touches nothing but the disk and what the job carries; `finish` takes the result
over.  While a job runs, timers come and fire as ever.

A job that found no space (`no_space`) is given up, and its kind waits a while; then what is to be
done is chosen anew, by what is so by then.  Other kinds go on: first loads, which let timers fire;
and if it was a flush a checkpoint, for that deletes log and files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np

from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk, short_of_space
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.disk import checkpoint_state
from duemq_server.timer_service.disk.capture import capture
from duemq_server.timer_service.far.far_segments import FarSegments, Flush
from duemq_server.timer_service.far.loading import Load
from duemq_server.timer_service.scheduling.scheduler import Scheduler

LOAD_ROWS_MAX = 16_384
LOAD_BYTES_MAX = 8 << 20
# A load begins when timers come this close to the horizon, so that it brings a good many.
LOAD_AT = 0.75
# Due timers of a herd that wait in memory, some tenths of a second; the rest waits on disk.
BACKLOG = 2 * LOAD_ROWS_MAX
ROOM_MIN = 0.1  # share of the near limits that must be free for a load
IDLE_MS = 1_000  # longest time between two looks
PRESSED_MS = 20  # the same while memory is short


class Timerlog(Protocol):
    """What a checkpoint needs of a duemq_server.storage.log.SegmentedLog."""

    @property
    def start_position(self) -> int: ...  # noqa: D102
    @property
    def end_position(self) -> int: ...  # noqa: D102
    def recovery_start(self, position: int) -> int: ...  # noqa: D102
    def delete_before(self, position: int) -> int: ...  # noqa: D102


class Save:
    """Writes a checkpoint.  May only run when the log is durable up to `position`."""

    def __init__(
        self, path: str, disk: Disk, segments: FarSegments, found: checkpoint_state.CheckpointState
    ) -> None:
        self.state = found
        self.position = found.position
        self._path = path
        self._disk = disk
        self._directory = segments.directory
        self._dirty = [segments.path(name) for name in segments.dirty if name in found.lengths]

    def run(self) -> None:
        """Does the work.  Raises DiskFull (the old checkpoint stands), DiskFailed."""
        for path in self._dirty:
            file = self._disk.open(path)
            try:
                file.fdatasync()
            finally:
                file.close()
        self._disk.fsync_dir(self._directory)
        checkpoint.save(self._path, checkpoint_state.encode(self.state), self._disk)


Job = Flush | Load | Save

# How long a kind of job waits that found no space.  The state of a checkpoint is collected in the
# event loop, which has better to do.
PUT_OFF_MS: dict[type[Job], int] = {Flush: 250, Load: 250, Save: 2_000}


class Housekeeper:
    """Chooses jobs and takes their results over."""

    def __init__(
        self,
        scheduler: Scheduler,
        log: Timerlog,
        disk: Disk,
        path: str,
        producer_id: int,
        now_ms: int,
        epochs: Sequence[tuple[int, int]] = (),
        store_id: int = 0,
    ) -> None:
        """With replicas: `epochs`, (epoch, start) of the log's EPOCH entries, and `store_id`."""
        self._scheduler = scheduler
        self._tiers = scheduler.tiers
        self._parking = scheduler.parking
        self._log = log
        self._epochs = Epochs(epochs)
        self._store_id = store_id
        self._disk = disk
        self._path = path
        self._producer_id = producer_id
        self._saved_position = -1
        self._saved_ms = now_ms
        # The log that timers in memory need, as of the last checkpoint.
        self._needed_from = self._needed_before = log.end_position
        self._put_off: dict[type[Job], int] = {}  # kinds that found no space, and when
        self._lacks_space = False  # a flush does
        self._loads_first = False  # however long it takes to find no space
        self.others_need: Callable[[], int | None] = lambda: None
        """From where on replicas that catch up need the log; None: none does."""
        self._unneeded_to = 0  # here
        self._cut_again = False

    def next_job(self, now_ms: int) -> Job | None:
        """What to do now, or None.  Raises LogFull or DiskFull (then ask again later)."""
        scheduler = self._scheduler
        if self._cut_again:
            self._cut_log()
        self._needed_before = self._needed_from
        self._pull_near(now_ms)
        job: Job | None = self._bring(now_ms) if self._loads_first else None
        self._loads_first = False
        job = job or self._make_space(now_ms) or self._flush(now_ms) or self._park(now_ms)
        job = job or self._bring(now_ms) or self._flush_soon(now_ms)
        if job is not None:
            return job
        scheduler.tombstones.expire(now_ms)
        scheduler.fires.expire(now_ms - scheduler.limits.tombstone_keep_ms)
        scheduler.keyed.expire(now_ms, scheduler.limits.tombstone_keep_ms)
        scheduler.bulk.expire(now_ms)
        if not self._save_is_due(now_ms):
            return None
        scheduler.forget_gone()
        return self.save(now_ms)

    def _bring(self, now_ms: int) -> Load | None:
        """Timers into memory."""
        if self._is_put_off(Load, now_ms):
            return None
        return self._load(now_ms) or self._unpark(now_ms)

    def _flush(self, now_ms: int) -> Flush | None:
        """Of a full memtable, or of one that keeps too much of the log."""
        held = self._log_is_held() and self._tiers.memtable.rows
        if self._is_put_off(Flush, now_ms) or not (held or self._tiers.memtable_full()):
            return None
        self._needed_from = self._log.end_position
        return self._tiers.begin_flush(now_ms)

    def _flush_soon(self, now_ms: int) -> Flush | None:
        if self._is_put_off(Flush, now_ms) or not self._waits_on_disk(now_ms):
            return None
        return self._tiers.begin_flush(now_ms)

    def _make_space(self, now_ms: int) -> Save | None:
        """A checkpoint, when a flush had no space; none soon after another.

        At the end of the queue it would wait for all loads, and there may always be one.
        """
        if not self._lacks_space or self._is_put_off(Save, now_ms) or self._saved_lately(now_ms):
            return None
        self._lacks_space = False
        if self._log.end_position == self._saved_position:
            return None
        try:
            return self.save(now_ms)
        except (LogFull, DiskFull):  # acknowledgements wait for the log, and loads not for them
            self._put_off[Save] = now_ms
            return None

    def _saved_lately(self, now_ms: int) -> bool:
        return abs(now_ms - self._saved_ms) < PUT_OFF_MS[Save]  # a clock may be set

    def _is_put_off(self, kind: type[Job], now_ms: int) -> bool:
        """Whether such a job found no space just now; not for longer if the clock is set."""
        since_ms = self._put_off.get(kind)
        return since_ms is not None and abs(now_ms - since_ms) < PUT_OFF_MS[kind]

    def no_space(self, job: Job, now_ms: int) -> None:
        """A job raised DiskFull, and has changed nothing: it is given up."""
        if isinstance(job, Flush):
            self._tiers.undo_flush()
            self._needed_from = self._needed_before
            self._lacks_space = True
        self._put_off[type(job)] = now_ms
        self._loads_first = True

    def short_of_space(self) -> bool:
        """Whether nothing more may be taken over: what is here needs the rest, to fire and go."""
        directory = self._scheduler.segments.directory
        return short_of_space(self._disk, directory, self._scheduler.limits.free_bytes_min)

    def finish(self, job: Job, now_ms: int) -> None:
        """A job ran."""
        self._put_off.pop(type(job), None)
        if isinstance(job, Flush):
            self._tiers.end_flush(job)
        elif isinstance(job, Load):
            self._tiers.end_load(job, now_ms, force=True)
        else:
            self._saved_position, self._saved_ms = job.position, now_ms
            self._needed_from = self._needed_before = job.state.log_needed_from
            self._unneeded_to = self._deletable(job.state)
            self._scheduler.segments.dirty.clear()
            with suppress(DiskFull):  # the next checkpoint's does it
                self._scheduler.segments.delete_done(job.state.files())
            self._cut_log()

    def save(self, now_ms: int) -> Save:
        """A checkpoint of the state as it is now.

        Raises InvariantError if it cannot be right, LogFull or DiskFull if acknowledgements cannot
        be logged (then nothing happened).
        """
        scheduler = self._scheduler
        scheduler.check()
        scheduler.flush_acks()
        position = self._log.end_position
        self._epochs.drop_before(self._log.start_position)
        found = capture(
            scheduler,
            position,
            self._log.recovery_start(position),
            self._producer_id,
            self._epochs.begins,
            self._store_id,
        )
        return Save(self._path, self._disk, scheduler.segments, found)

    def note_epoch(self, epoch: int, start: int) -> None:
        """An EPOCH entry was appended at `start`, after the log was opened."""
        self._epochs.note(epoch, start)

    def _deletable(self, saved: checkpoint_state.CheckpointState) -> int:
        """What the checkpoint does not need; replicas that are a little behind need some more."""
        kept = saved.position - self._scheduler.limits.log_kept_bytes
        return min(saved.log_needed_from, kept)

    def _cut_log(self) -> None:
        """Deletes what nobody needs any more.

        Again at each look while others need it, or while too many files are open.
        """
        needed = self.others_need()
        end = self._unneeded_to if needed is None else min(needed, self._unneeded_to)
        self._cut_again = True
        with suppress(DiskFull):
            self._log.delete_before(end)
            self._cut_again = end < self._unneeded_to

    def next_look_ms(self, now_ms: int) -> int:
        """When to ask `next_job` again, if nothing else happens."""
        wait = PRESSED_MS if self._pressed() or self._parking.looks_on else IDLE_MS
        for kind, since_ms in self._put_off.items():
            if self._is_put_off(kind, now_ms):
                wait = min(wait, max(PRESSED_MS, since_ms + PUT_OFF_MS[kind] - now_ms))
        due = self._scheduler.segments.next_due_ms()
        if due is not None:
            window = self._tiers.horizon_ms(now_ms) - now_ms
            wait = min(wait, max(PRESSED_MS, due - int(LOAD_AT * window) - now_ms))
        return now_ms + wait

    def _pressed(self) -> bool:
        near, limits = self._scheduler.near, self._scheduler.limits
        return len(near) > limits.near_rows_max / 2 or near.bytes > limits.near_bytes_max / 2

    def _pull_near(self, now_ms: int) -> None:
        """Moves timers of the memtable that became near; if need be, later ones give way."""
        for evict in (False, True, True):
            due = self._tiers.memtable.min_due_ms
            if due is None or due >= self._tiers.horizon_ms(now_ms):
                return
            if evict:
                self._make_room(due, now_ms)
            self._tiers.pull_near(now_ms)

    def _waits_on_disk(self, now_ms: int) -> bool:
        """Whether the memtable has what may come into memory some time soon, and did not now.

        What is near and waits for room gets the next there is: on disk it would wait behind all
        that is due before it.  If there is room, it lies in too large a piece.
        """
        scheduler = self._scheduler
        due = self._tiers.memtable.min_due_ms
        if due is None or due >= now_ms + scheduler.limits.near_window_ms:
            return False
        return due >= self._tiers.horizon_ms(now_ms) or not self._short_of_room()

    def _load(self, now_ms: int) -> Load | None:
        scheduler = self._scheduler
        near, limits = scheduler.near, scheduler.limits
        due = scheduler.segments.next_due_ms()
        horizon = self._tiers.horizon_ms(now_ms)
        if due is None or due >= now_ms + LOAD_AT * (horizon - now_ms):
            return None
        waiting = scheduler.dispatcher.due.waiting
        if waiting >= BACKLOG and self._parking.backlog(due, now_ms) >= BACKLOG:
            return None  # no sooner for being in memory, where others find room meanwhile
        if self._short_of_room():
            self._make_room(due, now_ms)
        if self._short_of_room():
            return None
        rows = min(LOAD_ROWS_MAX, limits.near_rows_max - len(near))
        size = min(LOAD_BYTES_MAX, limits.near_bytes_max - near.bytes)
        return scheduler.segments.load(horizon, rows, size)

    def _park(self, now_ms: int) -> Flush | None:
        """Moves due timers to disk whose targets are away, when memory is short or the log long."""
        if self._is_put_off(Flush, now_ms):
            return None
        held = self._log_is_held() and self._scheduler.dispatcher.due.waiting
        few = self._too_few_wait() and not self._short_of_room()
        if not held and (few or not self._pressed()):
            return None
        self._needed_from = self._log.end_position if held else self._needed_from
        targets = self._parking.stuck(now_ms)
        return self._parking.begin(targets, now_ms) if targets else None

    def _log_is_held(self) -> bool:
        """Whether timers in memory keep too much of the log from being deleted."""
        return self._log.end_position - self._needed_from > self._scheduler.limits.log_held_max

    def _too_few_wait(self) -> bool:
        scheduler = self._scheduler
        return scheduler.dispatcher.due.waiting < scheduler.limits.park_rows_min

    def _unpark(self, now_ms: int) -> Load | None:
        scheduler = self._scheduler
        targets, rows = [], 0
        for target in self._parking.unparkable(scheduler.segments.parked(), now_ms):
            targets.append(target)
            rows += scheduler.segments.parked_for(target)
            if rows >= LOAD_ROWS_MAX:
                break
        if targets and self._short_of_room():
            self._make_room(now_ms, now_ms)  # what is parked is due
        if not targets or self._short_of_room():
            return None
        return scheduler.segments.load_parked(targets, LOAD_ROWS_MAX, LOAD_BYTES_MAX)

    def _short_of_room(self) -> bool:
        near, limits = self._scheduler.near, self._scheduler.limits
        rows = int(limits.near_rows_max * ROOM_MIN)
        return not near.has_room(rows, int(limits.near_bytes_max * ROOM_MIN))

    def _make_room(self, due_ms: int, now_ms: int) -> None:
        """Frees what is gone; if that is too little, evicts the later half due after `due_ms`."""
        near = self._scheduler.near
        if near.free_dropped() and not self._short_of_room():
            return
        due = near.table.due_ms[near.on_wheel_ids()]
        later = due[due > max(due_ms, now_ms)]
        if len(later):
            self._tiers.evict(max(int(np.median(later)), due_ms + 1))

    def _save_is_due(self, now_ms: int) -> bool:
        end = self._log.end_position
        if end == self._saved_position or self._is_put_off(Save, now_ms):
            return False
        grown = end - max(self._saved_position, 0)
        limits = self._scheduler.limits
        late = abs(now_ms - self._saved_ms) >= limits.checkpoint_interval_ms  # a clock may be set
        return late or grown >= limits.checkpoint_log_bytes
