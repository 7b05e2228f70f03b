"""Opens a broker's data directory: checkpoint, then the log beyond it.

Directory            what
 LOCK                one process a directory (storage/dirlock.py)
 store_id            8 bytes in a checkpoint file: names this store for ever
 checkpoint          state at one position of the log (state.py)
 commitlog/          the log: frames (storage/frame.py) and changes (journal.py)
 consumequeue/<topic>.<id>/<queue>/   where each record lies; derived from the log

A start costs what was written since the checkpoint.  If the consume queues are not what the
checkpoint says (files were lost), or the log ends before it, everything that the log can tell is
rebuilt from the whole of it, and the log says so.
"""

import logging
import os
import secrets
from typing import NamedTuple

from broker import state as states
from broker.queues import QueueTable
from broker.replay import Replay
from broker.rules import Rules
from broker.state import State
from broker.store import Store
from broker.tables import Tables
from storage import checkpoint
from storage.disk import Disk
from storage.errors import CorruptFile
from storage.log import SEGMENT_BYTES, SegmentedLog
from storage.open_files import OpenFiles

log = logging.getLogger(__name__)

LOG_DIRECTORY = "commitlog"
CHECKPOINT = "checkpoint"
STORE_ID = "store_id"


class Opened(NamedTuple):
    """A store that is ready, and what opening it took."""

    store: Store
    store_id: int
    checkpoint_position: int
    replayed_entries: int


def open_store(
    data_dir: str, disk: Disk, rules: Rules, *, segment_bytes: int = SEGMENT_BYTES
) -> Opened:
    """Raises CorruptLog, CorruptFile, UnknownVersion, DiskFull, DiskFailed."""
    disk.makedirs(data_dir)
    store_id = _store_id(os.path.join(data_dir, STORE_ID), disk)
    payload = checkpoint.load(os.path.join(data_dir, CHECKPOINT), disk)
    state = states.decode(payload) if payload else None
    opening = _Opening(data_dir, disk, rules, segment_bytes)
    replayed = opening.from_checkpoint(state) if state else None
    if replayed is None:
        replayed = opening.from_the_whole_log(state)
    store = Store(opening.log, opening.tables, rules)
    store.ensure_timer_topic()
    position = state.position if state else 0
    return Opened(store, store_id, position, replayed)


class _Opening:
    """The log and what is known, as far as they have been opened."""

    log: SegmentedLog
    tables: Tables

    def __init__(self, data_dir: str, disk: Disk, rules: Rules, segment_bytes: int) -> None:
        self._data_dir = data_dir
        self._disk = disk
        self._rules = rules
        self._segment_bytes = segment_bytes

    def _begin(self, start_at: int | None) -> None:
        files = OpenFiles(self._disk)
        self.log = SegmentedLog.open(
            os.path.join(self._data_dir, LOG_DIRECTORY),
            self._disk,
            segment_bytes=self._segment_bytes,
            start_at=start_at,
            files=files,
        )
        self.tables = Tables(QueueTable(self._data_dir, self._disk, files), self._rules)

    def from_checkpoint(self, state: State) -> int | None:
        """Entries replayed; None: the checkpoint does not fit the other files."""
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

    def from_the_whole_log(self, state: State | None) -> int:
        """Entries replayed."""
        self._begin(None)
        if state:
            self.tables.restore(state, rebuild=True)
        return self._replay(self.log.start_position, state)

    def _replay(self, position: int, state: State | None) -> int:
        replay = Replay(self.tables, self._rules, state.position if state else 0)
        replayed = replay.run(self.log.recover(position))
        # The files of the consume queues may begin earlier: they shrink by whole files.
        self.tables.drop_before(self.log.start_position)
        return replayed


def _store_id(path: str, disk: Disk) -> int:
    saved = checkpoint.load(path, disk)
    if saved is None:
        saved = secrets.token_bytes(8)
        checkpoint.save(path, saved, disk)
    return int.from_bytes(saved, "little")


def save_checkpoint(data_dir: str, state: State, disk: Disk) -> None:
    """Raises DiskFull, DiskFailed."""
    checkpoint.save(os.path.join(data_dir, CHECKPOINT), states.encode(state), disk)
