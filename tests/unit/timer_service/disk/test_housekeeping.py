"""Work on the disk, while the disk does not do it all."""

from __future__ import annotations

import tracemalloc

import pytest

from duemq.errors import Corrupt
from duemq_server.storage.errors import DiskFull
from duemq_server.timer_service.disk.data_directory import open_directory
from duemq_server.timer_service.disk.standby import Standby
from duemq_server.timer_service.far.loading import Load
from duemq_server.timer_service.timers.log_entries import LaneId
from tests.crash.faulty_disk import FaultyDisk
from tests.property.timer_world import DATA, START_MS, TIGHT, World

HOUR_MS = 3_600_000


def far_timers(world: World) -> None:
    """In blocks; the log has them in several segments."""
    for _ in range(10):
        world.broker.accept([START_MS + HOUR_MS] * 10, 300, "any")
        world.ingest(1)
        world.sync()
        while world.housekeep():
            pass
    world.flush()


def test_a_log_that_cannot_be_cut_now_is_cut_with_the_next_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All files may be open that a process may have."""
    world = World(limits=TIGHT)
    far_timers(world)

    def none_left(path: str) -> None:
        if path == f"{DATA}/log":
            raise DiskFull(f"open {path}: too many open files")

    begin = world.directory.log.start_position
    with monkeypatch.context() as patched:
        patched.setattr(world.disk, "fsync_dir", none_left)
        world.run(world.directory.housekeeper.save(world.now_ms))
    world.checkpoint()
    assert world.directory.log.start_position > begin
    assert len(world.disk.listdir(f"{DATA}/log")) <= 3
    world.kill()
    assert world.scheduler.ledger.pending == 100


def test_jobs_go_on_while_the_log_that_others_needed_cannot_be_cut() -> None:
    """All files may be open that a process may have, for as long as clients wish."""
    world = World(limits=TIGHT)
    far_timers(world)
    keeper, log = world.directory.housekeeper, world.directory.log
    needed: int | None = log.start_position
    keeper.others_need = lambda: needed
    world.checkpoint()
    assert log.start_position == needed

    def none_left(path: str) -> None:
        if path == f"{DATA}/log":
            raise DiskFull(f"open {path}: too many open files")
        FaultyDisk.fsync_dir(world.disk, path)

    needed = None
    world.now_ms = START_MS + HOUR_MS
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(world.disk, "fsync_dir", none_left)
        assert isinstance(keeper.next_job(world.now_ms), Load)
    begin = log.start_position
    keeper.next_job(world.now_ms)
    assert log.start_position > begin, "it was not tried again"


def test_a_log_without_its_checkpoint_is_told_and_nothing_is_removed() -> None:
    """Parts of a directory were put back from copies of different times, say."""
    world = World(limits=TIGHT)
    far_timers(world)
    old = world.disk.content(f"{DATA}/checkpoint")
    world.checkpoint()
    files = world.disk.listdir(f"{DATA}/segments")
    disk = world.disk.after_kill()
    disk.unlink(f"{DATA}/checkpoint")
    for what in ("there is no checkpoint", "its checkpoint was made at"):
        with pytest.raises(Corrupt, match=f"log begins at .*{what}.* from a copy"):
            open_directory(DATA, disk, TIGHT, world.now_ms)
        with pytest.raises(Corrupt, match=f"log begins at .*{what}.* from a copy"):
            Standby.open(DATA, disk, TIGHT, clock=lambda: world.now_ms)
        disk.open(f"{DATA}/checkpoint", create=True).pwritev([old], 0)
    assert disk.listdir(f"{DATA}/segments") == files


def test_a_checkpoint_takes_next_to_nothing_for_a_lane_that_is_idle() -> None:
    """There is one for each queue that anything was ever fired to, all in one go: with 100,000 the
    shard stood still for a second every half minute."""
    world = World()
    for number in range(1_000):
        world.scheduler.dispatcher.lane(LaneId("b1", "any", number))
    tracemalloc.start()
    try:
        saved = world.directory.housekeeper.save(START_MS)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert len(saved.state.lanes) == 1_000
    assert taken < 300 * 1_000


def test_what_is_cancelled_makes_room_for_what_is_due_before() -> None:
    """Its rows stay on the wheel until they were due, as long as nobody needs them."""
    world = World()
    rows = world.scheduler.limits.near_rows_max
    world.broker.accept([START_MS + 5_000] * rows, 0, "any")
    world.ingest(rows)
    world.sync()
    for offset in range(rows):
        world.cancel(offset)
    world.sync()
    world.broker.accept([START_MS + 100], 0, "any")
    world.ingest(1)
    world.flush()
    world.now_ms += 100
    while world.housekeep():
        pass
    assert len(world.scheduler.near) == world.scheduler.ledger.pending == 1
    world.tick()
    world.sync()
    world.send()
    assert world.scheduler.ledger.fired == 1
