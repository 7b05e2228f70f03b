"""Damage in period files: a start refuses it, and one tool gives up what is damaged, only."""

from __future__ import annotations

import re

import pytest

import duemq_server.storage.tools.set_aside
from duemq.errors import Corrupt
from duemq_recurring.occurrences import CatchUp
from duemq_server.storage import record
from duemq_server.storage.errors import CorruptFile, CorruptLog
from duemq_server.storage.record import HEADER_BYTES
from duemq_server.storage.replicas import DISK_ID_FILE
from duemq_server.timer_service.__main__ import main
from duemq_server.timer_service.disk.set_aside import FOLDER, set_aside
from tests.property.schedule_world import ScheduleWorld, plan_of
from tests.property.timer_world import DATA, LIMITS, START_MS, World
from tests.unit.timer_service.disk.test_recovery import dispatch_again

HOUR_MS = 3_600_000
TIMERS = 60


def far_world(apart_ms: int = 60_000) -> World:
    """Timers three hours away, in blocks, and a checkpoint."""
    world = World()
    for part in range(3):
        dues = [START_MS + 3 * HOUR_MS + apart_ms * (20 * part + n) for n in range(20)]
        world.broker.accept(dues, 300, "any")
    world.ingest(9)
    world.sync()
    while world.housekeep():
        pass
    while world.scheduler.tiers.memtable.rows:
        flush = world.scheduler.tiers.begin_flush(world.now_ms)
        flush.run()
        world.scheduler.tiers.end_flush(flush)
    world.checkpoint()
    return world


def run_for(world: World, ms: int) -> None:
    end_ms = world.now_ms + ms
    while world.now_ms < end_ms:
        world.now_ms += 10_000
        world.tick()
        world.sync()
        world.send()
        while world.housekeep():
            pass


def flip(world: World, at: int) -> str:
    """Damages the block that is loaded last, `at` bytes from its beginning; its file."""
    block = max(world.scheduler.segments.blocks(), key=lambda each: each.next_due_ms)
    path = world.scheduler.segments.path(block.file)
    world.disk.flip(path, block.position + (at if at >= 0 else block.index_length - at), 3)
    return path


def given_up(world: World) -> list[str]:
    disk = world.disk.after_kill()
    said = list(set_aside(DATA, disk, LIMITS, world.now_ms))
    world.restart(disk.after_kill())
    return said


def test_one_damaged_body_costs_one_timer() -> None:
    world = far_world()
    path = flip(world, -(HEADER_BYTES + 350))
    with pytest.raises(CorruptFile, match="set-aside"):
        run_for(world, 5 * HOUR_MS)
    said = given_up(world)
    assert said[-1].startswith("1 timers lost")
    [named] = [line for line in said if re.match(r"  store .* offset \d+, due \d+", line)]
    lost = int(named.split("offset ")[1].split(",")[0])
    assert world.disk.exists(f"{DATA}/{FOLDER}/{path.rpartition('/')[2]}")

    run_for(world, 5 * HOUR_MS)
    assert set(world.broker.delivered) == set(range(TIMERS)) - {lost}
    assert world.scheduler.ledger.lost == 1
    world.kill()
    assert world.scheduler.ledger.lost == 1
    assert world.scheduler.ledger.pending == 0


def test_what_was_kept_of_earlier_damage_stays() -> None:
    world = far_world()
    path = flip(world, -(HEADER_BYTES + 350))
    damaged = world.disk.content(path)
    kept = f"{DATA}/{FOLDER}/{path.rpartition('/')[2]}"
    world.disk.makedirs(f"{DATA}/{FOLDER}")
    earlier = b"x" * (len(damaged) + 1)
    world.disk.open(kept, create=True).pwritev([earlier], 0)
    assert f"kept aside: {kept}.2" in given_up(world)
    assert world.disk.content(kept) == earlier
    assert world.disk.content(f"{kept}.2") == damaged


@pytest.mark.parametrize("apart_ms", [500, 60_000])
def test_a_bad_sector_costs_what_lies_in_it(apart_ms: int) -> None:
    """Also where what lies beside it is due soon, and comes into memory."""
    world = far_world(apart_ms)
    block = max(world.scheduler.segments.blocks(), key=lambda each: each.next_due_ms)
    path = world.scheduler.segments.path(block.file)
    world.disk.wear_out(path, block.position + block.index_length + 1_000)
    with pytest.raises(CorruptFile, match=r"Input/output error.*set-aside"):
        run_for(world, 5 * HOUR_MS)
    given_up(world)
    lost = world.scheduler.ledger.lost
    assert 0 < lost <= 3
    kept = world.disk.content(f"{DATA}/{FOLDER}/{path.rpartition('/')[2]}")
    assert kept[: block.position] == world.disk.content(path)[: block.position]

    world.kill()
    run_for(world, 5 * HOUR_MS)
    assert len(world.broker.delivered) == TIMERS - lost
    assert world.scheduler.ledger.pending == 0


