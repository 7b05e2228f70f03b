"""A replica that follows, on a disk in memory; the leader is a replica that was promoted."""

from __future__ import annotations

import itertools
import struct
from random import Random

import pytest

from duemq.errors import InvariantError
from duemq_server.broker.records.timer_claims import Service
from duemq_server.broker.store import checkpoint_state, recovery
from duemq_server.broker.store.changes import group_changes, offset_changes, timer_queue_changes
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.broker.store.standby import INSTALLING, Standby
from duemq_server.replication.protocol.follower import StreamBroken
from duemq_server.replication.running.state import ReplicaState
from duemq_server.storage.errors import CorruptFile, DiskFull, UnknownVersion
from duemq_server.storage.tools import set_aside
from duemq_server.storage.tools.cut import cut
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.unit.broker.batches import batch
from tests.unit.broker.leading import (
    DATA,
    NOW_MS,
    SEGMENT_BYTES,
    SETTINGS,
    Leader,
    comparable,
    extend,
    opened,
)

KEY = GroupQueue("g", "orders", 0)
KEPT = '{"generation": 7, "members": {"m": 10000}}'
LOG = f"{DATA}/{recovery.LOG_DIRECTORY}"
NAMED = 7  # operations of an installation until `installing` is there, and not durable


def send(leader: Leader, first: int = 0, count: int = 10, topic: str = "orders") -> None:
    for number in range(first, first + count):
        body = b"%d" % number + bytes(100)
        sent = {"topic": topic, "producer_id": 7, "sequence": number}
        leader.store.send(batch([body], **sent), NOW_MS + number)
        leader.store.send(batch([body], **sent, delays_ms=struct.pack("<q", 1)), NOW_MS + number)
    leader.settle()


def follower(leader: Leader, disk: FaultyDisk) -> Standby:
    """It has all that the leader has."""
    standby = opened(disk)
    extend(standby, leader.log)
    standby.apply(leader.committed)
    return standby


def check_same(standby: Standby, leader: Leader) -> None:
    assert standby.is_whole
    assert standby.applied == leader.committed
    assert comparable(standby.tables) == comparable(leader.store.tables)
    for queue in leader.store.all_queues():
        mine = standby.tables.queues.of(queue.topic)[queue.queue_id]
        first = max(mine.min_offset, queue.min_offset)
        assert mine.page(first, 1_000) == queue.page(first, 1_000)


def test_it_is_what_the_roles_follow_with() -> None:
    state: ReplicaState = opened(FaultyDisk())
    assert (state.epochs, state.committed, state.applied, state.lost) == ((), 0, 0, False)


def test_what_was_acknowledged_unsynced_founds_no_group_before_a_clean_stop() -> None:
    """Offsets of what a power failure took would be given away again."""
    disk = FaultyDisk()
    recovery.open_store(DATA, disk, SETTINGS, unsynced_boot=b"first").store.log.close()
    with pytest.raises(CorruptFile, match="Start it once without replicas"):
        opened(disk)
    recovery.open_store(DATA, disk, SETTINGS).store.log.close()
    assert opened(disk).committed >= 0


def test_what_was_acknowledged_unsynced_before_replicas_led_keeps_none_from_its_start() -> None:
    """A release that did not look made a group of it; alone, it would take that one's name."""
    disk = Leader().disk.after_kill()
    recovery.Marker(DATA, recovery.UNSYNCED, disk).put(b"first")
    assert opened(disk).epochs
    assert recovery.Marker(DATA, recovery.UNSYNCED, disk).value is None


def test_nor_does_what_a_log_that_had_replicas_acknowledged_unsynced_found_a_group() -> None:
    disk = Leader().disk.after_kill()
    recovery.open_store(DATA, disk, SETTINGS, unsynced_boot=b"first").store.log.close()
    with pytest.raises(CorruptFile, match="Start it once without replicas"):
        opened(disk)
    store = recovery.open_store(DATA, disk, SETTINGS, unsynced_boot=b"first").store
    assert store.queue("%TIMER%", 0).next_offset == 0  # nothing is lost in the same run
    recovery.closed(DATA, disk)
    assert opened(disk.after_kill()).epochs


