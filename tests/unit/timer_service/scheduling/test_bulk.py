"""Jobs on what is pending: what moves while they are at work, and what is left after a crash."""

from collections.abc import Callable

import pytest

from duemq.errors import Unavailable
from duemq_server.storage import checkpoint
from duemq_server.storage.errors import LogFull
from duemq_server.storage.record import HEADER_BYTES
from duemq_server.timer_service.scheduling.bulk import walk as walking
from duemq_server.timer_service.scheduling.bulk.adopting import adopt
from duemq_server.timer_service.scheduling.bulk.jobs import (
    KEEP_MS,
    REMEMBERED_MAX,
    BulkJobs,
    Job,
    Which,
)
from duemq_server.timer_service.scheduling.bulk.walk import Walk, accept
from duemq_server.timer_service.scheduling.cancelling import CANCELLED
from duemq_server.timer_service.timers.keyed import TimerKey
from duemq_server.timer_service.timers.log_entries import Cancelled, TargetId
from tests.property.timer_world import BROKER, DATA, OTHER, SOURCE, START_MS, World
from tests.unit.timer_service.scheduling.keyed.test_changes import (
    cancelling,
    decided,
    scheduling,
)

NO_END_MS = 1 << 60
FAR_MS = 20_000  # behind the near window
ALL = Which("any", "", 0, NO_END_MS, None)
ID = b"j" * 16


def flush(world: World) -> None:
    world.run(world.scheduler.tiers.begin_flush(world.now_ms))


def add(world: World, *waits: int, topic: str = "any") -> None:
    world.broker.accept([world.now_ms + wait for wait in waits], 10, topic)
    world.ingest(1)


def far_world(*waits: int) -> World:
    """Timers in blocks."""
    world = World()
    add(world, *waits)
    flush(world)
    return world


def begun(world: World, which: Which = ALL) -> tuple[Job, Walk]:
    job = accept(world.scheduler, ID, which, world.now_ms)
    return job, Walk(world.scheduler, job)


def go_on(world: World, walk: Walk) -> bool:
    reading = walk.reading()
    if reading is None:
        return walk.step(world.now_ms)
    reading.run()
    walk.read(reading)
    return True


def finish(world: World, walk: Walk) -> None:
    while go_on(world, walk):
        pass
    world.scheduler.check()


def handles(world: World) -> list[tuple[int, int]]:
    return [(each.offset, each.due_ms - START_MS) for each in world.pending()]


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_all_that_is_pending_of_a_topic_is_cancelled(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walking, "CANCELLED_AT_ONCE", at_once)
    world = far_world(FAR_MS, 2 * FAR_MS)
    add(world, FAR_MS, topic="keyed")
    add(world, 5_000, FAR_MS, 3 * FAR_MS)
    job, walk = begun(world)

    finish(world, walk)

    assert job.count == 5
    assert [each.topic for each in world.pending()] == ["keyed"]
    asked = [Cancelled(SOURCE, n, world.broker.due_ms[n]) for n in (0, 1, 3, 4, 5)]
    assert world.cancel_handles(asked) == [CANCELLED] * 5


@pytest.mark.parametrize(
    ("from_ms", "to_ms", "left"),
    [(0, START_MS + FAR_MS, [1, 2, 3]), (START_MS + FAR_MS, START_MS + FAR_MS + 1, [0, 2, 3])],
)
def test_only_what_is_due_in_time(from_ms: int, to_ms: int, left: list[int]) -> None:
    world = far_world(100, FAR_MS, FAR_MS + 1, 2 * FAR_MS)

    finish(world, begun(world, Which("any", "", from_ms, to_ms, None))[1])

    assert [offset for offset, _ in handles(world)] == left


@pytest.mark.parametrize("wait", [5_000, FAR_MS])
def test_only_keys_that_begin_so(wait: int) -> None:
    world = World()
    decided(world, scheduling(world, "a/1", "a/2", "b/1", wait=wait))
    if wait == FAR_MS:
        flush(world)
    add(world, wait)
    job, walk = begun(world, Which("any", "a/", 0, NO_END_MS, None))

    finish(world, walk)

    assert job.count == 2
    keys = [TimerKey("any", key) for key in ("a/1", "b/1")]
    assert decided(world, cancelling(world, *keys)) == ["UNKNOWN", "CANCELLED"]


