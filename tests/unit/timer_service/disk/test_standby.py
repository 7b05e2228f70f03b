from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from duemq.errors import Corrupt, InvariantError, Unavailable
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq_server.storage import checkpoint
from duemq_server.storage.replicas import epoch
from duemq_server.timer_service.disk import checkpoint_state, snapshot
from duemq_server.timer_service.disk.data_directory import load_checkpoint, open_directory
from duemq_server.timer_service.disk.standby import Standby
from duemq_server.timer_service.timers.limits import Limits
from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.property.replicated_timer_world import ReplicatedWorld
from tests.property.timer_world import DATA, LIMITS, SOURCE, START_MS, World

HOUR_MS = 3_600_000
SMALL = replace(LIMITS, log_segment_bytes=2 << 10)
NOTHING_HELD = replace(SMALL, log_held_max=2_000)


def opened(disk: FaultyDisk, now_ms: int = START_MS) -> Standby:
    return Standby.open(DATA, disk, SMALL, clock=lambda: now_ms)


def made(disk: FaultyDisk) -> FaultyDisk:
    for path in (DATA, f"{DATA}/log", f"{DATA}/segments"):
        disk.makedirs(path)
    return disk


def busy(timers: int = 100, limits: Limits = SMALL) -> ReplicatedWorld:
    """Some fired, some near, some far in files; the follower has all of the log."""
    world = ReplicatedWorld(1, limits)
    for n in range(timers):
        wait_ms = (0, 5_000, HOUR_MS * n)[n % 3]
        world.broker.accept([world.now_ms + wait_ms], 100, "any")
        world.ingest(1)
        world.tick()
        world.sync()
        world.housekeep()
        if n % 2:
            world.send()
    world.sync()
    return world


def far_behind(world: ReplicatedWorld) -> bytes:
    """The leader's log is cut; its snapshot."""
    world.now_ms += 10_000
    for _ in range(20):
        world.tick()
        world.sync()
        world.send()
        world.housekeep()
    world.checkpoint()
    assert world.log.start_position > 0
    data = snapshot.take(DATA, world.disk)
    assert data is not None
    return data


# -- passes


def test_a_pass_waits_for_enough_log() -> None:
    world = busy()
    standby = world.standby
    limits = replace(SMALL, checkpoint_log_bytes=standby.log.end_position + 1)
    standby._limits = limits
    standby.apply(world.committed)
    assert (standby.applied, standby.checkpoint_position) == (world.committed, 0)

    standby._limits = replace(limits, checkpoint_log_bytes=standby.log.end_position)
    standby.apply(world.committed)
    assert standby.checkpoint_position == world.committed


@pytest.mark.parametrize("passed_ms", [SMALL.standby_interval_ms, -SMALL.standby_interval_ms])
def test_a_pass_comes_after_a_while_whatever_the_clock_does(passed_ms: int) -> None:
    world = busy(9)
    world.standby.apply(world.committed)
    assert world.standby.checkpoint_position == 0

    world._now_ms += passed_ms
    world.standby.checkpoint()

    assert world.standby.checkpoint_position == world.committed


def test_a_pass_takes_whole_entries_and_what_is_durable() -> None:
    world = busy(9)
    standby = world.standby
    first = next(standby.log.entries(0))
    standby.apply(first.end + 8)
    standby.pass_now()
    assert standby.checkpoint_position == first.end

    standby.apply(1 << 40)
    assert standby.applied == standby.log.durable_position


def test_a_follower_keeps_what_its_checkpoint_or_its_leader_needs() -> None:
    world = busy(limits=NOTHING_HELD)
    standby = world.standby
    end = standby.log.end_position

    standby.drop_before(end)
    assert standby.log.start_position == 0

    standby._leader_start = 0
    standby.apply(end)
    standby.pass_now()
    assert standby.log.start_position == 0

    standby.drop_before(end)
    found = load_checkpoint(DATA, world.standby_disk)
    assert found is not None
    assert 0 < standby.log.start_position <= found.log_needed_from


def test_what_fired_in_time_is_not_remembered_as_late_by_a_pass() -> None:
    world = busy(30)
    world.standby.apply(world.committed)

    world.now_ms += SMALL.standby_interval_ms
    world.standby.checkpoint()

    found = load_checkpoint(DATA, world.standby_disk)
    assert found is not None
    assert found.ledger.fired
    assert not found.fired_late