def test_a_follower_has_what_is_committed_and_nothing_else() -> None:
    leader = Leader()
    send(leader, 0, 5)
    committed, state = leader.committed, comparable(leader.store.tables)
    send(leader, 5, 5)
    standby = opened(FaultyDisk())
    extend(standby, leader.log)
    standby.apply(committed)
    assert standby.applied == committed
    assert comparable(standby.tables) == state
    standby.apply(leader.committed, entries_max=3)
    assert committed < standby.applied < leader.committed
    standby.apply(leader.committed)
    check_same(standby, leader)


def test_what_is_committed_elsewhere_but_not_durable_here_waits() -> None:
    leader = Leader()
    send(leader)
    standby = opened(FaultyDisk())
    end = leader.log.end_position
    standby.log.extend(0, [leader.log.read_run(0, end)])
    while standby.log.write_group():
        pass
    standby.apply(end)
    assert standby.applied == 0
    standby.log.sync()
    standby.apply(end)
    assert standby.applied == standby.log.end_position


def test_half_an_entry_waits_for_its_rest() -> None:
    leader = Leader()
    send(leader)
    standby = opened(FaultyDisk())
    extend(standby, leader.log)
    ends = [entry.end for entry in leader.log.entries(0)]
    standby.apply(ends[5] - 8)
    assert standby.applied == ends[4]


def test_a_tail_that_may_not_be_committed_waits_over_a_start() -> None:
    leader = Leader()
    send(leader, 0, 5)
    disk = FaultyDisk()
    standby = follower(leader, disk)
    standby.checkpoint()
    at, state = standby.applied, comparable(leader.store.tables)
    for number in range(5):
        leader.store.send(batch([b"%d" % number]), NOW_MS)
    leader.write()
    extend(standby, leader.log)
    disk = disk.after_kill()
    again = opened(disk)
    assert (again.committed, again.applied, again.lost) == (at, at, False)
    assert comparable(again.tables) == state
    again.log.truncate(at)
    assert opened(disk.after_kill()).applied == at


def test_a_log_that_ends_before_what_was_applied_is_a_mistake() -> None:
    leader = Leader()
    send(leader)
    standby = follower(leader, FaultyDisk())
    standby.log.truncate(0)
    with pytest.raises(InvariantError, match="was applied"):
        standby.apply(leader.committed)


def test_epochs_are_known_after_a_start_from_a_checkpoint() -> None:
    leader = Leader()
    assert opened(leader.disk.after_kill()).epochs == ((1, 0),)
    send(leader)
    leader.checkpoint()
    second = leader.committed
    leader.again()
    assert opened(leader.disk.after_kill()).epochs == ((1, 0), (2, second))
    leader.checkpoint()
    assert opened(leader.disk.after_kill()).epochs == ((1, 0), (2, second))


def test_a_checkpoint_keeps_the_epoch_that_the_log_begins_in() -> None:
    leader = Leader()
    begins = []
    for number in range(2, 5):
        send(leader, 10 * (number - 2))
        begins.append((number, leader.committed))
        leader.again()
    send(leader, 30)
    leader.checkpoint()
    leader.retain(next(s.start for s in leader.log.segments if s.start > begins[1][1] + 100))
    leader.checkpoint()
    assert opened(leader.disk.after_kill()).epochs == tuple(begins[1:])


