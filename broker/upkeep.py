"""What a broker looks after now and then: retention, idle producers, free space, the clock.

One file that cannot be read holds up what depends on it and nothing else: it is said once, and
counted.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import pairwise

from duemq_server.broker.clock import SETTLED_MS, ClockWatch
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.edge.metrics import Meters
from duemq_server.broker.settings import Settings
from duemq_server.broker.store import retention
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.retention import SegmentAge
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.tables import begins_at, free
from duemq_server.storage import frame
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import StorageError, TooManyFiles
from duemq_server.storage.segment import Segment

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
# Where space runs short: what comes meanwhile is to be less than `free_bytes_min`.
INTERVAL_S_MIN = 0.1
# More than comes to a broker in a second, with what lies beside the log.
BYTES_S_MAX = 512 << 20
RETENTION_INTERVAL_MS = 60_000
WAYS_OUT = (
    "the disk is larger, retention removes old messages (at once after a start with a smaller"
    " retention_bytes), or topics are purged or deleted (broker/README.md, Full disks)"
)
# Entries looked at to find a segment's first frame.
FIRST_FRAME_ENTRIES_MAX = 1_000


class Upkeep:
    """See the module."""

    def __init__(
        self,
        store: Store,
        commits: Commits,
        meters: Meters,
        settings: Settings,
        disk: Disk,
        now_ms: Callable[[], int],
        steady_ms: Callable[[], int],
    ) -> None:
        """`steady_ms`: a clock that nobody sets."""
        self._store = store
        self._commits = commits
        self._meters = meters
        self._settings = settings
        self._disk = disk
        self._now_ms = now_ms
        self._steady_ms = steady_ms
        self._looked_ms = steady_ms()
        self._clock = ClockWatch(store.tables.store_ms, now_ms(), self._looked_ms)
        self._retention_ms = self._looked_ms
        self._retained: Sequence[Segment] = ()  # the newest of the log then
        self._held = False  # retention waits for the timer service
        self._first_ms: dict[int, int | None] = {}
        # Of positions that were asked for at the look before: to find one reads the log.
        self._begins: dict[int, dict[Queue, int]] = {}
        self.pause_s = INTERVAL_S
        """Until the next look."""
        self._complained: set[str] = set()

    async def run(self) -> None:
        """For ever."""
        await asyncio.gather(self._look_always(), self._retain_always())

    async def _look_always(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(self.pause_s)

    async def _retain_always(self) -> None:
        """By itself: to remove much takes its time, and space runs short meanwhile."""
        while True:
            await self.retain_if_due()
            await asyncio.sleep(INTERVAL_S)

    def look(self) -> None:
        """One round of all but retention."""
        steady_ms = self._watch_clock()[1]
        self._watch_space()
        # What could not be shown for want of space is shown now.
        self._store.durable(self._commits.position)
        self._store.producers.age(steady_ms - self._looked_ms)
        self._looked_ms = steady_ms

    async def retain_if_due(self) -> None:
        """Each minute, and with each segment."""
        steady_ms, newest = self._steady_ms(), self._store.log.segments[-1:]
        if steady_ms < self._retention_ms and newest == self._retained:
            return
        self._retention_ms, self._retained = steady_ms + RETENTION_INTERVAL_MS, newest
        try:
            await self.retain()
        except (StorageError, OSError) as error:
            self._complain("retention", error)

    def _watch_clock(self) -> tuple[int, int]:
        """What time it is: Unix ms, and by the clock that nobody sets."""
        now_ms, steady_ms = self._now_ms(), self._steady_ms()
        jump_ms = self._clock.look(now_ms, steady_ms)
        if jump_ms:
            self._meters.clock_jumps.inc()
            log.warning(
                "the clock jumped by %.3f s: nothing is removed for its age in the next %d min",
                jump_ms / 1000,
                SETTLED_MS // 60_000,
            )
        return now_ms, steady_ms

    def _watch_space(self) -> None:
        self.pause_s = INTERVAL_S
        try:
            free = self._disk.free_bytes(self._settings.data_dir)
        except OSError as error:
            self._complain("free space", error)
            return
        left = free - self._settings.free_bytes_min
        self._meters.disk_left_bytes.set(left)
        read_only = left < 0
        if not read_only:  # how fast it went until now says nothing of what comes next
            self.pause_s = min(max(left / BYTES_S_MAX, INTERVAL_S_MIN), INTERVAL_S)
        if read_only != self._store.read_only:
            self._store.read_only = read_only
            self._store.on_report()
            log.log(
                logging.ERROR if read_only else logging.WARNING,
                "%d bytes are free, %d are needed: %s",
                free,
                self._settings.free_bytes_min,
                f"nothing is accepted until {WAYS_OUT}" if read_only else "accepting again",
            )

    async def retain(self) -> int:
        """Removes the segments that may go; how many.  Raises StorageError, OSError."""
        commit_log = self._store.log
        queues = self._store.all_queues()
        now_ms, steady_ms = self._watch_clock()  # a jump after this look removes nothing either
        keep_ms = int(self._settings.retention_hours * 3_600_000)
        position, held = await asyncio.to_thread(
            self._cut_position,
            now_ms,
            keep_ms if self._clock.is_settled(steady_ms) else 0,
            retention.needed_from(self._store),
            queues,
        )
        self._tell_held(held)
        if position <= commit_log.start_position:
            return 0
        begins, failed = await asyncio.to_thread(begins_at, queues, position)
        for _, error in failed:
            if isinstance(error, TooManyFiles):  # the queue can be read later
                raise error
        self._store.tables.forget_before(begins)
        for what, error in failed + await asyncio.to_thread(free, begins):
            self._complain(what, error)
        removed = await asyncio.to_thread(commit_log.delete_before, position)
        log.info("removed %d segments: the log begins at %d", removed, commit_log.start_position)
        return removed

    def _cut_position(
        self, now_ms: int, keep_ms: int, needed: int, queues: Sequence[Queue]
    ) -> tuple[int, bool]:
        """What may go; whether the next segment would, too, but for the timer service."""
        ages, keep_bytes = self._ages(), self._settings.retention_bytes
        end, known, self._begins = self._commits.position, self._begins, {}

        def beside(position: int) -> int:
            if position not in self._begins:
                before = known.get(position, {})
                self._begins[position] = retention.begins_beside(queues, position, before)
            return retention.bytes_beside(self._begins[position])

        def cut(hold: int) -> int:
            return retention.cut_position(ages, end, now_ms, keep_ms, keep_bytes, hold, beside)

        position = cut(needed)
        following = next((each.end for each in ages if each.start >= position), position)
        return position, following <= self._store.next_start and cut(following) > position

    def _tell_held(self, held: bool) -> None:
        if held and not self._held:
            log.warning(
                "what may go by its age or size stays, with all behind it, until a timer service"
                " has taken over what waits in %%TIMER%% (`duemq timer owners`)"
            )
        elif self._held and not held:
            log.info("retention waits for the timer service no longer")
        self._held = held

    def _ages(self) -> list[SegmentAge]:
        """Nothing in a segment is younger than the first frame of a later one."""
        segments = self._store.log.segments
        known, self._first_ms = self._first_ms, {}
        for segment in segments[1:]:
            try:
                self._first_ms[segment.start] = (
                    known[segment.start]
                    if segment.start in known
                    else self._first_store_ms(segment.start)
                )
            except (StorageError, OSError, IndexError) as error:
                self._complain(segment.path, error)
        return [
            SegmentAge(segment.start, following.start, self._first_ms.get(following.start))
            for segment, following in pairwise(segments)
        ]

    def _first_store_ms(self, position: int) -> int | None:
        """None: a long stretch of the segment has no frame."""
        entries = self._store.log.entries(position)
        for _, entry in zip(range(FIRST_FRAME_ENTRIES_MAX), entries, strict=False):
            if entry.kind == frame.KIND:
                return frame.decode(entry.body).store_ms
        return None

    def _complain(self, what: str, error: Exception) -> None:
        """Counts each time, and says it the first time."""
        self._meters.upkeep_errors.inc()
        level = logging.DEBUG if what in self._complained else logging.ERROR
        self._complained.add(what)
        log.log(level, "upkeep goes on without it: %s: %s: %s", what, type(error).__name__, error)
