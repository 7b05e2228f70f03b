"""Looking into a shard: what is asked of it that changes nothing.

Owned by the event loop.  What is answered is committed: another leader would say the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from duemq.errors import Corrupt, DuemqError, InvalidArgument, Unavailable
from duemq.protocol.due import HOUR_MS, Edges
from duemq_server.storage.errors import CorruptFile, DiskFull
from duemq_server.timer_service.far.bodies import Bytes, Files
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.due_counts import CountBlocks, CountedBlock
from duemq_server.timer_service.far.reading import as_rows
from duemq_server.timer_service.log_loop import LogLoop
from duemq_server.timer_service.scheduling.cancelling import Cancelling
from duemq_server.timer_service.scheduling.holding import changes as holding
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.scheduling.topic_counts import OTHERS, TOPICS_MAX, TopicLedger
from duemq_server.timer_service.timers.limits import AHEAD_MS
from duemq_server.timer_service.timers.log_entries import Cancelled, TargetId
from duemq_server.timer_service.views.finding import HandleFinder
from duemq_server.timer_service.views.forecast import DueBucket, Forecast, split_blocks
from duemq_server.timer_service.views.listing import BYTES_MAX, Page, PageItem, PageQuery, Position

BLOCKS_AT_ONCE = 64  # read before their figures are taken over: some 5 ms of work
PAUSE_S = 0.001  # of the thread behind each
TRIES_MAX = 100  # rounds of reading what was written while the round before was read

T = TypeVar("T")


def _paused(work: Callable[[], T]) -> T:
    """With a pause in which the event loop has the interpreter for itself."""
    done = work()
    time.sleep(PAUSE_S)
    return done


class TopicCount(NamedTuple):
    """A topic's ledger, and how many of the pending ones fell due and are kept back."""

    ledger: TopicLedger
    held: int


class Fate(NamedTuple):
    """What became of a timer: a cancel's outcome; of a pending one what and where to, too."""

    outcome: str | DuemqError
    target: TargetId | None = None
    body: bytes = b""