def test_a_followers_checkpoint_keeps_the_epochs_of_its_own_log() -> None:
    leader = Leader()
    disk = FaultyDisk()
    for number in range(3):
        send(leader, 10 * number)
        leader.again()
    standby = follower(leader, disk)
    epochs = leader.store.freeze()().epochs
    standby.checkpoint()
    standby.drop_before(leader.committed)
    leader.store.send(batch([b"one more"]), NOW_MS)
    leader.settle()
    extend(standby, leader.log)
    standby.apply(leader.committed)
    standby.checkpoint()
    payload = recovery.load_checkpoint(DATA, disk)
    assert payload is not None
    kept = checkpoint_state.decode(payload).epochs
    assert 1 < len(kept) < len(epochs)
    assert kept == epochs[-len(kept) :]
    assert kept[0][1] < standby.log.start_position <= kept[1][1]
    assert opened(disk.after_kill()).epochs == kept


def test_a_log_from_before_there_were_replicas_is_of_epoch_0() -> None:
    disk = FaultyDisk()
    alone = recovery.open_store(DATA, disk, SETTINGS, segment_bytes=SEGMENT_BYTES).store
    alone.send(batch([b"before"]), NOW_MS)
    alone.log.write_pending()
    standby = opened(disk.after_kill())
    end = standby.log.end_position
    assert (standby.epochs, standby.committed < end, standby.store_id > 0) == ((), True, True)
    leader = Leader.__new__(Leader)
    leader.committed, leader.epoch, leader.ends, leader.disk = 0, 0, {}, standby._disk
    leader.lead(standby)
    leader.checkpoint()
    assert opened(leader.disk.after_kill()).epochs == ((0, 0), (1, end))


def snapshot_to_install() -> Leader:
    """Of a leader whose log does not begin at its beginning, and goes on behind the snapshot."""
    leader = Leader()
    send(leader)
    leader.store.send(batch([b"once"], producer_id=8), NOW_MS)
    send(leader, topic="old", count=3)
    leader.store.delete_topic("old")
    offset_changes.put(leader.store, "g", [(KEY, GroupOffset(3, 5))])
    group_changes.put(leader.store, GroupConfig("g"))
    group_changes.put_membership(leader.store, "g", KEPT)
    group_changes.put_membership(leader.store, "gone", KEPT)
    first, second = (Service((1 << 63) | n, f"t{n}", 0, 1) for n in range(2))
    leader.checkpoint()
    leader.retain(leader.log.segments[-1].start)
    send(leader, 10, 20)
    timer_queue_changes.claim(leader.store, first, [0, 1], NOW_MS, now_ms=NOW_MS)
    timer_queue_changes.release(leader.store, first.id, NOW_MS + 3_600_000)
    group_changes.put_membership(leader.store, "gone", None)
    group_changes.put_membership(leader.store, "h", KEPT)
    timer_queue_changes.claim(leader.store, second, [0, 1], NOW_MS, now_ms=NOW_MS)
    send(leader, topic="old", count=4)
    leader.checkpoint()
    send(leader, 30)
    leader.store.delete_topic("old")
    leader.settle()
    return leader


def test_a_snapshot_is_the_leaders_tables_as_soon_as_the_log_is_there() -> None:
    leader = snapshot_to_install()
    start = leader.log.start_position
    disk = FaultyDisk()
    standby = opened(disk)
    standby.install(leader.snapshot, start)
    assert (standby.log.end_position, standby.applied, standby.committed) == (start,) * 3
    assert standby.epochs == ((1, 0),)
    extend(standby, leader.log, start + 700)
    standby.apply(leader.committed)
    assert not standby.is_whole
    assert standby.known_to > standby.log.end_position
    standby.checkpoint()
    assert standby.checkpoint_position == 0
    disk = disk.after_kill()
    standby = opened(disk)
    assert (standby.is_whole, standby.lost, standby.epochs) == (False, False, ((1, 0),))
    extend(standby, leader.log)
    standby.apply(leader.committed)
    check_same(standby, leader)
    position = standby.checkpoint_position
    assert position
    standby = opened(disk.after_power_cut(Random(1)))
    assert standby.checkpoint_position == 0  # this process took none
    check_same(standby, leader)
    standby.promote().store.timer_owners.check_not_fenced((1 << 63) | 1)


