"""Opens a broker's data directory: checkpoint, then the log beyond it.

Directory            what
 LOCK                one process a directory (storage/dirlock.py)
 store_id            8 bytes in a checkpoint file: names this store for ever
 checkpoint          state at one position of the log (checkpoint_state.py)
 commitlog/          the log: frames (storage/frame.py) and changes (journal.py)
 consumequeue/<topic>.<id>/<queue>/   where each record lies; derived from the log

 unsynced            while entries are acknowledged unsynced: in which run of the machine, and
                     behind which epoch of a log that had replicas
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from duemq.protocol import names
from duemq_server.broker.store import checkpoint_state as states
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.queues import Queue, QueueTable, remove_key_runs, sync_all
from duemq_server.broker.store.replay import Replay
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.broker.store.tables import Tables
from duemq_server.storage import checkpoint, frame
from duemq_server.storage.disk import Disk, remove_durably
from duemq_server.storage.errors import (
    CorruptFile,
    DiskFailed,
    DiskFull,
    StorageError,
    TooManyFiles,
)
from duemq_server.storage.log import SEGMENT_BYTES, SegmentedLog
from duemq_server.storage.open_files import OpenFiles
from duemq_server.storage.record import Entry
from duemq_server.storage.writer import UNSYNCED_BYTES_MAX

log = logging.getLogger(__name__)

LOG_DIRECTORY = "commitlog"
CHECKPOINT = "checkpoint"
STORE_ID = "store_id"
UNSYNCED = "unsynced"
EPOCH = b" epoch "
"""In the value of that, before the last epoch of a log that had replicas."""
FAILED = b"failed in "
"""In the value of that, before the run of the machine in which the disk failed."""
REBUILDING = "rebuilding"
# What may have come behind what nameservers were told last, a heartbeat's time before the end.
UNTOLD_BYTES = 1 << 30
# Of queues' entries, 32 bytes a record, that a start on a full disk keeps in memory.
HELD_BYTES_MAX = 256 << 20
# Queues that are named one by one when something is lost.
NAMED_MAX = 20


class Opened(NamedTuple):
    """A store that is ready, and what opening it took."""

    store: Store
    store_id: int
    checkpoint_position: int
    replayed_entries: int
    unsynced: bool = False
    """Whether entries may be acknowledged unsynced: the next start would know."""


def open_store(
    data_dir: str,
    disk: Disk,
    settings: StoreSettings,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    unsynced_boot: bytes = b"",
) -> Opened:
    """`unsynced_boot`: names this run of the machine, where entries are acknowledged unsynced.

    A start that finds no space takes that of the key index, which is built anew behind.  Raises
    CorruptLog, CorruptFile, UnknownVersion, DiskFull, DiskFailed.
    """
    try:
        return _open_store(data_dir, disk, settings, segment_bytes, unsynced_boot)
    except TooManyFiles:
        raise
    except DiskFull as error:
        runs = remove_key_runs(data_dir, disk)
        if not runs:
            raise
        log.error("%d runs of the key index are removed to make room: %s", runs, error)
    return _open_store(data_dir, disk, settings, segment_bytes, unsynced_boot)


def _open_store(
    data_dir: str, disk: Disk, settings: StoreSettings, segment_bytes: int, unsynced_boot: bytes
) -> Opened:
    disk.makedirs(data_dir)
    store_id = load_store_id(data_dir, disk)
    opening = Opening(data_dir, disk, settings, segment_bytes)
    try:
        replayed = opening.run()
    except DiskFailed:
        with suppress(StorageError, OSError):
            failed(data_dir, disk)
        raise
    state = opening.state
    unsynced = Marker(data_dir, UNSYNCED, disk)
    boot, _ = unsynced_run(unsynced)
    may_be_lost = UNSYNCED_BYTES_MAX if boot not in (None, unsynced_boot) else 0
    lost = opening.skip_lost(may_be_lost)
    next_start = opening.next_start()
    if lost or (opening.whole and state):
        # Before anything is appended: the checkpoint that was found says what is not so.
        next_start = opening.log.end_position
        take_checkpoint(data_dir, disk, opening.log, opening.tables, next_start)
        opening.log.accept_loss()
    opening.rebuilding.remove()
    may_lag = bool(unsynced_boot) and _say_unsynced(unsynced, unsynced_boot, opening.tables)
    if not may_lag:
        unsynced.remove()
    store = Store(opening.log, opening.tables, settings, next_start)
    store.ensure_timer_topic()
    opening.tables.note_timer_ends()
    position = state.position if state else 0
    return Opened(store, store_id, position, replayed, may_lag)


def _say_unsynced(unsynced: "Marker", boot: bytes, tables: Tables) -> bool:
    """Whether the next start will know that entries were acknowledged unsynced."""
    epoch = tables.epochs.last
    try:
        unsynced.put(boot + (EPOCH + b"%d" % epoch if epoch else b""))
    except DiskFull as error:  # without a start nothing would make space
        log.error("flush_mode is sync until the next start, for want of space: %s", error)
        return False
    return True


def closed(data_dir: str, disk: Disk) -> None:
    """All that was acknowledged is on the disk.  Raises DiskFull, DiskFailed."""
    Marker(data_dir, UNSYNCED, disk).remove()


def failed(data_dir: str, disk: Disk) -> None:
    """The disk failed: what was acknowledged unsynced may be lost though the machine runs on.

    The next start takes it for another run of the machine.  Raises DiskFull, DiskFailed.
    """
    unsynced = Marker(data_dir, UNSYNCED, disk)
    if unsynced.value is not None and not unsynced.value.startswith(FAILED):
        unsynced.put(FAILED + unsynced.value)


class Marker:
    """A file that says something by being there, durably."""

    def __init__(self, data_dir: str, name: str, disk: Disk) -> None:
        self._path = os.path.join(data_dir, name)
        self._disk = disk
        self.value = checkpoint.load(self._path, disk)
        if self.value is not None:  # who put it there may have been killed before it was durable
            disk.fsync_dir(data_dir)

    def put(self, value: bytes) -> None:
        """Raises DiskFull, DiskFailed."""
        if self.value != value:
            checkpoint.save(self._path, value, self._disk)
            self.value = value

    def remove(self) -> None:
        """Raises DiskFull: try again; DiskFailed."""
        if self.value is not None:
            remove_durably(self._path, self._disk)
            self.value = None


def unsynced_run(unsynced: Marker) -> tuple[bytes | None, int]:
    """In which run of the machine entries were acknowledged unsynced, and behind which epoch."""
    if unsynced.value is None:
        return None, 0
    boot, _, epoch = unsynced.value.partition(EPOCH)
    return boot, int(epoch or 0)


class Opening:
    """The log and what is known, as far as they have been opened."""

    log: SegmentedLog
    tables: Tables
    replay: Replay
    files: OpenFiles
    log_type: type[SegmentedLog] = SegmentedLog

    def __init__(
        self, data_dir: str, disk: Disk, settings: StoreSettings, segment_bytes: int
    ) -> None:
        """Raises CorruptFile, UnknownVersion."""
        self.data_dir = data_dir
        self.disk = disk
        self.settings = settings
        self.segment_bytes = segment_bytes
        payload = load_checkpoint(data_dir, disk)
        path = os.path.join(data_dir, CHECKPOINT)
        self.state = states.decode(payload, path) if payload else None
        """The checkpoint that was found."""
        self.rebuilding = Marker(data_dir, REBUILDING, disk)
        self.whole = False
        """The consume queues were rebuilt from the whole log."""
        self.was_durable_to = 0

    def run(self) -> int:
        """Entries replayed.  Raises as `open_store`."""
        replayed = self._from_checkpoint(self.state) if self.state else None
        if replayed is None:
            self.whole = True
            replayed = self._from_the_whole_log()
        return replayed

    def next_start(self) -> int:
        """Where another start would begin: at the checkpoint that was found, which fits the files.

        0: at none.  Its name may not be durable yet: who saved it may have been killed.
        """
        if self.state is None or self.whole:
            return 0
        try:
            self.disk.fsync_dir(self.data_dir)
        except DiskFull:  # too many open files
            return 0
        return self.state.position

    def begin(self, start_at: int | None) -> None:
        """Opens the log."""
        self.files = OpenFiles(self.disk)
        self.log = self.log_type.open(
            os.path.join(self.data_dir, LOG_DIRECTORY),
            self.disk,
            segment_bytes=self.segment_bytes,
            start_at=start_at,
            files=self.files,
        )

    def _from_checkpoint(self, state: CheckpointState) -> int | None:
        """Entries replayed; None: the checkpoint does not fit the other files."""
        if self.rebuilding.value is not None:
            log.error("consume queues were being rebuilt when the process ended: once more")
            return None
        self.begin(state.verify_from)
        try:
            self.make_tables(rebuild=False)
            replayed = self._replay(state.position)
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

    def _from_the_whole_log(self) -> int:
        """Entries replayed."""
        self.begin(None)
        if self.state and self.rebuilding.value is None:
            # A crash meanwhile would leave consume queues that seem to fit the checkpoint.
            self.rebuilding.put(b"")
        self.make_tables(rebuild=True)
        return self._replay(self.log.start_position)

    def make_tables(self, *, rebuild: bool) -> None:
        """As the checkpoint has them; with `rebuild` its queues are empty."""
        queues = QueueTable(self.data_dir, self.disk, self.files)
        self.tables = Tables(queues, self.settings)
        if self.state:
            self.tables.restore(self.state, rebuild=rebuild)

    def _replay(self, position: int) -> int:
        self.make_replay(position)
        replayed = self.replay.run(self._entries(position), may_hold_bytes=HELD_BYTES_MAX)
        self.was_durable_to = max(self.was_durable_to, self.log.was_durable_to)
        if self.state and self.replay.position >= self.state.position:
            self.tables.reach(self.state)
        # The files of the consume queues may begin earlier: they shrink by whole files.
        drop_before(self.tables, self.log.start_position)
        return replayed

    def make_replay(self, position: int) -> None:
        """It begins at a position of the log."""
        known_to = self.state.position if self.state else 0
        self.replay = Replay(self.tables, self.settings, position, known_to)

    def _entries(self, position: int) -> Iterator[Entry]:
        """Recovers the log; what is to be replayed of it."""
        return self.log.recover(position)

    def skip_lost(self, may_be_lost: int) -> bool:
        """Leaves out the offsets that were given to what the log has lost, if it has lost anything,
        or to what was set aside of it.

        `may_be_lost`: bytes that may have been acknowledged beyond the end without anybody's
        knowing.
        """
        state = self.state if self.whole else None  # it may be ahead of the log
        end = self.log.end_position
        if state and state.position > end:
            self.tables.producers.forget_beyond(end)
            self.tables.epochs.truncate(end)
        lost_to = max(self.was_durable_to, end + may_be_lost)
        known_to = max(end, state.position) if state else end
        since_end = (lost_to - end) // frame.RECORD_BYTES_MIN
        since_checkpoint = max(0, lost_to - known_to) // frame.RECORD_BYTES_MIN
        if since_end and names.TIMER_TOPIC not in self.tables.topics:
            timer_topic = self.tables.topics.plan(names.TIMER_TOPIC, self.settings.timer_queues)
            self.tables.put_topic(timer_topic)
        for position, size in self.tables.set_aside:
            log.error(
                "what lay at %d in %d bytes was set aside: queues may lack it", position, size
            )
        skipped = self.tables.skip_lost(state, since_checkpoint, since_end)
        _tell_lost(skipped, end, lost_to)
        return bool(skipped)


def leave_out_lost(store: Store, known_to: int, data_dir: str, disk: Disk) -> None:
    """This data is from an older copy: nameservers know that the log went on to `known_to`.

    As `Opening.skip_lost`, of a store that was opened and has taken nothing yet.  Raises DiskFull,
    DiskFailed.
    """
    end, lost_to = store.log.end_position, known_to + UNTOLD_BYTES
    log.error(
        "the log ends at %d here, and went on to %d when nameservers heard of it last: this is an"
        " older copy, or has lost its end",
        end,
        known_to,
    )
    skipped = store.tables.skip_lost(None, 0, (lost_to - end) // frame.RECORD_BYTES_MIN)
    _tell_lost(skipped, end, lost_to)
    take_checkpoint(data_dir, disk, store.log, store.tables, end)
    store.next_start = end
    store.timers_given.update(store.tables.timer_ends())


def _tell_lost(skipped: Sequence[tuple[Queue, int]], end: int, lost_to: int) -> None:
    if lost_to > end:
        log.error("the log ends at %d and may have gone on to %d", end, lost_to)
    for queue, offset in skipped[:NAMED_MAX]:
        log.error(
            "%s/%d: up to %d messages from offset %d on are lost; the next one gets offset %d",
            *queue.key,
            queue.next_offset - offset,
            offset,
            queue.next_offset,
        )
    if skipped:
        log.error("offsets that are lost in %d queues are not given again", len(skipped))


def drop_before(tables: Tables, position: int) -> None:
    """The tables forget what lies before a position of the log; a queue that cannot is named."""
    for queue, error in tables.drop_before(position):
        log.error("%s cannot be read: %s: %s", queue, type(error).__name__, error)


def load_store_id(data_dir: str, disk: Disk) -> int:
    """The store's id; a new directory gets one.  Raises DiskFull, DiskFailed, CorruptFile."""
    saved = checkpoint.load(os.path.join(data_dir, STORE_ID), disk)
    if saved is not None:
        return int.from_bytes(saved, "little")
    store_id = int.from_bytes(secrets.token_bytes(8), "little")
    save_store_id(data_dir, store_id, disk)
    return store_id


