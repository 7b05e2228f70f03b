"""The ledger by topic: what a crash, an older release and many topics make of it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from duemq.errors import InvariantError
from duemq_recurring.occurrences import Recurrence
from duemq_recurring.schedule import Plan
from duemq_server.storage import checkpoint
from duemq_server.timer_service.disk import checkpoint_state
from duemq_server.timer_service.edge.topic_metrics import TopicCollector
from duemq_server.timer_service.far.numbering import Numbering
from duemq_server.timer_service.scheduling import topic_counts
from duemq_server.timer_service.scheduling.bulk import slices
from duemq_server.timer_service.scheduling.bulk.jobs import Which
from duemq_server.timer_service.scheduling.bulk.walk import Walk, accept
from duemq_server.timer_service.scheduling.cancelling import CANCELLED
from duemq_server.timer_service.scheduling.holding import changes
from duemq_server.timer_service.scheduling.keyed.changes import Rescheduling
from duemq_server.timer_service.scheduling.schedules import changes as schedule_changes
from duemq_server.timer_service.scheduling.topic_counts import OTHERS, TopicCounts, TopicLedger
from duemq_server.timer_service.scheduling.topic_lateness import SHOWN_MAX, TopicLateness
from duemq_server.timer_service.timers import log_entries
from duemq_server.timer_service.timers.keyed import RESCHEDULED
from duemq_server.timer_service.timers.keyed_entry import RequestKey
from duemq_server.timer_service.timers.log_entries import TargetId
from tests.property import timer_world
from tests.property.timer_world import DATA, World
from tests.unit.timer_service.scheduling.test_bulk import finish

DAY_MS = 86_400_000


def counts(world: World) -> dict[str, TopicLedger]:
    return dict(world.scheduler.topics)


def world_with_timers() -> World:
    """Near, far, in blocks; fired; cancelled in each place."""
    world = World()
    for topic in ("any", "keyed"):
        world.broker.accept([world.now_ms] * 3, 10, topic)
        world.broker.accept([world.now_ms + 5_000] * 4, 10, topic)
        world.broker.accept([world.now_ms + DAY_MS] * 40, 10, topic)
    world.ingest(100)
    world.housekeep()
    world.broker.accept([world.now_ms + 2 * DAY_MS] * 5, 10, "keyed")
    world.ingest(100)
    world.set_away(set())
    world.tick()
    world.sync()
    world.send()
    for offset in (3, 7, 8, 51, 60, 95):
        assert world.cancel(offset) == "CANCELLED"
    world.sync()
    return world


def pending(world: World) -> dict[str, tuple[int, int]]:
    return {name: (each.pending, each.cancelled) for name, each in counts(world).items()}


def columns(world: World) -> dict[str, tuple[int, ...]]:
    found = counts(world).items()
    return {name: (x.accepted, x.fired, x.cancelled, x.replaced) for name, x in found}


def test_each_topic_has_its_own_ledger() -> None:
    world = world_with_timers()
    found = counts(world)
    assert {name: (each.accepted, each.fired) for name, each in found.items()} == {
        "any": (47, 3),
        "keyed": (52, 3),
    }
    assert pending(world) == {"any": (41, 3), "keyed": (46, 3)}


@pytest.mark.parametrize("saved", [False, True])
def test_a_crash_changes_no_count(saved: bool) -> None:
    world = world_with_timers()
    before = pending(world)
    if saved:
        world.checkpoint()
    world.kill()
    assert pending(world) == before


def test_cancels_of_an_older_release_are_counted_by_reading_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = log_entries.cancelled_table

    def without_topics(*columns: Any) -> log_entries.CancelledTable:
        return made(*columns[:-1], 0)

    monkeypatch.setattr(log_entries, "cancelled_table", without_topics)
    world = world_with_timers()
    before = pending(world)
    world.kill()
    assert pending(world) == before
    world.checkpoint()
    world.kill()
    assert pending(world) == before


def test_a_checkpoint_of_an_older_release_counts_what_is_pending() -> None:
    world = world_with_timers()
    world.checkpoint()
    world.disk = world.disk.after_kill()
    path = f"{DATA}/checkpoint"
    payload = checkpoint.load(path, world.disk)
    assert payload is not None
    older = dataclasses.replace(checkpoint_state.decode(payload), topics={})
    checkpoint.save(path, checkpoint_state.encode(older), world.disk)
    world.kill()
    assert pending(world) == {"any": (41, 0), "keyed": (46, 0)}
    world.scheduler.check()
    world.kill()
    assert {name: each.accepted for name, each in counts(world).items()} == {
        "any": 41,
        "keyed": 46,
    }


def test_topics_that_the_log_cannot_tell_apart_are_counted_by_reading_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_counts, "mark_of", lambda topic: 7)
    world = world_with_timers()
    before = pending(world)
    world.kill()
    assert pending(world) == before


@pytest.mark.parametrize("far", [False, True])
def test_what_goes_and_comes_is_counted_though_the_log_cannot_tell_the_topics_apart(
    far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next start would know nothing of what any topic's timers have come to."""
    for each in (topic_counts, slices, schedule_changes):
        monkeypatch.setattr(each, "mark_of", lambda topic: 7)
    world = world_with_timers()
    scheduler = world.scheduler
    handle = world.first_handle(40 if far else 9)
    request = Rescheduling(scheduler, RequestKey(b"r" * 16), [handle], [world.now_ms + DAY_MS])
    while not request.advance(world.now_ms):
        keys, handles = request.asks()
        look_up = scheduler.segments.key_look_up(keys, handles, scheduler.numbers.find_source)
        look_up.run()
        scheduler.segments.keys_looked_up(look_up)
        request.answered()
    assert [each.outcome for each in request.results] == [RESCHEDULED]
    every = Recurrence(every_ms=60_000)
    plan = Plan("any", every, b"", from_given=False)
    schedule_changes.put(scheduler, "s", plan, world.now_ms)
    schedule_changes.pause(scheduler, "s", world.now_ms)
    job = accept(scheduler, b"j" * 16, Which("keyed", "", 0, 1 << 60, DAY_MS), world.now_ms)
    finish(world, Walk(scheduler, job))
    assert scheduler.topics.in_doubt == ""
    found = columns(world)
    assert found == {"any": (49, 3, 4, 1), "keyed": (52 + job.count, 3, 3, job.count)}
    world.checkpoint()
    world.kill()
    assert columns(world) == found


