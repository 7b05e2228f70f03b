"""A replica that follows, on a disk in memory; the leader is a replica that was promoted."""

from __future__ import annotations

import struct
from random import Random

import pytest

from duemq.errors import InvariantError
from duemq_server.broker.records.timer_owners import Service
from duemq_server.broker.store import recovery
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.offsets import GroupQueue, Progress
from duemq_server.broker.store.standby import Standby
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.replicas import epoch
from duemq_server.storage.replicas.replica_log import ReplicaLog
from tests.crash.faulty_disk import FaultyDisk
from tests.unit.broker.batches import batch

DATA = "/data"
SEGMENT_BYTES = 2_000
SETTINGS = StoreSettings(default_queues=2, timer_queues=2)
NOW_MS = 1_000_000
KEY = GroupQueue("g", "orders", 0)


def opened(disk: FaultyDisk) -> Standby:
    return Standby.open(DATA, disk, SETTINGS, segment_bytes=SEGMENT_BYTES)


class Leader:
    """What it appends is committed at once, unless it is told otherwise."""

    def __init__(self) -> None:
        self.disk = FaultyDisk()
        standby = opened(self.disk)
        self.lead(standby, 1)

    def lead(self, standby: Standby, number: int) -> None:
        self.log = standby.log
        self.log.committed = lambda: self.log.durable_position
        self.log.append(epoch.KIND, [epoch.encode(number, bytes(16), NOW_MS)])
        self.write()
        standby.apply(self.log.durable_position)
        self.store: Store = standby.promote().store
        self.store.ensure_timer_topic()
        self.settle()

    def write(self) -> None:
        while self.log.write_pending():
            pass

    def settle(self) -> None:
        self.write()
        self.store.durable(self.log.durable_position)

    def send(self, first: int = 0, count: int = 10, topic: str = "orders") -> None:
        for number in range(first, first + count):
            body = b"%d" % number + bytes(100)
            sent = {"topic": topic, "producer_id": 7, "sequence": number}
            self.store.send(batch([body], **sent), NOW_MS + number)
            self.store.send(batch([body], **sent, delays_ms=struct.pack("<q", 1)), NOW_MS + number)
        self.settle()

    def checkpoint(self) -> None:
        self.settle()
        for queue in self.store.all_queues():
            queue.sync()
        recovery.save_checkpoint(DATA, self.store.snapshot(), self.disk)

    def retain(self, position: int) -> None:
        self.store.tables.drop_before(position)
        self.log.delete_before(position)

    @property
    def snapshot(self) -> bytes:
        payload = recovery.load_checkpoint(DATA, self.disk)
        assert payload is not None
        return payload

    def state(self) -> CheckpointState:
        return state_of(self.store.tables)


def state_of(tables) -> CheckpointState:
    return tables.snapshot(0, 0)


def extend(standby: Standby, leader: ReplicaLog, end: int | None = None) -> None:
    """The follower's log gets the leader's bytes."""
    end = leader.written_position if end is None else end
    while standby.log.end_position < end:
        position = standby.log.end_position
        run = bytes(leader.read_run(position, min(end - position, 1_500)))
        standby.log.extend(position, [run])
        while standby.log.write_pending():
            pass


def test_a_follower_has_what_is_committed_and_nothing_else() -> None:
    leader = Leader()
    leader.send(0, 5)
    committed, state = leader.log.end_position, leader.state()
    leader.send(5, 5)
    standby = opened(FaultyDisk())
    extend(standby, leader.log)
    standby.apply(committed)
    assert standby.applied == committed
    assert state_of(standby.tables) == state
    standby.apply(leader.log.end_position, entries_max=3)
    assert committed < standby.applied < leader.log.end_position
    standby.apply(leader.log.end_position)
    assert state_of(standby.tables) == leader.state()


def test_a_tail_that_may_not_be_committed_waits_over_a_start() -> None:
    leader = Leader()
    leader.send(0, 5)
    disk = FaultyDisk()
    standby = opened(disk)
    extend(standby, leader.log)
    standby.apply(leader.log.end_position)
    standby.checkpoint()
    at, state = standby.applied, leader.state()
    leader.log.committed = lambda: at
    leader.send(5, 5)
    extend(standby, leader.log)
    again = opened(disk.after_kill())
    assert (again.committed, again.applied, again.lost) == (at, at, False)
    assert state_of(again.tables) == state
    with pytest.raises(InvariantError):
        again.check_truncate(at - 8)
    again.check_truncate(at)
    again.log.truncate(at)
    assert opened(disk.after_kill()).applied == at


def test_epochs_are_known_after_a_start_from_a_checkpoint() -> None:
    leader = Leader()
    assert opened(leader.disk.after_kill()).epochs == ((1, 0),)
    leader.send()
    leader.checkpoint()
    standby = opened(leader.disk.after_kill())
    assert standby.epochs == ((1, 0),)
    end = standby.log.end_position
    leader.lead(standby, 2)
    leader.send(10)
    leader.checkpoint()
    assert opened(standby._disk.after_kill()).epochs == ((1, 0), (2, end))


def test_a_snapshot_is_the_leaders_tables_as_soon_as_the_log_is_there() -> None:
    leader = Leader()
    leader.send()
    leader.send(topic="old", count=3)
    leader.store.delete_topic("old")
    leader.store.put_offsets("g", [(KEY, Progress(3, 5))])
    leader.store.put_group(GroupConfig("g"))
    leader.store.claim_timer_queues(Service((1 << 63) | 5, "t1", 0, 1), [0, 1], NOW_MS)
    leader.checkpoint()
    leader.retain(leader.log.segments[-2].start)
    start = leader.log.start_position
    leader.send(10, 20)
    leader.send(topic="old", count=4)
    leader.checkpoint()
    disk = FaultyDisk()
    standby = opened(disk)
    standby.install(leader.snapshot, start)
    assert (standby.log.end_position, standby.applied) == (start, start)
    assert standby.epochs == ((1, 0),)
    extend(standby, leader.log, (start + leader.log.end_position) // 16 * 8 + 700)
    standby.apply(leader.log.end_position)
    assert not standby.is_whole
    standby.checkpoint()
    again = opened(disk.after_kill())
    assert not again.is_whole
    for each in (standby, again):
        extend(each, leader.log)
        each.apply(leader.log.end_position)
        assert each.is_whole
        assert state_of(each.tables) == leader.state()
    for queue in leader.store.all_queues():
        mine = again.tables.queues.of(queue.topic)[queue.queue_id]
        assert (mine.min_offset, mine.max_offset) == (queue.min_offset, queue.max_offset)
        page = queue.page(queue.min_offset, 1_000)
        assert bytes(mine.page(queue.min_offset, 1_000)) == bytes(page)
    last = opened(disk.after_power_cut(Random(1)))
    assert last.applied == leader.log.end_position
    assert state_of(last.tables) == leader.state()


def test_only_an_empty_log_takes_a_store_id_over() -> None:
    disk = FaultyDisk()
    standby = opened(disk)
    standby.adopt(77)
    assert opened(disk.after_kill()).store_id == 77
    leader = Leader()
    extend(standby, leader.log)
    standby.adopt(77)
    with pytest.raises(ValueError, match="store"):
        standby.adopt(78)
