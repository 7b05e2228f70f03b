"""Schedules in a shard: what comes, and what does not, whatever happens to it."""

import dataclasses
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest

from duemq.errors import InvalidArgument, Overloaded
from duemq.v1 import message_pb2
from duemq_recurring.occurrences import LATE_MS, CatchUp, Recurrence
from duemq_recurring.schedule import DELETED, MOVED, Schedule, ScheduleChange, ScheduleState
from duemq_recurring.schedules import PATIENCE_MS
from duemq_recurring.steps import AT_ONCE
from duemq_server.timer_service.scheduling.cancelling import Cancelling
from duemq_server.timer_service.scheduling.fire_lane import FireBatch, FireOutcome
from duemq_server.timer_service.scheduling.schedules import changes as schedule_changes
from duemq_server.timer_service.scheduling.schedules.changes import CHANGED, CREATED, UNCHANGED
from duemq_server.timer_service.timers import schedule_entry
from duemq_server.timer_service.timers.limits import AHEAD_MS, Limits
from duemq_server.timer_service.timers.log_entries import Cancelled
from duemq_server.timer_service.timers.schedule_entry import decode_changes, encode_changes
from tests.property.schedule_world import MINUTE_MS, START_MS, ScheduleWorld, plan_of
from tests.property.timer_world import BROKER, LIMITS

POLICIES = list(CatchUp)


@pytest.fixture
def world() -> ScheduleWorld:
    return ScheduleWorld()


def came(world: ScheduleWorld, name: str = "s") -> list[int]:
    return [at_ms - START_MS for at_ms in world.broker.came.get(name, [])]


def every_second(first: int, last: int) -> list[int]:
    return list(range(1000 * first, 1000 * last + 1, 1000))


@pytest.mark.parametrize("policy", POLICIES)
def test_each_occurrence_comes_once(world: ScheduleWorld, policy: CatchUp) -> None:
    world.put("s", plan_of("seconds", policy))
    world.run_until(START_MS + 10_000)
    assert came(world) == every_second(0, 10)
    world.scheduler.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_kill_at_any_time_changes_nothing(policy: CatchUp) -> None:
    for at_ms in (0, 994, 999, 1_000, 1_001, 5_500):
        world = ScheduleWorld()
        world.put("s", plan_of("seconds", policy))
        world.run_until(START_MS + at_ms)
        world.kill()
        world.run_until(START_MS + 8_000)
        assert came(world) == every_second(0, 8)


@pytest.mark.parametrize(
    ("policy", "missed"),
    [
        (CatchUp.ALL, every_second(3, 500)),
        (CatchUp.LATEST, every_second(500, 500)),
        (CatchUp.NONE, every_second(500, 500)),  # the last one is not late
    ],
)
def test_after_a_downtime(world: ScheduleWorld, policy: CatchUp, missed: list[int]) -> None:
    world.put("s", plan_of("seconds", policy))
    world.run_until(START_MS + 2_000)
    world.now_ms += 498_200  # nobody ran
    world.kill()
    world.run_until(START_MS + 502_000)
    assert came(world) == every_second(0, 2) + missed + every_second(501, 502)


def test_a_missed_one_keeps_its_due_time_and_is_no_lateness(world: ScheduleWorld) -> None:
    """But the one that waited was late."""
    world.put("s", plan_of("seconds", CatchUp.ALL))
    world.run_until(START_MS + 2_000)
    world.now_ms += 3_200  # nobody ran
    world.kill()
    late, past_due = [], []
    store = world.broker.store

    def noted(batch: FireBatch, now_ms: int, *, refuse: bool) -> FireOutcome:
        late.extend((batch.due_ms[~batch.past_due] - START_MS).tolist())
        past_due.extend((batch.due_ms[batch.past_due] - START_MS).tolist())
        return store(batch, now_ms, refuse=refuse)

    world.broker.store = noted
    world.run_until(START_MS + 5_900)
    assert came(world) == every_second(0, 5)
    assert (late, past_due) == (every_second(3, 3), every_second(4, 5))


@pytest.mark.parametrize(
    ("policy", "missed"), [(CatchUp.ALL, 3), (CatchUp.LATEST, 1), (CatchUp.NONE, 0)]
)
def test_what_is_late_after_a_downtime(policy: CatchUp, missed: int) -> None:
    world = ScheduleWorld()
    world.put("s", plan_of("hours", policy))
    world.run_until(START_MS + 1)
    world.now_ms = START_MS + 3 * 60 * MINUTE_MS + LATE_MS + 1_000
    world.kill()
    world.run_until(world.now_ms + MINUTE_MS)
    assert len(came(world)) == 1 + missed


