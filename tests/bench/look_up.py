"""Look-ups of one broker: by key (entries a second) and by message id (MB of the log a second).

    python tests/bench/look_up.py [DIRECTORY]

Prints its parameters first.  Each line: by the clock and by the CPU of this process, with the files
in memory (warm) and after they were dropped from it (cold).  By key: a comparison of all key hashes
of a queue, as without the key index; the building of the index; the look-up with it, also as time a
run.  The floor of the comparison is that of the same column in memory; that of the look-up by id, a
search of the same bytes in memory.

All but the first frame of the queue with keys are entries of a consume queue without a log.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from duemq.protocol.record_bytes import text_hash
from duemq_server.broker.reading import lookup
from duemq_server.broker.reading.lookup import LookupStart, MessageQuery
from duemq_server.broker.store import recovery
from duemq_server.broker.store.keys.key_builder import KeyBuilder
from duemq_server.broker.store.keys.key_index import SPAN_RECORDS
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.indexes import consume_queue

SPANS = 64
BODY_BYTES = 100
ID_RECORDS = 256_000
ID_BODY_BYTES = 1_024
FRAME_RECORDS = 512
FLOOR_ENTRIES = 4_000_000
APPENDED_ENTRIES = 1 << 16
TOPIC = "orders"


@dataclass
class Batch:
    topic: str
    records: bytes
    sizes: bytes
    tag_hashes: bytes
    key_hashes: bytes
    queue_id: int = 0
    producer_id: int = 0
    producer_epoch: int = 0
    sequence: int = 0
    delays_ms: bytes = b""
    due_ms: bytes = b""
    delay_levels: bytes = b""


def entry(number: int, body: bytes) -> bytes:
    record = (
        b"\x0a"
        + _varint(len(body))
        + body
        + lookup.message_id_field(f"{number:028x}")
        + b"\x1a\x08"
        + b"%08x" % number
    )
    return b"\x0a" + _varint(len(record)) + record


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 0x7F | 0x80, value >> 7])


def fill(store: Store, topic: str, count: int, body_bytes: int) -> None:
    body = os.urandom(body_bytes)
    for first in range(0, count, FRAME_RECORDS):
        numbers = range(first, min(first + FRAME_RECORDS, count))
        entries = [entry(number, body) for number in numbers]
        layout = f"<{len(entries)}I"
        store.send(
            Batch(
                topic,
                b"".join(entries),
                struct.pack(layout, *map(len, entries)),
                bytes(4 * len(entries)),
                struct.pack(layout, *(text_hash(b"%08x" % number) for number in numbers)),
            ),
            1_000 + first,
        )
        if first // FRAME_RECORDS % 64 == 63:
            settle(store)
    settle(store)
    for queue in store.all_queues():
        queue.sync()


def fill_with_keys(store: Store) -> int:
    """A queue that ends with a span; how many entries."""
    fill(store, TOPIC, FRAME_RECORDS, BODY_BYTES)
    queue = store.queue(TOPIC, 0)
    count = SPANS * queue.keys.span
    random = np.random.default_rng(1)
    while queue.max_offset < count:
        size = min(APPENDED_ENTRIES, count - queue.max_offset)
        entries = np.repeat(consume_queue.decode(queue.page(0, 1)), size)
        entries["key_hash"] = random.integers(1, 1 << 32, size, np.uint32)
        queue.append(entries.tobytes())
    queue.sync()
    return count


def settle(store: Store) -> None:
    while store.log.write_pending():
        pass
    store.durable(store.log.durable_position)


def drop_from_memory(directory: str) -> None:
    for path in Path(directory).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def search(store: Store, topic: str, query: MessageQuery) -> int:
    """All steps; how many records were found."""
    place: LookupStart | None = LookupStart(0, 0)
    found = 0
    while place is not None:
        step = lookup.search(store.log, store.queues_of(topic), query, place, 64)
        found += len(step.found)
        place = step.following
    return found


@contextmanager
def measured(name: str, amount: float, unit: str) -> Iterator[None]:
    clock, cpu = time.perf_counter(), time.process_time()
    yield
    clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
    print(
        f"  {name:28} {amount / clock:10,.0f} {unit}/s by the clock, {amount / cpu:10,.0f} by CPU"
    )


def repeat(name: str, amount: float, unit: str, cold: Callable[[], None], work: Callable[[], int]):
    work()
    with measured(f"{name}, warm", amount, unit):
        assert work() == 1
    cold()
    with measured(f"{name}, cold", amount, unit):
        assert work() == 1


def main(parent: str) -> None:
    print(
        f"{SPANS * SPAN_RECORDS:,} entries with keys, {SPANS} spans of {SPAN_RECORDS:,},"
        f" {ID_RECORDS:,} records of {ID_BODY_BYTES} bytes for ids, {FRAME_RECORDS} a frame,"
        f" in {parent}, load"
        f" {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
    )
    directory = tempfile.mkdtemp(prefix="duemq-bench-", dir=parent)
    try:
        settings = StoreSettings(default_queues=1, timer_queues=1)
        store = recovery.open_store(directory, RealDisk(), settings).store
        count = fill_with_keys(store)
        fill(store, "ids", ID_RECORDS, ID_BODY_BYTES)
        key = b"%08x" % (FRAME_RECORDS - 7)
        by_key = MessageQuery(
            key_hash=text_hash(key), matches=lambda found: bytes(found).endswith(b"\x1a\x08" + key)
        )
        queue = store.queue(TOPIC, 0)
        page = consume_queue.decode(queue.page(0, FLOOR_ENTRIES))
        column = page["key_hash"]
        with measured("floor: compare the column", FLOOR_ENTRIES, "entries"):
            np.flatnonzero(column == text_hash(key))

        def cold() -> None:
            drop_from_memory(directory)

        def look_up() -> int:
            return search(store, TOPIC, by_key)

        repeat("by key, all compared", count, "entries", cold, look_up)
        builder = KeyBuilder(directory, RealDisk())
        with measured("building the key index", count, "entries"):
            while spans := builder.plan([queue], {TOPIC: [count]}).spans:
                for span in spans:
                    builder.build(span)
        repeat("by key, with the index", count, "entries", cold, look_up)
        repeat("by key, with the index", len(queue.keys), "runs", cold, look_up)
        size = sum(path.stat().st_size for path in Path(directory).rglob("*.keys"))
        print(f"  the index has {size / count:.2f} bytes an entry")
        needle = lookup.message_id_field(f"{ID_RECORDS - 7:028x}")
        size = sum(page_bytes(store, "ids"))
        data = os.urandom(64 << 20)
        with measured("floor: bytes.find", len(data) / 1e6, "MB"):
            data.find(needle)
        by_id = MessageQuery(needle=needle, matches=lambda found: needle in bytes(found))
        repeat("by id", size / 1e6, "MB", cold, lambda: search(store, "ids", by_id))
        store.close()
    finally:
        shutil.rmtree(directory)


def page_bytes(store: Store, topic: str) -> list[int]:
    queue = store.queue(topic, 0)
    return consume_queue.decode(queue.page(0, queue.max_offset))["size"].tolist()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