def test_a_damaged_index_costs_its_block() -> None:
    world = far_world()
    flip(world, HEADER_BYTES + 40)
    with pytest.raises(CorruptFile, match="block index"):
        run_for(world, 5 * HOUR_MS)
    before = len(world.broker.delivered)
    said = given_up(world)
    lost = world.scheduler.ledger.lost
    assert 0 < lost < TIMERS
    assert said[-1].startswith(f"{lost} timers lost")

    run_for(world, 5 * HOUR_MS)
    assert before <= len(world.broker.delivered) == TIMERS - lost


@pytest.mark.parametrize("at", [-(HEADER_BYTES + 350), HEADER_BYTES + 40])
def test_what_was_fired_or_cancelled_is_not_lost(at: int) -> None:
    """The cursor of the block at the checkpoint is behind what the log says."""
    world = far_world()
    last = TIMERS - 1
    assert world.cancel(last) == "CANCELLED"
    world.sync()
    run_for(world, 3 * HOUR_MS + 50 * 60_000)
    fired = len(world.broker.delivered)
    assert fired
    world.restart(world.disk.after_kill())
    flip(world, at)
    said = given_up(world)
    ledger = world.scheduler.ledger
    assert ledger.accepted == TIMERS
    assert ledger.pending >= 0
    run_for(world, 5 * HOUR_MS)
    assert len(world.broker.delivered) + ledger.lost + ledger.cancelled == TIMERS, said


def test_without_damage_nothing_is_lost() -> None:
    world = far_world()
    assert given_up(world) == ["0 timers lost; 60 are pending"]
    run_for(world, 5 * HOUR_MS)
    assert len(world.broker.delivered) == TIMERS


def test_a_missing_file_costs_what_was_in_it() -> None:
    world = far_world()
    path = flip(world, HEADER_BYTES)
    world.disk.unlink(path)
    with pytest.raises(CorruptFile, match="is missing"):
        world.kill()
    given_up(world)
    run_for(world, 5 * HOUR_MS)
    assert len(world.broker.delivered) == TIMERS - world.scheduler.ledger.lost


def lose_entry(world: World, position: int) -> None:
    """An entry of the timer log is damaged, and set aside as a start says."""
    log = f"{DATA}/log"
    world.disk.flip(f"{log}/{world.disk.listdir(log)[0]}", position + 100)
    with pytest.raises(CorruptLog, match=f"storage set-aside {log} --at {position}"):
        world.kill()
    duemq_server.storage.tools.set_aside.set_aside(log, position, world.disk)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("second_ms", [1_000, 2_000])
def test_timers_on_their_way_whose_bodies_are_gone_are_lost_and_no_others(
    stored: bool, second_ms: int
) -> None:
    """All of a batch, or some of one; a broker has stored it, and its answer was lost, or not."""
    world = World()
    positions = []
    for wait_ms in (0, 1_000, second_ms, 3_000, HOUR_MS):
        positions.append(world.directory.log.end_position)
        world.broker.accept([START_MS + wait_ms], 10, "keyed")
        world.ingest(1)
    for wait_ms in (0, 1_000, 2_000):
        if wait_ms == 1_000:
            world.send()
            world.checkpoint()
        world.now_ms = START_MS + wait_ms
        world.tick()
        world.sync()
    if stored:
        world.send(drop=True)
    assert world.scheduler.ledger.in_flight == 2
    lose_entry(world, positions[1])

    with pytest.raises(Corrupt, match="set-aside"):
        world.kill()
    said = given_up(world)
    world.broker.incomplete_repeats = True

    assert any(re.match("1 of [12] timers of the batch at .*keyed", line) for line in said)
    assert sum(f"offset 1, due {START_MS + 1_000}" in line for line in said) == 1
    assert said[-1] == "1 timers lost; 2 are pending"
    ledger = world.scheduler.ledger
    assert (ledger.accepted, ledger.pending, ledger.fired, ledger.lost) == (5, 2, 2, 1)
    assert ledger.in_flight == 1
    run_for(world, 2 * HOUR_MS)
    world.kill()
    assert set(world.broker.delivered) == {0, 2, 3, 4} | ({1} if stored else set())
    ledger = world.scheduler.ledger
    assert (ledger.pending, ledger.fired, ledger.lost, ledger.in_flight) == (0, 4, 1, 0)
    # What was on its way goes under the start's own numbers, too, where one is missing before it.
    _, under_its_own = world.broker.lanes.values()
    assert under_its_own == (3 if second_ms == 2_000 and not stored else 2)