@pytest.mark.parametrize(
    ("policy", "missed"), [(CatchUp.ALL, 300), (CatchUp.LATEST, 1), (CatchUp.NONE, 1)]
)
def test_a_topic_that_is_gone(policy: CatchUp, missed: int) -> None:
    """One message waits, however long it takes."""
    world = ScheduleWorld()
    world.put("s", plan_of("seconds", policy))
    world.run_until(START_MS)
    world.set_topics([])
    world.run_until(START_MS + 300_500)
    assert world.scheduler.ledger.pending == 1
    world.set_topics(["any"])
    world.run_until(START_MS + 300_600)
    assert len(came(world)) == 1 + missed
    assert came(world)[-1] == 300_000


@pytest.mark.parametrize(
    ("policy", "missed"), [(CatchUp.ALL, 10), (CatchUp.LATEST, 1), (CatchUp.NONE, 1)]
)
def test_a_pause(policy: CatchUp, missed: int) -> None:
    world = ScheduleWorld()
    world.put("s", plan_of("seconds", policy))
    world.run_until(START_MS + 3_500)
    world.pause("s")
    assert world.scheduler.ledger.pending == 0
    world.sync()
    world.kill()
    world.run_until(START_MS + 13_500)
    assert came(world) == every_second(0, 3)
    world.resume("s")
    world.run_until(START_MS + 13_600)
    assert came(world)[4:] == every_second(14 - missed, 13)
    world.run_until(START_MS + 15_000)
    assert came(world)[-2:] == every_second(14, 15)


def test_a_pause_that_is_not_caught_up(world: ScheduleWorld) -> None:
    world.put("s", plan_of("hours", CatchUp.ALL))
    world.run_until(START_MS + 1)
    world.pause("s")
    world.run_until(START_MS + 200 * MINUTE_MS)
    schedule_changes.resume(world.scheduler, "s", world.now_ms, CatchUp.NONE)
    world.run_until(START_MS + 240 * MINUTE_MS)
    assert came(world) == [0, 240 * MINUTE_MS]


