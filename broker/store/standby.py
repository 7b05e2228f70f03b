"""The store of a replica that follows: a start that never ends.

Owned by: the replica's role.  Blocking; one thread at a time.

A follower's log is its leader's, byte by byte (ReplicaLog.extend).  What is committed of it takes
its effect on the tables, consume queues and checkpoints as at any start; what is beyond waits.  So
nothing is ever undone that was applied, and a follower may truncate its log to all that is not
committed.  A deposed leader opens its directory by `open`: its checkpoints held what was committed.

A checkpoint may be ahead of the log: it came as a snapshot from the leader, which sends the log
from where its own begins, or the log has lost its end, which the leader sends again.  Up to the
checkpoint's position only the queues are filled from the log; all else is as the checkpoint says,
and whole when that position is reached.  Until then no checkpoint is saved, and a start begins
again at the log's begin.

A snapshot is installed in these durable steps; whatever is interrupted, the next start goes on:

    1  `installing`: the snapshot, and where the log is to begin; from here on there is no way back
    2  the log is empty and begins where it is to (ReplicaLog.begin_at): room for the rest
    3  `rebuilding` says that consume queues are those of nothing
    4  `checkpoint` is the snapshot
    5  `installing` goes
    6  the log reaches the snapshot's position: consume queues, a checkpoint; `rebuilding` goes
"""

import logging
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from duemq.errors import InvariantError
from duemq_server.broker.store import checkpoint_state, recovery
from duemq_server.broker.store.recovery import Marker, Opened, Opening
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.broker.store.tables import Tables
from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.follower import StreamBroken
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import CorruptFile, DiskFailed, DiskFull, StorageError
from duemq_server.storage.log import SEGMENT_BYTES
from duemq_server.storage.record import Entry
from duemq_server.storage.replicas import epoch
from duemq_server.storage.replicas.replica_log import ReplicaLog
from duemq_server.storage.tools.set_aside import GAP

log = logging.getLogger(__name__)

INSTALLING = "installing"
INSTALLED = b"installed"
"""Value of the marker `rebuilding`: the checkpoint is another replica's."""
SNAPSHOT_BYTES_MAX = 1 << 30
_LOG_START = struct.Struct("<Q")


