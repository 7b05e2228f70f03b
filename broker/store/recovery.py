"""Opens a broker's data directory: checkpoint, then the log beyond it.

Directory            what
 LOCK                one process a directory (storage/dirlock.py)
 store_id            8 bytes in a checkpoint file: names this store for ever
 checkpoint          state at one position of the log (checkpoint_state.py)
 commitlog/          the log: frames (storage/frame.py) and changes (journal.py)
 consumequeue/<topic>.<id>/<queue>/   where each record lies; derived from the log

 unsynced            while entries are acknowledged unsynced: in which run of the machine
 rebuilding          while consume queues are rebuilt

A start costs what was written since the checkpoint.  If the consume queues are not what the
checkpoint says (files were lost), or the log ends before it, everything that the log can tell is
rebuilt from the whole of it, and the log says so.

A log that ends before what was acknowledged or handed out (it was cut, its end is lost, or the
power failed before unsynced entries were on the disk) has lost messages.  Their offsets are left
out of their queues for good, so that nobody takes a new message for one that was consumed.
"""

import logging
import os
import secrets
from typing import NamedTuple

from duemq.protocol import names
from duemq_server.broker.store import checkpoint_state as states
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.queues import QueueTable
from duemq_server.broker.store.replay import Replay
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.broker.store.tables import Tables
from duemq_server.storage import checkpoint, frame
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import CorruptFile
from duemq_server.storage.log import SEGMENT_BYTES, SegmentedLog
from duemq_server.storage.open_files import OpenFiles
from duemq_server.storage.writer import UNSYNCED_BYTES_MAX

log = logging.getLogger(__name__)

LOG_DIRECTORY = "commitlog"
CHECKPOINT = "checkpoint"
STORE_ID = "store_id"
UNSYNCED = "unsynced"
REBUILDING = "rebuilding"
# Queues that are named one by one when something is lost.
NAMED_MAX = 20


class Opened(NamedTuple):
    """A store that is ready, and what opening it took."""

    store: Store
    store_id: int
    checkpoint_position: int
    replayed_entries: int


def open_store(
    data_dir: str,
    disk: Disk,
    settings: StoreSettings,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    unsynced_boot: bytes = b"",
) -> Opened:
    """`unsynced_boot`: names this run of the machine, where entries are acknowledged unsynced.

    Raises CorruptLog, CorruptFile, UnknownVersion, DiskFull, DiskFailed.
    """
    disk.makedirs(data_dir)
    store_id = _store_id(os.path.join(data_dir, STORE_ID), disk)
    payload = checkpoint.load(os.path.join(data_dir, CHECKPOINT), disk)
    state = states.decode(payload) if payload else None
    opening = _Opening(data_dir, disk, settings, segment_bytes)
    replayed = opening.from_checkpoint(state) if state else None
    whole = replayed is None
    if replayed is None:
        replayed = opening.from_the_whole_log(state)
    unsynced = _Marker(data_dir, UNSYNCED, disk)
    may_be_lost = UNSYNCED_BYTES_MAX if unsynced.value not in (None, unsynced_boot) else 0
    lost = opening.skip_lost(state if whole else None, may_be_lost)
    if lost or (whole and state):
        # Before anything is appended: the checkpoint that was found says what is not so.
        opening.save_checkpoint()
    _Marker(data_dir, REBUILDING, disk).remove()
    if unsynced_boot:
        unsynced.put(unsynced_boot)
    else:
        unsynced.remove()
    store = Store(opening.log, opening.tables, settings)
    store.ensure_timer_topic()
    position = state.position if state else 0
    return Opened(store, store_id, position, replayed)


def closed(data_dir: str, disk: Disk) -> None:
    """All that was acknowledged is on the disk.  Raises DiskFailed."""
    _Marker(data_dir, UNSYNCED, disk).remove()


class _Marker:
    """A file that says something by being there, durably."""

    def __init__(self, data_dir: str, name: str, disk: Disk) -> None:
        self._data_dir = data_dir
        self._path = os.path.join(data_dir, name)
        self._disk = disk
        self.value = checkpoint.load(self._path, disk)

    def put(self, value: bytes) -> None:
        """Raises DiskFull, DiskFailed."""
        if self.value != value:
            checkpoint.save(self._path, value, self._disk)
            self.value = value

    def remove(self) -> None:
        """Raises DiskFailed."""
        if self.value is not None:
            self._disk.unlink(self._path)
            self._disk.fsync_dir(self._data_dir)
            self.value = None