@pytest.mark.parametrize("policy", [CatchUp.LATEST, CatchUp.NONE])
@pytest.mark.parametrize("saved", [False, True])
def test_all_that_a_pause_has_missed_comes_if_that_is_asked_for(
    world: ScheduleWorld, policy: CatchUp, saved: bool
) -> None:
    """Also more than comes at once, over restarts; what is missed later is the policy's again."""
    world.put("s", plan_of("seconds", policy))
    world.run_until(START_MS + 10_500)
    world.pause("s")
    world.now_ms += 300_000
    schedule_changes.resume(world.scheduler, "s", world.now_ms, CatchUp.ALL)
    world.set_away({"b1", "b2"})
    for _ in range(3):
        world.run_until(world.now_ms + 10_000)
        world.sync()
        if saved:
            world.checkpoint()
        world.kill()
    resumed = 311  # of the first second to 310 and a half
    world.set_away(set())
    world.run_until(world.now_ms + 90_000)
    came = [(at_ms - START_MS) // 1_000 for at_ms in world.broker.came["s"]]
    assert came[:resumed] == list(range(resumed))
    assert came[resumed] > resumed
    assert came[resumed:] == list(range(came[resumed], came[-1] + 1))
    assert world.scheduler.schedules.known("s").state.all_until_ms == 0


@pytest.mark.parametrize("left_out", [(), (START_MS, START_MS + 1)])
@pytest.mark.parametrize("all_until_ms", [0, START_MS + 7])
def test_an_entry_and_back(left_out: tuple[int, ...], all_until_ms: int) -> None:
    state = ScheduleState(False, START_MS, 3, START_MS - 1, left_out, all_until_ms)
    changes = [ScheduleChange("s", MOVED, state), ScheduleChange("t", DELETED)]
    assert decode_changes(encode_changes(changes)) == changes


@pytest.mark.parametrize(
    ("text", "left_out", "all_until_ms"), [(b"[3,7]", (3, 7), 0), (b"[-500,3]", (3,), 500)]
)
def test_an_entry_of_the_release_before_is_read(
    monkeypatch: pytest.MonkeyPatch, text: bytes, left_out: tuple[int, ...], all_until_ms: int
) -> None:
    monkeypatch.setattr(schedule_entry, "_more_of", lambda _: text)
    written = encode_changes([ScheduleChange("s", MOVED, ScheduleState(False, START_MS, 3))])
    state = ScheduleState(False, START_MS, 3, left_out=left_out, all_until_ms=all_until_ms)
    assert decode_changes(written) == [ScheduleChange("s", MOVED, state)]


def test_a_change_takes_away_what_waits_and_begins_now(world: ScheduleWorld) -> None:
    assert world.put("s", plan_of("hours", CatchUp.ALL)) == (
        CREATED,
        world.scheduler.log.end_position,
    )
    world.run_until(START_MS + MINUTE_MS)
    changed = world.put("s", plan_of("seconds", CatchUp.ALL))
    assert changed is not None
    assert changed.what == CHANGED
    assert world.scheduler.ledger.replaced == 1
    world.run_until(START_MS + MINUTE_MS + 2_000)
    assert came(world) == [0, *every_second(60, 62)]


def test_the_same_again_changes_nothing(world: ScheduleWorld) -> None:
    plan = dataclasses.replace(plan_of("seconds", CatchUp.ALL), from_given=False)
    world.put("s", plan)
    world.run_until(START_MS + 2_500)
    end = world.scheduler.log.end_position
    assert world.put("s", plan) == (UNCHANGED, end)
    assert world.pause("x") is None
    assert world.scheduler.log.end_position == end
    schedule = world.scheduler.schedules.get("s")
    assert schedule is not None
    assert schedule.plan.recurrence.from_ms == START_MS + 1_000  # a period after it was made


def test_a_deleted_one_is_gone(world: ScheduleWorld) -> None:
    world.put("s", plan_of("seconds", CatchUp.ALL))
    world.run_until(START_MS + 1_500)
    world.delete("s")
    world.sync()
    world.kill()
    world.run_until(START_MS + 9_000)
    assert came(world) == every_second(0, 1)
    assert len(world.scheduler.schedules) == 0
    assert world.scheduler.schedules.bytes == 0


def test_count_and_until_end_it(world: ScheduleWorld) -> None:
    world.put("three", plan_of("seconds", CatchUp.ALL, count=3))
    world.put("until", plan_of("seconds", CatchUp.ALL, until_ms=START_MS + 2_000))
    world.run_until(START_MS + 1_500)
    world.kill()
    world.run_until(START_MS + 60_000)
    assert came(world, "three") == came(world, "until") == every_second(0, 2)
    assert all(each.ended for each in world.scheduler.schedules)
    assert world.scheduler.schedules.next_ms() > world.now_ms


def test_one_that_is_cancelled_by_its_handle_is_left_out(world: ScheduleWorld) -> None:
    world.put("s", plan_of("seconds", CatchUp.ALL))
    world.run_until(START_MS + 1_500)
    schedule = world.scheduler.schedules.get("s")
    assert schedule is not None
    [waits] = schedule.pending
    handle = Cancelled(waits.source, waits.offset, waits.due_ms)
    assert Cancelling(world.scheduler, [handle]).advance(world.now_ms)
    world.run_until(START_MS + 4_000)
    assert came(world) == every_second(0, 1) + every_second(3, 4)


@pytest.mark.parametrize(
    ("resumed", "caught_up"),
    [
        (CatchUp.ALL, [4, 6, 8, 9, 10, 11, 12, 13]),
        (CatchUp.LATEST, [13]),
        (CatchUp.NONE, [13]),
    ],
)
def test_one_that_was_cancelled_between_others_does_not_come_after_a_pause(
    world: ScheduleWorld, resumed: CatchUp, caught_up: list[int]
) -> None:
    world.put("s", plan_of("seconds", CatchUp.ALL))
    world.run_until(START_MS + 3_500)
    world.pause("s")
    world.run_until(START_MS + 13_500)
    world.set_topics([])  # what comes now waits
    world.resume("s")
    schedule = world.scheduler.schedules.get("s")
    assert schedule is not None
    assert [each.at_ms - START_MS for each in schedule.pending] == every_second(4, 13)
    handles = [Cancelled(each.source, each.offset, each.due_ms) for each in schedule.pending]
    for at in (1, 3):
        assert Cancelling(world.scheduler, [handles[at]]).advance(world.now_ms)
    world.pause("s")
    world.sync()
    world.kill()
    world.set_topics(["any"])
    schedule_changes.resume(world.scheduler, "s", world.now_ms, resumed)
    world.run_until(START_MS + 15_000)
    assert came(world) == [1_000 * each for each in (*range(4), *caught_up, 14, 15)]
    schedule = world.scheduler.schedules.get("s")
    assert schedule is not None
    assert not schedule.state.left_out
    world.scheduler.check()


def paused_without_its_latest(world: ScheduleWorld) -> Schedule:
    """One a second; ten came at once, and the last of them was cancelled by its handle."""
    world.put("s", plan_of("seconds", CatchUp.ALL))
    world.run_until(START_MS + 3_500)
    world.pause("s")
    world.run_until(START_MS + 13_500)
    world.set_topics([])
    world.resume("s")
    schedule = world.scheduler.schedules.get("s")
    assert schedule is not None
    last = schedule.pending[-1]
    gone = [Cancelled(last.source, last.offset, last.due_ms)]
    assert Cancelling(world.scheduler, gone).advance(world.now_ms)
    world.pause("s")
    return schedule


def test_what_has_not_come_since_the_clock_was_set_back_comes_after_a_pause(
    world: ScheduleWorld,
) -> None:
    """Though the last one that left was due later, by the clock as it was before."""
    schedule = paused_without_its_latest(world)
    world.now_ms -= 8_000
    for _ in range(2):
        world.resume("s")
        assert [each.at_ms - START_MS for each in schedule.pending] == every_second(4, 5)
        world.pause("s")
    assert schedule.state.left_out == (START_MS + 13_000,)
    world.resume("s")
    world.set_topics(["any"])
    world.run_until(START_MS + 14_000)
    assert came(world) == [*every_second(0, 12), 14_000]


def test_the_latest_that_was_cancelled_does_not_come_after_a_pause(world: ScheduleWorld) -> None:
    paused_without_its_latest(world)
    world.set_topics(["any"])
    schedule_changes.resume(world.scheduler, "s", world.now_ms, CatchUp.LATEST)
    world.run_until(START_MS + 14_000)
    assert came(world) == [*every_second(0, 3), 12_000, 14_000]


def test_what_is_due_at_once_shares_an_entry(world: ScheduleWorld) -> None:
    for number in range(50):
        world.put(f"s{number}", plan_of("minutes", CatchUp.LATEST))
    world.run_until(START_MS + 1_000)
    kinds: list[int] = []
    append = world.scheduler.log.append
    world.scheduler.log.append = lambda kind, parts: (kinds.append(kind), append(kind, parts))[1]  # type: ignore[method-assign]
    world.run_until(START_MS + MINUTE_MS)
    assert kinds.count(22) == 1


def test_memory_holds_no_more_than_is_allowed() -> None:
    world = ScheduleWorld(limits=dataclasses.replace(LIMITS, schedules_max=2))
    plan = plan_of("hours", CatchUp.ALL)
    world.put("a", plan)
    world.put("b", plan)
    with pytest.raises(Overloaded, match="schedules_max: this shard has 2 schedules"):
        schedule_changes.put(world.scheduler, "c", plan, world.now_ms)
    world.delete("a")
    assert world.put("c", plan) is not None


def test_bytes_are_bounded() -> None:
    world = ScheduleWorld(limits=dataclasses.replace(LIMITS, schedule_bytes_max=5_000))
    plan = dataclasses.replace(plan_of("hours", CatchUp.ALL), record=b"\x0a\x7d" + bytes(3_000))
    world.put("a", plan)
    with pytest.raises(Overloaded, match="schedule_bytes_max"):
        schedule_changes.put(world.scheduler, "b", plan, world.now_ms)
    assert len(world.scheduler.schedules) == 1


def test_nothing_to_come_is_refused(world: ScheduleWorld) -> None:
    plan = plan_of("seconds", CatchUp.ALL, until_ms=START_MS + 1)
    with pytest.raises(InvalidArgument, match="until_ms"):
        schedule_changes.put(world.scheduler, "s", plan, START_MS + 5_000)


def test_a_shard_without_schedules_writes_what_it_always_wrote() -> None:
    world = ScheduleWorld()
    before = world.disk.content("/data/checkpoint")
    world.put("s", plan_of("hours", CatchUp.ALL))
    world.delete("s")
    world.sync()
    world.checkpoint()
    assert b'"schedules"' not in world.disk.content("/data/checkpoint")
    assert b'"schedules"' not in before
    assert world.scheduler.schedules.next_ms() > START_MS + 10**15


def test_checkpoints_have_all_of_it() -> None:
    world = ScheduleWorld()
    world.put("s", plan_of("seconds", CatchUp.ALL))
    world.put("paused", plan_of("hours", CatchUp.NONE))
    world.pause("paused")
    world.run_until(START_MS + 5_500)
    saved = world.scheduler.schedules.saved()
    world.checkpoint()
    world.kill()
    assert world.directory.replayed == 0
    assert world.scheduler.schedules.saved() == saved
    world.run_until(START_MS + 7_000)
    assert came(world) == every_second(0, 7)


def test_many_missed_ones_come_in_parts(world: ScheduleWorld) -> None:
    world.put("s", plan_of("seconds", CatchUp.ALL))
    world.run_until(START_MS)
    world.now_ms += 1_000_000
    world.advance()
    world.tick(6)
    world.advance()
    assert world.scheduler.ledger.pending <= AT_ONCE
    world.set_away({BROKER})
    world.set_away(set())
    world.run_until(START_MS + 1_001_000)
    assert came(world) == every_second(0, 1_001)


def test_missed_ones_with_large_bodies_come_one_by_one(world: ScheduleWorld) -> None:
    plan = plan_of("seconds", CatchUp.ALL)
    body = b"seconds"
    padding = message_pb2.Record(body=body, properties={"pad": "x" * 600_000})
    world = ScheduleWorld(limits=Limits())
    world.put("s", dataclasses.replace(plan, record=padding.SerializeToString()))
    world.run_until(START_MS)
    world.now_ms += 10_500
    world.advance()
    world.tick(6)
    world.advance()
    assert world.scheduler.ledger.pending == 2
    world.run_until(START_MS + 11_000)
    assert came(world) == every_second(0, 11)


def test_a_schedule_that_this_machine_cannot_read_waits(
    world: ScheduleWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Zone data of the machine that took it were newer."""
    world.put("s", plan_of("seconds", CatchUp.ALL))
    world.put("lost", plan_of("minutes", CatchUp.ALL))
    schedule = world.scheduler.schedules.get("lost")
    assert schedule is not None
    recurrence = dataclasses.replace(schedule.plan.recurrence, zone="Mars/Olympus")
    schedule.plan = dataclasses.replace(schedule.plan, recurrence=recurrence)
    world.sync()
    world.checkpoint()
    world.kill()
    world.run_until(START_MS + 200_000)
    assert came(world) == every_second(0, 200)
    assert len(came(world, "lost")) == 1
    assert "Mars/Olympus" in caplog.text
    assert world.put("lost", plan_of("minutes", CatchUp.ALL)) is not None
    world.run_until(START_MS + 300_000)
    assert len(came(world, "lost")) > 1


def test_a_year_of_schedules() -> None:
    """Of wall times in two zones, day by day, against the calendar."""
    world = ScheduleWorld()
    zones = {"America/New_York": "30 2 * * *", "Europe/Berlin": "0 9 * * MON-FRI"}
    for zone, text in zones.items():
        recurrence = Recurrence(cron=text, zone=zone)
        world.put(zone, dataclasses.replace(plan_of("minutes", CatchUp.ALL), recurrence=recurrence))
    end_ms = START_MS + 365 * 24 * 60 * MINUTE_MS
    world.run_until(end_ms)
    world.scheduler.check()
    day, last = datetime.fromtimestamp(START_MS / 1000, UTC).date(), end_ms / 1000
    expected: dict[str, list[str]] = {zone: [] for zone in zones}
    for number in range(-1, 367):
        date = day + timedelta(days=number)
        night = datetime.combine(date, time(2, 30), ZoneInfo("America/New_York"))
        if date.strftime("%m-%d") == "03-10":  # clocks go forward from 2 to 3 in 2024
            night = night.replace(hour=3, minute=0)
        times = {"America/New_York": night}
        if date.isoweekday() <= 5:
            times["Europe/Berlin"] = datetime.combine(date, time(9), ZoneInfo("Europe/Berlin"))
        for zone, at in times.items():
            if START_MS / 1000 <= at.timestamp() <= last:
                expected[zone].append(at.isoformat())
    for zone, times_of in expected.items():
        instants = [each / 1000 for each in world.broker.came[zone]]
        found = [datetime.fromtimestamp(each, ZoneInfo(zone)).isoformat() for each in instants]
        assert found == times_of


def test_one_that_waited_while_the_log_was_full_moves_on_once() -> None:
    """Its time comes before the log has room: it is due for two reasons, and has one message."""
    world = ScheduleWorld()
    world.put("a", plan_of("minutes", CatchUp.LATEST))
    world.put("b", plan_of("seconds", CatchUp.LATEST, topic="keyed"))
    world.set_topics(["keyed"])
    world.now_ms += MINUTE_MS + PATIENCE_MS
    world.tick(AHEAD_MS)  # b's message goes, a's waits for its topic
    world.directory.log.disk_full = True
    world.advance()  # a says when to ask again, b cannot move on
    world.directory.log.disk_full = False
    world.now_ms += MINUTE_MS
    world.advance()
    waits = world.scheduler.schedules.known("a").pending
    assert [each.at_ms % MINUTE_MS for each in waits] == [0]
    world.scheduler.check()
