"""Bulk jobs in one shard, without gRPC: how many timers a second, and what one costs.

    python tests/bench/timer_bulk.py [--pending 1000000] [--directory DIRECTORY]

Prints its parameters first.  The pending timers are due within 30 days, but for a day from now on;
all of them are counted, shifted by an hour, counted by a prefix that none has, and cancelled.  CPU
is that of the whole process.  `longest` is how long the event loop was held at most, by a look each
millisecond: on a busy machine it says more of the machine.  `step` is the event loop's CPU of what
a job does at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from duemq.v1 import message_pb2
from duemq_server.serving.clock import now_ms
from duemq_server.storage import frame, record
from duemq_server.storage.disk import RealDisk
from duemq_server.timer_service.disk.data_directory import open_directory
from duemq_server.timer_service.scheduling.bulk.counting import Counting
from duemq_server.timer_service.scheduling.bulk.jobs import Which
from duemq_server.timer_service.scheduling.bulk.walk import Walk
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.log_entries import SourceId

DAY_MS = 86_400_000
TOPIC = "orders"
BODY_BYTES = 256
FRAME = 1_000  # timers of a frame
SOURCES = [SourceId(7, queue) for queue in range(4)]
NO_END_MS = 1 << 50
READING = Walk.reading


def frame_of(base: int, queue_id: int, due_ms: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bytes:
    """Timers as a broker has them."""
    made = message_pb2.Record(body=bytes(BODY_BYTES), message_id="m")
    one = message_pb2.RecordBatch(records=[made]).SerializeToString()
    hashes = bytes(4 * len(due_ms))
    parts = frame.encode_parts(
        topic="%TIMER%",
        queue_id=queue_id,
        base_offset=base,
        store_ms=now_ms(),
        sizes=np.full(len(due_ms), len(one), dtype="<u4").tobytes(),
        tag_hashes=hashes,
        key_hashes=hashes,
        payload=one * len(due_ms),
        target_topic=TOPIC,
        target_queue_id=-1,
        due_ms=due_ms.astype("<i8").tobytes(),
    )
    length = sum(map(record.nbytes, parts))
    return b"".join(bytes(part) for part in record.encode(frame.KIND, parts, length, 0, 0))


class Bench:
    def __init__(self, shard: Shard, pending: int) -> None:
        self.shard = shard
        self.pending = pending
        self.longest_s = 0.0
        self.steps_s: list[float] = []

    def time_steps(self) -> None:
        """From now on, for good."""
        for owner, name in (
            (Walk, "step"),
            (Walk, "read"),
            (Walk, "reading"),
            (Counting, "__init__"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            result = work(*arguments)
            if result is not None or work is not READING:  # it was asked for nothing
                self.steps_s.append(time.thread_time() - began)
            return result

        return timed

    async def fill(self) -> int:
        random = np.random.default_rng(1)
        for base in range(0, self.pending // len(SOURCES), FRAME):
            for source in SOURCES:
                due_ms = now_ms() + DAY_MS + random.integers(0, 29 * DAY_MS, FRAME)
                data = frame_of(base, source.queue_id, due_ms)
                await self.shard.ingest(source, "b1", data, base)
            await asyncio.sleep(0)
        await self.shard.settled()
        return self.pending

    async def count(self, prefix: str = "") -> int:
        await self.shard.bulk.count(Which(TOPIC, prefix, 0, NO_END_MS, None))
        return self.pending

    async def job(self, by_ms: int | None) -> int:
        job_id, which = os.urandom(16), Which(TOPIC, "", 0, NO_END_MS, by_ms)
        while True:
            job = await self.shard.bulk.change(job_id, which, 2.0)
            if job is not None and job.over_ms:
                assert job.count == self.pending, job.count
                return job.count

    async def measured(self, name: str, work: Callable[[], Awaitable[int]]) -> None:
        gc.collect()
        self.longest_s = 0.0
        self.steps_s = []
        began, before = time.perf_counter(), os.times()
        timers = await work()
        seconds, after = time.perf_counter() - began, os.times()
        user_s, system_s = after.user - before.user, after.system - before.system
        print(
            f"{name:28} {seconds:7.1f} s {timers / seconds:10,.0f} a second"
            f"  {1e6 * user_s / timers:6.1f} + {1e6 * system_s / timers:4.1f} us CPU each"
            f"  longest {1e3 * self.longest_s:5.1f} ms{self._step_text()}",
            flush=True,
        )

    def _step_text(self) -> str:
        if not self.steps_s:
            return ""
        steps_ms = 1e3 * np.array(self.steps_s)
        return f"  step p50 {np.median(steps_ms):4.1f}, max {steps_ms.max():4.1f} ms"

    async def watch(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.longest_s, before = max(self.longest_s, now - before - 0.001), now


async def run(directory: str, pending: int) -> None:
    print(f"{pending} pending timers of {BODY_BYTES} bytes, fsync as in service")
    shard = Shard(open_directory(directory, RealDisk(), Limits(), now_ms()))
    shard.log_loop.start()
    bench = Bench(shard, pending)
    bench.time_steps()
    tasks = [asyncio.create_task(shard.disk_jobs.run()), asyncio.create_task(bench.watch())]
    await bench.measured("fill", bench.fill)
    await bench.measured("count", bench.count)
    await bench.measured("shift", lambda: bench.job(3_600_000))
    await bench.measured("count, by a prefix", lambda: bench.count("customer-7/"))
    await bench.measured("cancel", lambda: bench.job(None))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await shard.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pending", type=int, default=1_000_000)
    parser.add_argument("--directory")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        asyncio.run(run(directory, options.pending))


if __name__ == "__main__":
    main()
