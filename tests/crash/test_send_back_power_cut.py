"""The power goes, or the process dies, at every operation of a store that takes messages back.

A message is sent back and settled, or neither: never lost between a queue and its retry topic,
never there twice.  The same for what an operator does to a group.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from duemq.errors import TopicNotFound
from duemq.protocol import names
from duemq.protocol.names import TIMER_TOPIC
from duemq.protocol.retry_policy import RetryPolicy
from duemq_server.broker.groups.progress import retries_waiting
from duemq_server.broker.groups.send_back import FailedMessage, SendBacks, SentBack
from duemq_server.broker.reading import reader
from duemq_server.broker.records import retry_record
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import group_changes, offset_changes
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage import frame
from duemq_server.storage.disk import Disk
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.crash.test_store_power_cut import save, settle
from tests.unit.broker.batches import batch

DATA = "/data"
SEGMENT_BYTES = 4_096
STORE_SETTINGS = StoreSettings(default_queues=1, timer_queues=1)
NOW_MS = 1_000
GROUP = "billing"
KEY = GroupQueue(GROUP, "orders", 0)
DEAD = names.dead_letter_topic(GROUP)
COMMITTED, RESET = GroupOffset(2, 9), GroupOffset(1, 10)
POLICY = RetryPolicy(2, (5, 7))
SEEDS = range(4)
MESSAGES = 12


def opened(disk: Disk) -> Store:
    return recovery.open_store(DATA, disk, STORE_SETTINGS, segment_bytes=SEGMENT_BYTES).store


@dataclass
class Consumer:
    """What it asked for, and what it was told is done."""

    asked: dict[int, bool] = field(default_factory=dict)
    """Offset: as a dead letter."""
    acknowledged: set[int] = field(default_factory=set)
    reset: int = 0
    """1: asked for, 2: acknowledged."""
    put: bool = False
    committed: bool = False

    def send_back(self, store: Store, *offsets: int, dead_letter: bool = False) -> None:
        failures = [FailedMessage(KEY, offset, dead_letter=dead_letter) for offset in offsets]
        self.asked |= dict.fromkeys(offsets, dead_letter)
        queue = store.queue("orders", 0)
        records = reader.read_each(store.log, [(queue, offset) for offset in offsets], 1 << 20)
        outcomes, _ = SendBacks(store, "b1").store(GROUP, failures, records, NOW_MS)
        assert all(isinstance(outcome, SentBack) for outcome in outcomes)
        settle(store)
        self.acknowledged |= set(offsets)


def script(disk: Disk, consumer: Consumer) -> None:
    """A short life."""
    store = opened(disk)
    store.send(batch([b"%d" % number * 40 for number in range(MESSAGES)]), NOW_MS)
    settle(store)
    group_changes.put(store, GroupConfig(GROUP, POLICY))
    settle(store)
    consumer.put = True
    consumer.send_back(store, 3, 4)
    save(store, disk)
    consumer.send_back(store, 6, dead_letter=True)
    offset_changes.put(store, GROUP, [(KEY, COMMITTED)])
    settle(store)
    consumer.committed = True
    consumer.send_back(store, 9, 7)
    save(store, disk)
    consumer.send_back(store, 2, 10, dead_letter=True)
    consumer.reset = 1
    offset_changes.reset(store, GROUP, [(KEY, 1)])
    settle(store)
    consumer.reset = 2
    save(store, disk)


def count_operations() -> int:
    disk = FaultyDisk()
    script(disk, Consumer())
    return disk.operations


OPERATIONS = count_operations()


def crashed(cut_at: int) -> tuple[FaultyDisk, Consumer]:
    disk, consumer = FaultyDisk(cut_at=cut_at), Consumer()
    with pytest.raises(PowerCut):
        script(disk, consumer)
    return disk, consumer


def sent_back(store: Store, topic: str) -> Counter[int]:
    """How often each offset of the queue lies there."""
    try:
        [queue] = store.queues_of(topic)
    except TopicNotFound:
        return Counter()
    found: Counter[int] = Counter()
    at = queue.min_offset
    while at < queue.max_offset:
        each = frame.decode(store.log.read_entry(queue.frame_at(at)).body)
        found.update(offset for *_, offset in retry_record.sources(each.payload, each.sizes))
        at = each.end_offset
    return found


def check(disk: FaultyDisk, consumer: Consumer) -> None:
    store = opened(disk)
    settle(store)
    retries, dead = sent_back(store, TIMER_TOPIC), sent_back(store, DEAD)
    both = retries + dead
    assert not both or max(both.values()) == 1
    assert consumer.acknowledged <= set(both) <= set(consumer.asked)
    assert all(consumer.asked[offset] for offset in dead)
    if consumer.put:
        assert store.groups.effective(GROUP).retry == POLICY
    progress = store.offsets.find(KEY)
    possible = [None] if not consumer.committed else []
    possible += [COMMITTED] if consumer.reset < 2 else []
    possible += [RESET] if consumer.reset else []
    assert progress in possible
    was_reset = progress == RESET
    assert set(store.offsets.settled(KEY)) == (set() if was_reset else set(both))
    assert retries_waiting(store, GROUP) == sum(retries.values())
    if was_reset:
        return
    for offset, dead_letter in consumer.asked.items():  # again, as who has no answer does
        consumer.send_back(store, offset, dead_letter=dead_letter)
    save(store, disk)
    for each in (store, opened(disk)):
        assert sent_back(each, TIMER_TOPIC) + sent_back(each, DEAD) == Counter(
            consumer.asked.keys()
        )
        assert set(each.offsets.settled(KEY)) == set(consumer.asked)


@pytest.mark.parametrize("cut_at", range(1, OPERATIONS + 1))
def test_a_dead_process_keeps_messages_and_what_is_settled_together(cut_at: int) -> None:
    disk, consumer = crashed(cut_at)
    check(disk.after_kill(), consumer)


@pytest.mark.parametrize("cut_at", range(1, OPERATIONS + 1))
def test_a_power_cut_keeps_messages_and_what_is_settled_together(cut_at: int) -> None:
    disk, consumer = crashed(cut_at)
    check(disk.after_power_cut(), consumer)
    for seed in SEEDS:
        disk, consumer = crashed(cut_at)
        check(disk.after_power_cut(Random(seed)), consumer)


def test_without_a_checkpoint_everything_is_read_from_the_log() -> None:
    disk, consumer = FaultyDisk(), Consumer()
    script(disk, consumer)
    disk.unlink(f"{DATA}/{recovery.CHECKPOINT}")
    check(disk, consumer)
