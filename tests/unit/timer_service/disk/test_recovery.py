"""A start: what it makes of a checkpoint and the log behind it, beyond what the models compare."""

from __future__ import annotations

from tests.property.timer_world import START_MS, World


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
