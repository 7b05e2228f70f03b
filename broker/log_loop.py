"""Everything that a broker does by itself.

commitlog-writer  two threads: write and sync what was appended, in groups (storage/writer.py)
checkpoint        saves the state each interval, or sooner when much was written
key index         builds the runs of what a checkpoint holds (key_indexer.py)
upkeep            retention, idle producers, free space, the clock (upkeep.py)
rates             samples how far queues and groups are (rates.py)
groups            sessions of groups' members (coordinator_servicer.py)
registration      heartbeats to the nameservers (duemq.transport)
routes            the cluster's routes, for the groups (duemq.transport)

Shutdown, in this order: leave the nameservers, so that clients turn to others; health says
NOT_SERVING; parked pulls are answered and streams end after their last answers; calls end; the
writer syncs what is left; the last checkpoint makes the next start short.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from duemq.errors import Internal
from duemq_server.broker.edge.admin_servicer import AdminServicer
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.metrics import Meters
from duemq_server.broker.groups.progress import Activity
from duemq_server.broker.groups.rates import SAMPLE_INTERVAL_MS, Rates
from duemq_server.broker.settings import Settings
from duemq_server.broker.store import recovery
from duemq_server.broker.store.checkpoint_state import State
from duemq_server.broker.store.offsets import GroupQueue
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import DiskFull, StorageError
from duemq_server.storage.writer import LogWriter

log = logging.getLogger(__name__)

ASYNC_SYNC_INTERVAL_S = 0.5
# A replay costs about 15 us a frame: so many make a start a second longer.
CHECKPOINT_FRAMES = 50_000
SYNC_THREADS = 16
# Queues that the sampler looks at before others have a turn.
SAMPLED_AT_ONCE = 1_000


class LogLoop:
    """The writer threads and the event loop, tied together."""

    def __init__(self, store: Store, commits: Commits, meters: Meters, settings: Settings) -> None:
        self._store = store
        self._commits = commits
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets an exception when the disk has failed: the process must stop."""
        self.written = asyncio.Event()
        """Set when enough was written for a checkpoint."""
        self._checkpoint_bytes = settings.checkpoint_bytes
        self._checkpoint_at = (store.log.durable_position, store.frames_in)
        self._writer = LogWriter(
            store.log,
            self._on_durable,
            self._on_fatal,
            sync_interval_s=ASYNC_SYNC_INTERVAL_S if settings.flush_mode == "async" else None,
            on_disk_full=self._on_disk_full,
            on_commit=meters.committed,
        )

    def start(self) -> None:
        """Starts the writer."""
        self._writer.start()

    def _on_durable(self, position: int) -> None:
        self._loop.call_soon_threadsafe(self._advance, position)

    def _on_disk_full(self, _full: bool) -> None:
        self._loop.call_soon_threadsafe(self._store.on_report)

    def _on_fatal(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _advance(self, position: int) -> None:
        if self.failed.done():
            return
        # Answers first: they are short, and the producers make the next frames meanwhile.  Who
        # waits is only woken in here, and finds both done.
        self._commits.advance(position)
        try:
            self._store.durable(position)
        except Exception as error:  # half applied: only a new start makes it whole
            log.exception("what is durable could not be shown to consumers")
            self._fail(error)
            return
        bytes_before, frames_before = self._checkpoint_at
        if (
            position - bytes_before >= self._checkpoint_bytes
            or self._store.frames_in - frames_before >= CHECKPOINT_FRAMES
        ):
            self.written.set()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(Internal(f"the disk failed: {error}"))

    def checkpoint_begins(self) -> None:
        """Counts anew from here."""
        self.written.clear()
        self._checkpoint_at = (self._store.log.end_position, self._store.frames_in)

    async def stop(self) -> bool:
        """Syncs what is left and ends the threads; whether the disk was sound to the end."""
        await asyncio.to_thread(self._writer.stop)
        if not self.failed.done():
            self._advance(self._store.log.durable_position)
        if not self.failed.done():
            self.failed.cancel()
            return True
        if not self.failed.cancelled():
            self.failed.exception()  # it is why the process stops, or came after that
        return False


class Checkpoints:
    """Saves the store's state.  The event loop takes it, a thread writes it."""

    def __init__(
        self,
        store: Store,
        commits: Commits,
        log_loop: LogLoop,
        admin: AdminServicer,
        meters: Meters,
        data_dir: str,
        disk: Disk,
        on_saved: Callable[[list[Queue], State], None],
    ) -> None:
        """`on_saved`: told of what a checkpoint holds, and of the queues there were then."""
        self._on_saved = on_saved
        self._store = store
        self._commits = commits
        self._log_loop = log_loop
        self._admin = admin
        self._meters = meters
        self._data_dir = data_dir
        self._disk = disk
        # Guards the file: at the stop, the last save waits for the thread of a cancelled one.
        self._writing = threading.Lock()

    async def run(self, interval_s: float) -> None:
        """At once, then for ever."""
        while True:
            if self._store.log.end_position != self._admin.checkpoint_position:
                try:
                    await self.save()
                except DiskFull as error:
                    log.error("no checkpoint: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._log_loop.written.wait()

    async def save(self) -> None:
        """One checkpoint.  Raises DiskFull, DiskFailed."""
        began = time.monotonic()
        self._log_loop.checkpoint_begins()
        state = self._store.snapshot()
        await self._commits.wait(state.position)
        # With flush_mode=async that means written: a checkpoint may not be ahead of the log.
        await asyncio.to_thread(self._store.log.sync)
        self._store.check_shown()
        state = self._store.tables.without_deleted(state)
        queues = self._store.all_queues()

        def write() -> None:
            with self._writing:
                sync_all(queues)  # those too of a topic that is deleted meanwhile
                recovery.save_checkpoint(self._data_dir, state, self._disk)

        await asyncio.to_thread(write)
        self._admin.checkpoint_position = state.position
        try:
            self._store.tables.erase_deleted(state)
        except (StorageError, OSError) as error:  # it is tried again after the next one
            log.error("files of deleted topics stay for now: %s", error)
        self._on_saved(queues, state)
        self._meters.checkpoint_seconds.set(time.monotonic() - began)


def sync_all(queues: list[Queue]) -> None:
    """Side by side: the file system joins syncs that it gets at once.

    Raises what the first sync raised that failed.
    """
    dirty = [queue for queue in queues if queue.dirty]
    with ThreadPoolExecutor(SYNC_THREADS, "checkpoint-sync") as threads:
        for _ in threads.map(lambda queue: queue.sync(), dirty):
            pass


class Sampler:
    """Samples the ends of queues and the offsets of groups, for rates."""

    def __init__(self, store: Store, activity: Activity, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._activity = activity
        self._now_ms = now_ms
        self.stored: Rates[Queue] = Rates()
        self.consumed: Rates[GroupQueue] = Rates()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_INTERVAL_MS / 1000)

    async def sample(self) -> None:
        """One round.  Lets others have a turn where there is much to look at."""
        ends: list[tuple[Queue, int]] = []
        for number, queue in enumerate(self._store.all_queues()):
            ends.append((queue, queue.max_offset))
            if number % SAMPLED_AT_ONCE == SAMPLED_AT_ONCE - 1:
                await asyncio.sleep(0)
        self.stored.sample(self._now_ms(), ends, began_at=0)
        offsets: list[tuple[GroupQueue, int]] = []
        for group in self._store.offsets.groups():
            offsets += [
                (GroupQueue(group, topic, queue_id), progress.offset)
                for topic, queue_id, progress in self._store.offsets.of_group(group)
            ]
            await asyncio.sleep(0)
        self.consumed.sample(self._now_ms(), offsets)
        self._activity.prune(lambda key: self._store.offsets.find(key) is not None)

    def in_per_s(self, queue: Queue) -> float:
        """Records that a queue got, a second over the last minute."""
        return self.stored.per_second(queue, queue.max_offset, self._now_ms())

    def consumed_per_s(self, key: GroupQueue, offset: int) -> float:
        """Offsets that a group passed in a queue, a second over the last minute."""
        return self.consumed.per_second(key, offset, self._now_ms())
