"""What falls due when, in buckets."""

from __future__ import annotations

from duemq_server.timer_service.far import due_counts
from duemq_server.timer_service.far.due_counts import DAY_MS, HOUR_MS, MINUTE_MS, Edges
from duemq_server.timer_service.views import forecast
from duemq_server.timer_service.views.forecast import DueBucket, Forecast
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
