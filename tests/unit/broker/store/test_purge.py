"""Purging: records before an offset are gone for everybody, over restarts and rebuilds."""

from collections.abc import Callable

import pytest

from duemq.errors import (
    InvalidArgument,
    OffsetOutOfRange,
    QueueNotFound,
    TopicNotFound,
)
from duemq.protocol.names import PURGED_GROUP, TIMER_TOPIC, check_group
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import offset_changes
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.store import Store
from duemq_server.storage.indexes.index import FixedIndex
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import batch
from tests.unit.broker.store.test_store import DATA, NOW_MS, opened, save, settle

Restart = Callable[[Store, FaultyDisk], FaultyDisk]


def filled(disk: FaultyDisk) -> Store:
    """Five records in queue 0 of `orders`."""
    store = opened(disk)
    for number in range(5):
        store.send(batch([b"%d" % number], queue_id=0), NOW_MS)
    settle(store)
    return store


def span(store: Store) -> tuple[int, int]:
    queue = store.queue("orders", 0)
    return queue.min_offset, queue.max_offset


def test_what_lies_before_the_cut_is_gone_and_offsets_go_on() -> None:
    store = filled(FaultyDisk())
    offset_changes.purge(store, "orders", {0: 3})
    assert span(store) == (3, 5)
    with pytest.raises(IndexError):
        store.queue("orders", 0).page(2, 1)
    offset_changes.purge(store, "orders", {0: 5})
    store.send(batch([b"5"], queue_id=0), NOW_MS)
    settle(store)
    assert span(store) == (5, 6)
    # Again, and a cut that is behind: nothing more.
    offset_changes.purge(store, "orders", {0: 5})
    offset_changes.purge(store, "orders", {0: 1})
    assert span(store) == (5, 6)


def killed(store: Store, disk: FaultyDisk) -> FaultyDisk:
    return disk.after_kill()


def without_power(store: Store, disk: FaultyDisk) -> FaultyDisk:
    return disk.after_power_cut()


def after_a_checkpoint(store: Store, disk: FaultyDisk) -> FaultyDisk:
    save(store, disk)
    return disk.after_power_cut()


def without_its_checkpoint(store: Store, disk: FaultyDisk) -> FaultyDisk:
    save(store, disk)
    disk.unlink(f"{DATA}/{recovery.CHECKPOINT}")
    return disk


@pytest.mark.parametrize(
    "restart",
    [killed, without_power, after_a_checkpoint, without_its_checkpoint],
    ids=lambda each: each.__name__,
)
def test_it_holds_over_a_start(restart: Restart) -> None:
    disk = FaultyDisk()
    store = filled(disk)
    save(store, disk)  # of before
    offset_changes.purge(store, "orders", {0: 4})
    settle(store)
    store.send(batch([b"5"], queue_id=0), NOW_MS)
    settle(store)
    store = opened(restart(store, disk))
    assert span(store) == (4, 6)


def test_a_purge_that_was_not_durable_was_not_answered() -> None:
    disk = FaultyDisk()
    store = filled(disk)
    save(store, disk)
    settled = offset_changes.purge(store, "orders", {0: 4})
    assert settled > store.log.durable_position
    store = opened(disk.after_power_cut())
    assert span(store) == (0, 5)


def test_a_topic_made_anew_has_nothing_purged() -> None:
    store = filled(FaultyDisk())
    offset_changes.purge(store, "orders", {0: 5})
    store.delete_topic("orders")
    store.send(batch([b"a"], queue_id=0), NOW_MS)
    settle(store)
    store.tables.drop_before(0)
    assert span(store) == (0, 1)


@pytest.mark.parametrize(
    ("topic", "cuts", "error"),
    [
        ("orders", {0: 6}, OffsetOutOfRange),
        ("orders", {0: -1}, OffsetOutOfRange),
        ("orders", {0: 3, 9: 0}, QueueNotFound),
        ("nowhere", {0: 0}, TopicNotFound),
        (TIMER_TOPIC, {0: 0}, InvalidArgument),
    ],
)
def test_a_wrong_cut_purges_nothing(
    topic: str, cuts: dict[int, int], error: type[Exception]
) -> None:
    store = filled(FaultyDisk())
    end = store.log.end_position
    with pytest.raises(error):
        offset_changes.purge(store, topic, cuts)
    assert (span(store), store.log.end_position) == ((0, 5), end)


def test_nobody_else_writes_or_sees_what_purges_are_kept_in() -> None:
    store = filled(FaultyDisk())
    offset_changes.purge(store, "orders", {0: 2})
    assert store.offsets.groups() == []
    assert store.offsets.find(GroupQueue(PURGED_GROUP, "orders", 0)) == GroupOffset(2, 0)
    with pytest.raises(InvalidArgument):
        check_group(PURGED_GROUP)


def test_a_crash_soon_after_a_purge_rebuilds_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What came since the last checkpoint may be more than a file of the consume queue holds."""
    monkeypatch.setattr(FixedIndex.__init__, "__kwdefaults__", {"files": None, "file_bytes": 64})
    disk = FaultyDisk()
    store = opened(disk)
    store.send(batch([b"0"], queue_id=0), NOW_MS)
    save(store, disk)
    for number in range(1, 9):
        store.send(batch([b"%d" % number], queue_id=0), NOW_MS)
    settle(store)
    store.queue("orders", 0).sync()
    offset_changes.purge(store, "orders", {0: 8})
    settle(store)
    store = opened(disk.after_kill())
    assert span(store) == (8, 9)
    assert "rebuilding" not in caplog.text


def test_files_of_what_was_purged_go_with_the_next_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FixedIndex.__init__, "__kwdefaults__", {"files": None, "file_bytes": 64})
    disk = FaultyDisk()
    store = filled(disk)
    save(store, disk)
    files = [path for path in disk.paths if "/orders." in path]
    offset_changes.purge(store, "orders", {0: 5})
    assert [path for path in disk.paths if "/orders." in path] == files
    save(store, disk)
    assert [path for path in disk.paths if "/orders." in path] == files[-1:]
    assert span(opened(disk.after_kill())) == (5, 5)


def test_a_checkpoint_removes_no_files_of_a_purge_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FixedIndex.__init__, "__kwdefaults__", {"files": None, "file_bytes": 32})
    disk = FaultyDisk()
    store = filled(disk)
    offset_changes.purge(store, "orders", {0: 2})
    settle(store)
    taken = store.freeze()()
    save(store, disk)
    offset_changes.purge(store, "orders", {0: 4})  # nobody has an answer yet
    store.tables.erase_deleted(taken)
    assert span(opened(disk.after_kill())) == (2, 5)
    before = [path for path in disk.paths if "/orders." in path]
    save(store, disk)
    assert len([path for path in disk.paths if "/orders." in path]) == len(before) - 2
    assert span(opened(disk.after_kill())) == (4, 5)