def test_what_is_moved_is_of_the_other_topic_and_due_as_before() -> None:
    world = far_world(FAR_MS, 2 * FAR_MS)
    decided(world, scheduling(world, "own", wait=FAR_MS))
    flush(world)
    add(world, 3_000, FAR_MS)
    add(world, FAR_MS, topic="keyed")
    before = {each.due_ms for each in world.pending()}
    which = ALL._replace(to_topic="keyed")
    job, walk = begun(world, which)

    finish(world, walk)

    assert job.count == 4
    assert {each.due_ms for each in world.pending()} == before
    assert sorted(each.topic for each in world.pending()) == ["any"] + ["keyed"] * 5
    topics = world.scheduler.topics
    assert [topics.of(name).replaced for name in ("any", "keyed")] == [4, 0]
    assert topics.of("keyed").accepted == 5
    world.sync()
    world.kill()
    assert sorted(each.topic for each in world.pending()) == ["any"] + ["keyed"] * 5
    # The one with a key is where it was.
    assert decided(world, cancelling(world, TimerKey("any", "own"))) == ["CANCELLED"]


def test_what_was_for_a_queue_of_a_broker_without_the_other_topic_goes_to_one_of_another() -> None:
    """It would wait for that broker for ever; what was for one queue stays together."""
    world = far_world(FAR_MS)
    add(world, 3_000, FAR_MS, topic="keyed")
    flush(world)
    add(world, 4_000, 2 * FAR_MS, topic="keyed")
    dispatcher = world.scheduler.dispatcher
    dispatcher.set_routes({"any": {OTHER: 7}, "keyed": {BROKER: 2}})
    job, walk = begun(world, Which("keyed", "", 0, NO_END_MS, None, to_topic="any"))
    while not job.count:
        go_on(world, walk)
    dispatcher.set_routes({"any": {BROKER: 2, OTHER: 6}})

    finish(world, walk)

    assert job.count == 4
    [moved] = [each for each in world.scheduler.numbers.targets if each.broker == OTHER]
    assert moved.topic == "any"
    assert 0 <= moved.queue_id < 7
    world.set_away(set())
    assert dispatcher.choose(moved, world.now_ms) is not None
    assert {each.topic for each in world.pending()} == {"any"}


@pytest.mark.parametrize("routes", [{}, {"any": {}}, {"any": {BROKER: 1, OTHER: 7}}])
def test_what_was_for_a_queue_is_for_it_where_its_broker_serves_the_other_topic_or_nobody_does(
    routes: dict[str, dict[str, int]],
) -> None:
    world = World()
    add(world, FAR_MS, topic="keyed")
    world.scheduler.dispatcher.set_routes(routes)

    finish(world, begun(world, Which("keyed", "", 0, NO_END_MS, None, to_topic="any"))[1])

    assert world.scheduler.numbers.targets[-1] == TargetId(BROKER, "any", 1)


@pytest.mark.parametrize("by_ms", [None, 7_000, -3_000])
def test_what_comes_while_it_is_open_stays(by_ms: int | None) -> None:
    world = far_world(FAR_MS)
    add(world, 5_000)
    job, walk = begun(world, ALL._replace(by_ms=by_ms))
    add(world, 5_000, 3 * FAR_MS)
    flush(world)
    add(world, 4 * FAR_MS)

    finish(world, walk)

    assert job.count == 2
    of_broker = [each for each in world.pending() if each.source == SOURCE]
    assert [each.offset for each in of_broker] == [2, 3, 4]
    shifted = [each for each in world.pending() if each.source != SOURCE]
    expected = [] if by_ms is None else [5_000 + by_ms, FAR_MS + by_ms]
    assert [each.due_ms - START_MS for each in shifted] == expected


def test_what_would_be_due_by_now_is_due_at_once() -> None:
    world = far_world(FAR_MS, 3 * FAR_MS)

    finish(world, begun(world, ALL._replace(by_ms=-2 * FAR_MS))[1])

    assert [each.due_ms - START_MS for each in world.pending()] == [0, FAR_MS]


def load(world: World) -> None:
    world.now_ms = START_MS + FAR_MS - 5_000
    while world.housekeep():
        pass


def evict(world: World) -> None:
    world.scheduler.tiers.evict(0)
    flush(world)


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("move", [load, evict])
@pytest.mark.parametrize("by_ms", [None, 1_000])
def test_what_moves_meanwhile_is_found(
    move: Callable[[World], None], steps: int, by_ms: int | None
) -> None:
    world = far_world(FAR_MS, FAR_MS, 9 * FAR_MS)
    add(world, 6_000, 7_000)
    job, walk = begun(world, ALL._replace(by_ms=by_ms))
    for _ in range(steps):
        go_on(world, walk)
    move(world)

    finish(world, walk)

    assert job.count == 5
    assert not any(each.source == SOURCE for each in world.pending())


