"""Saves the state each interval, or sooner when much was written: a start replays less."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.metrics import Meters
from duemq_server.broker.log_loop import LogLoop
from duemq_server.broker.store import recovery
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.queues import Queue, sync_all
from duemq_server.broker.store.store import Store
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import DiskFull, StorageError

log = logging.getLogger(__name__)


class Checkpoints:
    """Saves the store's state.  The event loop takes it, a thread makes its rows and writes it."""

    def __init__(
        self,
        store: Store,
        commits: Commits,
        log_loop: LogLoop,
        meters: Meters,
        data_dir: str,
        disk: Disk,
        on_saved: Callable[[list[Queue], CheckpointState], None],
    ) -> None:
        """`on_saved`: told of what a checkpoint holds, and of the queues there were then."""
        self._on_saved = on_saved
        self._store = store
        self._commits = commits
        self._log_loop = log_loop
        self._meters = meters
        self._data_dir = data_dir
        self._disk = disk
        self._turn = asyncio.Lock()
        # Guards the file: at the stop, the last save waits for the thread of a cancelled one.
        self._writing = threading.Lock()

    async def run(self, interval_s: float) -> None:
        """At once, then for ever."""
        while True:
            if self._store.log.end_position != self._store.checkpoint_position:
                try:
                    await self.save()
                except DiskFull as error:
                    log.error("no checkpoint: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._log_loop.written.wait()

    async def save(self) -> None:
        """One checkpoint, after those that were begun before.  Raises DiskFull, DiskFailed."""
        async with self._turn:
            await self._save()

    async def _save(self) -> None:
        began = time.monotonic()
        self._log_loop.checkpoint_begins()
        state = await asyncio.to_thread(self._store.freeze())
        await self._synced(state.position)
        self._store.check_shown()
        taken, state = state, self._store.tables.without_deleted(state)
        queues = self._store.all_queues()
        if state.queues.keys() != taken.queues.keys():
            # What is left out must be deleted for the next start, too.
            await self._synced(self._store.log.end_position)

        def write() -> None:
            with self._writing:
                sync_all(queues)  # those too of a topic that is deleted meanwhile
                recovery.save_checkpoint(self._data_dir, state, self._disk)

        await asyncio.to_thread(write)
        self._store.checkpointed(state.position)
        await self._erase(state)
        self._on_saved(queues, state)
        self._meters.checkpoint_seconds.set(time.monotonic() - began)

    async def _erase(self, saved: CheckpointState) -> None:
        """Thousands of files of a large topic: in a thread."""
        tables = self._store.tables
        not_needed = tables.not_needed(saved)

        def erase() -> None:
            with self._writing:
                tables.erase(not_needed)

        try:
            await asyncio.to_thread(erase)
        except (StorageError, OSError) as error:  # it is tried again after the next one
            log.error("files of deleted topics stay for now: %s", error)
        else:
            tables.erased(not_needed)

    async def _synced(self, position: int) -> None:
        """Returns when the log is on the disk up to there.  Raises DiskFailed."""
        await self._commits.wait(position)
        # With flush_mode=async that means written: a checkpoint may not be ahead of the log.
        await asyncio.to_thread(self._store.log.sync)
