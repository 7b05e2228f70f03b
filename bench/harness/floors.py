"""Floors: what this machine does with the same bytes and no queue in between.

Each runs in the benchmark's own run, on the same disk, so that the ratio means something on a
noisy machine.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from duemq.v1 import message_pb2
from duemq_server.bench.harness.percentiles import summary

# The producer's frames under load; see duemq.producing.blocking.
FRAME_BYTES = 512 << 10
# A broker's consume queue; see storage/indexes/consume_queue.py.
INDEX_ENTRY_BYTES = 32
INDEX_PAGE_ENTRIES = 4_096
# Enough for a steady figure, short enough to run every time.
BYTES_WRITTEN_MAX = 1 << 30
SECONDS_MAX = 5.0


@dataclass(frozen=True)
class Floor:
    """A rate, and the latencies of the single operations."""

    msgs_per_s: float
    latency: dict[str, float]


def durable_writes(directory: Path, message_bytes: int, frame_messages: int, count: int) -> Floor:
    """A plain loop: pwrite a frame of messages, fdatasync, repeat."""
    frame = os.urandom(message_bytes * frame_messages)
    frames = max(1, min(count // frame_messages, BYTES_WRITTEN_MAX // len(frame)))
    latencies = []
    with _scratch_file(directory) as file:
        began = time.perf_counter()
        for number in range(frames):
            begin = time.perf_counter()
            os.pwrite(file, frame, number * len(frame))
            os.fdatasync(file)
            end = time.perf_counter()
            latencies.append((end - begin) * 1000)
            if end - began > SECONDS_MAX:
                break
        seconds = time.perf_counter() - began
    return Floor(len(latencies) * frame_messages / seconds, summary(latencies))


def decoded_reads(directory: Path, message_bytes: int, count: int) -> Floor:
    """A plain loop: pread frames of records, decode them with protobuf, touch each body."""
    per_frame = max(1, FRAME_BYTES // message_bytes)
    body = os.urandom(message_bytes)
    record = message_pb2.Record(body=body, message_id="0" * 26, born_ms=time.time_ns() // 1_000_000)
    frame = message_pb2.RecordBatch(records=[record] * per_frame).SerializeToString()
    frames = max(1, min(count // per_frame, BYTES_WRITTEN_MAX // len(frame)))
    touched = 0
    with _scratch_file(directory) as file:
        for number in range(frames):
            os.pwrite(file, frame, number * len(frame))
        began = time.perf_counter()
        for number in range(frames):
            batch = message_pb2.RecordBatch.FromString(
                os.pread(file, len(frame), number * len(frame))
            )
            for read in batch.records:
                touched += len(read.body)
        seconds = time.perf_counter() - began
    return Floor(touched / message_bytes / seconds, {})


def decoded_reads_by(processes: int, directory: Path, message_bytes: int, count: int) -> Floor:
    """`decoded_reads` of `count` messages in each of several processes at once; their sum."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawning) as pool:
        # A first round starts the processes, so that the second one runs them side by side.
        for rounds in (1, count):
            runs = [
                pool.submit(decoded_reads, directory, message_bytes, rounds)
                for _ in range(processes)
            ]
            floors = [run.result() for run in runs]
    return Floor(sum(floor.msgs_per_s for floor in floors), {})


def indexed_reads(directory: Path, message_bytes: int, count: int, keep: int) -> Floor:
    """A plain loop: pread pages of an index, 32 bytes a message, and one message in `keep`."""
    page = INDEX_PAGE_ENTRIES * INDEX_ENTRY_BYTES
    pages = max(1, min(count // INDEX_PAGE_ENTRIES, BYTES_WRITTEN_MAX // page))
    log_bytes = FRAME_BYTES + message_bytes
    with _scratch_file(directory) as index, _scratch_file(directory) as log:
        for number in range(pages):
            os.pwrite(index, os.urandom(page), number * page)
        os.pwrite(log, os.urandom(log_bytes), 0)
        begin = time.perf_counter()
        for number in range(pages):
            os.pread(index, page, number * page)
            for kept in range(0, INDEX_PAGE_ENTRIES, keep):
                os.pread(log, message_bytes, kept * message_bytes % FRAME_BYTES)
        seconds = time.perf_counter() - begin
    return Floor(pages * INDEX_PAGE_ENTRIES / seconds, {})


def timed_writes(directory: Path, message_bytes: int, rate: int, seconds: float) -> Floor:
    """A plain loop: sleep to the next due millisecond, pwrite what is due, fdatasync.

    The latencies are those of each message's write being durable against its due time.
    """
    message = os.urandom(message_bytes)
    lateness = []
    with _scratch_file(directory) as file:
        begin_ns = time.time_ns() + 10_000_000
        fired = 0
        while fired < rate * seconds:
            due_ns = begin_ns + fired * 1_000_000_000 // rate
            time.sleep(max(0, due_ns - time.time_ns()) / 1e9)
            due = min(int((time.time_ns() - begin_ns) * rate / 1e9) + 1, int(rate * seconds))
            os.pwrite(file, message * (due - fired), fired * message_bytes)
            os.fdatasync(file)
            now_ns = time.time_ns()
            lateness += [
                (now_ns - begin_ns - number * 1_000_000_000 // rate) / 1e6
                for number in range(fired, due)
            ]
            fired = due
    return Floor(rate, summary(lateness))


@contextmanager
def _scratch_file(directory: Path) -> Iterator[int]:
    with tempfile.TemporaryFile(dir=directory, prefix="floor-") as file:
        yield file.fileno()