def test_a_wrong_count_stops_the_shard() -> None:
    world = world_with_timers()
    world.scheduler.topics.of("any").fired += 1
    with pytest.raises(InvariantError, match="topic 'any'"):
        world.scheduler.check()


def test_topics_beyond_the_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_counts, "TOPICS_MAX", 2)
    topics = TopicCounts(Numbering())
    for name in ("a", "b", "c", "d", "a"):
        topics.of(name).accepted += 1
    assert {name: each.accepted for name, each in topics} == {"a": 2, "b": 1, OTHERS: 2}
    again = TopicCounts(Numbering())
    again.restore(topics.saved())
    again.of("d").accepted += 1
    assert dict(again)[OTHERS].accepted == 3
    monkeypatch.setattr(topic_counts, "TOPICS_MAX", 3)
    again = TopicCounts(Numbering())
    again.restore(topics.saved())
    again.of("c").accepted += 1  # it may be one of those that were counted together
    assert dict(again)[OTHERS].accepted == 3


def test_beyond_the_limit_topics_that_are_gone_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else topics that are made and deleted take the places of all that come later, for good."""
    monkeypatch.setattr(topic_counts, "TOPICS_MAX", 4)
    monkeypatch.setattr(topic_counts, "KEPT_MAX", 2)
    monkeypatch.setattr(topic_counts, "SHOWN_MAX", 0)
    numbers = Numbering()
    topics = TopicCounts(numbers)
    targets = {
        name: numbers.number_target(TargetId("b", name, 0)) for name in ("a", "b", "c", "d", "e")
    }
    for name in "abcde":
        topics.of(name).accepted += 3
        topics.of(name).fired += 3 if name != "b" else 2
    before = dict(topics)
    assert list(before) == [OTHERS, "a", "b", "c", "d"]
    assert len(set(topics.slots(np.array(list(targets.values()))).tolist())) == 5

    topics.forget(lambda topic: True)
    assert dict(topics) == before
    topics.forget(lambda topic: topic == "a")

    assert {name: (each.accepted, each.fired) for name, each in topics} == {
        OTHERS: (9, 9),
        "a": (3, 3),
        "b": (3, 2),
    }
    for name in "edc":  # places are free again
        topics.of(name).accepted += 1
    again = TopicCounts(Numbering())
    again.restore(topics.saved(), dataclasses.astuple(topics.forgotten))
    assert dict(again) == dict(topics)
    assert topics.counted("e")
    assert len(set(topics.slots(np.array(list(targets.values()))).tolist())) == 5


def test_what_metrics_say_of_topics_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later topic took the place of one that was forgotten, and left the others' figure."""
    monkeypatch.setattr(topic_counts, "KEPT_MAX", SHOWN_MAX + 10)
    world: Any = SimpleNamespace(topic_lateness=TopicLateness())
    world.scheduler = SimpleNamespace(topics=TopicCounts(Numbering()))

    def fired() -> dict[str, float]:
        _, family, _ = TopicCollector(world).collect()
        return {each.labels["topic"]: each.value for each in family.samples}

    for number in range(SHOWN_MAX + 30):
        ledger = world.scheduler.topics.of(f"topic-{number}")
        ledger.accepted = ledger.fired = 1_000 + number
    before = fired()
    world.scheduler.topics.forget(lambda topic: False)

    assert fired() == before
    assert not world.scheduler.topics.counted(f"topic-{SHOWN_MAX + 19}")
    assert world.scheduler.topics.counted(f"topic-{SHOWN_MAX + 20}")


