"""Timers under keys: what moves during a look-up, what is remembered, what is refused."""

from collections.abc import Callable

import numpy as np
import pytest

from duemq.errors import Corrupt, InvalidArgument, Overloaded, TooLarge
from duemq.v1 import message_pb2
from duemq_server.timer_service.far.far_segments import FarSegments
from duemq_server.timer_service.scheduling.keyed import changes
from duemq_server.timer_service.scheduling.keyed.changes import (
    CancellingKeys,
    KeyedChange,
    Rescheduling,
    Scheduling,
)
from duemq_server.timer_service.scheduling.keyed.ended_keys import KEYS_MAX, EndedKeys
from duemq_server.timer_service.scheduling.keyed.request_memory import (
    KEEP_MIN_MS,
    KEEP_MS,
    SLOT_MS,
    RequestMemory,
)
from duemq_server.timer_service.scheduling.topic_counts import mark_of
from duemq_server.timer_service.timers import keyed_entry, log_entries
from duemq_server.timer_service.timers.keyed import (
    EXISTS,
    FIRED,
    REPLACED,
    RESCHEDULED,
    SCHEDULED,
    UNKNOWN,
    Handle,
    TimerKey,
)
from duemq_server.timer_service.timers.keyed_entry import (
    CANCELLED,
    NO_REQUEST,
    NOT_YET,
    Changed,
    RequestKey,
)
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.log_entries import SourceId
from tests.property.keyed_model import keyed_records
from tests.property.timer_world import LIMITS, SOURCE, START_MS, World

FAR_MS = 20_000  # behind the near window
KEY = TimerKey("any", "k")
requests = iter(range(1, 1 << 30))


def new_request() -> RequestKey:
    return RequestKey(next(requests).to_bytes(16, "big"))


def scheduling(
    world: World,
    *keys: str,
    wait: int = FAR_MS,
    body: int = 10,
    if_absent: bool = False,
    request: RequestKey | None = None,
) -> Scheduling:
    records = [message_pb2.Record(body=b"x" * body, message_id="0", timer_key=key) for key in keys]
    due_ms = [world.now_ms + wait] * len(keys)
    asked = keyed_records("any", keys, records, due_ms)
    return Scheduling(world.scheduler, request or new_request(), asked, if_absent=if_absent)


def rescheduling(world: World, *timers: Handle | TimerKey, wait: int = FAR_MS) -> Rescheduling:
    due_ms = [world.now_ms + wait] * len(timers)
    return Rescheduling(world.scheduler, new_request(), timers, due_ms)


def test_what_other_shards_have_is_unknown_here_and_what_nobody_has_has_not_arrived() -> None:
    world = World()
    theirs, nobodys = (Handle(SourceId(9, 1), offset, START_MS) for offset in (4, 5))
    due_ms = [world.now_ms + FAR_MS] * 2
    for elsewhere in ({theirs}, {theirs, nobodys}):  # it arrived there meanwhile
        change = Rescheduling(
            world.scheduler, RequestKey(b"r" * 16), [theirs, nobodys], due_ms, elsewhere=elsewhere
        )
        assert change.advance(world.now_ms)
        assert [each.outcome for each in change.results] == [UNKNOWN, NOT_YET]


def cancelling(world: World, *keys: TimerKey) -> CancellingKeys:
    return CancellingKeys(world.scheduler, RequestKey(NO_REQUEST), keys)


def look_up(world: World, change: KeyedChange) -> None:
    segments = world.scheduler.segments
    job = segments.key_look_up(*change.asks(), world.scheduler.numbers.find_source)
    job.run()
    segments.keys_looked_up(job)
    change.answered()


def decided(world: World, change: KeyedChange) -> list[str]:
    while not change.advance(world.now_ms):
        look_up(world, change)
    return [outcome for outcome, _ in change.results]


def looked_up(world: World, change: KeyedChange) -> KeyedChange:
    """A request whose look-up is done, and not yet taken over."""
    assert not change.advance(world.now_ms)
    look_up(world, change)
    return change


def flush(world: World) -> None:
    world.run(world.scheduler.tiers.begin_flush(world.now_ms))


def load(world: World) -> None:
    """The clock moves on until the first timer comes into memory."""
    world.now_ms += FAR_MS - LIMITS.near_window_ms + 5_000
    while world.housekeep():
        pass
    assert world.scheduler.near.pending


@pytest.fixture
def far() -> World:
    """A shard with a timer under a key, in a block."""
    world = World()
    assert decided(world, scheduling(world, "k")) == [SCHEDULED]
    flush(world)
    assert world.scheduler.segments.pending == 1
    return world


