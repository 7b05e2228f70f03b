"""A replica of a timer shard that follows: its log is the leader's, and now and then it recovers.

Nothing but the log is shipped.  Every `checkpoint_log_bytes` or `standby_interval_ms` of it a
*pass* does what a start does (recovery.py): it makes the shard from the checkpoint and what is
committed behind it, writes the memtable out if it is full, saves a checkpoint, and lets go of it.
Takeover is one more start, whose log is not opened a second time (`promote`).

    log      0 ──────── checkpoint ─────────── committed ── end
                        └─ next pass, or promote ─┘ (to the end)

Only what is committed is in a checkpoint, and nothing committed is ever truncated, so nothing has
to be undone.  Period files, memtables and what is near differ between replicas; the log does not.
A deposed leader opens its directory here, too: its checkpoints held what was committed.

Interrupted, a pass leaves the checkpoint before it, and period files that the next one cuts: as a
start that was killed.  One that finds no space for its checkpoint cuts them itself.

A log may end before its checkpoint was made: the checkpoint came as a snapshot, or the disk lost
what had been durable.  The replica is in no set then; passes wait until the leader has sent the
rest.  A snapshot arrives beside all that, and then takes its place (snapshots/).

Owned by whoever runs the replica: one thread at a time; another one may extend and sync the log.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple, Self

from duemq.errors import Corrupt, InvariantError
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import DiskFull
from duemq_server.storage.record import Entry
from duemq_server.storage.replicas import catching_up, epoch
from duemq_server.storage.replicas.replica_log import ReplicaLog
from duemq_server.timer_service.disk import checkpoint_state
from duemq_server.timer_service.disk.checkpoint_state import CheckpointState
from duemq_server.timer_service.disk.data_directory import (
    LOG_GROUP_BYTES_MAX,
    DataDirectory,
    Made,
    check_begins,
    check_reaches,
    checkpoint_path,
    load_checkpoint,
    log_path,
    make_shard,
    new_producer_id,
    save_checkpoint,
    segments_path,
)
from duemq_server.timer_service.disk.housekeeping import Save
from duemq_server.timer_service.disk.log_view import LogView
from duemq_server.timer_service.disk.recovery import check_no_gap_at, flush_now
from duemq_server.timer_service.disk.snapshots import arriving, installing
from duemq_server.timer_service.disk.snapshots.arriving import Arriving
from duemq_server.timer_service.far.far_segments import FarSegments
from duemq_server.timer_service.timers.limits import Limits

FULL_MS = 30_000
"""Between two passes of which the first found no space: one costs as much as a start."""
TIME_STEP_MS = 500  # a fire is late from a second on
TIMES_MAX = 2_048
EVERYTHING = 1 << 40  # tombstones that may expire in a pass


class _Noted(NamedTuple):
    """All before `applied` was there at `now_ms`."""

    applied: int
    now_ms: int


class Standby:
    """Implements replication.running.state.ReplicaState; see the module."""

    def __init__(
        self,
        data_dir: str,
        disk: Disk,
        limits: Limits,
        clock: Callable[[], int],
        log: ReplicaLog,
        found: CheckpointState,
    ) -> None:
        self.log = log
        self.store_id = _store_id(found)
        """The group's, once it was adopted.  Its fires' producer id is that and 2^63."""
        self.epochs: tuple[tuple[int, int], ...] = ()
        """(epoch, start) of the EPOCH entries that the log had at the open, or at `install`."""
        self.committed = log.committed_floor
        """What was known to be committed at the open, or at `install`."""
        self.lost = log.end_position < log.was_durable_to
        """The log ends before what was durable: the caller takes a new disk id before it writes."""
        self._data_dir = data_dir
        self._disk = disk
        self._limits = limits
        self._clock = clock
        self._leader_start = 0
        self._full_ms: int | None = None
        """When a pass found no space; None: the last one did."""
        self._times: list[_Noted] = []
        self._applied = self.committed
        self._saved(found)

    @classmethod
    def open(cls, data_dir: str, disk: Disk, limits: Limits, *, clock: Callable[[], int]) -> Self:
        """Opens a data directory that is locked by the caller; an empty one is made a shard's.

        `clock`: Unix ms.  Raises Corrupt, CorruptLog, CorruptFile, UnknownVersion, DiskFull,
        DiskFailed.
        """
        disk.makedirs(data_dir)
        arriving.remove(data_dir, disk)
        if installing.was_interrupted(data_dir, disk):
            installing.empty(data_dir, disk, _open_log(data_dir, disk, limits, None))
        found = load_checkpoint(data_dir, disk)
        log = _open_log(data_dir, disk, limits, found)
        verified_from = 0
        if found is not None:
            verified_from = log.start_position if found.installed else found.position
        if not (found and found.installed):
            check_begins(data_dir, log, found)
        met = []
        for entry in log.recover(verified_from):
            if found is not None:
                check_no_gap_at(entry, found.position)
            if entry.kind == epoch.KIND:
                met.append(entry)
        if found is None:
            found = _first_checkpoint(data_dir, disk, log)
        standby = cls(data_dir, disk, limits, clock, log, found)
        standby.epochs = _epochs(found, log, met)
        standby._expect_more(found)
        return standby

    @property
    def applied(self) -> int:
        """Up to where it was told what is committed, and has it: `promote` takes over the rest."""
        return self._applied

    @property
    def known_to(self) -> int:
        """Where the last checkpoint here was made; the log may end before (see the module)."""
        return self._position

    @property
    def unfit(self) -> str:
        """See ReplicaState: what `promote` would raise."""
        end, position = self.log.end_position, self._position
        if end >= position:
            return ""
        return (
            f"its log ends at {end}, and its checkpoint was made at {position}: what lies between"
            " has not come from the leader, and only with that it has the group's timers"
        )

    def _expect_more(self, found: CheckpointState) -> None:
        """If the log ends before the checkpoint, what comes is no proof of what is here."""
        if self.log.end_position < found.position and not self.log.catching_up:
            catching_up.set_durably(self.log.directory, self._disk)
            self.log.catching_up = True

    # -- following --------------------------------------------------------

    def apply(self, committed: int, entries_max: int | None = None) -> None:
        """Notes what is committed; a pass over it if it is time for one (`entries_max`: no bound).

        Counts what is durable here.  Raises as `checkpoint`.
        """
        self._applied = max(self._applied, min(committed, self.log.durable_position))
        self._note_time()
        self.checkpoint()

    def _note_time(self) -> None:
        """What is applied was there by now: a pass, later, must not think that it fired late."""
        now_ms, times = self._clock(), self._times
        if not times or abs(now_ms - times[-1].now_ms) >= TIME_STEP_MS:
            times.append(_Noted(self._applied, now_ms))
        if len(times) > TIMES_MAX:
            del times[::2]

    def _fired_by(self, now_ms: int) -> Callable[[int], int]:
        """When what lies at a position was there, at the latest."""
        times = self._times

        def fired_by(position: int) -> int:
            at = bisect.bisect_right(times, position, key=lambda each: each.applied)
            return times[at].now_ms if at < len(times) else now_ms

        return fired_by

    def checkpoint(self) -> None:
        """A pass if it is time for one, and none found no space just now.  Blocking.

        Raises DiskFull: a later call tries again; Corrupt, CorruptLog, CorruptFile: it cannot
        follow any more; DiskFailed.
        """
        waits = self._applied - self._position
        now_ms, limits = self._clock(), self._limits
        if self._full_ms is not None and abs(now_ms - self._full_ms) < FULL_MS:
            return
        quiet_ms = abs(now_ms - self._passed_ms)  # a clock may be set
        if waits >= limits.checkpoint_log_bytes or quiet_ms >= limits.standby_interval_ms:
            self.pass_now()

    def pass_now(self) -> None:
        """A pass over all that is committed, if there is any.  Raises as `checkpoint`."""
        if self._applied <= self._position:
            return
        try:
            self._pass()
            self._full_ms = None
        except DiskFull:
            self._full_ms = self._clock()
            self._cut_back()
            raise

    def _cut_back(self) -> None:
        """What a pass wrote that came to no checkpoint goes: the log may need the space."""
        with suppress(DiskFull):  # else the next pass does it
            self._disk.fsync_dir(self._data_dir)  # it may have been renamed, and no more
            lengths = self._load().lengths
            FarSegments(segments_path(self._data_dir), self._disk).recover(lengths, ())

    def _pass(self) -> None:
        now_ms = self._clock()
        found = self._load()
        view = LogView(self.log, found.position, self._applied)
        made = self._make(view, found, now_ms)
        _forget(made, now_ms)
        save = self._save(made, now_ms)
        made.housekeeper.finish(save, now_ms)
        self._saved(save.state)
        self._delete()

    def _make(self, log: ReplicaLog | LogView, found: CheckpointState, now_ms: int) -> Made:
        fired_by = self._fired_by(now_ms)
        limits = self._limits
        return make_shard(self._data_dir, self._disk, limits, now_ms, log, found, fired_by=fired_by)

    def _save(self, made: Made, now_ms: int) -> Save:
        """Saves a checkpoint; what holds up too much of the log goes to disk before.

        Where that has no space the checkpoint names the log instead.
        """
        scheduler, has_space = made.scheduler, True
        if scheduler.tiers.memtable_full():
            has_space = flush_now(scheduler, now_ms)
        save = made.housekeeper.save(now_ms)
        if has_space and save.position - save.state.log_needed_from > self._limits.log_held_max:
            scheduler.tiers.evict(0)
            if scheduler.tiers.memtable.rows:
                flush_now(scheduler, now_ms)
            save = made.housekeeper.save(now_ms)
        save.run()
        return save

    def _load(self) -> CheckpointState:
        found = load_checkpoint(self._data_dir, self._disk)
        if found is None:
            raise Corrupt(f"{checkpoint_path(self._data_dir)} is gone: somebody removed it")
        return found

    def _saved(self, state: CheckpointState) -> None:
        self._position = state.position
        self._needed_from = state.log_needed_from
        self._passed_ms = self._clock()
        self._times = [each for each in self._times if each.applied > state.position]

    def drop_before(self, log_start: int) -> None:
        """The leader has no entries before that; nor does this log, but what its checkpoint needs.

        Raises DiskFailed.
        """
        self._leader_start = max(self._leader_start, log_start)
        self._delete()

    def _delete(self) -> None:
        self.log.delete_before(min(self._leader_start, self._needed_from))

    # -- becoming another -------------------------------------------------

    def rename(self, store_id: int) -> None:
        """Goes on under another id: of an empty replica, or where the group accepted a loss.

        To brokers it is another service then, to which its queues must be released.  Raises
        DiskFull, DiskFailed.
        """
        producer_id = store_id | SERVICE_IDS_FROM
        own = 0 if producer_id == store_id else store_id
        state = dataclasses.replace(self._load(), producer_id=producer_id, store_id=own)
        save_checkpoint(self._data_dir, self._disk, state)
        self.store_id = store_id

    def promote(self) -> DataDirectory:
        """The shard that leads from now on; the standby is used up.  Blocking.

        All of the log must be committed, and durable here.  Raises Corrupt, CorruptLog,
        CorruptFile, DiskFull, DiskFailed.
        """
        if self.log.durable_position != self.log.end_position:
            raise InvariantError("it is to lead, and its log is not durable to its end")
        found = self._load()
        check_reaches(self._data_dir, self.log, found.position)
        return DataDirectory(self.log, *self._make(self.log, found, self._clock()))

    def receive(self) -> Arriving:
        """This replica is too far behind: it begins anew, with a leader's snapshot.

        All else goes on beside it until that is installed.  Raises DiskFull, DiskFailed.
        """
        return Arriving(self._data_dir, self._disk, self._limits.free_bytes_min, self._install)

    def _install(self, taken: Arriving, log_start: int) -> None:
        """The log will be sent from `log_start` on.

        Nobody appends, reads or runs a LogWriter meanwhile.  Raises ValueError before anything has
        changed; DiskFull, DiskFailed: only `open` helps then.
        """
        state = installing.install(
            self._data_dir, self._disk, self.log, taken, log_start, self.store_id
        )
        self.store_id = _store_id(state)
        self.epochs = _epochs(state, self.log, ())
        self.committed = self._applied = log_start
        self.lost = False
        self._leader_start = 0
        self._saved(state)
        self._expect_more(state)

    def close(self) -> None:
        """Closes the log; also that of the shard that was promoted."""
        self.log.close()


def _open_log(
    data_dir: str, disk: Disk, limits: Limits, found: CheckpointState | None
) -> ReplicaLog:
    log = ReplicaLog.open(
        log_path(data_dir),
        disk,
        segment_bytes=limits.log_segment_bytes,
        pending_bytes_max=limits.log_pending_bytes_max,
        group_bytes_max=LOG_GROUP_BYTES_MAX,
        start_at=found.recovery_start if found else None,
    )
    assert isinstance(log, ReplicaLog)
    return log


def _epochs(
    found: CheckpointState, log: ReplicaLog, met: Iterable[Entry]
) -> tuple[tuple[int, int], ...]:
    """Of the checkpoint and of entries behind it; epoch 0 is what was written without replicas."""
    epochs = Epochs(found.epochs)
    epochs.truncate(min(found.position, log.end_position))
    for entry in met:
        if entry.position >= found.position:
            epochs.note(epoch.decode(entry.body).epoch, entry.position)
    epochs.drop_before(log.start_position)
    begins = epochs.begins
    if log.end_position and not (begins and begins[0].start <= log.start_position):
        return ((0, 0), *begins)
    return begins


def _store_id(found: CheckpointState) -> int:
    return found.store_id or found.producer_id


def _first_checkpoint(data_dir: str, disk: Disk, log: ReplicaLog) -> CheckpointState:
    if log.end_position:
        raise Corrupt(
            f"{data_dir}/log holds timers, and there is no checkpoint: restore the directory from"
            " a copy, or empty it: the replica gets everything anew"
        )
    state = checkpoint_state.empty(new_producer_id())
    save_checkpoint(data_dir, disk, state)
    return state


def _forget(made: Made, now_ms: int) -> None:
    """What a leader's housekeeping does all the time."""
    scheduler = made.scheduler
    scheduler.tombstones.expire(now_ms, EVERYTHING)
    scheduler.fires.expire(now_ms - scheduler.limits.tombstone_keep_ms)
    scheduler.keyed.expire(now_ms, scheduler.limits.tombstone_keep_ms)
    scheduler.bulk.expire(now_ms)
    scheduler.topics.forget()