@pytest.mark.parametrize("others", [[], [2]])
def test_timers_that_are_nowhere_are_given_up_and_all_others_fire(others: list[int]) -> None:
    """Fired before the checkpoint, and dispatched once more, as a release before did."""
    world = World()
    world.broker.accept([START_MS, START_MS, START_MS + 10, START_MS + HOUR_MS], 10, "keyed")
    world.ingest(1)
    world.tick()
    world.sync()
    world.send()
    world.checkpoint()
    world.now_ms += 10
    dispatch_again(world, [0, *others])
    world.sync()

    with pytest.raises(Corrupt, match="set-aside"):
        world.kill()
    said = given_up(world)

    assert f"1 of {1 + len(others)} timers of the batch at" in said[0]
    assert said[1].endswith(", offset 0")
    assert said[2:] == [
        "of these, 1 had been fired before",
        f"0 timers lost; {2 - len(others)} are pending",
    ]
    world.drain()
    assert set(world.broker.delivered) == {0, 1, 2, 3}


def test_an_entry_that_was_set_aside_and_that_nobody_knows_is_not_skipped() -> None:
    world = World()
    position = world.directory.log.end_position
    for _ in range(2):
        world.broker.accept([START_MS] * 9, 10, "keyed")
        world.ingest(1)
    world.sync()
    lose_entry(world, position)
    for start in (world.kill, lambda: given_up(world)):
        with pytest.raises(Corrupt, match=f"position {position}: an entry was set aside .* a copy"):
            start()


def test_what_was_set_aside_on_both_sides_of_a_checkpoint_is_not_skipped() -> None:
    """No further set-aside is advised, which would be refused."""
    world = World()
    position = world.directory.log.end_position
    for _ in range(3):
        world.broker.accept([START_MS + HOUR_MS] * 9, 10, "keyed")
        world.ingest(1)
        world.sync()
    entries = [each.position for each in world.directory.log.entries(position)]
    world.checkpoint()
    saved = world.directory.log.end_position
    world.broker.accept([START_MS + HOUR_MS] * 9, 10, "keyed")
    world.ingest(1)
    behind = world.directory.log.end_position
    world.broker.accept([START_MS + HOUR_MS] * 9, 10, "keyed")
    world.ingest(1)
    world.sync()
    log = f"{DATA}/log"
    path = f"{log}/{world.disk.listdir(log)[0]}"
    for at in (entries[-1], saved):
        world.disk.overwrite(path, at, bytes(record.HEADER_BYTES))
    _, end = duemq_server.storage.tools.set_aside.set_aside(log, entries[-1], world.disk)
    assert entries[-1] < saved < end == behind
    for start in (world.kill, lambda: given_up(world)):
        with pytest.raises(Corrupt, match=f"position {entries[-1]}: an entry was set aside"):
            start()


def test_wrong_use(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["set-aside"]) == 2
    assert "usage" in capsys.readouterr().err
    assert main(["set-aside", str(tmp_path / "none")]) == 2
    assert "none is not a directory" in capsys.readouterr().err
    assert main(["set-aside", str(tmp_path)]) == 0
    assert "0 timers lost" in capsys.readouterr().out


def test_a_replica_gives_up_nothing_that_others_have(
    tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be lost once that one leads, and the others have another state than it."""
    (tmp_path / DISK_ID_FILE).write_bytes(b"")
    assert main(["set-aside", str(tmp_path)]) == 2
    assert "is a replica's: empty it" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint").exists()
    assert main(["set-aside", "--last-copy", str(tmp_path)]) == 0
    assert "0 timers lost" in capsys.readouterr().out


@pytest.mark.parametrize("at", [HEADER_BYTES + 40, -(HEADER_BYTES + 20)], ids=["index", "body"])
def test_a_schedule_whose_message_is_lost_goes_on(at: int) -> None:
    world = ScheduleWorld()
    world.put("s", plan_of("hours", CatchUp.ALL))
    world.run_until(START_MS + 1_000)
    world.sync()
    flush = world.scheduler.tiers.begin_flush(world.now_ms)
    flush.run()
    world.scheduler.tiers.end_flush(flush)
    world.checkpoint()
    flip(world, at)
    said = given_up(world)
    assert said[-1].startswith("1 timers lost")
    world.run_until(START_MS + 3 * HOUR_MS)
    assert world.broker.came["s"] == [START_MS, START_MS + 2 * HOUR_MS, START_MS + 3 * HOUR_MS]
    world.scheduler.check()
