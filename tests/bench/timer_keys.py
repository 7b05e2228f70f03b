"""Timers under keys in one shard, without gRPC: how many a second, and what they cost in memory.

    python tests/bench/timer_keys.py [--pending 1000000] [--directory DIRECTORY]

Prints its parameters first.  The pending timers are due within 30 days, but for a day from now on;
what is replaced or cancelled is drawn from all of them.  In lists of 1,000 (replace) and 10,000
(cancel), and one by one from 16 callers.  CPU is that of the whole process, all threads, its own
and the kernel's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from duemq.v1 import message_pb2
from duemq_server.serving.clock import now_ms
from duemq_server.storage.disk import RealDisk
from duemq_server.timer_service.disk.data_directory import open_directory
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.keyed import KeyedRecords, TimerKey
from duemq_server.timer_service.timers.limits import Limits

DAY_MS = 86_400_000
TOPIC = "orders"
BODY_BYTES = 256
LIST = 1_000
CANCEL_LIST = 10_000
CALLERS = 16
SINGLES = 300  # a caller
CANCEL_LISTS = 8
CANCELLED = CANCEL_LISTS * CANCEL_LIST + CALLERS * SINGLES


def records(numbers: Sequence[int]) -> KeyedRecords:
    """Messages of `BODY_BYTES` under the keys of these numbers."""
    now = now_ms()
    keys = [f"order-{number:09d}" for number in numbers]
    encoded = [
        message_pb2.RecordBatch(
            records=[
                message_pb2.Record(
                    body=bytes(BODY_BYTES), message_id=key, born_ms=now, timer_key=key
                )
            ]
        ).SerializeToString()
        for key in keys
    ]
    due_ms = [now + DAY_MS + random.randrange(29 * DAY_MS) for _ in numbers]
    zeros = [0] * len(numbers)
    sizes = [len(each) for each in encoded]
    return KeyedRecords(TOPIC, -1, "", keys, b"".join(encoded), sizes, zeros, zeros, due_ms)


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def measured(name: str, timers: int, work: Callable[[], Awaitable[None]]) -> None:
    gc.collect()
    began, before = time.perf_counter(), os.times()
    await work()
    seconds, after = time.perf_counter() - began, os.times()
    user_s, system_s = after.user - before.user, after.system - before.system
    print(
        f"{name:28} {timers / seconds:10,.0f} a second  {1e6 * user_s / timers:8.1f} +"
        f" {1e6 * system_s / timers:5.1f} us CPU each"
        f"  RSS {rss_mb():7.1f} MB",
        flush=True,
    )


class Bench:
    def __init__(self, shard: Shard, pending: int) -> None:
        self.shard = shard
        self.pending = pending
        self.left = list(range(pending))
        random.shuffle(self.left)

    async def schedule(self, numbers: Sequence[int]) -> None:
        made = records(numbers)
        await self.shard.schedule(os.urandom(16), made)

    async def fill(self) -> None:
        for start in range(0, self.pending, LIST):
            await self.schedule(range(start, min(start + LIST, self.pending)))

    def drawn(self, count: int) -> list[int]:
        return random.sample(self.left, count)

    async def lists(self, rounds: int) -> None:
        for _ in range(rounds):
            await self.schedule(self.drawn(LIST))

    async def singles(self, each: int) -> None:
        async def caller() -> None:
            for _ in range(each):
                await self.schedule(self.drawn(1))

        await asyncio.gather(*(caller() for _ in range(CALLERS)))

    async def new_singles(self, each: int) -> None:
        async def caller(first: int) -> None:
            for number in range(first, first + each):
                await self.schedule([number])

        starts = (self.pending + n * each for n in range(CALLERS))
        await asyncio.gather(*(caller(start) for start in starts))

    def taken(self, count: int) -> list[TimerKey]:
        taken = self.left[-count:]
        del self.left[-count:]
        return [TimerKey(TOPIC, f"order-{number:09d}") for number in taken]

    async def cancel_lists(self, rounds: int) -> None:
        for _ in range(rounds):
            outcomes = await self.shard.cancel_keys(os.urandom(16), self.taken(CANCEL_LIST))
            assert set(outcomes) == {"CANCELLED"}, set(map(str, outcomes))

    async def cancel_singles(self, each: int) -> None:
        async def caller() -> None:
            for _ in range(each):
                assert await self.shard.cancel_keys(os.urandom(16), self.taken(1)) == ["CANCELLED"]

        await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def run(directory: str, pending: int) -> None:
    print(f"{pending} pending timers of {BODY_BYTES} bytes, {CALLERS} callers, fsync as in service")
    shard = Shard(open_directory(directory, RealDisk(), Limits(), now_ms()))
    shard.log_loop.start()
    jobs = asyncio.create_task(shard.disk_jobs.run())
    bench = Bench(shard, pending)
    print(f"{'empty':28} RSS {rss_mb():.1f} MB")
    await measured("schedule new, lists", pending, bench.fill)
    await measured("replace, lists", 30 * LIST, lambda: bench.lists(30))
    one_by_one = CALLERS * SINGLES
    await measured("replace, one by one", one_by_one, lambda: bench.singles(SINGLES))
    await measured("schedule new, one by one", one_by_one, lambda: bench.new_singles(SINGLES))
    in_lists = CANCEL_LISTS * CANCEL_LIST
    await measured("cancel, lists", in_lists, lambda: bench.cancel_lists(CANCEL_LISTS))
    await measured("cancel, one by one", one_by_one, lambda: bench.cancel_singles(SINGLES))
    jobs.cancel()
    await asyncio.gather(jobs, return_exceptions=True)
    await shard.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pending", type=int, default=1_000_000)
    parser.add_argument("--directory")
    options = parser.parse_args()
    if options.pending < CANCELLED:
        parser.error(f"--pending: {options.pending} are fewer than the {CANCELLED} it cancels")
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        asyncio.run(run(directory, options.pending))


if __name__ == "__main__":
    main()