def test_a_snapshot_whose_name_a_kill_left_undurable_goes_on_when_it_is_durable() -> None:
    """A start finds it, and removes the log; a power failure must not take it away then."""
    leader, other = snapshot_to_install(), Leader()
    send(other, count=20)

    def killed() -> FaultyDisk:
        disk = FaultyDisk()
        standby = opened(disk)
        extend(standby, other.log)
        standby.apply(other.committed)
        standby.checkpoint()
        disk.cut_at = disk.operations + NAMED
        with pytest.raises(PowerCut):
            standby.install(leader.snapshot, leader.log.start_position)
        return disk.after_kill()

    assert killed().exists(f"{DATA}/{INSTALLING}")
    for operations in itertools.count(1):
        disk = killed()
        disk.cut_at = operations
        try:
            opened(disk)
        except PowerCut:
            assert not opened(disk.after_power_cut()).lost
        else:
            break
    assert operations > NAMED


def test_a_batch_that_retention_removed_is_still_a_repeat_after_a_snapshot() -> None:
    leader = snapshot_to_install()
    standby = opened(FaultyDisk())
    standby.install(leader.snapshot, leader.log.start_position)
    extend(standby, leader.log)
    standby.apply(leader.committed)
    store = standby.promote().store
    assert store.send(batch([b"once"], producer_id=8), NOW_MS).duplicate


def test_offsets_that_were_left_out_for_good_are_left_out_after_a_snapshot() -> None:
    leader = Leader()
    send(leader)
    leader.store.queue("orders", 0).skip_to(100)  # as after a loss
    leader.checkpoint()
    leader.ends.clear()
    standby = opened(FaultyDisk())
    standby.install(leader.snapshot, 0)
    extend(standby, leader.log)
    standby.apply(leader.committed)
    queue = standby.tables.queues.of("orders")[0]
    assert (queue.next_offset, queue.max_offset, queue.last_store_ms()) == (100, 100, NOW_MS + 9)


def test_a_disk_that_is_full_when_the_snapshot_is_reached_delays_the_checkpoint() -> None:
    leader = snapshot_to_install()
    disk = FaultyDisk()
    standby = opened(disk)
    standby.install(leader.snapshot, leader.log.start_position)
    extend(standby, leader.log)
    disk.capacity_bytes = disk.used_bytes()
    standby.apply(leader.committed)
    assert (standby.is_whole, standby.checkpoint_position) == (True, 0)
    disk.capacity_bytes = None
    standby.promote()
    assert disk.exists(f"{DATA}/{recovery.REBUILDING}") is False
    check_same(opened(disk.after_kill()), leader)


@pytest.mark.parametrize("rebuilding", [False, True])
def test_a_full_disk_holds_no_start_without_a_checkpoint_of_its_own_up(rebuilding: bool) -> None:
    leader = Leader()
    send(leader)
    disk = FaultyDisk()
    standby = follower(leader, disk)
    if rebuilding:
        standby.checkpoint()
        recovery.Marker(DATA, recovery.REBUILDING, disk).put(b"")
    for _ in range(2):
        disk = disk.after_kill()
        disk.capacity_bytes = 0
        standby = opened(disk)
        standby.apply(leader.committed)
        check_same(standby, leader)
        assert standby.checkpoint_position == 0
        assert disk.exists(f"{DATA}/{recovery.REBUILDING}") is rebuilding
    disk.capacity_bytes = None
    standby.checkpoint()
    assert disk.exists(f"{DATA}/{recovery.REBUILDING}") is False
    check_same(opened(disk.after_kill()), leader)


