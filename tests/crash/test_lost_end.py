"""The log has lost its end, by `storage cut` or by a power failure before it was synced.

Who has seen what lay there (a group, a timer shard, a member in the middle of a queue) goes on
behind it: what comes new must lie behind it too, or it is never delivered.
"""

import struct
from random import Random

import pytest

from duemq.errors import OffsetOutOfRange
from duemq.protocol.names import TIMER_TOPIC
from duemq_server.broker.groups.progress import Activity, lags, state_of
from duemq_server.broker.reading import reader, time_search
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import offset_changes
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage import frame, record
from duemq_server.storage.errors import DiskFailed
from duemq_server.storage.tools.cut import cut
from duemq_server.storage.writer import UNSYNCED_BYTES_MAX
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.unit.broker.batches import batch

DATA = "/data"
LOG = f"{DATA}/{recovery.LOG_DIRECTORY}"
STORE_SETTINGS = StoreSettings(default_queues=1, timer_queues=1)
SEGMENT_BYTES = 4_096
NOW_MS = 1_000
KEY = GroupQueue("g", "orders", 0)
PRODUCERS = {"old": 1, "new": 2}
BEFORE, AFTER = 40, 60


def opened(disk: FaultyDisk, boot: bytes = b"") -> Store:
    opened = recovery.open_store(
        DATA, disk, STORE_SETTINGS, segment_bytes=SEGMENT_BYTES, unsynced_boot=boot
    )
    return opened.store


def settle(store: Store) -> None:
    while store.log.write_pending():
        pass
    store.durable(store.log.durable_position)


def acknowledge_unsynced(store: Store) -> None:
    """And show it to all."""
    while store.log.write_group():
        pass


def save(store: Store, disk: FaultyDisk) -> None:
    taken = store.freeze()()
    settle(store)
    for queue in store.all_queues():
        queue.sync()
    recovery.save_checkpoint(DATA, taken, disk)


def send(store: Store, name: str, first: int, count: int) -> list[int]:
    """Of each number a message and a timer; where the messages lie in the log."""
    positions = []
    for number in range(first, first + count):
        body = b"%s %d" % (name.encode(), number)
        sent = {"producer_id": PRODUCERS[name], "sequence": number}
        positions.append(store.send(batch([body], **sent), NOW_MS).stored.position)
        store.send(batch([body], **sent, delays_ms=struct.pack("<q", 1)), NOW_MS)
    return positions


def consumed(store: Store, queue: Queue, offset: int) -> list[bytes]:
    """What a reader gets that goes on at an offset, in whole frames."""
    found = []
    while offset < queue.max_offset:
        read = reader.read_frames(store.log, queue, offset, 1 << 20)
        for data in read.slices:
            found += [bytes(frame.decode(each.body).payload) for each in record.split(data)]
        assert read.next_offset > offset
        offset = read.next_offset
    return found


def cut_after_a_checkpoint(kept: int) -> tuple[FaultyDisk, list[int]]:
    """100 of each are consumed; then the log is cut after `kept` of them.  Answers the ends too."""
    disk = FaultyDisk()
    store = opened(disk)
    positions = send(store, "old", 0, 100)
    settle(store)
    offset_changes.put(store, "g", [(KEY, GroupOffset(100, 5))])
    settle(store)
    ends = [store.queue("orders", 0).max_offset, store.queue(TIMER_TOPIC, 0).max_offset]
    save(store, disk)
    store.close()
    cut(LOG, positions[kept], disk)
    return disk, ends


def check_new_ones_are_seen(store: Store, ends: list[int]) -> None:
    orders, timers = store.queue("orders", 0), store.queue(TIMER_TOPIC, 0)
    send(store, "new", 0, 80)
    settle(store)
    for each, end in zip((orders, timers), ends, strict=True):
        bodies = consumed(store, each, end)
        assert len(bodies) == 80
        assert all(b"new" in body for body in bodies)
    resumed = store.offsets.acquire(KEY, 6, 0, orders.min_offset, orders.max_offset)
    assert len(consumed(store, orders, resumed.offset)) == 80


