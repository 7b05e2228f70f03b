"""What a pull is told when retention, a purge or damage was faster."""

from functools import partial

import pytest

from duemq.errors import Corrupt, OffsetOutOfRange
from duemq_server.broker.edge.pulls.disk_reads import DiskReads
from duemq_server.broker.reading import reader
from duemq_server.broker.store import recovery
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.indexes import consume_queue
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import batch

NOW_MS = 1_760_000_000_000


def filled(disk: FaultyDisk) -> tuple[Store, Queue]:
    """A queue of 100 records over several segments, all in files."""
    settings = StoreSettings(default_queues=1, timer_queues=1)
    store = recovery.open_store("/data", disk, settings, segment_bytes=20_000).store
    for _ in range(100):
        store.send(batch([bytes(1_000)]), NOW_MS)
    while store.log.write_pending():
        pass
    store.durable(store.log.durable_position)
    queue = store.queue("orders", 0)
    queue.sync()
    return store, queue


async def read(store: Store, queue: Queue, offset: int, remove: bool = False) -> None:
    """`remove`: retention comes when the read has begun."""
    read_records = partial(reader.read_records, store.log, queue, offset, 10, 1 << 20)

    def reading(nowait: bool = False) -> object:
        if remove:
            second = store.log.segments[1].start
            store.tables.drop_before(second)
            store.log.delete_before(second)
            raise IndexError("the segment was deleted")
        return read_records(nowait=nowait)

    await DiskReads().read(reading, queue, offset)


async def test_what_retention_removed_meanwhile_is_out_of_range() -> None:
    store, queue = filled(FaultyDisk())
    with pytest.raises(OffsetOutOfRange):
        await read(store, queue, 0, remove=True)


async def test_where_retention_could_not_move_a_queues_start_on_it_is_damage() -> None:
    """Out of range, a consumer would begin anew at the queue's start, at once and for ever."""
    disk = FaultyDisk()
    store, queue = filled(disk)
    [path] = [each for each in disk.paths if "/orders." in each]
    disk.chop(path, 40 * consume_queue.ENTRY_BYTES)
    second = store.log.segments[1].start
    assert [name for name, _ in store.tables.drop_before(second)] == ["orders/0"]
    store.log.delete_before(second)
    assert queue.min_offset == 0
    with pytest.raises(Corrupt):
        await read(store, queue, 0)