class _Opening:
    """The log and what is known, as far as they have been opened."""

    log: SegmentedLog
    tables: Tables

    def __init__(
        self, data_dir: str, disk: Disk, settings: StoreSettings, segment_bytes: int
    ) -> None:
        self._data_dir = data_dir
        self._disk = disk
        self._settings = settings
        self._segment_bytes = segment_bytes
        self._was_durable_to = 0

    def _begin(self, start_at: int | None) -> None:
        files = OpenFiles(self._disk)
        self.log = SegmentedLog.open(
            os.path.join(self._data_dir, LOG_DIRECTORY),
            self._disk,
            segment_bytes=self._segment_bytes,
            start_at=start_at,
            files=files,
        )
        self.tables = Tables(QueueTable(self._data_dir, self._disk, files), self._settings)

    def from_checkpoint(self, state: CheckpointState) -> int | None:
        """Entries replayed; None: the checkpoint does not fit the other files."""
        if _Marker(self._data_dir, REBUILDING, self._disk).value is not None:
            log.error("consume queues were being rebuilt when the process ended: once more")
            return None
        self._begin(state.verify_from)
        try:
            self.tables.restore(state)
            replayed = self._replay(state.position, state)
        except (IndexError, CorruptFile) as error:
            if isinstance(error, CorruptFile) and "consumequeue" not in error.path:
                raise
            log.error("consume queues are damaged, rebuilding them from the log: %s", error)
            return None
        if self.log.end_position < state.position:
            log.error(
                "the log ends at %d, before the checkpoint at %d: rebuilding from what is left",
                self.log.end_position,
                state.position,
            )
            return None
        return replayed

    def from_the_whole_log(self, state: CheckpointState | None) -> int:
        """Entries replayed."""
        self._begin(None)
        if state:
            # A crash meanwhile would leave consume queues that seem to fit the checkpoint.
            _Marker(self._data_dir, REBUILDING, self._disk).put(b"")
            self.tables.restore(state, rebuild=True)
        replayed = self._replay(self.log.start_position, state)
        if state and state.position > self.log.end_position:
            self.tables.keep_topics_of(state)
        return replayed

    def skip_lost(self, state: CheckpointState | None, may_be_lost: int) -> bool:
        """Leaves out the offsets that were given to what the log has lost, if it has lost anything.

        `state`: a checkpoint that may be ahead of the log; `may_be_lost`: bytes that may have been
        acknowledged beyond the end without anybody's knowing.
        """
        end = self.log.end_position
        lost_to = max(self._was_durable_to, end + may_be_lost)
        known_to = max(end, state.position) if state else end
        since_end = (lost_to - end) // frame.RECORD_BYTES_MIN
        since_checkpoint = max(0, lost_to - known_to) // frame.RECORD_BYTES_MIN
        if since_end and names.TIMER_TOPIC not in self.tables.topics:
            timer_topic = self.tables.topics.plan(names.TIMER_TOPIC, self._settings.timer_queues)
            self.tables.put_topic(timer_topic)
        skipped = self.tables.skip_lost(state, since_checkpoint, since_end)
        for queue, offset in skipped[:NAMED_MAX]:
            log.error(
                "%s/%d: up to %d messages from offset %d on are lost; the next one gets offset %d",
                *queue.key,
                queue.next_offset - offset,
                offset,
                queue.next_offset,
            )
        if skipped:
            log.error(
                "the log ends at %d and may have gone on to %d:"
                " offsets that are lost in %d queues are not given again",
                end,
                lost_to,
                len(skipped),
            )
        return bool(skipped)

    def save_checkpoint(self) -> None:
        """Raises DiskFull, DiskFailed."""
        position = self.log.end_position
        for queue in self.tables.queues.all():
            queue.sync()
        state = self.tables.snapshot(position, self.log.recovery_start(position))
        save_checkpoint(self._data_dir, state, self._disk)

    def _replay(self, position: int, state: CheckpointState | None) -> int:
        replay = Replay(self.tables, self._settings, state.position if state else 0)
        replayed = replay.run(self.log.recover(position))
        self._was_durable_to = max(self._was_durable_to, self.log.was_durable_to)
        # The files of the consume queues may begin earlier: they shrink by whole files.
        for queue, error in self.tables.drop_before(self.log.start_position):
            log.error("%s cannot be read: %s: %s", queue, type(error).__name__, error)
        return replayed


def _store_id(path: str, disk: Disk) -> int:
    saved = checkpoint.load(path, disk)
    if saved is None:
        saved = secrets.token_bytes(8)
        checkpoint.save(path, saved, disk)
    return int.from_bytes(saved, "little")


def save_checkpoint(data_dir: str, state: CheckpointState, disk: Disk) -> None:
    """Raises DiskFull, DiskFailed."""
    checkpoint.save(os.path.join(data_dir, CHECKPOINT), states.encode(state), disk)