@pytest.mark.parametrize("kept", [1, 50, 99])
def test_what_comes_after_a_cut_is_new_to_all_who_had_seen_what_was_cut(kept: int) -> None:
    disk, ends = cut_after_a_checkpoint(kept)
    store = opened(disk)
    check_new_ones_are_seen(store, ends)
    for number, queue in enumerate((store.queue("orders", 0), store.queue(TIMER_TOPIC, 0))):
        whole = consumed(store, queue, 0)
        assert len(whole) == kept + 80
        for again in (disk.after_kill(), _without_checkpoint(disk)):
            reopened = opened(again)
            found = reopened.queue(*queue.key)
            assert consumed(reopened, found, 0) == whole
            assert found.next_offset == ends[number] + 80


def _without_checkpoint(disk: FaultyDisk) -> FaultyDisk:
    disk = disk.after_kill()
    disk.unlink(f"{DATA}/{recovery.CHECKPOINT}")
    return disk


def test_a_loss_is_found_once(caplog: pytest.LogCaptureFixture) -> None:
    disk, _ = cut_after_a_checkpoint(50)
    ends = [queue.next_offset for queue in opened(disk).all_queues()]
    caplog.clear()
    for again in (disk.after_kill(), disk.after_power_cut()):
        assert [queue.next_offset for queue in opened(again).all_queues()] == ends
    assert caplog.text == ""


def test_what_was_committed_bounds_a_queue_that_got_nothing_since() -> None:
    disk, _ = cut_after_a_checkpoint(50)
    store = opened(disk)
    offset_changes.put(store, "g", [(KEY, GroupOffset(100, 6))])
    settle(store)
    assert opened(_without_checkpoint(disk)).queue("orders", 0).next_offset == 100


def test_a_cut_behind_the_checkpoint_leaves_out_what_may_have_been_given() -> None:
    disk = FaultyDisk()
    store = opened(disk)
    send(store, "old", 0, 10)
    save(store, disk)
    positions = send(store, "old", 10, 90)
    settle(store)
    ends = [store.queue("orders", 0).max_offset, store.queue(TIMER_TOPIC, 0).max_offset]
    lost_bytes = store.log.end_position - positions[10]
    cut(LOG, positions[10], disk)
    store = opened(disk)
    orders = store.queue("orders", 0)
    assert ends[0] <= orders.next_offset <= 20 + lost_bytes // 12
    send(store, "new", 0, 80)
    settle(store)
    assert len(consumed(store, orders, ends[0])) == 80
    assert len(consumed(store, store.queue(TIMER_TOPIC, 0), ends[1])) == 80


def test_who_reads_steps_over_what_is_lost() -> None:
    disk, _ = cut_after_a_checkpoint(50)
    store = opened(disk)
    queue = store.queue("orders", 0)
    store.offsets.put(KEY, GroupOffset(49, 5))
    for offset in (50, 73, 100):
        assert (queue.present(offset), queue.entry_from(offset)) == (100, None)
        assert reader.read_records(store.log, queue, offset, 9, 1 << 20).next_offset == 100
        assert reader.read_frames(store.log, queue, offset, 1 << 20).next_offset == 100
    assert lags(store) == {("g", "orders"): 1}
    assert queue.last_store_ms() == NOW_MS
    store.send(batch([b"new"] * 3), NOW_MS + 5)
    settle(store)
    assert lags(store) == {("g", "orders"): 4}
    got = reader.read_records(store.log, queue, 49, 9, 1 << 20)
    assert [(run.offset, run.records) for run in got.runs] == [(49, 1), (100, 3)]
    assert got.next_offset == 103
    assert [time_search.first_stored_since(queue, at) for at in (NOW_MS, NOW_MS + 6)] == [0, 103]
    since = time_search.first_stored_since(queue, NOW_MS + 1)
    assert queue.present(since) == 100
    state = state_of(store, Activity(), KEY, GroupOffset(60, 5))
    assert state.lag_ms(NOW_MS + 7) == 2
    [found] = reader.read_each(store.log, [(queue, 60)], 1 << 20)
    assert isinstance(found, OffsetOutOfRange)
    store.tables.drop_before(queue.frame_at(100))
    assert (queue.min_offset, queue.records_from(0)) == (100, 3)


def operations_of_a_start() -> int:
    disk, _ = cut_after_a_checkpoint(50)
    disk = disk.after_kill()
    opened(disk)
    return disk.operations


