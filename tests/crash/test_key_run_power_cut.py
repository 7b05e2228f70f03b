"""The power goes, or the process dies, at every operation of a broker that builds key runs.

Look-ups by key then find what the log has, and no file is left that nobody owns.
"""

import posixpath
from collections.abc import Iterator
from random import Random

import pytest

from duemq.v1 import message_pb2
from duemq_server.broker.reading.lookup import MessageQuery
from duemq_server.broker.store import recovery
from duemq_server.broker.store.keys.key_builder import TEMPORARY, KeyBuilder
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.errors import DiskFailed, DiskFull
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.unit.broker.reading.test_lookup import KEYS, batch_of, by_key, settle, walk
from tests.unit.broker.short_spans import DATA, SPAN, runs_of, save, short_spans

STORE_SETTINGS = StoreSettings(default_queues=1, timer_queues=1)
SEEDS = range(2)


@pytest.fixture(autouse=True)
def _short_spans() -> Iterator[None]:
    with short_spans():
        yield


def opened(disk: FaultyDisk) -> Store:
    store = recovery.open_store(DATA, disk, STORE_SETTINGS, segment_bytes=8_192).store
    settle(store)
    return store


def send(store: Store, topic: str, count: int) -> None:
    records = [message_pb2.Record(key=KEYS[n % 4], body=bytes(300)) for n in range(count)]
    made = batch_of(0, records)
    made.topic = topic
    store.send(made, 1_000)
    settle(store)


def retain(store: Store, disk: FaultyDisk) -> None:
    save(store, disk)
    position = store.log.segments[-1].start
    store.tables.drop_before(position)
    store.log.delete_before(position)


def life(disk: FaultyDisk) -> Store:
    store = opened(disk)
    for count in (SPAN, 3, SPAN):
        send(store, "orders", count)
    send(store, "bills", 2 * SPAN)
    save(store, disk)
    send(store, "orders", SPAN)
    store.delete_topic("bills")
    settle(store)
    save(store, disk)
    [queue] = store.queues_of("orders")
    queue.keys.discard(0)
    for count in (SPAN, 2 * SPAN, 5):
        send(store, "orders", count)
    retain(store, disk)
    send(store, "orders", SPAN)
    save(store, disk)
    return store


def check(disk: FaultyDisk) -> None:
    store = opened(disk)
    KeyBuilder(DATA, disk)
    assert f"{DATA}/{TEMPORARY}" not in disk.paths
    found_as_stored(store)
    save(store, disk)
    found_as_stored(store)
    owned = sum(len(queue.keys) for queue in store.all_queues())
    # The disk's model may bring a file back whose folder was removed.
    there = [path for path in disk.paths if disk.exists(posixpath.dirname(path))]
    assert len([path for path in there if path.endswith(".keys")]) == owned


def found_as_stored(store: Store) -> None:
    if "orders" not in store.topics:
        return
    everything = walk(store, MessageQuery(), records_max=1_000)
    for key in KEYS[1:]:
        wanted = [each for each in everything if each.record.key == key]
        assert walk(store, by_key(key), records_max=1_000) == wanted


def crashed(cut_at: int) -> FaultyDisk:
    disk = FaultyDisk(cut_at=cut_at)
    with pytest.raises(PowerCut):
        life(disk)
    return disk


def count_operations() -> int:
    disk = FaultyDisk()
    with short_spans():
        life(disk)
    return disk.operations


OPERATIONS = range(1, count_operations() + 1)


def test_what_is_built_is_what_there_is() -> None:
    disk = FaultyDisk()
    store = life(disk)
    [queue] = store.queues_of("orders")
    first, end = queue.min_offset // SPAN, queue.max_offset // SPAN
    assert first > 0
    assert len(runs_of(disk, "orders")) == len(queue.keys) == end - first
    assert not runs_of(disk, "bills")


@pytest.mark.parametrize("cut_at", OPERATIONS)
def test_after_the_end_of_the_process(cut_at: int) -> None:
    check(crashed(cut_at).after_kill())


@pytest.mark.parametrize("cut_at", OPERATIONS)
def test_after_a_power_cut(cut_at: int) -> None:
    check(crashed(cut_at).after_power_cut())
    for seed in SEEDS:
        check(crashed(cut_at).after_power_cut(Random(seed)))


def test_runs_of_lost_consume_queues_go_with_them() -> None:
    disk = FaultyDisk()
    store = life(disk)
    store.close()
    for path in disk.paths:
        if "consumequeue" in path and not path.endswith(".keys"):
            disk.unlink(path)
    assert runs_of(disk, "orders")
    again = opened(disk)
    assert not runs_of(disk, "orders")
    found_as_stored(again)


def unbuilt(disk: FaultyDisk) -> Store:
    store = opened(disk)
    send(store, "orders", 2 * SPAN)
    for queue in store.all_queues():
        queue.sync()
    return store


@pytest.mark.parametrize("fault", [DiskFull, DiskFailed])
def test_a_disk_that_is_full_or_fails_costs_nothing_but_the_run(fault: type[Exception]) -> None:
    disk = FaultyDisk()
    store = unbuilt(disk)
    builder = KeyBuilder(DATA, disk)
    plan = builder.plan(store.queues_of("orders"), {"orders": [2 * SPAN]})
    assert [span.base for span in plan.spans] == [SPAN, 0]
    if fault is DiskFull:
        disk.capacity_bytes = disk.used_bytes() + 100
    else:
        disk.fail_sync_at = disk.syncs + 1
    with pytest.raises(fault):
        builder.build(plan.spans[0])
    assert f"{DATA}/{TEMPORARY}" not in disk.paths
    found_as_stored(store)
    disk.capacity_bytes = disk.fail_sync_at = None
    assert all(builder.build(span) for span in plan.spans)
    found_as_stored(store)


def test_what_goes_while_its_run_is_built_gets_none() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    for _ in range(6):
        send(store, "orders", SPAN)
    for queue in store.all_queues():
        queue.sync()
    builder = KeyBuilder(DATA, disk)
    [queue] = store.queues_of("orders")
    spans = builder.plan([queue], {"orders": [6 * SPAN]}).spans
    position = queue.frame_at(SPAN + 1)
    store.tables.drop_before(position)
    assert not builder.build(spans[-1])
    store.delete_topic("orders")
    settle(store)
    store.tables.erase_deleted(store.freeze()())
    assert not builder.build(spans[0])
    assert not [path for path in disk.paths if "orders" in path or TEMPORARY in path]
