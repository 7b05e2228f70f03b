"""What falls due when, in buckets."""

from __future__ import annotations

import pytest

from duemq.protocol.due import DAY_MS, HOUR_MS, MINUTE_MS, Edges
from duemq_recurring.occurrences import CatchUp
from duemq_server.timer_service.far import due_counts
from duemq_server.timer_service.views import forecast
from duemq_server.timer_service.views.forecast import DueBucket, Forecast
from tests.property.schedule_world import START_MS, ScheduleWorld, plan_of
from tests.property.timer_world import World


def buckets(world: World, topic: str | None = None) -> list[DueBucket]:
    world.count_some(1 << 20)
    world.join_counted()
    slot = world.scheduler.topics.slot(topic) if topic else None
    return Forecast(world.scheduler, world.now_ms, Edges.at(world.now_ms), slot, {}).run()


def world_of(*waits_ms: int, topic: str = "any") -> World:
    world = World()
    world.now_ms = world.now_ms // DAY_MS * DAY_MS + 10 * HOUR_MS + 30_000
    world.broker.accept([world.now_ms + wait for wait in waits_ms], 10, topic)
    world.ingest(100)
    while world.housekeep():
        pass
    return world


def test_minutes_then_hours_then_days() -> None:
    world = world_of(
        -5, 0, 29_999, 30_000, 23 * HOUR_MS, 3 * DAY_MS, 29 * DAY_MS, 40 * DAY_MS, 400 * DAY_MS
    )
    now_ms = world.now_ms
    found = buckets(world)
    assert found[0] == DueBucket(0, now_ms, 1)
    assert found[1] == DueBucket(now_ms, now_ms + 30_000, 2)
    assert found[2] == DueBucket(now_ms + 30_000, now_ms + 30_000 + MINUTE_MS, 1)
    widths = [each.to_ms - each.from_ms for each in found[2:]]
    assert widths == [MINUTE_MS, MINUTE_MS, HOUR_MS, HOUR_MS, DAY_MS, DAY_MS]
    assert all(each.from_ms % width == 0 for each, width in zip(found[2:], widths, strict=True))


def test_a_file_is_counted_anew_when_its_time_comes_nearer() -> None:
    world = world_of(*[5 * DAY_MS + n * MINUTE_MS for n in range(40)])
    assert len(buckets(world)) == 1  # an hour
    world.now_ms += 4 * DAY_MS + HOUR_MS
    assert len(buckets(world)) == 40  # minutes


def test_days_beyond_the_last_bucket_are_in_it(monkeypatch) -> None:
    monkeypatch.setattr(forecast, "BUCKETS_MAX", 2)
    world = world_of(*[(100 + n) * DAY_MS for n in range(5)])
    first, last = buckets(world)
    assert (first.pending, last.pending) == (1, 4)
    assert last.to_ms - last.from_ms == 4 * DAY_MS


def test_no_more_is_kept_than_the_bound(monkeypatch) -> None:
    world = world_of(*[n * DAY_MS for n in range(100, 140)])
    before = buckets(world)
    monkeypatch.setattr(due_counts, "ENTRIES_MAX", 3)
    counts = world.scheduler.due_counts
    counts.shrink()
    assert sum(len(steps) for _, steps, _ in counts.tables(None)) <= 3
    assert buckets(world) == before


def far_schedule() -> ScheduleWorld:
    """A schedule's message and another one, each in a block of its own, in one file."""
    world = ScheduleWorld()
    world.put("s", plan_of("hours", CatchUp.LATEST))
    world.run_until(START_MS)  # the next one waits an hour
    world.flush()
    world.broker.accept([START_MS + HOUR_MS], 10, "any")
    world.ingest(1)
    world.flush()
    blocks = world.scheduler.segments.blocks()
    assert [each.count for each in blocks] == [1, 1]
    assert len({each.file for each in blocks}) == 1
    return world


@pytest.mark.parametrize("counted", [0, 1, 2])
@pytest.mark.parametrize("begun", [0, 1, 2])
def test_a_file_may_be_forgotten_while_its_blocks_are_read(counted: int, begun: int) -> None:
    """A schedule is deleted whose message lies in a block, nobody knows in which."""
    world = far_schedule()
    world.count_some(counted)
    world.join_counted()
    world.count_some(begun)  # read, and not yet taken over
    world.delete("s")
    world.join_counted()

    assert [each.pending for each in buckets(world)] == [1]
    world.scheduler.check()


def test_a_forecast_that_was_made_shows_what_was_there() -> None:
    world = far_schedule()
    world.count_some(2)
    world.join_counted()
    made = Forecast(world.scheduler, world.now_ms, Edges.at(world.now_ms), None, {})
    world.delete("s")

    assert sum(each.pending for each in made.run()) == 2
    assert sum(each.pending for each in buckets(world)) == 1
