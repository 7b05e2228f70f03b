from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.protocol.names import TIMER_TOPIC, retry_topic
from duemq_server.broker.records import batch as batches
from duemq_server.broker.records.timer_claims import Service
from duemq_server.broker.store import recovery, retention
from duemq_server.broker.store.changes import offset_changes, timer_queue_changes
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.recovery import REBUILDING, UNSYNCED, Marker
from duemq_server.broker.store.store import Store
from duemq_server.storage.disk import RealDisk, RealFile
from duemq_server.storage.errors import CorruptFile, DiskFull, TooManyFiles
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import batch
from tests.unit.broker.leading import DATA, NOW_MS, SEGMENT_BYTES, SETTINGS, save
from tests.unit.broker.reading.test_lookup import filled
from tests.unit.broker.short_spans import SPAN, runs_of, short_spans
from tests.unit.broker.short_spans import save as save_with_keys


def opened(disk: FaultyDisk) -> Store:
    return recovery.open_store(DATA, disk, SETTINGS, segment_bytes=SEGMENT_BYTES).store


def send(store: Store, count: int = 30) -> None:
    for _ in range(count):
        store.send(batch([bytes(200)]), NOW_MS)
    store.log.write_pending()
    while store.log.write_pending():
        pass
    store.durable(store.log.durable_position)


