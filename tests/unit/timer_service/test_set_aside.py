"""Damage in period files: a start refuses it, and one tool gives up what is damaged, only."""

from __future__ import annotations

import re

import pytest

from storage.errors import CorruptFile
from storage.record import HEADER_BYTES
from tests.property.timer_world import DATA, LIMITS, START_MS, World
from timer_service.__main__ import main
from timer_service.set_aside import FOLDER, set_aside

HOUR_MS = 3_600_000
TIMERS = 60


def far_world() -> World:
    """Timers three hours away, in blocks, and a checkpoint."""
    world = World()
    for part in range(3):
        dues = [START_MS + 3 * HOUR_MS + 60_000 * (20 * part + n) for n in range(20)]
        world.broker.accept(dues, 300, "any")
    world.ingest(9)
    world.sync()
    while world.housekeep():
        pass
    while world.scheduler.memtable.rows:
        flush = world.scheduler.begin_flush(world.now_ms)
        flush.run()
        world.scheduler.end_flush(flush)
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


def test_wrong_use(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["set-aside"]) == 2
    assert "usage" in capsys.readouterr().err
    assert main(["set-aside", str(tmp_path)]) == 0
    assert "0 timers lost" in capsys.readouterr().out
