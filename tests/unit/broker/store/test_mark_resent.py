"""Dead letters that were sent again are marked, in any order, over starts."""

import pytest

from duemq.errors import OffsetOutOfRange, QueueNotFound, TopicNotFound
from duemq.protocol.names import RESENT_GROUP, dead_letter_topic
from duemq_server.broker.store.changes import offset_changes
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.store import Store
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import batch
from tests.unit.broker.store.test_store import NOW_MS, opened, save, settle

GROUP = "billing"
TOPIC = dead_letter_topic(GROUP)
KEY = GroupQueue(RESENT_GROUP, TOPIC, 0)
SERVICE_ID = 1 << 63


def filled(disk: FaultyDisk) -> Store:
    """Six dead letters."""
    store = opened(disk)
    store.create_topic(TOPIC)
    for number in range(6):
        letter = batch([b"%d" % number], topic=TOPIC, queue_id=0, producer_id=SERVICE_ID)
        letter.sequence = number
        store.send(letter, NOW_MS)
    settle(store)
    return store


def marked(store: Store) -> list[int]:
    return [offset for offset in range(6) if store.offsets.is_done(KEY, offset)]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_marks_hold_over_a_start(checkpoint: bool) -> None:
    disk = FaultyDisk()
    store = filled(disk)
    offset_changes.mark_resent(store, GROUP, 0, [4, 2])
    if checkpoint:
        save(store, disk)
    offset_changes.mark_resent(store, GROUP, 0, [1])
    settle(store)
    assert marked(store) == [1, 2, 4]
    store = opened(disk.after_power_cut())
    assert marked(store) == [1, 2, 4]


def test_marks_that_follow_one_another_are_one_offset() -> None:
    store = filled(FaultyDisk())
    offset_changes.mark_resent(store, GROUP, 0, [1, 2, 4])
    offset_changes.mark_resent(store, GROUP, 0, [0])
    assert store.offsets.find(KEY) == GroupOffset(3, 0)
    assert list(store.offsets.settled(KEY)) == [4]
    offset_changes.mark_resent(store, GROUP, 0, [3, 5])
    assert store.offsets.find(KEY) == GroupOffset(6, 0)
    assert list(store.offsets.settled(KEY)) == []


def test_the_same_again_writes_nothing() -> None:
    store = filled(FaultyDisk())
    offset_changes.mark_resent(store, GROUP, 0, [0, 3])
    end = store.log.end_position
    offset_changes.mark_resent(store, GROUP, 0, [0, 3])
    assert store.log.end_position == end


def test_no_group_is_seen_for_it() -> None:
    store = filled(FaultyDisk())
    offset_changes.mark_resent(store, GROUP, 0, [0, 3])
    assert store.offsets.groups() == []


@pytest.mark.parametrize(
    ("group", "queue_id", "offset", "error"),
    [
        (GROUP, 0, 6, OffsetOutOfRange),
        (GROUP, 0, -1, OffsetOutOfRange),
        (GROUP, 1, 0, QueueNotFound),
        ("nobody", 0, 0, TopicNotFound),
    ],
)
def test_what_is_not_there_cannot_be_marked(
    group: str, queue_id: int, offset: int, error: type[Exception]
) -> None:
    store = filled(FaultyDisk())
    with pytest.raises(error):
        offset_changes.mark_resent(store, group, queue_id, [0, offset])
    assert marked(store) == []