def test_a_topic_whose_leftovers_cannot_go_for_want_of_space_is_made_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = Leader()
    disk = FaultyDisk()
    standby = follower(leader, disk)
    standby.checkpoint()
    send(leader)
    extend(standby, leader.log)
    standby.apply(leader.committed)
    for queue in standby.tables.queues.all():
        queue.sync()
    disk = disk.after_kill()
    standby = opened(disk)

    def unlink(path: str) -> None:
        raise DiskFull(f"remove {path}: no space left")  # as a copy-on-write file system says

    with monkeypatch.context() as patch:
        patch.setattr(disk, "unlink", unlink)
        with pytest.raises(DiskFull):
            standby.apply(leader.committed)
    standby.apply(leader.committed)
    check_same(standby, leader)


def test_a_snapshot_without_space_changes_nothing() -> None:
    leader, other = snapshot_to_install(), Leader()
    send(other, topic="others")
    disk = FaultyDisk()
    standby = follower(other, disk)
    disk.capacity_bytes = disk.used_bytes() + 10
    with pytest.raises(StreamBroken, match="no space for the leader's snapshot"):
        standby.install(leader.snapshot, leader.log.start_position)
    disk.capacity_bytes = None
    send(other, 10, topic="others")
    extend(standby, other.log)
    standby.apply(other.committed)
    check_same(standby, other)
    again = opened(disk.after_kill())
    again.apply(other.committed)
    check_same(again, other)


def test_a_snapshot_has_the_room_of_the_log_that_it_replaces() -> None:
    leader, other = snapshot_to_install(), Leader()
    send(other, topic="others", count=25)
    disk = FaultyDisk()
    standby = follower(other, disk)
    disk.capacity_bytes = disk.used_bytes() + 2 * len(leader.snapshot) - 10
    standby.install(leader.snapshot, leader.log.start_position)
    disk.capacity_bytes = None
    extend(standby, leader.log)
    standby.apply(leader.committed)
    check_same(standby, leader)


def test_a_snapshot_replaces_another_history() -> None:
    leader, other = snapshot_to_install(), Leader()
    send(other, topic="others", count=25)
    disk = FaultyDisk()
    standby = follower(other, disk)
    standby.checkpoint()
    standby.install(leader.snapshot, leader.log.start_position)
    extend(standby, leader.log)
    standby.apply(leader.committed)
    check_same(standby, leader)
    assert not [path for path in disk.paths if "others" in path]


def test_what_is_no_snapshot_changes_nothing() -> None:
    leader = Leader()
    send(leader)
    leader.checkpoint()
    standby = follower(leader, FaultyDisk())
    with pytest.raises(ValueError, match="does not go with"):
        standby.install(leader.snapshot, leader.committed + 8)
    with pytest.raises(UnknownVersion):
        standby.install(leader.snapshot.replace(b'"version":4', b'"version":9'), 0)
    check_same(standby, leader)


def test_a_lost_end_is_told_and_comes_again() -> None:
    leader = Leader()
    send(leader)
    offset_changes.put(leader.store, "g", [(KEY, GroupOffset(3, 5))])
    leader.settle()
    disk = FaultyDisk()
    standby = follower(leader, disk)
    standby.checkpoint()
    kept = leader.log.segments[1].start
    standby.close()
    cut(LOG, kept, disk)
    disk.unlink(f"{LOG}/durable")  # as a power failure may have it
    for _ in range(2):
        disk = disk.after_kill()
        standby = opened(disk)
        assert (standby.lost, standby.is_whole) == (True, False)
        assert standby.committed <= standby.log.end_position == kept
    extend(standby, leader.log, kept + 200)
    standby.apply(leader.committed)
    disk = disk.after_kill()
    standby = opened(disk)
    assert (standby.lost, standby.is_whole) == (False, False)
    extend(standby, leader.log)
    standby.apply(leader.committed)
    check_same(standby, leader)
    check_same(opened(disk.after_power_cut(None)), leader)


