"""The power goes, or the process dies, at every single operation of the broker's store on its disk.

Whatever was acknowledged is there afterwards, once, in order, with its topic and its offset; and a
producer that repeats everything it has no answer for gets it stored exactly once.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest

from duemq.errors import TopicNotFound
from duemq.protocol.names import TIMER_TOPIC
from duemq_server.broker.reading import reader
from duemq_server.broker.records.batch import IncomingBatch
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import offset_changes
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.disk import Disk
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.unit.broker.batches import batch

DATA = "/data"
SEGMENT_BYTES = 4_096
STORE_SETTINGS = StoreSettings(default_queues=1, timer_queues=1)
NOW_MS = 1_000
PRODUCER = 7
SEEDS = range(4)


def opened(disk: Disk) -> Store:
    return recovery.open_store(DATA, disk, STORE_SETTINGS, segment_bytes=SEGMENT_BYTES).store


def settle(store: Store) -> None:
    """What the writer thread and the event loop do."""
    while store.log.write_pending():
        pass
    store.durable(store.log.durable_position)


def save(store: Store, disk: Disk) -> None:
    """What the checkpoint loop does."""
    state = store.freeze()()
    settle(store)
    for queue in store.all_queues():
        queue.sync()
    recovery.save_checkpoint(DATA, state, disk)
    store.tables.erase_deleted(state)


@dataclass
class Client:
    """Numbers its batches per topic; remembers which are acknowledged."""

    batches: dict[tuple[str, bool], list[IncomingBatch]] = field(default_factory=dict)
    acknowledged: dict[tuple[str, bool], int] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    committed: int = 0

    def send(self, store: Store, topic: str, size: int, *, timed: bool = False) -> IncomingBatch:
        lane = self.batches.setdefault((topic, timed), [])
        number = len(lane)
        bodies = [f"{topic}-{timed}-{number}-{n}".encode().ljust(size) for n in range(1 + size % 3)]
        due = {"delays_ms": struct.pack("<q", 5_000)} if timed else {}
        made = batch(bodies, topic=topic, producer_id=PRODUCER, sequence=number, **due)
        lane.append(made)
        store.send(made, NOW_MS)
        return made

    def settle(self, store: Store) -> None:
        settle(store)
        self.acknowledged = {lane: len(sent) for lane, sent in self.batches.items()}


def script(disk: Disk, client: Client) -> Iterator[None]:
    """A short life of a store; yields where it may be looked at."""
    store = opened(disk)
    settle(store)
    for size in (10, 600, 31):
        client.send(store, "orders", size)
    client.settle(store)
    save(store, disk)
    for size in (700, 5):
        client.send(store, "orders", size)
        client.send(store, "orders", size, timed=True)
        client.settle(store)
    offset_changes.put(store, "g", [(GroupQueue("g", "orders", 0), GroupOffset(2, 9))])
    client.settle(store)
    client.committed = 2
    client.send(store, "bills", 900)
    client.settle(store)
    save(store, disk)
    store.delete_topic("bills")
    client.settle(store)
    client.deleted.add("bills")
    save(store, disk)
    client.send(store, "orders", 1_500)
    client.send(store, "orders", 2_500)
    client.settle(store)
    save(store, disk)
    client.send(store, "orders", 40, timed=True)
    client.send(store, "orders", 8)
    client.settle(store)
    yield


def run(disk: Disk, client: Client) -> None:
    for _ in script(disk, client):
        pass


def count_operations() -> int:
    disk = FaultyDisk()
    run(disk, Client())
    return disk.operations


OPERATIONS = count_operations()


def crashed(cut_at: int) -> tuple[FaultyDisk, Client]:
    disk, client = FaultyDisk(cut_at=cut_at), Client()
    with pytest.raises(PowerCut):
        run(disk, client)
    return disk, client


def records_in(store: Store, topic: str) -> bytes:
    queue = store.queues_of(topic)[0]
    assert queue.max_offset == queue.next_offset
    read = reader.read_records(store.log, queue, 0, 65_536, 8 << 20)
    assert read.next_offset == queue.max_offset
    return b"".join(read.slices)


def stored(store: Store, topic: str, timed: bool) -> bytes:
    try:
        return records_in(store, TIMER_TOPIC if timed else topic)
    except TopicNotFound:
        return b""


def check(disk: FaultyDisk, client: Client) -> None:
    store = opened(disk)
    settle(store)
    for lane, sent in client.batches.items():
        if lane[0] == "bills":  # it was deleted, or is about to be
            continue
        pieces = [each.records for each in sent]
        found = stored(store, *lane)
        known = client.acknowledged.get(lane, 0)
        assert found in [b"".join(pieces[:n]) for n in range(known, len(pieces) + 1)]
        for each in sent:  # everything again, as a client does that has no answer
            accepted = store.send(each, NOW_MS)
            assert accepted.duplicate or accepted.stored.store_ms >= NOW_MS
        settle(store)
        assert stored(store, *lane) == b"".join(pieces)
    assert not client.deleted & {topic.name for topic in store.topics}
    progress = store.offsets.find(GroupQueue("g", "orders", 0))
    if client.committed:
        assert progress == GroupOffset(2, 9)
    save(store, disk)
    again = opened(disk)
    for lane in client.batches:
        assert stored(again, *lane) == stored(store, *lane)


@pytest.mark.parametrize("cut_at", range(1, OPERATIONS + 1))
def test_a_dead_process_lost_and_repeats_nothing(cut_at: int) -> None:
    disk, client = crashed(cut_at)
    check(disk.after_kill(), client)


@pytest.mark.parametrize("cut_at", range(1, OPERATIONS + 1))
def test_a_power_cut_lost_and_repeats_nothing(cut_at: int) -> None:
    disk, client = crashed(cut_at)
    check(disk.after_power_cut(), client)
    for seed in SEEDS:
        disk, client = crashed(cut_at)
        check(disk.after_power_cut(Random(seed)), client)


def test_lost_consume_queues_are_rebuilt_from_the_log() -> None:
    disk, client = FaultyDisk(), Client()
    run(disk, client)
    for path in list(disk.paths):
        if "consumequeue" in path:
            disk.unlink(path)
    check(disk, client)


def test_without_a_checkpoint_everything_is_read_from_the_log() -> None:
    disk, client = FaultyDisk(), Client()
    run(disk, client)
    disk.unlink(f"{DATA}/{recovery.CHECKPOINT}")
    check(disk, client)