class Standby:
    """See the module; made by `open`."""

    def __init__(self, opening: "_ReplicaOpening", store_id: int, replayed: int) -> None:
        self._opening = opening
        self._data_dir = opening.data_dir
        self._disk = opening.disk
        self.log = opening.log
        self.store_id = store_id
        self.epochs: tuple[tuple[int, int], ...] = opening.epochs.begins
        """(epoch, start) of what the log held at the open, or is to follow after an `install`."""
        self.committed = opening.committed
        """What is known to have been committed at the open."""
        self.applied = opening.replay.position
        """The tables are the log up to here: never beyond what is committed."""
        self.lost = self.log.end_position < opening.was_durable_to
        """The log ends before what was durable: the caller takes a new disk id before it writes."""
        self._replayed = replayed
        self.checkpoint_position = 0
        """Where this process took its last checkpoint; 0: it took none."""
        self._next_start = opening.next_start()
        self._promoted = False

    @classmethod
    def open(
        cls,
        data_dir: str,
        disk: Disk,
        settings: StoreSettings,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> "Standby":
        """Any thread; the caller holds the directory's lock.

        Raises CorruptLog, CorruptFile, UnknownVersion, DiskFull, DiskFailed.
        """
        disk.makedirs(data_dir)
        store_id = recovery.load_store_id(data_dir, disk)
        opening = _ReplicaOpening(data_dir, disk, settings, segment_bytes)
        replayed = opening.run()
        opening.check_synced()
        standby = cls(opening, store_id, replayed)
        if opening.whole and standby.is_whole:
            with suppress(DiskFull):  # another start would begin at the log's begin once more
                standby.checkpoint()
        return standby

    @property
    def tables(self) -> Tables:
        """As of `applied`; with `is_whole` only."""
        return self._opening.tables

    @property
    def is_whole(self) -> bool:
        """Whether the log has reached the checkpoint that this replica began with."""
        return self.applied >= self.known_to

    @property
    def unfit(self) -> str:
        """See ReplicaState: `promote` goes on without what its log lacks."""
        return ""

    @property
    def known_to(self) -> int:
        """Where the checkpoint was made that this replica began with."""
        return self._opening.state.position if self._opening.state else 0

    # -- following --------------------------------------------------------------------------------

    def apply(self, committed: int, entries_max: int | None = None) -> None:
        """Takes over whole entries up to `committed`, or to what is durable here if that is less.

        `entries_max`: at most so many now (15 us each, or some ms for large frames).  Raises
        DiskFull, after which it may be called again; DiskFailed, CorruptLog.
        """
        if self.applied > self.log.end_position:
            raise InvariantError(
                f"the log ends at {self.log.end_position}, {self.applied} was applied"
            )
        end = min(committed, self.log.durable_position)
        if end <= self.applied:
            return
        was_whole = self.is_whole
        entries = (each for each in self.log.entries(self.applied, end) if each.end <= end)
        if self.lost and not was_whole:
            # Another disk by now, which never claimed to have what the checkpoint says.
            self._opening.rebuilding.put(INSTALLED)
        try:
            self._opening.replay.run(islice(entries, entries_max))
        finally:
            self.applied = self._opening.replay.position
        if self.is_whole and not was_whole:
            self._reached()

    def _reached(self) -> None:
        assert self._opening.state is not None
        self.tables.reach(self._opening.state)
        log.info("the log has reached the checkpoint at %d", self.known_to)
        with suppress(DiskFull):  # the next one is in time
            self.checkpoint()

    def checkpoint(self) -> None:
        """Saves the tables as of `applied`; nothing to do before `is_whole`.

        Raises DiskFull, DiskFailed.
        """
        if self.is_whole and self.applied != self.checkpoint_position:
            self._save()

    def _save(self) -> None:
        recovery.drop_before(self.tables, self.log.start_position)
        state = recovery.take_checkpoint(
            self._data_dir, self._disk, self.log, self.tables, self.applied
        )
        self._opening.rebuilding.remove()
        self.checkpoint_position = self._next_start = state.position
        try:
            self.tables.erase_deleted(state)
        except (StorageError, OSError) as error:  # it is tried again after the next one
            log.error("files of deleted topics stay for now: %s", error)

    def drop_before(self, log_start: int) -> None:
        """The leader's log begins there: so does this one, but for what its own start needs.

        Raises DiskFull: what is left goes the next time; DiskFailed.
        """
        wanted = min(log_start, self._next_start)
        starts = [segment.start for segment in self.log.segments if segment.start <= wanted]
        if starts and starts[-1] > self.log.start_position:
            recovery.drop_before(self.tables, starts[-1])
            self.log.delete_before(starts[-1])

    # -- becoming another -------------------------------------------------------------------------

    def rename(self, store_id: int) -> None:
        """Takes the group's store id over, or its new one.  Raises DiskFull, DiskFailed."""
        recovery.save_store_id(self._data_dir, store_id, self._disk)
        self.store_id = store_id

    def promote(self) -> Opened:
        """The store that leads; this standby is used up.

        All of the log is applied.  The caller calls `ensure_timer_topic`, which may append, when
        it leads; nothing is appended here.  Raises DiskFull, DiskFailed.
        """
        if self.applied != self.log.end_position:
            raise InvariantError(f"{self.applied} of {self.log.end_position} bytes are applied")
        if not self.is_whole or self.tables.set_aside:
            # An operator makes it lead, although its log ends before what it had seen, or has lost
            # an entry.
            self._opening.skip_lost(0)
            self._save()
        elif self._opening.rebuilding.value is not None:
            self.checkpoint()
        recovery.drop_before(self.tables, self.log.start_position)
        self.tables.producers.idle_as_logged(self.tables.store_ms)
        self._promoted = True
        store = Store(self.log, self.tables, self._opening.settings, self._next_start)
        return Opened(store, self.store_id, self.known_to, self._replayed)

    def receive(self) -> "Received":
        """A snapshot that arrives; it is installed by `install`."""
        return Received(self)

    def install(self, snapshot: bytes, log_start: int) -> None:
        """This replica is too far behind: it begins anew, with a leader's checkpoint.

        `snapshot`: as it lies in the leader's file (recovery.load_checkpoint); the log will be sent
        from `log_start` on.  Nobody appends, reads or runs a LogWriter meanwhile.  Raises
        UnknownVersion, ValueError, StreamBroken for want of space before anything has changed;
        DiskFull, DiskFailed: only `open` helps then.
        """
        state = checkpoint_state.decode(snapshot)
        if log_start > state.position or log_start % 8:
            raise ValueError(
                f"a log from {log_start} on does not go with a snapshot of {state.position}"
            )
        payload = _LOG_START.pack(log_start) + snapshot
        installing = os.path.join(self._data_dir, INSTALLING)
        try:
            checkpoint.save(installing, payload, self._disk)
        except DiskFull as error:
            if self._disk.exists(installing):  # and perhaps not durably
                raise
            raise StreamBroken(f"no space for the leader's snapshot: {error}") from error
        self._opening.install(payload)
        self._opening.start_over()
        self.committed = self.applied = log_start
        self.epochs = self._opening.epochs.begins
        self.lost = False
        self.checkpoint_position = self._next_start = 0

    def close(self) -> None:
        """Closes the files; those of the store that leads, if there is one, are its own."""
        if self._promoted:
            return
        for queue in self.tables.queues.all():
            with suppress(DiskFull, DiskFailed):  # the next start makes up for it, from the log
                queue.close()
        self.log.close()


class Received:
    """A leader's snapshot, part by part.  It is a checkpoint: small enough for memory."""

    def __init__(self, standby: Standby) -> None:
        self._standby = standby
        self._data = bytearray()

    def write(self, part: bytes) -> None:
        """Raises ValueError for more than any checkpoint has."""
        self._data += part
        if len(self._data) > SNAPSHOT_BYTES_MAX:
            raise ValueError(f"a snapshot of more than {SNAPSHOT_BYTES_MAX} bytes")

    def install(self, log_start: int) -> None:
        """See Standby.install."""
        self._standby.install(bytes(self._data), log_start)

    def close(self) -> None:
        """Gives the memory back."""
        self._data = bytearray()


class _ReplicaOpening(Opening):
    """Replays what is known to be committed, and no more."""

    log: ReplicaLog
    log_type = ReplicaLog
    epochs: Epochs
    committed = 0

    def run(self) -> int:
        payload = Marker(self.data_dir, INSTALLING, self.disk).value
        if payload is not None:
            log.warning("a snapshot was being installed when the process ended: once more")
            self.begin(None)
            for _ in self.log.recover(self.log.start_position):
                pass
            self.install(payload)
            self.log.close()
        return super().run()

    def check_synced(self) -> None:
        """Raises CorruptFile for what was acknowledged unsynced, and led by nobody since."""
        unsynced = Marker(self.data_dir, recovery.UNSYNCED, self.disk)
        if unsynced.value is None:
            return
        if self.epochs.last <= recovery.unsynced_run(unsynced)[1]:
            self.log.close()
            raise CorruptFile(
                os.path.join(self.data_dir, recovery.UNSYNCED),
                0,
                "with flush_mode=async this broker ended without a clean stop",
                "Start it once without replicas, which leaves out the offsets of what may be lost,"
                " and stop it; then its log can become one of replicas",
            )
        with suppress(DiskFull):  # the next start does it
            unsynced.remove()  # it is a group's log by now: what that lost is lost

    def install(self, payload: bytes) -> None:
        """Steps 2 to 5; each may be done again."""
        (log_start,) = _LOG_START.unpack_from(payload)
        snapshot = payload[_LOG_START.size :]
        self.log.begin_at(log_start)
        self.rebuilding.put(INSTALLED)
        checkpoint.save(os.path.join(self.data_dir, recovery.CHECKPOINT), snapshot, self.disk)
        self.state = checkpoint_state.decode(snapshot)
        Marker(self.data_dir, INSTALLING, self.disk).remove()

    def start_over(self) -> None:
        """The log is empty, and the checkpoint another one."""
        self.whole = True
        self.was_durable_to = 0
        self.make_tables(rebuild=True)
        self.epochs = self._known_epochs(self.log.start_position)
        self.committed = self.log.start_position
        self.make_replay(self.log.start_position)

    def _entries(self, position: int) -> Iterator[Entry]:
        epochs = self._known_epochs(position)
        first = known_to = max(position, self.log.start_position)
        for entry in self.log.recover(position):
            if entry.position < first and entry.kind == GAP:  # as one with what lay before
                first, known_to = entry.position, entry.end
            if entry.kind == epoch.KIND:
                epochs.note(epoch.decode(entry.body).epoch, entry.position)
        epochs.truncate(self.log.end_position)
        epochs.drop_before(self.log.start_position)
        self.epochs = epochs
        floor = max(self.log.committed_floor, known_to)
        if self.state and self.rebuilding.value != INSTALLED:  # this replica was there once
            floor = max(floor, self.state.position)
            self.was_durable_to = max(self.was_durable_to, self.state.position)
        self.committed = min(floor, self.log.end_position)
        return self.log.entries(first, self.committed)

    def _known_epochs(self, position: int) -> Epochs:
        """Those that begin before a position, as the checkpoint says."""
        epochs = Epochs(self.state.epochs if self.state else ())
        epochs.truncate(position)
        return epochs
