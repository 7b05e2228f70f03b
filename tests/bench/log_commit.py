"""Group commit of a log against its floor, and the ways to take space ahead.

    python tests/bench/log_commit.py [DIRECTORY]

Prints its parameters first.  The floor writes the same bytes with pwrite and fdatasync in a plain
loop, one thread, no format.  Each line: commits/s, MB/s, and the time of a commit in ms.
"""

from __future__ import annotations

import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from duemq_server.storage import frame
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.writer import LogWriter

RECORD_BYTES = 1024
AHEAD_BYTES = 16 * 1024 * 1024
ZERO_BYTES = 1024 * 1024
SHAPES = ((1, 4000), (64, 2000), (512, 600))  # records a frame, frames
IN_FLIGHT = 8


@contextmanager
def folder(parent: str) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="duemq-bench-", dir=parent)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def report(name: str, seconds: list[float], size: int) -> None:
    total = sum(seconds)
    ordered = sorted(seconds)
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    print(
        f"  {name:26} {len(ordered) / total:8.0f}/s {size * len(ordered) / total / 1e6:7.0f} MB/s"
        f"   p50 {p50 * 1e3:.3f}  p99 {p99 * 1e3:.3f}  max {ordered[-1] * 1e3:.1f} ms"
    )


def plain_loop(parent: str, size: int, count: int, ahead: Callable[[int, int], int]) -> list[float]:
    """`ahead(fd, offset)` takes space and answers up to where there is some."""
    data = os.urandom(size)
    times = []
    with folder(parent) as path:
        fd = os.open(os.path.join(path, "file"), os.O_RDWR | os.O_CREAT)
        end = 0
        for offset in range(0, size * count, size):
            started = time.perf_counter()
            if offset + size > end:
                end = ahead(fd, max(offset, end))
            os.pwrite(fd, data, offset)
            os.fdatasync(fd)
            times.append(time.perf_counter() - started)
        os.close(fd)
    return times


def zeros(fd: int, offset: int) -> int:
    return offset + os.pwrite(fd, bytes(ZERO_BYTES), offset)


def reserved(fd: int, offset: int) -> int:
    os.posix_fallocate(fd, offset, AHEAD_BYTES)
    return offset + AHEAD_BYTES


def frame_parts(count: int) -> list[bytes | bytearray | memoryview]:
    return frame.encode_parts(
        topic="bench",
        queue_id=0,
        base_offset=0,
        store_ms=0,
        sizes=RECORD_BYTES.to_bytes(4, "little") * count,
        tag_hashes=bytes(4 * count),
        key_hashes=bytes(4 * count),
        payload=os.urandom(RECORD_BYTES * count),
    )


def log_commits(parent: str, records: int, count: int, in_flight: int) -> list[float]:
    """Appends frames, at most `in_flight` of them not yet durable; the time of each."""
    parts = frame_parts(records)
    times = []
    with folder(parent) as path:
        log = SegmentedLog.open(path, RealDisk())
        assert not list(log.recover())
        durable: queue.SimpleQueue[int] = queue.SimpleQueue()
        failed: list[BaseException] = []
        writer = LogWriter(log, durable.put, failed.append)
        writer.start()
        waiting: list[tuple[int, float]] = []
        for _ in range(count):
            waiting.append((log.append(frame.KIND, parts)[1], time.perf_counter()))
            while len(waiting) >= in_flight:
                position = durable.get()
                now = time.perf_counter()
                times += [now - at for end, at in waiting if end <= position]
                waiting = [(end, at) for end, at in waiting if end > position]
        writer.stop()
        log.close()
        assert not failed
    return times


def recovery_seconds(parent: str, records: int, total_bytes: int) -> tuple[float, int]:
    with folder(parent) as path:
        log = SegmentedLog.open(path, RealDisk())
        assert not list(log.recover())
        parts = frame_parts(records)
        while log.end_position < total_bytes:
            log.append(frame.KIND, parts)
            log.write_group()
        log.sync()
        log.close()
        again = SegmentedLog.open(path, RealDisk())
        started = time.perf_counter()
        entries = sum(1 for _ in again.recover())
        seconds = time.perf_counter() - started
        again.close()
    return seconds, entries


def main(parent: str) -> None:
    print(f"directory {parent}, record {RECORD_BYTES} B, shapes (records a frame, frames) {SHAPES}")
    for records, count in SHAPES:
        size = RECORD_BYTES * records
        print(f"frames of {records} x {RECORD_BYTES} B")
        report("floor: growing file", plain_loop(parent, size, count, lambda _, o: o), size)
        report("floor: 1 MiB zeros ahead", plain_loop(parent, size, count, zeros), size)
        report("floor: 16 MiB reserved", plain_loop(parent, size, count, reserved), size)
        report("log, one at a time", log_commits(parent, records, count, 1), size)
        times = log_commits(parent, records, count, IN_FLIGHT)
        total = sum(times) / IN_FLIGHT
        print(
            f"  log, {IN_FLIGHT} in flight          {count / total:8.0f}/s"
            f" {size * count / total / 1e6:7.0f} MB/s = {records * count / total:,.0f} records/s"
        )
    for records in (1, 64, 512):
        seconds, entries = recovery_seconds(parent, records, 256 << 20)
        print(f"recovery of 256 MiB in {entries} frames of {records}: {seconds:.2f} s (cached)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
