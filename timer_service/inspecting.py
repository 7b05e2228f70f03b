"""Looking into a shard: what is asked of it that changes nothing.

Owned by the event loop.  What is answered is committed: another leader would say the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from duemq.errors import InvalidArgument, Unavailable
from duemq_server.timer_service.far.catalog import Block
from duemq_server.timer_service.far.due_counts import HOUR_MS, CountBlocks, CountedBlock, Edges
from duemq_server.timer_service.log_loop import LogLoop
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.scheduling.topic_counts import OTHERS, TOPICS_MAX, TopicLedger
from duemq_server.timer_service.views.forecast import DueBucket, Forecast, split_blocks

BLOCKS_AT_ONCE = 16  # read before their figures are taken over: some 2 ms of work
PAUSE_S = 0.001  # of the thread behind each
TRIES_MAX = 100  # rounds of reading what was written while the round before was read

T = TypeVar("T")


def _paused(work: Callable[[], T]) -> T:
    """With a pause in which the event loop has the interpreter for itself."""
    done = work()
    time.sleep(PAUSE_S)
    return done


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

    async def counts(self, topic: str) -> dict[str, TopicLedger]:
        """The ledger by topic; of one topic, if it is not empty.

        Raises InvalidArgument for a topic that is counted with others.
        """
        topics = self._scheduler.topics
        self._check_counted(topic)
        found = {name: dataclasses.replace(each) for name, each in topics if topic in ("", name)}
        await self._committed()
        return found

    async def histogram(self, topic: str, at_ms: int = 0) -> tuple[int, list[DueBucket]]:
        """What falls due when, and as of when; of one topic, if it is not empty.

        `at_ms`: from when on minutes and hours are counted, if that is about now.  Raises
        InvalidArgument for a topic that is counted with others, CorruptFile, Unavailable.
        """
        self._check_counted(topic)
        topics = self._scheduler.topics
        if topic and not topics.counted(topic):
            return self._clock(), []
        slot = topics.slot(topic) if topic else None
        async with self._counting:
            forecast, now_ms = await self._forecast(slot, at_ms)
            self._scheduler.due_counts.shrink()
        found = await self._run(forecast.run)
        await self._committed()
        return now_ms, found

    async def _forecast(self, slot: int | None, at_ms: int) -> tuple[Forecast, int]:
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
                return Forecast(scheduler, now_ms, edges, slot, read), now_ms
            for chunk in _chunks(missing):
                await self._count(chunk)
            for chunk in _chunks(split):
                for each in (await self._read(chunk)).counted:
                    read[each.block.file, each.block.position] = each
        raise Unavailable("what is pending changes faster than it can be read; ask again")

    async def _count(self, blocks: list[tuple[Block, int]]) -> None:
        read = await self._read(blocks)
        unmet = self._scheduler.tombstones.unmet_in
        steps = [step_ms for _, step_ms in blocks]
        self._scheduler.due_counts.join(read.counted, steps, unmet)

    async def _read(self, blocks: list[tuple[Block, int]]) -> CountBlocks:
        scheduler = self._scheduler
        segments, numbers = scheduler.segments, scheduler.numbers
        job = CountBlocks(
            segments.disk, segments.directory, blocks, scheduler.topics.slot, numbers.find_source
        )
        with segments.pinned({each.file for each, _ in blocks}):
            await self._run(job.run)
        return job

    async def _run(self, work: Callable[[], T]) -> T:
        """In the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, _paused, work)

    def _check_counted(self, topic: str) -> None:
        topics = self._scheduler.topics
        if topic and not topics.counted(topic) and any(name == OTHERS for name, _ in topics):
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


def _chunks(blocks: Iterable[tuple[Block, int]]) -> Iterable[list[tuple[Block, int]]]:
    left = iter(blocks)
    while chunk := list(itertools.islice(left, BLOCKS_AT_ONCE)):
        yield chunk
