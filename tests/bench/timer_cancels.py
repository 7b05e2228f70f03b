"""Cancels of far timers in one shard, without gRPC: what one costs, by part.

    python tests/bench/timer_cancels.py [--pending 10000000] [--directory DIRECTORY]

Prints its parameters first.  The pending timers are due within 30 days, but for 2.4 hours from now
on, and lie on disk.  Each round cancels a list of 10,000 of them, and 2,000 as 16 callers of one
client do: singly, but a request is shared by all.  Figures are CPU us a cancel, medians over the
rounds:

    loop      of the event loop's thread: `decide` what cancelling.py does of it, `rest` the edge
    look-up   of the look-up's thread
    log       of all other threads: the log's writer

`turn` is how long the event loop was held at once at most, and but for a hundredth of its turns, in
ms of CPU.  The floor reads and checks as many indexes of blocks as there are cancels in a list.

With a DIRECTORY the timers stay there, and the next run finds them: so two releases are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import tempfile
import time
from asyncio import events
from collections import defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from duemq.v1 import message_pb2, timer_pb2
from duemq_server.serving.clock import now_ms
from duemq_server.storage import frame, record
from duemq_server.storage.disk import RealDisk
from duemq_server.timer_service.disk.data_directory import open_directory
from duemq_server.timer_service.edge.cancel_requests import CancelRequests
from duemq_server.timer_service.far.look_up import LookUp
from duemq_server.timer_service.scheduling.cancelling import Cancelling
from duemq_server.timer_service.shard import Shard
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.log_entries import SourceId

DAY_MS = 86_400_000
BODY_BYTES = 16
FRAME = 2_000  # timers of a frame
SOURCES = [SourceId(7, queue) for queue in range(4)]
LIST = 10_000
SINGLES = 2_000
CALLERS = 16


async def _nobody(*_: object) -> list[Any]:
    """What other shards say: there are none."""
    return []


def dues_of(queue_id: int, base: int, began_ms: int) -> Any:
    """Due times of a frame, the same at each run."""
    draw = np.random.default_rng((queue_id, base))
    return began_ms + draw.integers(DAY_MS // 10, 30 * DAY_MS, FRAME)


def frame_of(base: int, queue_id: int, due_ms: Any) -> bytes:
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
        target_topic="orders",
        target_queue_id=-1,
        due_ms=due_ms.astype("<i8").tobytes(),
    )
    length = sum(map(record.nbytes, parts))
    return b"".join(bytes(part) for part in record.encode(frame.KIND, parts, length, 0, 0))


class Meter:
    """CPU seconds by part, of this process."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.turns: list[float] = []
        for owner, name, part in (
            (LookUp, "run", "look-up"),
            (Cancelling, "__init__", "decide"),
            (Cancelling, "advance", "decide"),
            (Cancelling, "query", "decide"),
            (Cancelling, "answered", "decide"),
            (Cancelling, "outcomes", "decide"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), part))
        turn = events.Handle._run  # type: ignore[attr-defined]

        def timed(handle: Any) -> None:
            began = time.thread_time()
            turn(handle)
            self.turns.append(time.thread_time() - began)

        events.Handle._run = timed  # type: ignore[attr-defined]

    def _timed(self, work: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*arguments)
            finally:
                self.spent[part] += time.thread_time() - began

        return timed

    async def of(self, work: Coroutine[None, None, None], count: int) -> dict[str, float]:
        """CPU us of each of `count`, by part; of turns: ms."""
        gc.collect()
        await asyncio.sleep(0)  # what was so far is a turn of its own
        self.spent.clear()
        self.turns.clear()
        began, loop, process = time.perf_counter(), time.thread_time(), time.process_time()
        await asyncio.create_task(work)
        seconds = time.perf_counter() - began
        loop, process = time.thread_time() - loop, time.process_time() - process
        look_up, decide = self.spent["look-up"], self.spent["decide"]
        parts = {
            "all": process,
            "decide": decide,
            "rest": loop - decide,
            "look-up": look_up,
            "log": process - loop - look_up,
        }
        found = {name: 1e6 * spent / count for name, spent in parts.items()}
        turns = 1e3 * np.array(self.turns)
        return found | {
            "per_s": count / seconds,
            "turn p99": float(np.quantile(turns, 0.99)),
            "turn": float(turns.max()),
        }


