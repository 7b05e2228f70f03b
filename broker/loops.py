"""Everything that a broker does by itself.  All of it is started here and nowhere else.

commitlog-writer  two threads: write and sync what was appended, in groups (storage/writer.py)
checkpoint        saves the state each interval, or sooner when much was written
key index         builds the runs of what a checkpoint holds (key_indexer.py)
upkeep            retention, idle producers, free space
rates             samples how far queues and groups are (rates.py)
groups            sessions of groups' members (group_servicer.py)
registration      heartbeats to the nameservers (duemq.rpc)
routes            the cluster's routes, for the groups (duemq.rpc)

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
from itertools import pairwise

from broker import recovery, retention
from broker.admin_servicer import AdminServicer
from broker.commits import Commits
from broker.metrics import Meters
from broker.names import TIMER_GROUP, TIMER_TOPIC
from broker.offsets import GroupQueue
from broker.progress import Activity
from broker.queues import Queue
from broker.rates import SAMPLE_INTERVAL_MS, Rates
from broker.retention import SegmentAge
from broker.settings import Settings
from broker.state import State
from broker.store import Store
from duemq.errors import Internal
from storage import frame
from storage.disk import Disk
from storage.errors import DiskFull, StorageError
from storage.writer import LogWriter

log = logging.getLogger(__name__)

ASYNC_SYNC_INTERVAL_S = 0.5
# A replay costs about 15 us a frame: so many make a start a second longer.
CHECKPOINT_FRAMES = 50_000
SYNC_THREADS = 16
UPKEEP_INTERVAL_S = 5.0
# Queues that the sampler looks at before others have a turn.
SAMPLED_AT_ONCE = 1_000
RETENTION_INTERVAL_S = 60.0
# Entries looked at to find a segment's first frame.
FIRST_FRAME_ENTRIES_MAX = 1_000


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
        self._store.tables.erase_deleted(state)
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


class Upkeep:
    """Retention, idle producers, free space."""

    def __init__(
        self,
        store: Store,
        admin: AdminServicer,
        settings: Settings,
        disk: Disk,
        now_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._admin = admin
        self._settings = settings
        self._disk = disk
        self._now_ms = now_ms
        self._first_ms: dict[int, int] = {}

    async def run(self) -> None:
        """For ever."""
        next_retention = 0.0
        while True:
            self._watch_space()
            # What could not be shown for want of space is shown now.
            self._store.durable(self._store.log.durable_position)
            if time.monotonic() >= next_retention:
                next_retention = time.monotonic() + RETENTION_INTERVAL_S
                try:
                    await self.retain()
                except StorageError as error:
                    log.error("retention: %s", error)
            await asyncio.sleep(UPKEEP_INTERVAL_S)

    def _watch_space(self) -> None:
        free = self._disk.free_bytes(self._settings.data_dir)
        read_only = free < self._settings.free_bytes_min
        if read_only != self._store.read_only:
            self._store.read_only = read_only
            self._store.on_report()
            log.log(
                logging.ERROR if read_only else logging.WARNING,
                "%d bytes are free, %d are needed: %s",
                free,
                self._settings.free_bytes_min,
                "nothing is accepted" if read_only else "accepting again",
            )

    async def retain(self) -> int:
        """Removes the segments that may go; how many."""
        commit_log = self._store.log
        segments = await asyncio.to_thread(self._ages)
        position = retention.cut_position(
            segments,
            commit_log.durable_position,
            self._now_ms(),
            int(self._settings.retention_hours * 3_600_000),
            self._settings.retention_bytes,
            self._hold(),
        )
        if position <= commit_log.start_position:
            return 0
        self._store.tables.drop_before(position)
        removed = await asyncio.to_thread(commit_log.delete_before, position)
        log.info("removed %d segments: the log begins at %d", removed, commit_log.start_position)
        return removed

    def _hold(self) -> int:
        """The oldest position that is still needed."""
        hold = self._admin.checkpoint_position
        for queue in self._store.queues_of(TIMER_TOPIC):
            progress = self._store.offsets.find(
                GroupQueue(TIMER_GROUP, TIMER_TOPIC, queue.queue_id)
            )
            offset = max(progress.offset if progress else 0, queue.min_offset)
            if offset < queue.max_offset:
                hold = min(hold, queue.frame_at(offset))
        return hold

    def _ages(self) -> list[SegmentAge]:
        """Nothing in a segment is younger than the first frame of the next one."""
        segments = self._store.log.segments
        self._first_ms = {
            segment.start: self._first_ms[segment.start]
            for segment in segments
            if segment.start in self._first_ms
        }
        ages = []
        for segment, following in pairwise(segments):
            if following.start not in self._first_ms:
                first_ms = self._first_store_ms(following.start)
                if first_ms is None:
                    break
                self._first_ms[following.start] = first_ms
            ages.append(SegmentAge(segment.start, following.start, self._first_ms[following.start]))
        return ages

    def _first_store_ms(self, position: int) -> int | None:
        entries = self._store.log.entries(position)
        for _, entry in zip(range(FIRST_FRAME_ENTRIES_MAX), entries, strict=False):
            if entry.kind == frame.KIND:
                return frame.decode(entry.body).store_ms
        return None