def test_an_operator_may_make_a_replica_lead_that_has_lost_its_end() -> None:
    leader = Leader()
    send(leader)
    disk = FaultyDisk()
    standby = follower(leader, disk)
    standby.checkpoint()
    standby.close()
    cut(LOG, leader.log.segments[1].start, disk)
    standby = opened(disk)
    standby.apply(standby.log.end_position)
    opened_store = standby.promote()
    store = opened_store.store
    queue = store.queue("orders", 0)
    assert queue.max_offset == queue.next_offset >= 10
    assert not store.send(batch([b"4"], producer_id=7, sequence=4), NOW_MS).duplicate
    again = opened(disk.after_kill())
    assert (again.lost, again.is_whole) == (True, True)


def test_consume_queues_that_are_lost_are_made_again() -> None:
    leader = snapshot_to_install()
    disk = FaultyDisk()
    standby = opened(disk)
    standby.install(leader.snapshot, leader.log.start_position)
    extend(standby, leader.log)
    standby.apply(leader.committed)
    standby.checkpoint()
    for path in [path for path in disk.paths if "consumequeue" in path]:
        disk.unlink(path)
    standby = opened(disk.after_kill())
    check_same(standby, leader)
    assert standby.checkpoint_position == leader.committed


def test_who_started_anew_keeps_what_its_own_start_needed_and_no_more() -> None:
    leader = Leader()
    send(leader)
    disk = FaultyDisk()
    follower(leader, disk).checkpoint()
    standby = opened(disk.after_kill())
    standby.drop_before(leader.committed)
    assert 0 < standby.log.start_position <= leader.committed
    check_same(standby, leader)
    assert standby.promote().store.next_start == leader.committed


def test_retention_is_the_leaders_but_a_start_keeps_what_it_needs() -> None:
    leader = Leader()
    send(leader)
    disk = FaultyDisk()
    standby = follower(leader, disk)
    standby.drop_before(leader.committed)
    assert standby.log.start_position == 0
    standby.checkpoint()
    send(leader, 10)
    leader.checkpoint()
    extend(standby, leader.log)
    standby.apply(leader.committed)
    standby.drop_before(leader.committed)
    assert 0 < standby.log.start_position <= standby.checkpoint_position
    again = opened(disk.after_kill())
    again.apply(leader.committed)
    check_same(again, leader)
    leader.retain(leader.log.segments[2].start)
    start = standby.log.start_position
    standby.drop_before(leader.log.start_position)
    assert standby.log.start_position == max(start, leader.log.start_position)
    queue = standby.tables.queues.of("orders")[0]
    assert queue.min_offset > 0


def test_who_leads_tells_idle_lanes_by_the_log() -> None:
    leader = Leader()
    leader.store.send(batch([b"a"], producer_id=1), NOW_MS)
    leader.store.send(batch([b"a"], producer_id=2), NOW_MS + 50_000)
    leader.store.send(batch([b"a"], producer_id=3), NOW_MS + 400 * 86_400_000)
    leader.settle()
    standby = follower(leader, FaultyDisk())
    lanes = standby.promote().store.producers
    assert [lane.used_at_ms for lane in lanes._lanes.values()] == [-60_000, -60_000, 0]
    assert lanes.age(0) == 0


def test_a_group_gives_its_store_id() -> None:
    disk = FaultyDisk()
    standby = opened(disk)
    standby.rename(77)
    assert opened(disk.after_kill()).store_id == 77


