"""The power goes at every single operation of a replica that takes a snapshot over."""

from __future__ import annotations

from random import Random

import pytest

from tests.crash.faulty_disk import FaultyDisk, PowerCut
from tests.unit.broker.batches import batch
from tests.unit.broker.leading import NOW_MS, Leader, comparable, extend, opened

SEEDS = range(4)


def history(topic: str, count: int) -> Leader:
    leader = Leader()
    for number in range(count):
        sent = {"topic": topic, "producer_id": 7, "sequence": number}
        leader.store.send(batch([b"%d" % number + bytes(150)], **sent), NOW_MS + number)
        leader.settle()
    return leader


def leading() -> Leader:
    """Its log begins somewhere, and goes on behind the snapshot."""
    leader = history("orders", 30)
    leader.checkpoint()
    leader.retain(leader.log.segments[2].start)
    leader.store.send(batch([b"last"], topic="bills"), NOW_MS)
    leader.settle()
    return leader


LEADER, OTHER = leading(), history("others", 12)
SNAPSHOT, START = LEADER.snapshot, LEADER.log.start_position
BEFORE = comparable(OTHER.store.tables)


def begun(disk: FaultyDisk) -> None:
    """It followed another history, and saved a checkpoint of it."""
    standby = opened(disk)
    extend(standby, OTHER.log)
    standby.apply(OTHER.committed)
    standby.checkpoint()


def install(disk: FaultyDisk) -> None:
    opened(disk).install(SNAPSHOT, START)


def catch_up(disk: FaultyDisk) -> None:
    standby = opened(disk)
    middle = (START + LEADER.committed) // 2
    extend(standby, LEADER.log, middle)
    standby.apply(middle)
    extend(standby, LEADER.log)
    standby.apply(LEADER.committed)
    standby.checkpoint()


def run(disk: FaultyDisk) -> None:
    install(disk)
    catch_up(disk)


def operations() -> int:
    disk = FaultyDisk()
    begun(disk)
    disk = disk.after_power_cut(None)
    run(disk)
    return disk.operations


def kept_states(disk: FaultyDisk) -> list[FaultyDisk]:
    cuts = [disk.after_power_cut(Random(seed)) for seed in SEEDS]
    return [disk.after_power_cut(None), *cuts, disk.after_kill()]


@pytest.mark.parametrize("cut_at", range(1, operations() + 1))
def test_whenever_the_power_goes_the_replica_goes_on(cut_at: int) -> None:
    disk = FaultyDisk()
    begun(disk)
    disk = disk.after_power_cut(None)
    disk.cut_at = cut_at
    with pytest.raises(PowerCut):
        run(disk)
    for after in kept_states(disk):
        standby = opened(after)
        assert not standby.lost
        if standby.log.start_position != START:
            assert standby.applied == OTHER.committed
            assert comparable(standby.tables) == BEFORE
            install(after)
        catch_up(after)
        last = opened(after.after_power_cut(None))
        last.apply(LEADER.committed)
        assert last.applied == LEADER.committed
        assert comparable(last.tables) == comparable(LEADER.store.tables)
        for queue in LEADER.store.all_queues():
            mine = last.tables.queues.of(queue.topic)[queue.queue_id]
            assert (mine.min_offset, mine.max_offset) == (queue.min_offset, queue.max_offset)
            assert mine.page(queue.min_offset, 100) == queue.page(queue.min_offset, 100)