def test_one_that_may_be_among_the_others_is_counted_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_counts, "TOPICS_MAX", 1)
    monkeypatch.setattr(topic_counts, "KEPT_MAX", 0)
    monkeypatch.setattr(topic_counts, "SHOWN_MAX", 0)
    topics = TopicCounts(Numbering())
    for name in ("a", "b"):
        topics.of(name).accepted += 1
    topics.of("a").fired += 1
    topics.forget(lambda topic: False)
    assert not topics.counted("a")

    topics.of("b").accepted += 1
    assert not topics.counted("b")  # one was pending, and is nowhere but among the others
    topics.of("b").fired += 2
    topics.of("b").accepted += 1
    assert topics.counted("b")


def test_a_start_knows_nothing_of_a_topic_that_was_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_counts, "KEPT_MAX", 1)
    monkeypatch.setattr(topic_counts, "SHOWN_MAX", 0)
    world = World()
    world.broker.accept([world.now_ms] * 3, 10, "keyed")
    world.broker.accept([world.now_ms, world.now_ms + DAY_MS], 10, "any")
    world.broker.accept([world.now_ms + 2_000] * 2, 10, "any")
    world.ingest(3)
    for _ in range(3):
        world.tick()
        world.sync()
        world.send()
    world.set_topics(["any"])
    world.now_ms += world.limits.checkpoint_interval_ms
    while world.housekeep():
        pass
    world.kill()

    assert [each.topic for each in world.scheduler.numbers.targets] == ["any"]
    found = {name: (x.accepted, x.fired, x.pending) for name, x in counts(world).items()}
    assert found == {OTHERS: (3, 3, 0), "any": (4, 1, 3)}
    world.broker.accept([world.now_ms + DAY_MS], 10, "keyed")  # there is one again
    world.ingest(1)
    assert world.cancel(7) == "CANCELLED"
    world.sync()
    world.kill()
    assert pending(world) == {OTHERS: (0, 0), "any": (3, 0), "keyed": (0, 1)}
    world.set_topics(["any", "keyed"])
    for _ in range(3):
        world.now_ms += DAY_MS
        world.tick()
        world.sync()
        world.send()
        world.housekeep()
    assert pending(world)["any"] == (0, 0)