def test_a_marker_that_went_while_too_many_files_were_open_is_gone_by_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FaultyDisk()
    disk.makedirs(DATA)
    marker = Marker(DATA, REBUILDING, disk)
    marker.put(b"")

    def fsync_dir(path: str) -> None:
        raise DiskFull(f"open {path}: too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "fsync_dir", fsync_dir)
        with pytest.raises(DiskFull):
            marker.remove()
    marker.remove()
    assert Marker(DATA, REBUILDING, disk.after_power_cut(None)).value is None


@pytest.mark.parametrize("name", [recovery.STORE_ID, UNSYNCED, recovery.CHECKPOINT])
def test_only_a_checkpoint_that_is_damaged_may_be_removed(name: str) -> None:
    """Without its id it would be another store, of which timer shards fetch everything again."""
    disk = FaultyDisk()
    store = opened(disk)
    send(store)
    recovery.save_checkpoint(DATA, store.freeze()(), disk)
    Marker(DATA, UNSYNCED, disk).put(b"first")
    disk.flip(f"{DATA}/{name}", 25)
    with pytest.raises(CorruptFile, match="Restore the data directory") as refused:
        opened(disk.after_kill())
    assert ("remove this file" in str(refused.value)) == (name == recovery.CHECKPOINT)
    if name == recovery.CHECKPOINT:
        disk.unlink(f"{DATA}/{name}")
        assert opened(disk).queue("orders", 0).records_from(0) == 30


def test_retention_needs_no_checkpoint_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a disk that is full at the start has no room for."""
    disk = FaultyDisk()
    store = opened(disk)
    send(store)
    state = store.freeze()()
    sync = disk.fsync_dir

    def fsync_dir(path: str) -> None:
        if path == DATA:
            raise DiskFull(f"open {path}: too many open files")
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "fsync_dir", fsync_dir)
        with pytest.raises(DiskFull):
            save(store, state, disk)  # its name is there, and not durable
    assert retention.needed_from(store) == 0
    send(store)
    disk = disk.after_kill()
    store = opened(disk)
    assert (retention.needed_from(store), store.checkpoint_position) == (state.position, 0)
    store.tables.drop_before(state.position)
    assert store.log.delete_before(state.position)
    again = opened(disk.after_power_cut(None))
    assert again.log.start_position == store.log.start_position > 0
    assert again.queue("orders", 0).max_offset == 60


def test_a_quiet_queue_is_there_where_a_group_has_an_offset_in_it() -> None:
    """Of its topic retention has removed the making, and a lost checkpoint knew it."""
    disk = FaultyDisk()
    store = opened(disk)
    queues = 3 * SETTINGS.default_queues
    store.create_topic("orders", queues)
    send(store)
    last = GroupQueue("billing", "orders", queues - 1)
    offset_changes.put(store, "billing", [(last, GroupOffset(0, 3))])
    send(store)
    save(store, store.freeze()(), disk)
    begin = store.log.segments[1].start
    store.tables.drop_before(begin)
    store.log.delete_before(begin)
    disk = disk.after_kill()
    disk.unlink(f"{DATA}/{recovery.CHECKPOINT}")
    again = opened(disk)
    assert again.offsets.find(last) == GroupOffset(0, 3)
    assert again.queue("orders", queues - 1).max_offset == 0
    assert again.topics.find("orders").queues == queues


def test_a_hand_over_is_taken_without_the_claim_that_retention_has_removed() -> None:
    """Of a service whose number of shards changed; a lost checkpoint knew the claim."""
    disk = FaultyDisk()
    store = opened(disk)
    alone = Service(SERVICE_IDS_FROM + 7, "t1", 0, 1)
    timer_queue_changes.claim(store, alone, [0, 1], NOW_MS, now_ms=NOW_MS)
    send(store)
    begin = store.log.segments[1].start
    now = replace(alone, shards=2, key_shards=1)
    timer_queue_changes.claim(store, now, [0], NOW_MS, now_ms=NOW_MS)
    assert store.timer_owners.claim_of(1) is None
    send(store)
    store.tables.drop_before(begin)
    store.log.delete_before(begin)
    again = opened(disk.after_kill())
    claim = again.timer_owners.claim_of(0)
    assert claim is not None
    assert claim.service.id == alone.id
    assert again.timer_owners.claim_of(1) is None


def test_the_brokers_own_topics_have_their_queues_after_a_rebuild() -> None:
    """As they are made: the number of timer queues never changes."""
    disk, settings = FaultyDisk(), replace(SETTINGS, timer_queues=6)
    store = recovery.open_store(DATA, disk, settings, segment_bytes=SEGMENT_BYTES).store
    retries = retry_topic("billing")
    store.create_topic(retries)
    send(store)
    begin = store.log.segments[1].start
    columns = batches.check(batch([b"again"]), settings.limits, 100)
    store.append_frame(store.queue(retries, 0), columns, NOW_MS)
    store.send(batch([b"later"], delays_ms=bytes(8)), NOW_MS)
    send(store)
    store.tables.drop_before(begin)
    store.log.delete_before(begin)
    again = recovery.open_store(DATA, disk.after_kill(), settings, segment_bytes=SEGMENT_BYTES)
    assert len(again.store.queues_of(retries)) == 1
    assert len(again.store.queues_of(TIMER_TOPIC)) == 6


def test_where_consume_queues_were_lost_retention_waits_for_a_checkpoint() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    send(store)
    state = store.freeze()()
    save(store, state, disk)
    send(store)
    disk.unlink(next(path for path in disk.paths if "consumequeue/orders" in path))
    store = opened(disk.after_kill())
    assert retention.needed_from(store) == store.log.end_position  # it was taken at the start


def beyond_a_checkpoint_on_a_full_disk() -> FaultyDisk:
    disk = FaultyDisk()
    store = opened(disk)
    save(store, store.freeze()(), disk)
    for _ in range(30):
        store.send(batch([b"x"] * 100), NOW_MS)
    while store.log.write_pending():
        pass
    disk = disk.after_kill()
    disk.capacity_bytes = 0
    return disk


def test_a_start_on_a_full_disk_keeps_in_memory_what_the_queues_lack() -> None:
    disk = beyond_a_checkpoint_on_a_full_disk()
    store = opened(disk)
    queue = store.queue("orders", 0)
    assert (queue.min_offset, queue.max_offset, queue.next_offset) == (0, 3_000, 3_000)
    entries = bytes(queue.page(0, 3_000))
    with pytest.raises(DiskFull):
        save(store, store.freeze()(), disk)
    disk.capacity_bytes = None
    send(store)
    save(store, store.freeze()(), disk)
    again = opened(disk.after_power_cut(None)).queue("orders", 0)
    assert again.max_offset == 3_030
    assert bytes(again.page(0, 3_000)) == entries


def test_so_much_and_no_more_is_kept_in_memory_at_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "HELD_BYTES_MAX", 1_000)
    with pytest.raises(DiskFull, match="no space for what lies in the queues"):
        opened(beyond_a_checkpoint_on_a_full_disk())


def test_who_cannot_say_that_entries_may_be_lost_starts_and_syncs_them() -> None:
    """A start with less retention is what helps a full disk."""
    disk = FaultyDisk()
    opened(disk).close()
    disk.capacity_bytes = 0
    now = recovery.open_store(DATA, disk, SETTINGS, unsynced_boot=b"first")
    assert not now.unsynced
    now.store.close()
    disk.capacity_bytes = None
    assert recovery.open_store(DATA, disk, SETTINGS, unsynced_boot=b"first").unsynced


def power_failed(disk: FaultyDisk) -> FaultyDisk:
    """While entries were acknowledged unsynced."""
    Marker(DATA, UNSYNCED, disk).put(b"first")
    disk.fsync_dir(os.path.dirname(runs_of(disk, "orders")[0]))
    return disk.after_power_cut()


def lost_a_queue(disk: FaultyDisk) -> FaultyDisk:
    disk.unlink(next(path for path in disk.paths if path.endswith("/0/" + "0" * 20)))
    return disk.after_kill()


@pytest.mark.parametrize("failed", [power_failed, lost_a_queue])
def test_a_start_that_has_something_to_note_on_a_full_disk_takes_the_key_indexs_space(
    failed: Callable[[FaultyDisk], FaultyDisk],
) -> None:
    disk = FaultyDisk()
    with short_spans():
        store, _ = filled([(0, 1, [("key", 0)] * SPAN)] * 4, disk)
        save_with_keys(store, disk)
        end = store.queue("orders", 0).max_offset
        last = store.log.segments[-1]
        disk.chop(last.path, store.log.end_position - last.start)  # the space ahead, given back
        disk = failed(disk)
        assert len(runs_of(disk, "orders")) == 4
        disk.capacity_bytes = disk.used_bytes()
        for _ in range(2):
            now = recovery.open_store(DATA, disk, SETTINGS, unsynced_boot=b"second").store
            assert now.queue("orders", 0).records_from(0) == end
            now.close()
        assert not runs_of(disk, "orders")


def test_a_start_with_too_many_open_files_keeps_the_key_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its space would not help."""
    disk = FaultyDisk()
    with short_spans():
        store, _ = filled([(0, 1, [("key", 0)] * SPAN)] * 4, disk)
        save_with_keys(store, disk)
    store.close()

    def too_many(opening: recovery.Opening) -> int:
        raise TooManyFiles("open a segment")

    monkeypatch.setattr(recovery.Opening, "run", too_many)
    with pytest.raises(TooManyFiles):
        recovery.open_store(DATA, disk, SETTINGS)
    assert len(runs_of(disk, "orders")) == 4


class FullDisk(RealDisk):
    """The operating system's, with no space for a checkpoint."""

    def open(self, path: str, *, create: bool = False) -> RealFile:
        if path.endswith(".tmp"):
            raise DiskFull(f"create {path}: no space")
        return super().open(path, create=create)


def test_a_file_among_the_folders_of_topics_is_in_nobodys_way(tmp_path: Path) -> None:
    """A desktop, or a copy, has left it there."""
    store = recovery.open_store(str(tmp_path), RealDisk(), SETTINGS).store
    send(store)
    store.queue("orders", 0).sync()
    stray = tmp_path / "consumequeue" / ".DS_Store"
    stray.touch()
    store.delete_topic("orders")
    store.tables.erase_deleted(store.freeze()())
    assert os.listdir(stray.parent) == [stray.name]
    store.close()
    os.unlink(tmp_path / recovery.STORE_ID)
    with pytest.raises(DiskFull):  # which is what it tells, and not what lies there
        recovery.open_store(str(tmp_path), FullDisk(), SETTINGS)