def ledger_holds(world: World, *, replaced: int, pending: int) -> None:
    world.scheduler.check()
    ledger = world.scheduler.ledger
    assert (ledger.replaced, ledger.pending) == (replaced, pending)


def nothing(world: World) -> None:
    """Happens meanwhile."""


def load_and_flush(world: World) -> None:
    load(world)
    world.scheduler.tiers.evict(0)
    flush(world)


@pytest.mark.parametrize("meanwhile", [nothing, load, load_and_flush])
def test_a_timer_that_moves_during_the_look_up_is_replaced(
    far: World, meanwhile: Callable[[World], None]
) -> None:
    change = looked_up(far, scheduling(far, "k"))
    meanwhile(far)

    assert decided(far, change) == [REPLACED]
    ledger_holds(far, replaced=1, pending=1)


def test_one_that_came_during_the_look_up_is_replaced(far: World) -> None:
    change = looked_up(far, scheduling(far, "k"))
    assert decided(far, scheduling(far, "k")) == [REPLACED]
    flush(far)

    assert decided(far, change) == [REPLACED]
    ledger_holds(far, replaced=2, pending=1)


def test_one_that_fired_during_the_look_up_is_not(far: World) -> None:
    change = looked_up(far, cancelling(far, KEY))
    far.now_ms += FAR_MS
    while far.housekeep():
        pass
    far.set_away(set())
    far.tick()

    assert decided(far, change) == [FIRED]


def test_what_is_in_a_flush_is_found(far: World) -> None:
    assert decided(far, scheduling(far, "other")) == [SCHEDULED]
    job = far.scheduler.tiers.begin_flush(far.now_ms)

    assert decided(far, scheduling(far, "other", if_absent=True)) == [EXISTS]
    assert decided(far, scheduling(far, "other")) == [REPLACED]
    far.run(job)
    ledger_holds(far, replaced=1, pending=2)
    assert decided(far, cancelling(far, TimerKey("any", "other"))) == [CANCELLED]


def test_the_keys_of_blocks_are_learnt_after_a_restart(far: World) -> None:
    far.sync()
    far.checkpoint()
    far.kill()
    assert far.scheduler.segments.key_filter.unknown

    assert decided(far, scheduling(far, "k", if_absent=True)) == [EXISTS]
    assert not far.scheduler.segments.key_filter.unknown
    assert decided(far, scheduling(far, "new", if_absent=True)) == [SCHEDULED]


def test_one_whose_replacement_is_lost_is_found_by_its_key() -> None:
    """It was replaced while a checkpoint was saved, and the log lost that: else both would fire."""
    world = World()
    assert decided(world, scheduling(world, "k")) == [SCHEDULED]
    world.sync()
    save = world.directory.housekeeper.save(world.now_ms)
    assert decided(world, scheduling(world, "k")) == [REPLACED]
    save.run()

    world.kill()

    assert world.scheduler.ledger.replaced == 0
    assert decided(world, scheduling(world, "k")) == [REPLACED]


def test_a_topic_of_its_own(far: World) -> None:
    assert decided(far, cancelling(far, TimerKey("keyed", "k"))) == [UNKNOWN]


def test_what_became_of_a_keys_last_timer_is_known(far: World) -> None:
    assert decided(far, cancelling(far, KEY)) == [CANCELLED]
    assert decided(far, cancelling(far, KEY)) == [CANCELLED]
    assert decided(far, cancelling(far, TimerKey("any", "never"))) == [UNKNOWN]

    assert decided(far, scheduling(far, "k", wait=0)) == [SCHEDULED]
    far.set_away(set())
    far.tick()
    assert decided(far, cancelling(far, KEY)) == [FIRED]
    far.sync()
    far.kill()
    assert decided(far, cancelling(far, KEY)) == [FIRED]


def test_only_the_last_ends_are_remembered() -> None:
    ended = EndedKeys()
    ended.note(range(1, KEYS_MAX + 2), 5, fired=True)

    assert ended.outcome(1) is None
    assert ended.outcome(2) == FIRED
    ended.expire(6)
    ended.forget([2, 3])
    assert ended.outcome(KEYS_MAX + 1) == FIRED  # no more than some at once
    for _ in range(20):
        ended.expire(6)
    assert ended.outcome(KEYS_MAX + 1) is None