class Inspector:
    """Answers what a shard holds."""

    def __init__(self, scheduler: Scheduler, log_loop: LogLoop, clock: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._log_loop = log_loop
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timer-inspector")
        self._counting = asyncio.Lock()  # who reads blocks for a forecast

    async def stop(self) -> None:
        """Nobody may ask any more."""
        await asyncio.to_thread(self._thread.shutdown)

    async def counts(self, topic: str) -> dict[str, TopicCount]:
        """The ledger by topic; of one topic, if it is not empty.

        Raises InvalidArgument for a topic that is counted with others, Corrupt, Unavailable.
        """
        topics = self._scheduler.topics
        self._check_counted(topic)
        held: Counter[str] = Counter()
        for name, count in (await self.held()).items():
            held[name if topics.counted(name) else OTHERS] += count
        found = {
            name: TopicCount(dataclasses.replace(each), held[name])
            for name, each in topics
            if topic in ("", name)
        }
        await self._committed()
        return found

    async def held(self) -> Counter[str]:
        """Timers that fell due and are kept back, by topic; exact.  Raises Corrupt, Unavailable."""
        scheduler = self._scheduler
        for _ in range(TRIES_MAX):
            blocks = holding.parked_blocks(scheduler) if scheduler.tombstones.unmet else []
            gone = await self._gone_in(blocks)
            if gone is not None:
                return holding.waiting(scheduler) - gone
        raise Unavailable("what is held moves faster than it can be counted; ask again")

    async def _gone_in(self, blocks: list[Block]) -> Counter[str] | None:
        """How many timers of these parked blocks are cancelled, by topic; None: they moved."""
        scheduler, gone = self._scheduler, Counter[str]()
        if not blocks:
            return gone
        before = [each.cursor for each in blocks]
        segments = scheduler.segments
        with segments.pinned({each.file for each in blocks}):
            indexes = await self._run(lambda: [segments.index_of(each) for each in blocks])
        if blocks != holding.parked_blocks(scheduler) or before != [x.cursor for x in blocks]:
            return None
        for each, index in zip(blocks, indexes, strict=True):
            rows = as_rows(index, each.cursor, each.count)
            rows = scheduler.numbers.translate(rows, index.sources, index.targets)
            unmet = scheduler.tombstones.unmet_in(rows)
            assert each.parked is not None
            gone[each.parked.topic] += 0 if unmet is None else int(unmet.sum())
        return gone

    def is_held(self, topic: str, key: str, due_ms: int) -> bool:
        """Whether a pending timer fell due and is kept back."""
        ahead_ms = self._clock() + AHEAD_MS  # as counts have it
        return due_ms <= ahead_ms and self._scheduler.holds.covers(topic, key)

    def pending_of(self, topic: str) -> int | None:
        """Pending timers of a topic; None: it is counted with others."""
        topics = self._scheduler.topics
        if topics.counted(topic):
            return topics.of(topic).pending
        return None if topics.mixed else 0

    async def find(self, handles: Sequence[Cancelled]) -> list[Fate]:
        """What became of these timers, and the bodies of the pending ones, as many as fit.

        The answer may be shorter than the list: who wants the rest asks again.
        """
        finding = await self._finding(handles)
        outcomes = finding.outcomes()
        assert outcomes is not None
        segments = self._scheduler.segments
        names = {each.file for each in finding.located.values() if each.file}
        with segments.pinned(names):
            found = await self._run(lambda: self._bodies(handles, outcomes, finding))
        await self._log_loop.durable(finding.end)
        return found

    async def _finding(self, handles: Sequence[Cancelled]) -> HandleFinder:
        scheduler = self._scheduler
        finding = HandleFinder(scheduler, handles)
        for _ in range(TRIES_MAX):
            if finding.advance(self._clock() + AHEAD_MS):
                return finding
            await self.look_up(finding)
        raise Unavailable("timers move faster than they can be looked for; ask again")

    async def look_up(self, asked: Cancelling) -> None:
        """Looks for what `asked.advance` did not find in memory."""
        segments, query = self._scheduler.segments, asked.query()
        look_up = segments.look_up([query], self._scheduler.numbers.find_source)
        await self._run(look_up.run)
        segments.looked_up(look_up)
        asked.answered(query)

    def _bodies(
        self,
        handles: Sequence[Cancelled],
        outcomes: Sequence[str | DuemqError],
        finding: HandleFinder,
    ) -> list[Fate]:
        segments = self._scheduler.segments
        found: list[Fate] = []
        size = 0
        with Files(segments.disk, segments.directory) as files:
            for handle, outcome in zip(handles, outcomes, strict=True):
                if size > BYTES_MAX:
                    break
                located = finding.located.get(handle)
                if located is None:
                    found.append(Fate(outcome))
                    continue
                try:
                    body = bytes(located.bodies.read(located.row, files))
                except CorruptFile as error:
                    found.append(Fate(Corrupt(str(error))))
                    continue
                size += len(body)
                found.append(Fate(outcome, located.target, body))
        return found

    async def page(
        self, wanted: PageQuery, make: Callable[[Bytes], T | None], *, wants_all: bool
    ) -> tuple[list[PageItem[T]], Position | None]:
        """A page of a topic's pending timers, and where the next one begins; None: the last one.

        `make`: of a record's entry, in another thread.  Raises Corrupt.
        """
        scheduler = self._scheduler
        page = Page(scheduler, wanted, make, wants_all=wants_all)
        end = scheduler.log.end_position
        with scheduler.segments.pinned(page.files()):
            await self._run(page.run)
        listed = page.still_pending(scheduler)
        await self._log_loop.durable(end)
        return listed, page.next

    async def histogram(self, topic: str, at_ms: int = 0) -> tuple[int, list[DueBucket]]:
        """What falls due when, and as of when; of one topic, if it is not empty.

        `at_ms`: from when on minutes and hours are counted, if that is about now.  Raises
        InvalidArgument for a topic that is counted with others, Corrupt, Unavailable.
        """
        self._check_counted(topic)
        topics = self._scheduler.topics
        if topic and not topics.counted(topic):
            return self._clock(), []
        async with self._counting:
            forecast, now_ms = await self._forecast(topic, at_ms)
            self._scheduler.due_counts.shrink()
        found = await self._run(forecast.run)
        await self._committed()
        return now_ms, found

    async def _forecast(self, topic: str, at_ms: int) -> tuple[Forecast, int]:
        scheduler = self._scheduler
        read: dict[tuple[str, int], CountedBlock] = {}
        for _ in range(TRIES_MAX):
            now_ms = self._clock()
            edges = Edges.at(at_ms if abs(at_ms - now_ms) < HOUR_MS else now_ms)
            missing = scheduler.due_counts.missing(scheduler.segments.blocks(), edges)
            split = [
                (each, edges.step_ms(0))
                for each in split_blocks(scheduler, now_ms)
                if (each.file, each.position) not in read
            ]
            if not missing and not split:
                slot = scheduler.topics.slot(topic) if topic else None
                return Forecast(scheduler, now_ms, edges, slot, read), now_ms
            for chunk in _chunks(missing):
                await self._count(chunk)
            for chunk in _chunks(split):
                for each in (await self._read(_left(chunk))).counted:
                    read[each.block.file, each.block.position] = each
        raise Unavailable("what is pending changes faster than it can be read; ask again")

    async def _count(self, blocks: list[tuple[Block, int]]) -> None:
        blocks = _left(blocks)
        read = await self._read(blocks)
        unmet = self._scheduler.tombstones.unmet_in
        steps = [step_ms for _, step_ms in blocks]
        self._scheduler.due_counts.join(read.counted, steps, unmet)

    async def _read(self, blocks: list[tuple[Block, int]]) -> CountBlocks:
        scheduler = self._scheduler
        segments, numbers = scheduler.segments, scheduler.numbers
        job = CountBlocks(
            segments.disk,
            segments.directory,
            blocks,
            scheduler.topics.slot_of_left,
            numbers.find_source,
        )
        with segments.pinned({each.file for each, _ in blocks}):
            await self._run(job.run)
        return job

    async def _run(self, work: Callable[[], T]) -> T:
        """In the thread.  Raises Corrupt; Unavailable while too many files are open."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, _paused, work)
        except CorruptFile as error:
            raise Corrupt(str(error)) from error
        except DiskFull as error:
            raise Unavailable(str(error)) from error

    def _check_counted(self, topic: str) -> None:
        topics = self._scheduler.topics
        if topic and not topics.counted(topic) and topics.mixed:
            raise InvalidArgument(
                f"topic {topic!r} may be one of those that are counted together: this shard has"
                f" had more than {TOPICS_MAX} topics",
                field="topic",
                value=topic,
                limit=TOPICS_MAX,
            )

    async def _committed(self) -> None:
        """Until all that memory shows by now is."""
        await self._log_loop.durable(self._scheduler.log.end_position)


def _left(blocks: Iterable[tuple[Block, int]]) -> list[tuple[Block, int]]:
    """Those with timers that are not loaded: their files are there."""
    return [each for each in blocks if each[0].cursor < each[0].count]


def _chunks(blocks: Iterable[tuple[Block, int]]) -> Iterable[list[tuple[Block, int]]]:
    left = iter(blocks)
    while chunk := list(itertools.islice(left, BLOCKS_AT_ONCE)):
        yield chunk
