"""A disk without space: what needs none goes on, and all else by itself when there is some."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from duemq_server.storage.disk import DiskFile
from duemq_server.storage.errors import DiskFull
from duemq_server.timer_service.disk.checkpoint_state import CheckpointState
from duemq_server.timer_service.disk.housekeeping import PUT_OFF_MS, Save
from duemq_server.timer_service.disk.standby import Standby
from duemq_server.timer_service.far.far_segments import Flush
from duemq_server.timer_service.far.loading import Load
from duemq_server.timer_service.timers.limits import AHEAD_MS, Limits
from tests.crash.faulty_disk import FaultyDisk
from tests.property.timer_world import BROKER, DATA, LIMITS, SOURCE, START_MS, TIGHT, World
from tests.unit.timer_service.disk.test_standby import SMALL, busy
from tests.unit.timer_service.scheduling.test_scheduler import fire

SECOND_MS = 1_000
HOUR_MS = 3_600_000
LATER_MS = 60 * SECOND_MS  # loaded when it is near
HELD = replace(TIGHT, log_held_max=1 << 20)


def second(world: World) -> None:
    world.now_ms += SECOND_MS
    world.housekeep()
    world.tick(AHEAD_MS)
    world.sync()
    world.send()
    world.sync()


def with_a_block(limits: Limits) -> World:
    """Thirty timers lie in a block, due in a minute."""
    world = World(limits=limits)
    world.broker.accept([START_MS + LATER_MS + n for n in range(30)], 50, "any")
    world.ingest(1)
    world.sync()
    while world.housekeep():
        pass
    assert world.scheduler.segments.pending == 30
    return world


def fill_memtable(world: World) -> None:
    world.broker.accept([world.now_ms + HOUR_MS + n for n in range(30)], 150, "any")
    world.ingest(1)
    world.sync()
    assert world.scheduler.tiers.memtable_full()


@pytest.mark.parametrize("left", [0, 500, 2_000])
def test_timers_are_loaded_and_fire_while_a_flush_has_no_space(left: int) -> None:
    world = with_a_block(HELD)
    fill_memtable(world)
    world.fill_disk(left)
    world.directory.log.disk_full = False  # it has space of its own yet
    for _ in range(70):
        second(world)
    assert set(world.broker.delivered) == set(range(30))
    assert world.scheduler.tiers.memtable.rows == 30
    world.kill()
    world.drain()


def test_a_checkpoint_makes_the_space_that_a_flush_lacks() -> None:
    """Of log that nobody needs any more."""
    world = with_a_block(replace(HELD, checkpoint_interval_ms=HOUR_MS))
    for _ in range(30):  # these come and fire
        world.broker.accept([world.now_ms] * 20, 50, "any")
        world.ingest(1)
        for _ in range(6):
            fire(world)
            world.sync()
    fill_memtable(world)
    world.fill_disk(4_000)
    assert world.directory.log.start_position == 0
    for _ in range(5):
        second(world)
    assert world.directory.log.start_position > 0
    assert world.scheduler.segments.pending == 60
    assert not world.scheduler.tiers.memtable.rows
    world.power_cut()
    world.drain()


def test_a_checkpoint_that_had_no_space_is_made_anew_of_what_is_so_by_then() -> None:
    limits = replace(TIGHT, checkpoint_interval_ms=5 * SECOND_MS, memtable_rows_max=1_000)
    world = with_a_block(replace(limits, memtable_rows_max=30))
    world.scheduler.tiers.limits = limits
    world.broker.accept([START_MS + 9_000 + n for n in range(90)], 10, "any")
    world.ingest(1)
    world.sync()
    world.now_ms += 5 * SECOND_MS
    save = world.directory.housekeeper.next_job(world.now_ms)
    assert isinstance(save, Save)
    world.fill_disk(2_000)
    assert not world.try_run(save)
    assert world.directory.housekeeper.next_job(world.now_ms) is None

    for _ in range(5):
        second(world)
    for _ in range(20):
        world.tick()
        world.sync()
        world.send()
    second(world)
    second(world)

    assert world.directory.housekeeper._saved_position > save.position
    for _ in range(60):
        second(world)
    assert sum(world.broker.delivered.values()) == 120


def test_what_found_no_space_waits_a_while_and_no_longer_if_the_clock_is_set() -> None:
    world = with_a_block(TIGHT)
    fill_memtable(world)
    keeper, now_ms = world.directory.housekeeper, world.now_ms
    flush = keeper.next_job(now_ms)
    assert isinstance(flush, Flush)
    keeper.no_space(flush, now_ms)
    wait_ms = PUT_OFF_MS[Flush]
    assert keeper.next_job(now_ms + wait_ms - 1) is None
    assert keeper.next_look_ms(now_ms + 10) == now_ms + wait_ms
    flush = keeper.next_job(now_ms + wait_ms)
    assert isinstance(flush, Flush)
    keeper.no_space(flush, now_ms)
    keeper._saved_ms = now_ms - HOUR_MS
    assert isinstance(keeper.next_job(now_ms - HOUR_MS), Flush)


@pytest.mark.parametrize("takes_ms", [100, 500, 5_000])
def test_each_kind_of_job_has_its_turn_however_long_one_takes(takes_ms: int) -> None:
    """A flush finds no space, timers on disk are due all the time, and the log grows."""
    world = with_a_block(replace(TIGHT, checkpoint_interval_ms=HOUR_MS))
    fill_memtable(world)
    now_ms, chosen = START_MS + LATER_MS, []
    keeper = world.directory.housekeeper
    while len(chosen) < 100:
        job = keeper.next_job(now_ms)
        chosen.append(type(job))
        now_ms += takes_ms
        world.broker.accept([now_ms + HOUR_MS], 10, "any")  # the log grows
        frames = world.broker.frames_from(world.next_offset(), 1)
        world.scheduler.ingest(SOURCE, BROKER, frames, now_ms)
        world.sync()
        if isinstance(job, Flush):
            keeper.no_space(job, now_ms)
        elif isinstance(job, Save):
            world.run(job)
        # a load is not run, so that there is always one
    for kind in (Flush, Load, Save):
        times = [n for n, each in enumerate(chosen) if each is kind]
        most = max(4, 2 * PUT_OFF_MS[kind] // takes_ms)
        assert np.diff([0, *times, len(chosen)]).max() <= most


def test_loads_do_not_wait_for_acknowledgements_that_the_log_does_not_take() -> None:
    world = with_a_block(TIGHT)
    world.broker.accept([START_MS], 10, "any")
    world.ingest(1)
    fire(world)  # its acknowledgement is held back
    fill_memtable(world)
    world.now_ms += LATER_MS
    keeper = world.directory.housekeeper
    flush = keeper.next_job(world.now_ms)
    assert isinstance(flush, Flush)
    world.directory.log.disk_full = True
    keeper.no_space(flush, world.now_ms)
    assert isinstance(keeper.next_job(world.now_ms), Load)


def test_timers_that_find_no_space_to_be_parked_fire_when_their_broker_is_back() -> None:
    world = World()
    world.set_topics(["any"])
    world.broker.accept([START_MS] * 60, 10, "keyed")
    world.ingest(1)
    for _ in range(10):
        world.tick()
    world.sync()
    world.fill_disk(0)
    world.directory.log.disk_full = False
    park = world.directory.housekeeper.next_job(world.now_ms)
    assert isinstance(park, Flush)
    assert len(world.scheduler.near) == 0
    assert not world.try_run(park)
    world.scheduler.check()
    world.housekeep()
    assert len(world.scheduler.near) == 60

    world.set_topics(["keyed"])
    assert fire(world) == list(range(60))
    assert not world.disk.free_bytes("/")
    world.kill()
    world.drain()


def test_what_a_flush_gave_back_comes_before_what_came_since_and_can_be_cancelled() -> None:
    world = World()
    world.broker.accept([START_MS + HOUR_MS] * 3, 10, "any")
    world.ingest(1)
    flush = world.scheduler.tiers.begin_flush(START_MS)
    world.broker.accept([START_MS + HOUR_MS] * 3, 10, "any")
    world.ingest(1)
    assert world.cancel(1) == "CANCELLED"
    world.fill_disk(0)
    world.directory.log.disk_full = False
    assert not world.try_run(flush)
    assert [rows.offset.tolist() for rows, _ in world.scheduler.tiers.pieces()] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    assert world.cancel(2) == "CANCELLED"
    world.scheduler.check()
    world.free_disk()
    world.sync()
    world.kill()
    world.drain()
    assert {n for n, count in world.broker.delivered.items() if count} == {0, 3, 4, 5}


def test_a_log_that_is_held_is_let_go_of_as_soon_as_there_is_space() -> None:
    """The flush that found none did not do it."""
    world = World(limits=replace(LIMITS, log_held_max=2_000, memtable_rows_max=1_000))
    world.broker.accept([START_MS + HOUR_MS] * 20, 200, "any")
    world.ingest(1)
    keeper = world.directory.housekeeper
    for _ in range(3):
        flush = keeper.next_job(world.now_ms)
        assert isinstance(flush, Flush)
        keeper.no_space(flush, world.now_ms)
        world.now_ms += PUT_OFF_MS[Flush]


# -- starts, and replicas that follow


def with_full_memtables(limits: Limits = LIMITS) -> World:
    """Of three memtables of far timers none was written; one more is due."""
    world = World(limits=limits)
    for count in (25, 25, 30, 30):
        world.broker.accept([START_MS + HOUR_MS + n for n in range(count)], 50, "any")
        world.ingest(1)
    world.broker.accept([START_MS + 50], 50, "any")
    world.ingest(1)
    world.sync()
    return world


def test_a_shard_starts_on_a_full_disk_and_is_flushed_when_there_is_space() -> None:
    world = with_full_memtables()
    for power in (False, True):
        disk = world.disk.after_power_cut() if power else world.disk.after_kill()
        disk.capacity_bytes = 0
        world.restart(disk)
        assert world.scheduler.ledger.pending == 111
        assert world.scheduler.tiers.memtable.rows == 110
        assert not any(disk.content(path) for path in disk.paths if path.endswith(".due"))
        world.housekeep()
    world.free_disk()
    world.now_ms += SECOND_MS
    assert world.housekeep()
    assert world.scheduler.segments.pending == 110
    world.drain()


@pytest.mark.parametrize("cut_at", range(1, 40, 3))
def test_the_power_may_go_while_a_shard_starts_on_a_nearly_full_disk(cut_at: int) -> None:
    world = with_full_memtables()
    disk = world.disk.after_kill()
    disk.capacity_bytes = disk.used_bytes() - (1 << 20) + 2_500  # without the log's space ahead
    disk.cut_at = cut_at
    world.restart(disk)
    assert world.scheduler.ledger.pending == 111
    world.drain()


@pytest.mark.parametrize("left", [0, 3_000, 6_000, 9_000, 12_000, 20_000])
def test_a_pass_without_space_leaves_nothing_and_the_replica_can_lead(left: int) -> None:
    world = busy(150)
    standby, disk = world.standby, world.standby_disk
    standby._limits = replace(SMALL, checkpoint_log_bytes=1 << 40)
    standby.apply(world.committed)
    disk.capacity_bytes = disk.used_bytes() + left
    try:
        standby.pass_now()
    except DiskFull:
        assert disk.free_bytes("/") == left
    else:
        assert left > 9_000
    assert disk.free_bytes("/") or not left
    made = standby.promote()
    assert made.scheduler.ledger == world.scheduler.ledger
    made.scheduler.check()


def test_a_pass_without_space_is_tried_again_after_a_while() -> None:
    """Entries come all the time, and each pass costs as much as a start."""
    world = busy(150)
    standby, disk = world.standby, world.standby_disk
    standby._limits = replace(SMALL, checkpoint_log_bytes=1)
    begun: list[int] = []
    load = standby._load

    def passes() -> CheckpointState:
        begun.append(world.now_ms)
        return load()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(standby, "_load", passes)
        disk.capacity_bytes = disk.used_bytes()
        with pytest.raises(DiskFull):
            standby.apply(world.committed)
        tried = len(begun)
        for _ in range(29):
            world._now_ms += 1_000
            standby.apply(world.committed)
            standby.checkpoint()
        assert len(begun) == tried
        disk.capacity_bytes = None
        world._now_ms += 1_000
        standby.checkpoint()
    assert standby.known_to == world.committed


def test_a_pass_without_space_for_a_flush_saves_a_checkpoint_that_names_the_log() -> None:
    world = busy(150)
    standby, disk = world.standby, world.standby_disk
    standby._limits = replace(SMALL, checkpoint_log_bytes=1 << 40, log_held_max=1)
    standby.apply(world.committed)

    def full(path: str, *, create: bool = False) -> DiskFile:
        if path.endswith(".due"):
            raise DiskFull(f"open {path}: no space left")
        return FaultyDisk.open(disk, path, create=create)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk, "open", full)
        standby.pass_now()
    assert standby.known_to == world.committed
    assert not disk.listdir(f"{DATA}/segments")
    standby.drop_before(world.committed)
    assert standby.log.start_position == 0
    made = standby.promote()
    assert made.scheduler.ledger == world.scheduler.ledger


def test_a_checkpoint_that_was_renamed_and_no_more_keeps_the_files_that_it_names() -> None:
    """Too many files are open just then: it is not known to be durable."""
    world = busy(150)
    standby, disk = world.standby, world.standby_disk
    standby._limits = replace(SMALL, checkpoint_log_bytes=1 << 40)
    standby.apply(world.committed)

    old = disk.content(f"{DATA}/checkpoint")

    def none_left(path: str) -> None:
        if path == DATA and disk.content(f"{DATA}/checkpoint") != old:
            raise DiskFull(f"open {path}: too many open files")
        FaultyDisk.fsync_dir(disk, path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk, "fsync_dir", none_left)
        with pytest.raises(DiskFull):
            standby.pass_now()
    for lost in (disk.after_kill(), disk.after_power_cut(), disk.after_power_cut(Random(1))):
        again = Standby.open(DATA, lost, SMALL, clock=lambda: world.now_ms)
        made = again.promote()
        assert made.scheduler.ledger == world.scheduler.ledger