def test_a_request_comes_again_for_a_while(far: World) -> None:
    request = new_request()
    first = scheduling(far, "k", request=request)
    decided(far, first)
    far.sync()
    far.kill()

    again = scheduling(far, "k", request=request)
    assert decided(far, again) == [REPLACED]
    assert again.results == first.results
    assert again.end == far.scheduler.log.end_position
    for passed_ms in range(0, KEEP_MS + 3 * SLOT_MS, SLOT_MS):
        far.scheduler.keyed.expire(far.now_ms + passed_ms, 0)
    assert decided(far, scheduling(far, "k", request=request)) == [REPLACED]
    ledger_holds(far, replaced=2, pending=1)


def pass_time(memory: RequestMemory, from_ms: int, to_ms: int) -> None:
    """As housekeeping looks at it."""
    for now_ms in (*range(from_ms, to_ms, 1_000), to_ms):
        memory.expire(now_ms)


def test_requests_remembered_are_bounded() -> None:
    memory = RequestMemory(requests_max=2, bytes_max=10)
    memory.add(new_request(), b"1234", 0)
    pass_time(memory, 0, 70_000)
    memory.add(new_request(), b"1234", 70_000)
    with pytest.raises(Overloaded, match="2 requests"):
        memory.make_room(b"", 70_000)
    end_ms = SLOT_MS + KEEP_MS + 1
    pass_time(memory, 70_000, end_ms)
    memory.make_room(b"123456", end_ms)
    memory.add(new_request(), b"123456", end_ms)
    with pytest.raises(Overloaded, match="10 bytes of answers"):
        memory.make_room(b"12345", end_ms)


def test_where_there_is_no_room_the_oldest_request_goes_but_none_that_may_come_again() -> None:
    memory = RequestMemory(requests_max=2, bytes_max=10)
    first, second = new_request(), new_request()
    memory.add(first, b"1", 0)
    memory.add(second, b"2", SLOT_MS)
    pass_time(memory, SLOT_MS, SLOT_MS + KEEP_MIN_MS)
    with pytest.raises(Overloaded):
        memory.make_room(b"", SLOT_MS + KEEP_MIN_MS)
    assert memory.find(first) == b"1"
    memory.make_room(b"", SLOT_MS + KEEP_MIN_MS + 1)
    assert memory.find(first) is None
    assert memory.find(second) == b"2"
    assert (memory.requests, memory.bytes) == (1, 1)


def test_a_slot_that_is_over_takes_nothing_in_when_the_clock_goes_back() -> None:
    """A checkpoint may be encoding it in another thread."""
    memory = RequestMemory(requests_max=9, bytes_max=99)
    memory.add(new_request(), b"1", 0)
    memory.add(new_request(), b"2", SLOT_MS)
    before = memory.saved()
    memory.add(new_request(), b"3", 0)

    assert [(slot, len(answers)) for slot, answers in before] == [(0, 1), (1, 1)]
    assert [len(answers) for _, answers in memory.saved()] == [1, 2]


@pytest.mark.parametrize("wait", [5_000, FAR_MS])
def test_moving_a_timer_all_the_time_fills_no_memory(wait: int) -> None:
    world = World(limits=Limits(tombstones_max=200, near_window_ms=10_000))
    for _ in range(150):
        decided(world, scheduling(world, "k", wait=wait))
    if wait == FAR_MS:
        flush(world)
    decided(world, scheduling(world, "k", wait=wait))

    assert len(world.scheduler.tombstones) < 3
    ledger_holds(world, replaced=150, pending=1)


def test_a_full_memory_of_tombstones_refuses_nothing() -> None:
    world = World(limits=Limits(tombstones_max=1, near_window_ms=10_000))
    keys = [TimerKey("any", key) for key in "abc"]
    for wait in (5_000, FAR_MS):
        asked = scheduling(world, "a", "b", "c", wait=wait)
        decided(world, asked)
        handles = [handle for _, (handle,) in asked.results]

        assert decided(world, cancelling(world, *keys)) == [CANCELLED] * 3
        assert len(world.scheduler.tombstones) == 1
        assert world.cancel_handles(handles) == [CANCELLED] * 3
    ledger_holds(world, replaced=0, pending=0)


def test_a_replaced_timer_s_handle_is_cancelled(far: World) -> None:
    change = scheduling(far, "k")
    decided(far, change)
    [(_, (new, old))] = change.results

    assert far.cancel_handles([old]) == [CANCELLED]
    far.sync()
    far.checkpoint()
    far.kill()
    assert far.cancel_handles([old]) == [CANCELLED]
    assert far.cancel_handles([new]) == [CANCELLED]