def save_store_id(data_dir: str, store_id: int, disk: Disk) -> None:
    """Raises DiskFull, DiskFailed."""
    checkpoint.save(os.path.join(data_dir, STORE_ID), store_id.to_bytes(8, "little"), disk)


def load_checkpoint(data_dir: str, disk: Disk) -> bytes | None:
    """The last one that was saved, encoded.  Raises CorruptFile, UnknownVersion."""
    remedy = f"{checkpoint.REMEDY}. Else remove this file: what the log still has is rebuilt"
    return checkpoint.load(os.path.join(data_dir, CHECKPOINT), disk, remedy)


def save_checkpoint(data_dir: str, state: CheckpointState, disk: Disk) -> None:
    """Raises DiskFull, DiskFailed."""
    checkpoint.save_parts(os.path.join(data_dir, CHECKPOINT), states.encode(state), disk)


def take_checkpoint(
    data_dir: str, disk: Disk, commit_log: SegmentedLog, tables: Tables, position: int
) -> CheckpointState:
    """Saves the tables, which are the log up to `position`, where it is durable.

    Raises DiskFull, DiskFailed.
    """
    sync_all(tables.queues.all())
    tables.epochs.drop_before(commit_log.start_position)
    state = tables.snapshot(position, commit_log.recovery_start(position))
    save_checkpoint(data_dir, state, disk)
    return state