@pytest.mark.parametrize("steps", range(5))
def test_what_is_cancelled_meanwhile_is_not_counted(steps: int) -> None:
    world = far_world(FAR_MS, FAR_MS)
    add(world, 5_000, 3 * FAR_MS)
    job, walk = begun(world)
    for _ in range(steps):
        go_on(world, walk)
    outcomes = {world.cancel(offset) for offset in range(4)}

    finish(world, walk)

    assert outcomes == {CANCELLED}
    assert world.scheduler.ledger.cancelled == 4
    assert job.count <= 4


@pytest.mark.parametrize("by_ms", [None, 1_000])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("steps", range(7))
def test_a_job_goes_on_after_a_crash(
    steps: int, saved: bool, by_ms: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walking, "CANCELLED_AT_ONCE", 1)
    monkeypatch.setattr(walking, "SHIFTED_AT_ONCE", 1)
    world = far_world(FAR_MS, FAR_MS)
    add(world, 5_000, 3 * FAR_MS)
    which = ALL._replace(by_ms=by_ms)
    _, walk = begun(world, which)
    for _ in range(steps):
        go_on(world, walk)
    world.sync()
    if saved:
        world.now_ms += world.limits.checkpoint_interval_ms
        while world.housekeep():
            world.sync()
        world.now_ms = START_MS
    done = world.scheduler.ledger
    world.kill()
    assert world.scheduler.ledger == done

    job = world.scheduler.bulk.open
    assert job is not None
    finish(world, Walk(world.scheduler, job))
    world.sync()
    world.kill()

    again = world.scheduler.bulk.find(ID)
    assert again is not None
    assert (again.which, again.count, bool(again.over_ms)) == (which, 4, True)
    ledger = world.scheduler.ledger
    assert (ledger.cancelled, ledger.replaced) == ((4, 0) if by_ms is None else (0, 4))


def test_a_full_log_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = far_world(FAR_MS)
    add(world, 5_000)
    job, walk = begun(world)
    go_on(world, walk)
    before = handles(world)

    def full(kind: int, parts: object) -> tuple[int, int]:
        raise LogFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(world.directory.log, "append", full)
        with pytest.raises(LogFull):
            go_on(world, walk)
        world.scheduler.check()
        assert (handles(world), job.count) == (before, 0)
    finish(world, walk)

    assert job.count == 2


@pytest.mark.parametrize("by_ms", [None, 60_000])
@pytest.mark.parametrize("body", [False, True])
def test_a_block_that_cannot_be_read_is_named_and_stays(body: bool, by_ms: int | None) -> None:
    world = far_world(FAR_MS)
    add(world, 100 * FAR_MS)
    flush(world)
    damaged = max(world.scheduler.segments.blocks(), key=lambda each: each.last_due_ms)
    path = f"{DATA}/segments/{damaged.file}"
    file = world.disk.open(path)
    at = damaged.index_length + HEADER_BYTES + 2 if body else 40
    file.pwritev([b"damage"], damaged.position + at)
    file.close()
    job, walk = begun(world, ALL._replace(by_ms=by_ms))

    finish(world, walk)

    if body and by_ms is None:  # bodies are not looked at
        assert (job.count, job.problem) == (2, "")
        return
    assert job.count == 1
    assert damaged.file in job.problem
    assert world.scheduler.ledger.pending == (1 if by_ms is None else 2)


@pytest.mark.parametrize("at", [0, 8])
def test_damage_around_bodies_that_are_whole_loses_none(at: int) -> None:
    world = far_world(FAR_MS, 2 * FAR_MS)
    [damaged] = world.scheduler.segments.blocks()
    file = world.disk.open(f"{DATA}/segments/{damaged.file}")
    file.pwritev([b"!"], damaged.position + damaged.index_length + at)
    file.close()
    job, walk = begun(world, ALL._replace(by_ms=60_000))

    finish(world, walk)

    assert (job.count, job.problem) == (2, "")