def test_a_handle_that_the_shard_has_not_given_yet_is_unknown(far: World) -> None:
    source = far.scheduler.keyed.source
    assert far.cancel_handles([Handle(source, 99, START_MS)]) == [UNKNOWN]
    assert decided(far, rescheduling(far, Handle(source, 99, START_MS))) == [UNKNOWN]
    other = SourceId(0xABC, 2)
    assert decided(far, rescheduling(far, Handle(other, 99, START_MS))) == ["NOT_YET"]


def test_a_handle_of_the_shard_before_it_lost_timers_is_unknown(far: World) -> None:
    lost = Handle(SourceId(0xABC, 2), 99, START_MS)
    assert far.cancel_handles([lost]) == ["NOT_YET"]
    far.scheduler.keyed.formers = frozenset({lost.source})
    assert far.cancel_handles([lost]) == [UNKNOWN]
    assert decided(far, rescheduling(far, lost)) == [UNKNOWN]


def test_a_broker_s_timer_gets_another_due_time() -> None:
    world = World()
    world.broker.accept([START_MS + 500, START_MS + FAR_MS, START_MS + FAR_MS], 10, "keyed")
    world.ingest(1)
    flush(world)
    handles = [Handle(SOURCE, n, due) for n, due in enumerate(world.broker.due_ms)]
    change = rescheduling(world, *handles[:2], handles[2]._replace(due_ms=START_MS + 7), wait=900)

    assert decided(world, change) == [RESCHEDULED, RESCHEDULED, UNKNOWN]
    assert world.cancel_handles(handles[:2]) == [CANCELLED] * 2
    assert decided(world, rescheduling(world, handles[0])) == [UNKNOWN]
    ledger_holds(world, replaced=2, pending=3)
    targets = world.scheduler.numbers.targets
    row = world.scheduler.near.pending_ids()[0]
    assert targets[world.scheduler.near.table.target[row]].broker == "b1"


def test_a_rescheduled_timer_keeps_its_key(far: World) -> None:
    change = rescheduling(far, KEY, wait=FAR_MS + 5)
    assert decided(far, change) == [RESCHEDULED]
    [(_, (handle,))] = change.results

    assert decided(far, rescheduling(far, handle)) == [RESCHEDULED]
    assert decided(far, scheduling(far, "k", if_absent=True)) == [EXISTS]
    assert decided(far, cancelling(far, KEY)) == [CANCELLED]
    assert decided(far, rescheduling(far, KEY)) == [UNKNOWN]


@pytest.mark.parametrize("wait", [1_000, FAR_MS])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_key_to_cancel_that_is_named_twice_is_cancelled_once(wait: int, flushed: bool) -> None:
    """Counted twice, the ledger is wrong for good, and no start accepts that."""
    world = World()
    assert scheduling(world, "k", "l", wait=wait).advance(world.now_ms)
    world.sync()
    if flushed:
        world.flush()
    change = cancelling(world, KEY, KEY, TimerKey("any", "none"), KEY)
    assert decided(world, change) == [CANCELLED, CANCELLED, UNKNOWN, CANCELLED]
    for _ in range(2):
        world.sync()
        world.scheduler.check()
        assert (world.scheduler.ledger.cancelled, world.scheduler.ledger.pending) == (1, 1)
        assert len(world.scheduler.tombstones.left) <= 1
        world.kill()


@pytest.mark.parametrize("wait", [1_000, FAR_MS])
def test_a_log_that_names_a_cancelled_timer_twice_is_read(wait: int) -> None:
    """A release before wrote such."""
    world = World()
    change = scheduling(world, "k", "l", wait=wait)
    assert change.advance(world.now_ms)
    [handle] = change.results[0].handles
    twice = Changed(
        RequestKey(NO_REQUEST),
        world.now_ms,
        [handle] * 2,
        np.zeros(2, dtype=np.uint64),
        (),
        handle.source,
        (),
        np.empty(0, dtype=np.uint64),
        b"",
        b"",
        topics=[mark_of("any")] * 2,
    )
    world.directory.log.append(log_entries.SCHEDULE, keyed_entry.encode(twice))
    world.sync()
    world.kill()
    assert (world.scheduler.ledger.cancelled, world.scheduler.ledger.pending) == (1, 1)


def test_a_timer_named_twice_is_refused(far: World) -> None:
    change = scheduling(far, "k")
    decided(far, change)
    [(_, (handle, _))] = change.results

    with pytest.raises(InvalidArgument, match=r"timers\[1\] is the same one as timers\[0\]"):
        decided(far, rescheduling(far, KEY, handle))
    with pytest.raises(InvalidArgument):
        rescheduling(far, KEY, KEY)
    ledger_holds(far, replaced=1, pending=1)


