"""A start: what it makes of a checkpoint and the log behind it, beyond what the models compare."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from duemq.errors import Corrupt
from duemq_server.storage import checkpoint
from duemq_server.storage.errors import CorruptFile, CorruptLog, DiskFull, UnknownVersion
from duemq_server.timer_service.disk.data_directory import (
    checkpoint_path,
    load_checkpoint,
    open_directory,
)
from duemq_server.timer_service.scheduling.dispatch import Dispatcher
from duemq_server.timer_service.timers import log_entries
from duemq_server.timer_service.timers.log_entries import Dispatched
from tests.property.timer_world import DATA, LIMITS, SOURCE, START_MS, TOPICS, World
from tests.unit.timer_service.scheduling.test_scheduler import HOUR_MS, fire, world_with


def test_what_was_stored_after_the_checkpoint_counts_for_nothing_any_more() -> None:
    """Bytes that nobody waits for would be held against the broker for as long as the process."""
    world = World()
    world.broker.accept([START_MS, START_MS], 100, "keyed")
    world.ingest(1)
    world.tick()
    world.sync()
    world.checkpoint()  # the batch is on its way
    world.send()
    world.broker.accept([START_MS + 1_000], 100, "keyed")
    world.ingest(1)
    world.now_ms = START_MS + 1_000
    world.tick()  # its entry takes the acknowledgement along
    world.sync()

    world.kill()

    [lane] = world.scheduler.dispatcher.lanes()
    waiting = sum(len(batch.records) for batch in lane.unacked)
    assert [batch.count for batch in lane.unacked] == [1]
    assert lane.unacked_bytes == waiting
    assert world.scheduler.dispatcher.peer(lane.id.broker).unacked_bytes == waiting


def test_the_lanes_are_looked_through_once_however_many_batches_were_stored_since(
    monkeypatch,
) -> None:
    """A start with 20,000 lanes took 4 s for 2,000 acknowledgements of batches of its checkpoint,
    for it looked through all lanes for each."""
    world = World()
    topics = [f"topic-{number}" for number in range(10)]
    world.set_topics(topics)
    for topic in topics:
        monkeypatch.setitem(TOPICS, topic, 1)
        world.broker.accept([START_MS], 10, topic)
    world.ingest(10)
    world.tick()
    world.tick()
    world.sync()
    assert sum(len(lane.unacked) for lane in world.scheduler.dispatcher.lanes()) == 10
    world.checkpoint()
    while any(lane.unacked for lane in world.scheduler.dispatcher.lanes()):
        world.send()
    world.broker.accept([START_MS + 1_000], 10, topics[0])
    world.ingest(1)
    world.now_ms = START_MS + 1_000
    world.tick()  # its entry takes the acknowledgements along
    world.sync()
    looks = Mock(wraps=Dispatcher.lanes)
    monkeypatch.setattr(Dispatcher, "lanes", lambda dispatcher: looks(dispatcher))

    world.kill()

    assert looks.call_count < 10


def test_what_came_after_the_checkpoint_is_told_to_brokers() -> None:
    """Else the first commit moves them back to the checkpoint: who replaces a data directory that
    is lost begins there, and fires again all that came since."""
    world = world_with(HOUR_MS)
    world.checkpoint()
    world.broker.accept([START_MS + HOUR_MS], 100, "any")
    world.ingest(1)
    world.sync()

    world.kill()

    [source] = world.scheduler.numbers.sources
    assert source.durable_offset == source.next_offset == 2


def test_a_damaged_checkpoint_refuses_to_start() -> None:
    world = world_with(10)
    world.checkpoint()
    world.disk.flip(f"{DATA}/checkpoint", 100)

    with pytest.raises(CorruptFile, match="checkpoint"):
        open_directory(DATA, world.disk, LIMITS, START_MS)


def test_damage_in_the_log_before_the_checkpoint_refuses_to_start() -> None:
    world = world_with(5_000, body_bytes=50)
    world.checkpoint()
    [held] = world.directory.housekeeper.save(START_MS).state.held
    world.broker.accept([START_MS], 10, "any")
    world.ingest(1)
    world.sync()
    world.disk.flip(f"{DATA}/log/{0:020d}", held.home.position + held.start)

    with pytest.raises(CorruptLog, match="CRC"):
        open_directory(DATA, world.disk, LIMITS, START_MS)


def test_a_log_that_lost_what_the_checkpoint_has_seen_refuses_to_start() -> None:
    world = world_with(5_000)
    world.checkpoint()
    world.disk.chop(f"{DATA}/log/{0:020d}", 8)

    with pytest.raises(Corrupt, match="acknowledged timers are gone"):
        open_directory(DATA, world.disk, LIMITS, START_MS)


def test_what_was_parked_and_dispatched_is_found_before_all_that_is_far() -> None:
    """All that was on disk came into memory, until what was parked was looked at."""
    world = world_with(*[5] * 20, topic="keyed")
    world.broker.accept([START_MS + 5] * 10 + [START_MS + HOUR_MS] * 20, 10, "any")
    world.ingest(1)
    world.set_topics([])
    world.now_ms += 5
    world.tick()
    for target in world.scheduler.dispatcher.due.turns():
        park = world.scheduler.parking.begin([target], world.now_ms)
        assert park is not None
        world.run(park)
    world.run(world.scheduler.tiers.begin_flush(world.now_ms))
    world.checkpoint()
    world.set_topics(["keyed"])
    job = world.directory.housekeeper._unpark(world.now_ms)
    assert job is not None
    world.run(job)
    world.tick()
    world.sync()
    assert world.scheduler.ledger.fired == 20

    world.kill()

    assert world.scheduler.ledger.fired == 20
    assert world.scheduler.segments.pending == 30  # far, and parked for another topic
    world.drain()


def dispatch_again(world: World, offsets: list[int]) -> int:
    """Writes what a release wrote that handed timers out twice; where."""
    lane = next(lane for lane in world.scheduler.dispatcher.lanes() if lane.next_sequence)
    dispatched = Dispatched(
        lane.id,
        lane.epoch,
        lane.next_sequence,
        [SOURCE],
        np.array(offsets, dtype=np.int64),
        np.zeros(len(offsets), dtype=np.uint16),
    )
    parts = [log_entries.encode_dispatch(dispatched)]
    position, _ = world.directory.log.append(log_entries.DISPATCH, parts)
    return position


@pytest.mark.parametrize("others", [[], [2]])
def test_a_timer_that_a_log_dispatches_twice_is_sent_once_and_others_are_not_lost(
    others: list[int],
) -> None:
    world = world_with(0, 0, HOUR_MS, topic="keyed")
    world.tick()
    dispatch_again(world, [0, *others])
    world.sync()

    world.kill()

    assert world.scheduler.ledger.fired == 2 + len(others)
    world.broker.decided.update(others)
    world.drain()
    assert set(world.broker.delivered) == {0, 1, 2}


def test_a_dispatched_timer_that_is_nowhere_but_stored_is_no_loss(caplog) -> None:
    world = world_with(0, HOUR_MS, topic="keyed")
    fire(world)
    world.checkpoint()
    position = dispatch_again(world, [0])
    world.directory.log.append(log_entries.ACK, [log_entries.encode_ack([position])])
    world.sync()

    world.kill()

    assert "1 dispatched timers are nowhere to be found" in caplog.text
    world.drain()
    assert set(world.broker.delivered) == {0, 1}


def test_a_dispatched_timer_that_is_nowhere_refuses_to_start_and_says_what_to_do() -> None:
    world = world_with(0, HOUR_MS, topic="keyed")
    fire(world)
    world.checkpoint()
    position = dispatch_again(world, [0])
    world.sync()

    told = rf"{DATA}: 1 timers .* {DATA}/segments.* {position} \(.*keyed.* set-aside"
    for _ in range(2):
        with pytest.raises(Corrupt, match=told):
            open_directory(DATA, world.disk, LIMITS, START_MS)


def test_what_a_checkpoint_does_not_name_goes_only_when_no_older_one_can_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process was killed between a checkpoint's renaming and the sync of its directory."""
    world = world_with(HOUR_MS)
    world.run(world.scheduler.tiers.begin_flush(world.now_ms))
    world.checkpoint()
    world.now_ms += HOUR_MS
    assert world.housekeep()  # it is loaded: its file is not needed any more
    fire(world)
    world.sync()

    def killed(path: str) -> None:
        if path == DATA:
            raise DiskFull("the next step is not done")

    with monkeypatch.context() as patched:
        patched.setattr(world.disk, "fsync_dir", killed)
        world.checkpoint()
    world.kill()
    assert not world.disk.listdir(f"{DATA}/segments")
    world.restart(world.disk.after_power_cut())
    world.drain()
    assert world.broker.delivered[0] == 1


def test_a_checkpoint_of_a_newer_release_is_refused_by_its_name() -> None:
    world = World()
    world.checkpoint()
    path = checkpoint_path(DATA)
    payload = bytearray(checkpoint.load(path, world.disk) or b"")
    payload[4:6] = (2).to_bytes(2, "little")
    checkpoint.save(path, bytes(payload), world.disk)
    with pytest.raises(UnknownVersion) as raised:
        load_checkpoint(DATA, world.disk)
    assert str(raised.value) == f"{path} has version 2, this release reads 1"
