"""Loading timers from disk, without gRPC: CPU us a timer, and what of it holds the event loop.

    python tests/bench/timer_loads.py [--pending 1000000] [--spread 1] [--directory DIRECTORY]

Prints its parameters first.  The pending timers are due within `spread` seconds and lie in blocks,
as memtables leave them; then they are loaded in the portions that housekeeping takes, and let go.
`run` is what a thread does, `admit` what the event loop does; `longest` is the longest of each.
`out_of_order`: timers that were loaded behind a later one.  The floor reads all files once.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time

import numpy as np

from duemq_server.storage.disk import RealDisk
from duemq_server.timer_service.disk.housekeeping import LOAD_BYTES_MAX, LOAD_ROWS_MAX
from duemq_server.timer_service.far.far_segments import FarSegments
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId
from duemq_server.timer_service.timers.rows import Blob, Home, new_rows

BODY_BYTES = 280
NOW_MS = 1_767_225_600_000
HOUR_MS = 3_600_000


class NoLog:
    """A timer log that nothing is written to."""

    end_position = 0

    def append(self, kind: int, parts: object) -> tuple[int, int]:
        return 0, 0


def filled(scheduler: Scheduler, pending: int, spread_s: float, now_ms: int) -> None:
    """Far timers, flushed as they come."""
    numbers, random = scheduler.numbers, np.random.default_rng(1)
    source = numbers.number_source(SourceId(7, 0), "b", 0)
    target = numbers.number_target(TargetId("b", "t", -1))
    step = scheduler.limits.memtable_rows_max
    for base in range(0, pending, step):
        count = min(step, pending - base)
        rows = new_rows(count)
        rows.wide[0] = now_ms + HOUR_MS + random.integers(0, max(1, int(spread_s * 1000)), count)
        rows.wide[1] = np.arange(base, base + count)
        rows.narrow[0], rows.narrow[1] = source, target
        rows.narrow[2] = np.arange(count) * BODY_BYTES
        rows.narrow[3], rows.narrow[4:6] = BODY_BYTES, 0
        scheduler.ledger.accepted += count
        scheduler.topics.of_target(target).accepted += count
        scheduler.tiers.memtable.add(rows, Blob(bytes(count * BODY_BYTES), Home("", 0)))
        flush = scheduler.tiers.begin_flush(now_ms)
        flush.run()
        scheduler.tiers.end_flush(flush)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pending", type=int, default=1_000_000)
    parser.add_argument("--spread", type=float, default=1.0, help="seconds")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    given = parser.parse_args()
    print(f"pending={given.pending} spread_s={given.spread} body_bytes={BODY_BYTES}", end=" ")
    print(f"load_rows={LOAD_ROWS_MAX} directory={given.directory} cpus={os.cpu_count()}")
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        segments = FarSegments(os.path.join(directory, "segments"), RealDisk())
        scheduler = Scheduler(NoLog(), segments, Limits(), NOW_MS)
        filled(scheduler, given.pending, given.spread, NOW_MS)
        measure(scheduler, given.pending, NOW_MS + HOUR_MS)


def measure(scheduler: Scheduler, pending: int, now_ms: int) -> None:
    """Loads all and prints."""
    segments = scheduler.segments
    before = time.process_time()
    for name in segments.lengths:
        with open(segments.path(name), "rb") as file:
            while file.read(1 << 20):
                pass
    floor_s = time.process_time() - before
    run_s: list[float] = []
    admit_s: list[float] = []
    pieces = out_of_order = 0
    latest_ms = 0
    while segments.pending:
        now_ms = max(now_ms, segments.next_due_ms() or 0)
        load = segments.load(scheduler.tiers.horizon_ms(now_ms), LOAD_ROWS_MAX, LOAD_BYTES_MAX)
        start = time.process_time()
        load.run()
        loaded = time.process_time()
        scheduler.tiers.end_load(load, now_ms, force=True)
        run_s.append(loaded - start)
        admit_s.append(time.process_time() - loaded)
        pieces += len(load.pieces)
        due = np.concatenate([piece.rows.due_ms for piece in load.pieces])
        out_of_order += int((due < latest_ms).sum())
        latest_ms = max(latest_ms, int(due.max()))
        while len(scheduler.near):
            now_ms = max(now_ms, scheduler.near.wheel.next_due_ms() or 0)
            scheduler.near.remove(scheduler.near.take_due(now_ms, 1 << 20))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for name, parts in (("run", run_s), ("admit", admit_s), ("floor", [floor_s])):
        whole, longest = 1e6 * sum(parts) / pending, 1e3 * max(parts)
        print(f"{name}: us a timer={whole:.2f} longest ms={longest:.1f}")
    print(
        f"loads={len(run_s)} pieces={pieces} out_of_order={out_of_order} rss_peak_mb={peak_mb:.0f}"
    )


if __name__ == "__main__":
    main()