def test_bodies_that_are_too_large_together_are_refused(
    far: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "RESCHEDULED_BYTES_MAX", 15)

    with pytest.raises(TooLarge, match="at most 15"):
        decided(far, rescheduling(far, KEY))
    ledger_holds(far, replaced=0, pending=1)


def damage(world: World, at: int) -> None:
    """A byte of the block's file is another."""
    [name] = world.scheduler.segments.lengths
    path = world.scheduler.segments.path(name)
    world.disk.flip(path, at % world.scheduler.segments.lengths[name])


def test_a_damaged_block_answers_for_no_key(far: World) -> None:
    assert decided(far, scheduling(far, "near", wait=50)) == [SCHEDULED]
    damage(far, 40)
    far.scheduler.segments.key_filter = type(far.scheduler.segments.key_filter)()
    far.scheduler.segments.key_filter.add(0, None)

    with pytest.raises(Corrupt, match="block index"):
        decided(far, scheduling(far, "k"))
    change = cancelling(far, KEY, TimerKey("any", "near"))
    decided(far, change)
    assert isinstance(change.errors[0], Corrupt)
    assert change.results[1].outcome == CANCELLED


def test_a_damaged_body_is_no_timer_s(far: World) -> None:
    damage(far, -20)

    with pytest.raises(Corrupt, match="CRC-32C of a record"):
        decided(far, scheduling(far, "k"))
    ledger_holds(far, replaced=0, pending=1)


def test_a_shard_without_keys_has_no_filter_and_no_column() -> None:
    world = World()
    world.broker.accept([START_MS + 5, START_MS + FAR_MS], 10, "any")
    world.ingest(1)
    flush(world)

    assert isinstance(world.scheduler.segments, FarSegments)
    assert not len(world.scheduler.segments.key_filter)
    assert world.scheduler.near.table.timer_key is None


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000, 25_500, -25_500])
def test_a_clock_that_is_set_forgets_no_request_early_and_keeps_none_longer(jump_ms: int) -> None:
    memory = RequestMemory(requests_max=2, bytes_max=10)
    before, after = new_request(), new_request()
    now_ms = START_MS
    memory.add(before, b"1", now_ms)
    now_ms += jump_ms
    memory.expire(now_ms)
    memory.add(after, b"2", now_ms)
    with pytest.raises(Overloaded):
        memory.make_room(b"", now_ms)
    for passed_ms in range(0, KEEP_MS + 4 * SLOT_MS, 1_000):
        memory.expire(now_ms + passed_ms)
        if passed_ms <= KEEP_MS - SLOT_MS:
            assert memory.find(before) == b"1"
        if passed_ms <= KEEP_MS:
            assert memory.find(after) == b"2"
    assert memory.find(before) is memory.find(after) is None
    assert (memory.requests, memory.bytes) == (0, 0)


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000])
def test_requests_outlive_a_clock_that_is_set_and_a_restart(far: World, jump_ms: int) -> None:
    """One is in the checkpoint, the other in the log behind it."""
    asked = []
    for key in ("saved", "logged"):
        asked.append(scheduling(far, key, request=new_request()))
        decided(far, asked[-1])
        far.sync()
        if key == "saved":
            far.checkpoint()
    far.now_ms += jump_ms
    far.kill()
    while far.housekeep():
        pass

    for change in asked:
        again = scheduling(far, *[key.key for key in change.keys], request=change.request)
        decided(far, again)
        assert again.results == change.results


def test_one_that_fired_during_the_look_up_is_not_found_where_it_lay(far: World) -> None:
    """Its block was read before; another one with keys is still there."""
    decided(far, scheduling(far, "other", wait=3_600_000))
    flush(far)
    change = looked_up(far, scheduling(far, "k"))
    load(far)
    far.now_ms += FAR_MS
    far.tick()
    assert far.scheduler.ledger.fired == 1

    assert decided(far, change) == [SCHEDULED]
    ledger_holds(far, replaced=0, pending=2)


@pytest.mark.parametrize("wait", [5_000, FAR_MS])
def test_a_handle_with_another_due_time_is_unknown(wait: int) -> None:
    world = World()
    change = scheduling(world, "k", wait=wait)
    decided(world, change)
    [(_, [handle])] = change.results

    wrong = handle._replace(due_ms=handle.due_ms + 1)
    assert decided(world, rescheduling(world, wrong)) == [UNKNOWN]
    ledger_holds(world, replaced=0, pending=1)