def test_lateness_by_topic_leaves_out_what_was_past_due() -> None:
    lateness = TopicLateness()
    due_ms = np.array([100, 98, 40])
    lateness.record("a", due_ms, 101, np.array([False, False, True]))
    assert lateness.buckets("a")[:3] == [1, 1, 2]
    assert lateness.sum_ms("a") == 4


def test_the_number_of_a_target_is_anothers_once_its_topic_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many topics come and go, memory has those that there are."""
    monkeypatch.setattr(topic_counts, "KEPT_MAX", 2)
    monkeypatch.setattr(topic_counts, "SHOWN_MAX", 0)
    world = World()
    world.broker.accept([world.now_ms + DAY_MS], 10, "any")
    for number in range(20):
        topic = f"short-{number}"
        monkeypatch.setitem(timer_world.TOPICS, topic, number % 2)
        world.set_topics(["any", topic])
        world.broker.accept([world.now_ms, world.now_ms + 500], 10, topic)
        left = number == 7
        world.broker.accept([world.now_ms + DAY_MS if left else world.now_ms], 10, topic)
        world.ingest(9)
        cancelled = len(world.broker.due_ms) - 2
        assert world.cancel(cancelled) == CANCELLED
        for _ in range(3):
            world.tick()
            world.sync()
            world.send()
        world.set_topics(["any"])
        world.now_ms += world.limits.checkpoint_interval_ms
        while world.housekeep():
            pass
        counts = {name: each.pending for name, each in world.scheduler.topics if each.pending}
        assert counts == {"any": 1, **({"short-7": 1} if number >= 7 else {})}

    targets = world.scheduler.numbers.targets
    assert len(targets) == len(set(targets))
    assert len(targets) <= 6
    assert {"any", "short-7"} <= {each.topic for each in targets}
    world.kill()
    monkeypatch.setattr(world, "_check_topics", lambda *_: None)  # of some nobody knows any more
    world.drain()


def gone_again(world: World, monkeypatch: pytest.MonkeyPatch, *topics: str) -> None:
    """These topics come, have a timer that fires, go, and are counted no more."""
    monkeypatch.setattr(topic_counts, "KEPT_MAX", 0)
    monkeypatch.setattr(topic_counts, "SHOWN_MAX", 0)
    for topic in topics:
        monkeypatch.setitem(timer_world.TOPICS, topic, -1)
        world.set_topics([topic])
        world.broker.accept([world.now_ms], 10, topic)
        world.ingest(9)
        for _ in range(3):
            world.tick()
            world.sync()
            world.send()
    world.set_topics([])


def test_a_count_that_is_wrong_sends_no_timer_to_another_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    gone_again(world, monkeypatch, "short")
    world.broker.accept([world.now_ms + 5_000], 10, "short")
    world.ingest(9)
    scheduler = world.scheduler
    scheduler.topics.of("short").accepted -= 1
    scheduler.forget_gone()
    assert not scheduler.topics.counted("short")

    monkeypatch.setitem(timer_world.TOPICS, "new", -1)
    world.broker.accept([world.now_ms + DAY_MS], 10, "new")
    world.ingest(9)
    assert [each.topic for each in world.pending()] == ["short", "new"]


def test_what_a_hold_kept_back_goes_on_under_its_own_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what waits for another target, that has the number now, would be sorted in for ever."""
    world = World()
    gone_again(world, monkeypatch, "held")
    scheduler = world.scheduler
    changes.hold(scheduler, world.now_ms, "held", "key")
    changes.resume(scheduler, world.now_ms, "held", "key")
    scheduler.forget_gone()

    monkeypatch.setitem(timer_world.TOPICS, "new", -1)
    monkeypatch.setitem(timer_world.TOPICS, "newer", -1)
    world.broker.accept([world.now_ms], 10, "new")
    world.broker.accept([world.now_ms], 10, "newer")
    world.ingest(9)
    for _ in range(3):
        world.tick()
    assert scheduler.dispatcher.due.waiting == 2
    assert scheduler.next_tick_ms() > world.now_ms