def test_a_follower_appends_nothing() -> None:
    world = busy(3)
    standby = world.standby
    standby.log.append(epoch.KIND, [epoch.encode(9, bytes(16), 0)])
    with pytest.raises(InvariantError, match="not durable to its end"):
        standby.promote()


# -- opening


def test_a_shard_without_replicas_becomes_one_and_is_one_again() -> None:
    alone = World(limits=SMALL)
    alone.broker.accept([START_MS, START_MS + HOUR_MS], 10, "keyed")
    alone.ingest(1)
    alone.sync()
    alone.checkpoint()
    disk = alone.disk.after_kill()

    standby = opened(disk)
    assert standby.epochs == ((0, 0),)
    assert standby.store_id == alone.directory.producer_id
    assert not standby.lost
    start, _ = standby.log.append(epoch.KIND, [epoch.encode(1, bytes(16), START_MS)])
    while standby.log.write_pending():
        pass
    directory = standby.promote()
    assert directory.scheduler.ledger.pending == 2
    directory.log.close()

    assert opened(disk.after_kill()).epochs == ((0, 0), (1, start))
    again = open_directory(DATA, disk.after_kill(), SMALL, START_MS)
    assert again.producer_id == alone.directory.producer_id
    assert again.scheduler.ledger.pending == 2


def test_checkpoints_keep_the_epochs_that_the_log_still_has() -> None:
    world = busy(limits=NOTHING_HELD)
    for _ in range(4):
        world.kill()
        world.now_ms += 10_000
        for _ in range(40):
            world.broker.accept([world.now_ms], 100, "any")
            world.ingest(1)
            world.tick()
            world.sync()
            world.send()
            world.housekeep()
        world.checkpoint()
    begins = world.directory.housekeeper.save(world.now_ms).state.epochs
    assert 0 < len(begins) < world.epoch
    assert begins[0][1] < world.log.start_position
    assert begins[-1] == world._epochs[-1]


@pytest.mark.parametrize("store_id", [77, SERVICE_IDS_FROM + 77])
def test_a_replica_takes_the_groups_id_over_and_keeps_it(store_id: int) -> None:
    disk = made(FaultyDisk())
    standby = opened(disk)
    standby.rename(store_id)
    standby = opened(disk.after_power_cut())
    assert standby.store_id == store_id
    assert standby.promote().producer_id == SERVICE_IDS_FROM + 77


def test_another_id_leaves_all_else_as_it_is() -> None:
    world = busy()
    world.standby.apply(world.committed)
    world.standby.pass_now()
    before = load_checkpoint(DATA, world.standby_disk)
    world.standby.rename(77)
    after = load_checkpoint(DATA, world.standby_disk)
    assert before is not None
    assert after is not None
    assert after.held
    assert [each.crc32c for each in after.held] == [each.crc32c for each in before.held]
    assert after.ledger == before.ledger
    assert (after.store_id, after.producer_id) == (77, SERVICE_IDS_FROM + 77)


def test_a_log_without_a_checkpoint_is_refused() -> None:
    world = busy(3)
    world.standby_disk.unlink(f"{DATA}/checkpoint")
    with pytest.raises(Corrupt, match="there is no checkpoint"):
        opened(world.standby_disk)


def test_a_log_that_lost_its_end_gets_it_again() -> None:
    world = busy(30)
    world.standby.apply(world.committed)
    world.standby.pass_now()
    disk = world.standby_disk.after_kill()
    first = next(world.log.entries(0))
    for name in disk.listdir(f"{DATA}/log")[1:]:
        disk.unlink(f"{DATA}/log/{name}")
    disk.chop(f"{DATA}/log/{0:020d}", first.end)

    standby = opened(disk)
    assert standby.lost
    assert standby.log.catching_up
    assert standby.applied == standby.committed == standby.log.end_position == first.end
    with pytest.raises(Corrupt, match="acknowledged timers are gone"):
        standby.promote()

    world.standby_disk, world.alone = disk, True
    world.standby_restarts = lambda disk=None: None  # type: ignore[method-assign]
    standby = world.standby = opened(disk)
    standby.apply(world.committed)
    standby.pass_now()
    world.sync()
    assert not standby.log.catching_up
    standby.apply(world.committed)
    world.kill()
    world.drain()


# -- snapshots