def test_a_bounded_number_of_jobs_is_remembered_for_a_day() -> None:
    world = World()
    for number in range(REMEMBERED_MAX + 1):
        job = accept(world.scheduler, number.to_bytes(16, "big"), ALL, world.now_ms)
        finish(world, Walk(world.scheduler, job))

    jobs = world.scheduler.bulk
    assert jobs.find(bytes(16)) is None
    assert jobs.find((1).to_bytes(16, "big")) is not None
    for now_ms in range(START_MS, START_MS + KEEP_MS + 2, KEEP_MS // 24):
        assert jobs.saved()
        jobs.expire(now_ms)
    jobs.expire(START_MS + KEEP_MS + 1)
    assert jobs.saved() == []


def test_a_job_that_is_over_just_after_the_clock_was_set_is_remembered() -> None:
    world = far_world(FAR_MS)
    jobs = world.scheduler.bulk
    finish(world, begun(world, ALL._replace(topic="other"))[1])
    jobs.expire(START_MS)
    world.now_ms -= 2 * KEEP_MS
    job = accept(world.scheduler, b"k" * 16, ALL, world.now_ms)
    finish(world, Walk(world.scheduler, job))
    jobs.expire(world.now_ms + 1_000)
    assert [each.id for each in jobs.known] == [ID, job.id]


@pytest.mark.parametrize("by_ms", [2 * KEEP_MS, -2 * KEEP_MS, -START_MS])
@pytest.mark.parametrize("killed", [False, True])
def test_a_clock_that_is_set_forgets_no_job(killed: bool, by_ms: int) -> None:
    """Whoever got no answer asks again, and would shift what was shifted."""
    world = far_world(FAR_MS)
    job, walk = begun(world, ALL._replace(by_ms=60_000))
    finish(world, walk)
    now_ms = START_MS
    for _ in range(3):
        now_ms += 1_000
        world.scheduler.bulk.expire(now_ms)
    if killed:
        world.sync()
        world.kill()
    now_ms += by_ms
    for _ in range(3):
        now_ms += 1_000
        world.scheduler.bulk.expire(now_ms)
    found = world.scheduler.bulk.find(job.id)
    assert found is not None
    assert found.over_ms
    for _ in range(25):
        now_ms += KEEP_MS // 24
        world.scheduler.bulk.expire(now_ms)
    assert world.scheduler.bulk.find(job.id) is None


def test_a_job_s_offsets_are_those_of_timers_that_were_there() -> None:
    world = far_world(FAR_MS, FAR_MS)
    job, _ = begun(world)

    assert job.fences == {SOURCE: 2}
    assert Job.from_json(job.to_json()) == job


def test_a_new_shard_notes_the_jobs_of_others_as_over() -> None:
    world = World()
    assert adopt(world.scheduler, world.now_ms, {ID: ALL, b"k" * 16: ALL}) == 2
    assert adopt(world.scheduler, world.now_ms, {ID: ALL}) == 0
    world.sync()
    world.kill()
    add(world, FAR_MS)
    for job_id in (ID, b"k" * 16):
        job = world.scheduler.bulk.find(job_id)
        assert job is not None
        assert (job.which, job.count, bool(job.over_ms)) == (ALL, 0, True)
    assert adopt(world.scheduler, world.now_ms, {b"l" * 16: ALL}) == 0  # it may be about this one
    assert world.scheduler.bulk.find(b"l" * 16) is None


def test_a_job_that_was_noted_in_part_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    log, append = world.scheduler.log, world.scheduler.log.append
    room = iter([True, False])

    def full(kind: int, parts: list[bytes]) -> tuple[int, int]:
        if not next(room):
            raise LogFull("no room")
        return append(kind, parts)

    with monkeypatch.context() as patch:
        patch.setattr(log, "append", full)
        with pytest.raises(LogFull):
            adopt(world.scheduler, world.now_ms, {ID: ALL})
    with pytest.raises(Unavailable, match="under way"):
        adopt(world.scheduler, world.now_ms, {ID: ALL, b"k" * 16: ALL})
    world.sync()
    world.kill()
    add(world, FAR_MS)
    job = world.scheduler.bulk.open
    assert job is not None
    finish(world, Walk(world.scheduler, job))
    assert (job.count, world.scheduler.ledger.pending) == (0, 1)


@pytest.mark.parametrize("steps", [0, 3, 4, 6])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("crash", range(4))
def test_a_cancel_in_front_of_a_shift_misses_none(
    crash: int, saved: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are whole after a crash before, in and behind the one that went first."""
    monkeypatch.setattr(walking, "CANCELLED_AT_ONCE", 1)
    monkeypatch.setattr(walking, "SHIFTED_AT_ONCE", 1)
    world = far_world(FAR_MS, 2 * FAR_MS)
    add(world, 5_000, 3 * FAR_MS)
    jobs = world.scheduler.bulk

    def crashes(at: int) -> None:
        nonlocal jobs
        if at != crash:
            return
        world.sync()
        if saved:
            world.now_ms += world.limits.checkpoint_interval_ms
            while world.housekeep():
                world.sync()
            world.now_ms = START_MS
        before = jobs.saved()
        world.kill()
        jobs = world.scheduler.bulk
        again = [job for job in jobs.saved() if not job["over_ms"]]
        assert again == [job for job in before if not job["over_ms"]]

    _, shift = begun(world, ALL._replace(by_ms=60_000))
    for _ in range(steps):
        go_on(world, shift)
    done = world.scheduler.ledger.replaced
    accept(world.scheduler, b"k" * 16, ALL, world.now_ms)
    crashes(0)
    add(world, FAR_MS)  # this one comes behind the cancel
    assert jobs.open is not None
    walk = Walk(world.scheduler, jobs.open)
    go_on(world, walk)
    go_on(world, walk)
    crashes(1)
    assert jobs.open is not None
    assert jobs.open.id == b"k" * 16
    finish(world, Walk(world.scheduler, jobs.open))
    crashes(2)
    walking.go_on(world.scheduler, world.now_ms)
    crashes(3)
    assert jobs.open is not None
    assert (jobs.open.id, jobs.behind) == (ID, None)
    finish(world, Walk(world.scheduler, jobs.open))

    ledger = world.scheduler.ledger
    assert (ledger.cancelled, ledger.replaced, ledger.pending) == (4, done, 1)
    assert [job.count for job in jobs.known] == [4, done]


def test_who_follows_with_an_older_checkpoint_reads_what_goes_on_after_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica, say: the log alone is to tell which job a slice is of."""
    world = far_world(FAR_MS)
    begun(world, ALL._replace(by_ms=60_000))
    world.sync()
    world.checkpoint()
    path = f"{DATA}/checkpoint"
    older = checkpoint.load(path, world.disk)
    assert older is not None
    monkeypatch.setattr(world.directory.log, "delete_before", lambda position: 0)
    accept(world.scheduler, b"k" * 16, ALL._replace(topic="other"), world.now_ms)
    assert world.scheduler.bulk.open is not None
    finish(world, Walk(world.scheduler, world.scheduler.bulk.open))
    world.sync()
    world.checkpoint()
    world.kill()
    jobs = world.scheduler.bulk
    if jobs.open is None:
        walking.go_on(world.scheduler, world.now_ms)
    assert jobs.open is not None
    finish(world, Walk(world.scheduler, jobs.open))
    world.sync()
    checkpoint.save(path, older, world.disk)
    world.kill()
    assert [job.count for job in world.scheduler.bulk.known] == [0, 1]


def test_an_older_release_reads_what_goes_on_as_one_that_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It knows of one open job, and refuses a log with a slice of another."""
    monkeypatch.setattr(walking, "SHIFTED_AT_ONCE", 1)
    world = far_world(FAR_MS, FAR_MS)
    job, shift = begun(world, ALL._replace(by_ms=60_000))
    while not job.count:
        go_on(world, shift)
    other = accept(world.scheduler, b"k" * 16, ALL._replace(topic="other"), world.now_ms)
    finish(world, Walk(world.scheduler, other))
    walking.go_on(world.scheduler, world.now_ms)
    world.sync()
    with monkeypatch.context() as patch:
        patch.setattr(BulkJobs, "begin", lambda jobs, job: setattr(jobs, "open", job))
        world.kill()
    assert world.scheduler.bulk.open == job
    assert job.count == 1
    finish(world, Walk(world.scheduler, world.scheduler.bulk.open))
    assert world.scheduler.ledger.replaced == 2


@pytest.mark.parametrize(
    ("which", "first", "may"),
    [
        ({}, {"by_ms": 5}, True),
        ({"from_ms": 1}, {"by_ms": 5}, False),
        ({"to_ms": START_MS}, {"by_ms": 5}, False),
        ({"from_ms": 1, "topic": "other"}, {"by_ms": 5}, True),
        ({"from_ms": 1, "key_prefix": "a/"}, {"by_ms": 5, "key_prefix": "b/"}, True),
        ({"from_ms": 1, "key_prefix": "a/"}, {"by_ms": 5, "key_prefix": "a/b"}, False),
        ({"from_ms": 1, "key_prefix": "a/b"}, {"by_ms": 5}, False),
        ({}, {"to_topic": "other"}, False),
        ({"topic": "other"}, {"to_topic": "other"}, False),
        ({"topic": "third"}, {"to_topic": "other"}, True),
        ({"key_prefix": "a/"}, {"to_topic": "other"}, True),
        ({"topic": "third", "by_ms": 5}, {"by_ms": 5}, False),
        ({"topic": "third", "to_topic": "other"}, {"by_ms": 5}, False),
    ],
)
def test_which_cancel_may_go_before_a_shift_or_a_move(
    which: dict[str, object], first: dict[str, object], may: bool
) -> None:
    assert ALL._replace(**which).may_pass(ALL._replace(**first)) is may