@pytest.mark.parametrize("cut_at", range(1, operations_of_a_start() + 1))
def test_a_start_after_a_cut_may_be_cut_short_anywhere(cut_at: int) -> None:
    for seed in (None, 1, 2):
        before, ends = cut_after_a_checkpoint(50)
        disk = before.after_kill()
        disk.cut_at = cut_at
        with pytest.raises(PowerCut):
            opened(disk)
        killed = disk.after_kill()
        cut_short = disk.after_power_cut(Random(seed) if seed else None)
        for again in (killed, cut_short):
            check_new_ones_are_seen(opened(again), ends)


@pytest.mark.parametrize("seed", [None, *range(20)])
def test_without_sync_a_power_cut_takes_the_end_only_and_hides_nothing_new(
    seed: int | None,
) -> None:
    disk = FaultyDisk()
    store = opened(disk, boot=b"first")
    send(store, "old", 0, BEFORE)
    save(store, disk)
    send(store, "old", BEFORE, AFTER)
    acknowledge_unsynced(store)
    store.durable(store.log.written_position)
    offset_changes.put(store, "g", [(KEY, GroupOffset(100, 5))])
    acknowledge_unsynced(store)
    ends = [store.queue("orders", 0).max_offset, store.queue(TIMER_TOPIC, 0).max_offset]
    assert ends == [100, 100]
    sent = [consumed(store, store.queue(*place), 0) for place in (("orders", 0), (TIMER_TOPIC, 0))]

    same = opened(disk.after_kill(), boot=b"first")
    assert [queue.next_offset for queue in same.all_queues()] == ends

    disk = disk.after_power_cut(None if seed is None else Random(seed))
    store = opened(disk, boot=b"second")
    queues = [store.queue("orders", 0), store.queue(TIMER_TOPIC, 0)]
    for queue, all_sent in zip(queues, sent, strict=True):
        kept = consumed(store, queue, 0)
        assert len(kept) >= BEFORE
        assert kept == all_sent[: len(kept)]
        assert len(kept) + UNSYNCED_BYTES_MAX // 12 == queue.next_offset
    check_new_ones_are_seen(store, ends)


@pytest.mark.parametrize("epoch", [b"", recovery.EPOCH + b"7"])
def test_what_a_disk_lost_that_failed_is_left_out_in_the_same_run_of_the_machine(
    epoch: bytes,
) -> None:
    """The kernel may forget pages that it could not write."""
    disk = FaultyDisk()
    store = opened(disk, boot=b"first")
    marker = recovery.Marker(DATA, recovery.UNSYNCED, disk)
    marker.put(b"first" + epoch)
    send(store, "old", 0, 50)
    acknowledge_unsynced(store)
    for _ in range(2):
        recovery.failed(DATA, disk)
    marker = recovery.Marker(DATA, recovery.UNSYNCED, disk)
    assert recovery.unsynced_run(marker)[1] == int(epoch.removeprefix(recovery.EPOCH) or 0)
    store = opened(disk.after_power_cut(None), boot=b"first")
    assert store.queue("orders", 0).next_offset >= 50


def test_what_the_disk_lost_after_a_start_that_failed_is_left_out_too() -> None:
    """Its sync is the first after a kill: by the next one the kernel may have forgotten pages."""
    disk = FaultyDisk()
    store = opened(disk, boot=b"first")
    send(store, "old", 0, 50)
    acknowledge_unsynced(store)
    for _ in range(2):
        disk = disk.after_kill()
        disk.fail_sync_at = 1
        with pytest.raises(DiskFailed):
            opened(disk, boot=b"first")
    assert recovery.Marker(DATA, recovery.UNSYNCED, disk).value == recovery.FAILED + b"first"
    store = opened(disk.after_power_cut(None), boot=b"first")
    assert store.queue("orders", 0).next_offset >= 50


def test_a_clean_stop_leaves_nothing_out() -> None:
    disk = FaultyDisk()
    store = opened(disk, boot=b"first")
    send(store, "old", 0, 10)
    settle(store)
    recovery.closed(DATA, disk)
    for boot in (b"second", b""):
        disk = disk.after_power_cut(None)
        assert opened(disk, boot=boot).queue("orders", 0).next_offset == 10
        recovery.closed(DATA, disk)