def test_a_snapshot_is_what_it_was() -> None:
    world = busy()
    data = far_behind(world)
    state, files = snapshot.decode(data)
    assert sorted(state.lengths.items()) == [(name, len(data)) for name, data in files]
    assert files
    saved = checkpoint.load(f"{DATA}/checkpoint", world.disk)
    assert saved == data[snapshot.HEADER.size :][: len(saved or b"")]


@pytest.mark.parametrize("at", [0, 5, 30, 2_000, -1])
def test_a_snapshot_with_a_wrong_bit_is_refused(at: int) -> None:
    data = bytearray(far_behind(busy()))
    data[at] ^= 1
    with pytest.raises(ValueError, match="snapshot"):
        snapshot.decode(bytes(data))


def test_a_snapshot_that_ends_too_early_is_refused() -> None:
    data = far_behind(busy())
    for length in (0, 20, 1_000, len(data) - 1):
        with pytest.raises(ValueError, match="snapshot"):
            snapshot.decode(data[:length])


def test_a_shard_that_is_too_large_has_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    world = busy()
    far_behind(world)
    monkeypatch.setattr(snapshot, "BYTES_MAX", 1_000)
    with pytest.raises(Unavailable, match="larger than 1000"):
        snapshot.take(DATA, world.disk)


def test_files_that_a_newer_checkpoint_took_away_are_no_damage() -> None:
    world = busy()
    far_behind(world)
    names = [name for name in world.disk.listdir(f"{DATA}/segments") if name.endswith(".due")]
    world.disk.unlink(f"{DATA}/segments/{names[0]}")
    with pytest.raises(Unavailable, match="try again"):
        snapshot.take(DATA, world.disk)


def test_a_snapshot_needs_the_log_that_goes_with_it() -> None:
    world = busy()
    data = far_behind(world)
    needed = snapshot.decode(data).state.log_needed_from
    standby = opened(made(FaultyDisk()))
    for start in (needed + 8, 4):
        with pytest.raises(ValueError, match="does not go with"):
            standby.install(data, start)
    assert not standby.log.start_position


def test_whenever_an_installation_is_interrupted_the_replica_gets_all_in_the_end() -> None:
    world = busy()
    data = far_behind(world)
    start = world.log.start_position
    operations = 0
    ends = set()
    while True:
        operations += 1
        disk = made(FaultyDisk())
        standby = opened(disk)
        standby.rename(world.directory.producer_id)
        standby.log.append(epoch.KIND, [epoch.encode(1, bytes(16), 0)])  # of old
        standby.log.write_pending()
        disk.cut_at = disk.operations + operations
        try:
            standby.install(data, start)
            disk.cut_at = None
            break
        except PowerCut:
            disk = disk.after_power_cut(Random(operations))
        again = opened(disk)
        ends.add(again.log.end_position)
        assert again.store_id == world.directory.producer_id
        assert not disk.exists(f"{DATA}/installing")
        if not again.checkpoint_position:
            again.install(data, start)
        follow_to_the_end(world, again)
    follow_to_the_end(world, standby)
    assert {0, start} <= ends
    assert operations > 10


def follow_to_the_end(world: ReplicatedWorld, standby: Standby) -> None:
    """It gets the log, restarts on the way, and could lead."""
    log = world.log
    while standby.log.end_position < log.written_position:
        standby.log.extend(
            standby.log.end_position, [log.read_run(standby.log.end_position, 1_000)]
        )
        standby.log.write_pending()
        standby = opened(standby._disk, world.now_ms)  # type: ignore[arg-type]
        assert not standby.lost
        assert (
            standby.epochs[-1] == [x for x in world._epochs if x[1] < standby.log.end_position][-1]
        )
        standby.apply(world.committed)
        standby.pass_now()
    assert standby.checkpoint_position == world.committed
    led = standby.promote().scheduler
    assert led.ledger == world.scheduler.ledger
    assert led.numbers.source(SOURCE).next_offset == len(world.broker.due_ms)  # type: ignore[union-attr]
    led.check()


def test_a_checkpoint_is_the_same_read_and_written_again() -> None:
    world = busy()
    far_behind(world)
    payload = checkpoint.load(f"{DATA}/checkpoint", world.disk)
    assert payload is not None
    state = checkpoint_state.decode(payload)
    assert state.epochs
    assert checkpoint_state.encode(state) == payload