class Bench:
    """Rounds of cancels."""

    def __init__(self, shard: Shard, pending: int, began_ms: int) -> None:
        self._shard = shard
        self._pending = pending
        self._began_ms = began_ms
        links: Any = SimpleNamespace(
            check_may_answer=lambda _: None,
            why_not_arrived=lambda _: "has not arrived",
            place=SimpleNamespace(has=lambda _: True),
            untold=dict,
        )
        others: Any = SimpleNamespace(there=False, each=_nobody)
        self._requests = CancelRequests(shard, links, others)

    async def fill(self) -> None:
        began = time.perf_counter()
        for base in range(0, self._pending // len(SOURCES), FRAME):
            for source in SOURCES:
                due_ms = dues_of(source.queue_id, base, self._began_ms)
                data = frame_of(base, source.queue_id, due_ms)
                await self._shard.ingest(source, "b1", data, base)
                # Blocks of the size that they have where timers come through a broker.
                while self._shard.scheduler.tiers.memtable_full():  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        await self._shard.settled()
        print(f"filled in {time.perf_counter() - began:.0f} s", flush=True)

    def requests(self, count: int, size: int) -> list[bytes]:
        """So many requests, of so many timers at random each."""
        handles = self._handles(count * size)
        return [
            timer_pb2.CancelRequest(handles=handles[at : at + size]).SerializeToString()
            for at in range(0, len(handles), size)
        ]

    def _handles(self, count: int) -> list[message_pb2.TimerHandle]:
        frames = self._pending // len(SOURCES) // FRAME
        made = []
        for _ in range(-(-count // 10)):
            source, base = random.choice(SOURCES), random.randrange(frames) * FRAME
            dues = dues_of(source.queue_id, base, self._began_ms).tolist()
            made += [
                message_pb2.TimerHandle(
                    store_id=source.store_id,
                    queue_id=source.queue_id,
                    offset=base + at,
                    due_ms=dues[at],
                )
                for at in random.sample(range(FRAME), 10)
            ]
        random.shuffle(made)
        return made[:count]

    async def singly(self, requests: list[bytes]) -> None:
        """One after the other."""
        for each in requests:
            await self.ask(each)

    async def ask(self, request: bytes) -> None:
        """As gRPC does."""
        response = await self._requests.cancel(timer_pb2.CancelRequest.FromString(request))
        response.SerializeToString()
        strange = {each.outcome for each in response.results} - {timer_pb2.CANCELLED}
        assert not strange, strange

    def floor(self) -> float:
        """CPU us to read and check the index of a block."""
        segments = self._shard.scheduler.segments
        weighted = segments.blocks()
        blocks = random.choices(weighted, [each.count for each in weighted], k=LIST)
        files = {name: segments.disk.open(segments.path(name)) for name in segments.lengths}
        blocks.sort(key=lambda each: (each.file, each.position))
        began = time.thread_time()
        for each in blocks:
            record.decode(files[each.file].pread(each.index_length, each.position), 0)
        spent = time.thread_time() - began
        rows = sum(each.count for each in blocks) / len(blocks)
        print(f"floor: {1e6 * spent / LIST:.1f} us a block of {rows:.0f} rows", flush=True)
        return spent


def tell(name: str, found: list[dict[str, float]]) -> None:
    """Medians over the rounds."""
    middle = {key: float(np.median([each[key] for each in found])) for key in found[0]}
    longest = max(each["turn"] for each in found)
    print(
        f"{name:8} {middle['all']:7.1f} = loop: decide {middle['decide']:6.1f}"
        f" + rest {middle['rest']:6.1f}; look-up {middle['look-up']:6.1f}; log {middle['log']:5.1f}"
        f"   {middle['per_s']:8,.0f} a second   turn p99 {middle['turn p99']:.1f},"
        f" max {longest:.1f} ms",
        flush=True,
    )


def noted(directory: str, pending: int) -> tuple[bool, int, int]:
    """Whether the timers are there; since when, and how many."""
    path = Path(directory, "began_ms.json")
    filled = path.exists()
    if not filled:
        path.write_text(json.dumps([now_ms(), pending]))
    began_ms, pending = json.loads(path.read_text())
    return filled, began_ms, pending


async def run(directory: str, pending: int, rounds: int) -> None:
    """Fills, unless that was done, and measures."""
    filled, began_ms, pending = noted(directory, pending)
    print(f"{pending} pending timers, lists of {LIST}, {CALLERS} callers, {rounds} rounds")
    path = os.path.join(directory, "data")
    shard = Shard(open_directory(path, RealDisk(), Limits(), now_ms()))
    shard.log_loop.start()
    bench = Bench(shard, pending, began_ms)
    jobs = asyncio.create_task(shard.disk_jobs.run())
    if not filled:
        await bench.fill()
    await bench.ask(*bench.requests(1, LIST))  # blocks are learnt
    meter, lists, singles = Meter(), [], []
    for _ in range(rounds):
        lists.append(await meter.of(bench.ask(*bench.requests(1, LIST)), LIST))
        shared = bench.requests(SINGLES // CALLERS, CALLERS)
        singles.append(await meter.of(bench.singly(shared), SINGLES))
    bench.floor()
    tell("list", lists)
    tell("singly", singles)
    jobs.cancel()
    await asyncio.gather(jobs, return_exceptions=True)
    await shard.stop()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pending", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if options.directory is not None:
        os.makedirs(options.directory, exist_ok=True)
        asyncio.run(run(options.directory, options.pending, options.rounds))
        return
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(directory, options.pending, options.rounds))


if __name__ == "__main__":
    main()