@pytest.mark.parametrize("saved", [False, True])
def test_a_replica_that_leads_without_an_entry_gives_none_of_its_offsets_again(saved: bool) -> None:
    """The last copy was damaged, and given up; perhaps it leads after more starts than one."""
    leader = Leader()
    at = leader.store.send(batch([b"a", b"b"]), NOW_MS).stored.position
    leader.store.send(batch([b"c"], queue_id=1), NOW_MS)
    leader.settle()
    disk = leader.disk.after_kill()
    segment = [each for each in leader.log.segments if each.start <= at][-1]
    disk.flip(segment.path, at - segment.start + 120, 3)
    set_aside.set_aside(leader.log.directory, at, disk)
    standby = opened(disk)
    standby.apply(standby.log.end_position)
    if saved:
        standby.checkpoint()
        standby = opened(disk.after_kill())
        standby.apply(standby.log.end_position)
    store = standby.promote().store
    ends = [queue.next_offset for queue in store.queues_of("orders")]
    assert [end >= 2 for end in ends] == [True, False]
    again = opened(standby._disk.after_kill())
    again.apply(again.log.end_position)
    assert [queue.next_offset for queue in again.promote().store.queues_of("orders")] == ends


def test_a_replica_goes_on_behind_what_was_set_aside_as_one_with_what_its_checkpoint_knows() -> (
    None
):
    leader = Leader()
    worn = [leader.store.send(batch([b"a", b"b"]), NOW_MS).stored.position]
    leader.checkpoint()
    worn.append(leader.store.send(batch([b"c", b"d"], queue_id=1), NOW_MS).stored.position)
    leader.store.send(batch([b"e"]), NOW_MS)
    leader.settle()
    disk = leader.disk.after_kill()
    segment = [each for each in leader.log.segments if each.start <= worn[0]][-1]
    for at in worn:
        disk.overwrite(segment.path, at - segment.start, bytes(40))
    _, end = set_aside.set_aside(leader.log.directory, worn[0], disk)
    standby = opened(disk)
    assert standby.applied == standby.committed == end
    standby.apply(standby.log.end_position)
    ends = [queue.next_offset for queue in standby.promote().store.queues_of("orders")]
    assert (ends[0], ends[1] >= 2) == (3, True)


def test_nothing_is_promoted_before_all_is_applied() -> None:
    leader = Leader()
    send(leader)
    standby = opened(FaultyDisk())
    extend(standby, leader.log)
    with pytest.raises(InvariantError):
        standby.promote()
    standby.apply(leader.committed)
    end = standby.log.end_position
    store = standby.promote().store
    assert store.log.end_position == end
    standby.close()  # the store's files stay open
    store.send(batch([b"new"]), NOW_MS)


def test_what_is_kept_of_groups_survives_the_leader_and_the_begin_of_the_log() -> None:
    leader = Leader()
    for group in ("g", "dropped", "deleted"):
        group_changes.put_membership(leader.store, group, KEPT)
    group_changes.put(leader.store, GroupConfig("deleted"))
    leader.settle()
    standby = follower(leader, disk := FaultyDisk())
    assert standby.tables.memberships == dict.fromkeys(("g", "dropped", "deleted"), KEPT)
    group_changes.put_membership(leader.store, "dropped", None)
    group_changes.delete(leader.store, "deleted")
    send(leader)
    extend(standby, leader.log)
    standby.apply(leader.committed)
    standby.checkpoint()
    standby.drop_before(leader.log.segments[-1].start)
    assert standby.log.start_position > 0
    again = opened(disk.after_kill())
    again.apply(again.log.end_position)
    assert again.promote().store.tables.memberships == {"g": KEPT}


def test_what_is_kept_of_a_group_is_one_entry_and_nothing_if_it_is_known() -> None:
    leader = Leader()
    end = group_changes.put_membership(leader.store, "g", KEPT)
    assert group_changes.put_membership(leader.store, "g", KEPT) == end == leader.log.end_position
    assert group_changes.put_membership(leader.store, "h", None) == end == leader.log.end_position


def test_a_checkpoint_without_epochs_has_the_version_that_it_had() -> None:
    store = recovery.open_store(DATA, FaultyDisk(), SETTINGS).store
    state: CheckpointState = store.freeze()()
    assert state.epochs == ()
    store.tables.epochs.note(3, 0)
    assert store.freeze()().epochs == ((3, 0),)
