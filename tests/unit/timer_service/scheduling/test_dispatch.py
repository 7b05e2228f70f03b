from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from duemq.protocol.limits import BATCHES_MAX
from duemq_server.timer_service.scheduling import stuck
from duemq_server.timer_service.scheduling.dispatch import (
    FAILOVER_AFTER_MS,
    NEVER,
    PIPELINE_MAX,
    SMALL_ROWS,
    Dispatcher,
)
from duemq_server.timer_service.scheduling.due_timers import GONE_WITHIN_MS, PACE_MS
from duemq_server.timer_service.scheduling.fire_lane import (
    RETRY_MS_MAX,
    RETRY_STEPS,
    UNACKED_MAX,
    FireBatch,
    FireLane,
    FireOutcome,
)
from duemq_server.timer_service.scheduling.holding.holds import Holds
from duemq_server.timer_service.scheduling.peer import BROKER_BYTES_MAX, REJECTED_BYTES_MAX
from duemq_server.timer_service.timers.log_entries import LaneId, TargetId
from duemq_server.timer_service.timers.wheel import Ids

NOW = 1_000_000
ANY = TargetId("home", "t", -1)
KEYED = TargetId("home", "t", 1)


def ids(*numbers: int) -> Ids:
    return np.array(numbers, dtype=np.int32)


def dispatcher_with(**queues: int) -> Dispatcher:
    """Brokers that serve the topic `t`, all connected."""
    dispatcher = Dispatcher(Holds())
    dispatcher.set_routes({"t": queues})
    for broker in queues:
        dispatcher.connected(broker)
    return dispatcher


def push(dispatcher: Dispatcher, lane: FireLane, size: int = 10, target: int = 0) -> FireBatch:
    batch = FireBatch(
        lane, lane.next_sequence, 0, 0, bytes(size), b"", b"", b"", np.array([1]), True, target
    )
    dispatcher.push(batch)
    lane.begun = True
    return batch


def test_targets_take_turns() -> None:
    dispatcher = Dispatcher(Holds())
    dispatcher.due.add(1, ids(*range(100)))
    dispatcher.due.add(2, ids(200))
    dispatcher.due.add(1, ids(100))

    served = []
    while turns := dispatcher.due.turns():
        served.append((turns[0], len(dispatcher.due.take(turns[0], 60))))

    assert served == [(1, 60), (2, 1), (1, 41)]
    assert dispatcher.due.waiting == 0


def test_what_waits_in_another_order_keeps_its_turn() -> None:
    """A target that gets something late at each tick would never be served otherwise."""
    dispatcher = Dispatcher(Holds())
    dispatcher.due.add(1, ids(1, 3), 30)
    dispatcher.due.add(2, ids(4), 40)
    assert (dispatcher.due.latest_ms(1), dispatcher.due.latest_ms(3)) == (30, 0)

    dispatcher.due.replace(1, ids(1, 2, 3), 20)

    assert dispatcher.due.turns() == [1, 2]
    assert (dispatcher.due.waiting, dispatcher.due.latest_ms(1)) == (4, 30)
    assert dispatcher.due.take(1, 9).tolist() == [1, 2, 3]
    assert (dispatcher.due.waiting, dispatcher.due.latest_ms(1)) == (1, 0)


class Compared(np.ndarray):
    """Counts how many values of it were compared."""

    count = 0

    def __eq__(self, other: object) -> Any:
        Compared.count += self.size
        return super().__eq__(other)


def test_timers_of_many_targets_are_told_apart_in_one_pass() -> None:
    """8,192 that were due together for as many queues held up a tick by a tenth of a second."""
    dispatcher = Dispatcher(Holds())
    table: Any = SimpleNamespace(
        target=np.array([*range(50), *range(50)], dtype=np.uint32).view(Compared),
        due_ms=np.arange(100),
    )

    dispatcher.due.sort_in(np.arange(100, dtype=np.int32), table)
    dispatcher.due.sort_in(ids(), table)

    assert dispatcher.due.turns() == list(range(50))
    assert dispatcher.due.take(7, 9).tolist() == [7, 57]
    assert Compared.count <= 2 * 100


def test_what_is_put_back_is_first_again() -> None:
    dispatcher = Dispatcher(Holds())
    dispatcher.due.add(1, ids(1, 2, 3))
    taken = dispatcher.due.take(1, 3)

    dispatcher.due.put_back(1, taken[1:])

    assert dispatcher.due.waiting == 2
    dispatcher.due.add(1, ids(4))
    assert dispatcher.due.take(1, 10).tolist() == [2, 3, 4]


def test_any_queue_means_those_of_the_home_broker_in_turn() -> None:
    dispatcher = dispatcher_with(home=2, other=2)

    chosen = [dispatcher.choose(ANY, NOW) for _ in range(3)]

    assert [lane and lane.id for lane in chosen] == [
        LaneId("home", "t", 0),
        LaneId("home", "t", 1),
        LaneId("home", "t", 0),
    ]


def test_what_a_start_found_unanswered_goes_before_all_that_it_builds() -> None:
    """Under its old number; what comes then has numbers of the start's own."""
    dispatcher = dispatcher_with(home=1)
    lane = dispatcher.lane(LaneId("home", "t", 0))
    push(dispatcher, lane)
    lane.begun = False
    assert dispatcher.choose(ANY, NOW) is None
    [batch] = dispatcher.sendable("home", NOW, 1)
    lane.answered(batch, FireOutcome.STORED, NOW, 0)
    dispatcher.stored(batch)
    assert dispatcher.choose(ANY, NOW) is lane


def test_small_batches_of_a_target_wait_for_answers_and_large_ones_do_not() -> None:
    dispatcher = dispatcher_with(home=1)
    for _ in range(PIPELINE_MAX):
        push(dispatcher, dispatcher.lane(LaneId("home", "t", 0)), target=5)

    dispatcher.due.add(5, ids(1))
    assert dispatcher.gathering(5) == {"home"}
    for target in (ANY, KEYED):
        assert dispatcher.choose(target, NOW)
        assert not dispatcher.choose(target, NOW, dispatcher.gathering(5))
    assert not dispatcher.gathering(6)
    dispatcher.due.add(5, ids(*range(SMALL_ROWS)))
    assert not dispatcher.gathering(5)
    dispatcher.due.take(5, SMALL_ROWS)
    assert dispatcher.gathering(5)
    [batch] = dispatcher.sendable("home", NOW, 1)
    batch.lane.answered(batch, FireOutcome.STORED, NOW, 0)
    dispatcher.stored(batch)
    assert not dispatcher.gathering(5)


def test_a_broker_that_does_not_answer_or_refuses_holds_up_no_target_that_others_take() -> None:
    """Its timers waited for that broker, or for more of them."""
    dispatcher = dispatcher_with(home=2, other=1)
    anywhere = ANY._replace(broker="")
    lane = dispatcher.lane(LaneId("home", "t", 0))
    for _ in range(PIPELINE_MAX):
        push(dispatcher, lane, target=5)
    dispatcher.due.add(5, ids(1))

    chosen = [dispatcher.choose(anywhere, NOW, dispatcher.gathering(5)) for _ in range(2)]
    assert [each and each.id.broker for each in chosen] == ["other", "other"]

    [batch] = dispatcher.sendable("home", NOW, 1)
    lane.answered(batch, FireOutcome.REJECTED, NOW, 0)
    elsewhere = dispatcher.choose(ANY, NOW, dispatcher.gathering(5))
    assert elsewhere is not None
    assert elsewhere.id == LaneId("home", "t", 1)


def test_without_its_home_broker_any_goes_elsewhere_after_a_while_and_keyed_waits() -> None:
    dispatcher = dispatcher_with(home=2, other=1)
    dispatcher.disconnected("home", NOW)

    assert dispatcher.choose(ANY, NOW + FAILOVER_AFTER_MS - 1) is None
    assert dispatcher.next_failover_ms(NOW) == NEVER
    dispatcher.due.add(0, ids(1))
    assert dispatcher.next_failover_ms(NOW) == NOW + FAILOVER_AFTER_MS
    elsewhere = dispatcher.choose(ANY, NOW + FAILOVER_AFTER_MS)
    assert elsewhere is not None
    assert elsewhere.id == LaneId("other", "t", 0)
    assert dispatcher.choose(KEYED, NOW + 10 * FAILOVER_AFTER_MS) is None
    dispatcher.connected("home")
    keyed = dispatcher.choose(KEYED, NOW)
    assert keyed is not None
    assert keyed.id == LaneId("home", "t", 1)


def test_nothing_goes_to_a_topic_without_a_route() -> None:
    dispatcher = dispatcher_with(home=1)

    assert dispatcher.choose(TargetId("home", "unknown", -1), NOW) is None
    assert dispatcher.choose(TargetId("home", "unknown", 0), NOW) is None
    assert dispatcher.why_not(TargetId("home", "unknown", 0), {}) == "no broker serves the topic"
    assert dispatcher.why_not(KEYED, dispatcher.refusals()) == ""


def test_of_a_topic_with_fewer_queues_than_before_another_queue_takes_over() -> None:
    lane = dispatcher_with(home=3).choose(TargetId("home", "t", 7), NOW)

    assert lane is not None
    assert lane.id == LaneId("home", "t", 1)


def test_a_fenced_shard_sends_nothing() -> None:
    dispatcher = dispatcher_with(home=1)
    lane = dispatcher.choose(ANY, NOW)
    assert lane is not None
    push(dispatcher, lane)
    assert dispatcher.set_fence("another has taken over")

    assert dispatcher.choose(ANY, NOW) is None
    assert dispatcher.sendable("home", NOW, 100) == []
    assert dispatcher.why_not(ANY, {}) == "another has taken over"
    dispatcher.due.add(0, np.array([1], dtype=np.int32))
    dispatcher.due.sleep(0)
    assert dispatcher.set_fence("")
    assert dispatcher.due.awake() == [0]
    assert not dispatcher.set_fence("")
    assert len(dispatcher.sendable("home", NOW, 100)) == 1


def rejected(dispatcher: Dispatcher, topic: str, size: int, outcome: FireOutcome) -> None:
    batch = push(dispatcher, dispatcher.lane(LaneId("home", topic, 0)), size)
    batch.lane.sent(batch)
    dispatcher.answered(batch, outcome, NOW, 0.5)


def test_what_is_rejected_for_its_own_sake_holds_up_no_other_topic() -> None:
    dispatcher = dispatcher_with(home=1)
    for number in range(REJECTED_BYTES_MAX // BROKER_BYTES_MAX + 2):
        rejected(dispatcher, f"gone{number}", BROKER_BYTES_MAX, FireOutcome.REJECTED)
        if (number + 1) * BROKER_BYTES_MAX <= REJECTED_BYTES_MAX:
            assert dispatcher.choose(ANY, NOW) is not None
    assert dispatcher.choose(ANY, NOW) is None  # memory has a bound

    full = dispatcher_with(home=1)
    rejected(full, "other", BROKER_BYTES_MAX, FireOutcome.REFUSED)
    assert full.choose(ANY, NOW) is None  # the broker takes nothing at all


class Unseen(dict[LaneId, FireLane]):
    def values(self) -> Any:
        pytest.fail("all lanes are looked at")


def test_what_is_rejected_is_not_counted_anew_for_each_batch() -> None:
    """After 2 MiB for a topic that was deleted each look at a broker was one at all of its lanes,
    in each tick several for each queue with something due."""
    dispatcher = dispatcher_with(home=1)
    for topic in ("gone", "gone too", "and this"):
        rejected(dispatcher, topic, BROKER_BYTES_MAX // 2, FireOutcome.REJECTED)
    peer = dispatcher.peer("home")
    peer.busy = Unseen(peer.busy)

    assert dispatcher.choose(ANY, NOW) is not None
    assert not dispatcher.is_stuck(1, ANY, NOW)
    assert not peer.takes("gone")
    assert peer.takes("t")

    [lane] = [x for x in peer.lanes.values() if x.id.topic == "gone too"]
    lane.sent(lane.unacked[0])
    assert dispatcher.answered(lane.unacked[0], FireOutcome.STORED, NOW, 0.5)
    assert peer.takes("gone too")
    assert (peer.rejected_bytes, peer.unacked_bytes) == (BROKER_BYTES_MAX, BROKER_BYTES_MAX)


def test_a_clock_that_was_set_neither_ends_waits_nor_makes_them_longer() -> None:
    day_ms = 86_400_000
    dispatcher = dispatcher_with(home=1, other=1)
    lane = dispatcher.lane(LaneId("other", "t", 0))
    batch = push(dispatcher, lane)
    lane.sent(batch)
    lane.answered(batch, FireOutcome.REFUSED, NOW + day_ms, 1.0)
    dispatcher.disconnected("home", NOW + day_ms)
    dispatcher.clock_set(-day_ms)

    assert dispatcher.next_retry_ms("other", NOW) <= NOW + RETRY_MS_MAX
    dispatcher.due.add(0, ids(1))
    assert dispatcher.next_failover_ms(NOW) == NOW + FAILOVER_AFTER_MS


def test_a_full_or_failing_lane_is_passed_over() -> None:
    dispatcher = dispatcher_with(home=2)
    lane = dispatcher.lane(LaneId("home", "t", 0))
    for _ in range(UNACKED_MAX):
        push(dispatcher, lane)

    for _ in range(2):
        chosen = dispatcher.choose(ANY, NOW)
        assert chosen is not None
        assert chosen.id.queue_id == 1
    [batch, *_] = dispatcher.sendable("home", NOW, 1)
    lane.answered(batch, FireOutcome.REFUSED, NOW, 0.5)
    assert dispatcher.choose(TargetId("home", "t", 0), NOW) is None


def test_a_broker_takes_a_bounded_number_of_bytes() -> None:
    dispatcher = dispatcher_with(home=4)
    batch = push(dispatcher, dispatcher.lane(LaneId("home", "t", 0)), BROKER_BYTES_MAX)

    assert dispatcher.choose(ANY, NOW) is None
    dispatcher.sendable("home", NOW, 1)
    batch.lane.answered(batch, FireOutcome.STORED, NOW, 0)
    dispatcher.stored(batch)
    assert dispatcher.choose(ANY, NOW) is not None


def test_what_was_refused_is_held_back_until_its_time() -> None:
    dispatcher = dispatcher_with(home=1)
    batch = push(dispatcher, dispatcher.lane(LaneId("home", "t", 0)))
    assert dispatcher.sendable("home", NOW, 1) == [batch]
    assert dispatcher.next_retry_ms("home", NOW) == NEVER

    batch.lane.answered(batch, FireOutcome.REFUSED, NOW, 0.5)

    retry_ms = dispatcher.next_retry_ms("home", NOW)
    assert dispatcher.sendable("home", retry_ms - 1, 1) == []
    assert dispatcher.sendable("home", retry_ms, 1) == [batch]


def refused(dispatcher: Dispatcher, lanes: int, times: int) -> set[int]:
    """Each lane's batch is refused so often, the last time now; when they are sent again."""
    random = Random(7)
    for queue in range(lanes):
        push(dispatcher, dispatcher.lane(LaneId("home", "t", queue)))
    for left in reversed(range(times)):
        now_ms = NOW - left * RETRY_MS_MAX
        while batches := dispatcher.sendable("home", now_ms, 1 << 20):
            for batch in batches:
                jitter = random.random()
                dispatcher.answered(batch, FireOutcome.REFUSED, now_ms, jitter)
    return {lane.retry_at_ms for lane in dispatcher.lanes()}


def test_thousands_of_lanes_that_are_refused_go_again_in_a_few_requests() -> None:
    again_ms = refused(dispatcher_with(home=2_000), 2_000, times=12)

    assert len(again_ms) <= RETRY_STEPS
    assert min(again_ms) > NOW + RETRY_MS_MAX // 3
    assert max(again_ms) <= NOW + RETRY_MS_MAX


def test_a_look_for_what_can_be_sent_costs_nothing_for_lanes_that_were_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatcher = dispatcher_with(home=100)
    again_ms = refused(dispatcher, 99, times=12)
    batch = push(dispatcher, dispatcher.lane(LaneId("home", "t", 99)))
    batch.ready_ms = max(again_ms) + 1
    assert dispatcher.next_retry_ms("home", NOW) == min(again_ms)
    batch.ready_ms = NOW + 1
    looked_at: list[FireLane] = []
    next_of = FireLane._next

    def look(lane: FireLane) -> FireBatch | None:
        looked_at.append(lane)
        return next_of(lane)

    monkeypatch.setattr(FireLane, "_next", look)

    assert dispatcher.sendable("home", NOW, 1 << 20) == []
    assert dispatcher.next_retry_ms("home", NOW) == NOW + 1
    assert looked_at == [batch.lane, batch.lane]
    assert dispatcher.sendable("home", NOW + 1, 1 << 20) == [batch]
    assert dispatcher.next_retry_ms("home", NOW + 1) == min(again_ms)


def test_a_broker_that_is_not_connected_is_sent_nothing() -> None:
    dispatcher = dispatcher_with(home=1)
    push(dispatcher, dispatcher.lane(LaneId("home", "t", 0)))
    dispatcher.disconnected("home", NOW)

    assert dispatcher.sendable("home", NOW, 1) == []


def full(dispatcher: Dispatcher, waiting: int) -> FireLane:
    """The lane of KEYED, target 0, takes no more; so many timers wait."""
    lane = dispatcher.lane(LaneId("home", "t", 1))
    for _ in range(UNACKED_MAX):
        push(dispatcher, lane)
    dispatcher.due.add(0, ids(*range(waiting)))
    return lane


def served(dispatcher: Dispatcher, lane: FireLane, now_ms: int, count: int = 10) -> None:
    """A batch is answered, and the next one takes its place."""
    [batch, *_] = dispatcher.sendable("home", now_ms, 1 << 20)
    lane.answered(batch, FireOutcome.STORED, now_ms, 0)
    dispatcher.stored(batch)
    dispatcher.due.take(0, count)
    push(dispatcher, lane)


def test_what_waits_its_turn_is_not_stuck_while_answers_come() -> None:
    dispatcher = dispatcher_with(home=2)
    lane = full(dispatcher, 1_000)
    assert not dispatcher.is_stuck(0, KEYED, NOW)
    for second in range(1, 8):
        for _ in range(10):
            served(dispatcher, lane, NOW + second * PACE_MS)
        assert not dispatcher.is_stuck(0, KEYED, NOW + second * PACE_MS)


def test_what_would_wait_long_is_stuck_once_that_is_known() -> None:
    dispatcher = dispatcher_with(home=2)
    lane = full(dispatcher, 1_000)
    assert not dispatcher.is_stuck(0, KEYED, NOW)
    served(dispatcher, lane, NOW + 1)
    assert not dispatcher.is_stuck(0, KEYED, NOW + PACE_MS - 1)
    assert dispatcher.is_stuck(0, KEYED, NOW + PACE_MS)
    dispatcher.due.take(0, 1_000 - 10 - 10 * GONE_WITHIN_MS // PACE_MS)
    assert not dispatcher.is_stuck(0, KEYED, NOW + PACE_MS)


def test_a_broker_that_stops_answering_is_noticed_however_quick_it_was() -> None:
    dispatcher = dispatcher_with(home=2)
    lane = full(dispatcher, 100_000)
    assert not dispatcher.is_stuck(0, KEYED, NOW)
    for _ in range(90):
        served(dispatcher, lane, NOW + PACE_MS, 1_000)
    times = range(NOW + PACE_MS, NOW + 20 * PACE_MS, 20)
    assert not dispatcher.is_stuck(0, KEYED, times[0])
    assert any(dispatcher.is_stuck(0, KEYED, now_ms) for now_ms in times)


def test_what_no_broker_takes_is_stuck_at_once() -> None:
    dispatcher = dispatcher_with(home=2)
    full(dispatcher, 10)
    dispatcher.disconnected("home", NOW)
    assert dispatcher.is_stuck(0, KEYED, NOW)
    dispatcher.connected("home")
    assert not dispatcher.is_stuck(0, KEYED, NOW)
    dispatcher.set_routes({})
    assert dispatcher.is_stuck(0, KEYED, NOW)
    dispatcher.set_routes({"t": {"home": 2}})
    [batch, *_] = dispatcher.sendable("home", NOW, 1)
    dispatcher.answered(batch, FireOutcome.REJECTED, NOW, 0)
    assert dispatcher.is_stuck(0, KEYED, NOW)


def test_a_clock_that_was_set_makes_no_target_slow() -> None:
    dispatcher = dispatcher_with(home=2)
    full(dispatcher, 10)
    assert not dispatcher.is_stuck(0, KEYED, NOW)
    dispatcher.clock_set(3_600_000)
    assert not dispatcher.is_stuck(0, KEYED, NOW + 3_600_000)


def test_lanes_take_turns_on_the_wire() -> None:
    dispatcher = dispatcher_with(home=2)
    first, second = (dispatcher.lane(LaneId("home", "t", queue)) for queue in (0, 1))
    for lane in (first, first, first, first, second, second):
        push(dispatcher, lane, size=100)
        lane._proven = True
    sent = [dispatcher.sendable("home", NOW, 150) for _ in range(3)]
    assert [[batch.lane for batch in each] for each in sent] == [
        [first, second],
        [first, second],
        [first, first],
    ]


def test_a_request_has_no_more_batches_than_a_broker_takes() -> None:
    """A few timers each, of many topics, that were not answered when a connection broke."""
    dispatcher = dispatcher_with(home=BATCHES_MAX + 1)
    for queue in range(BATCHES_MAX + 1):
        push(dispatcher, dispatcher.lane(LaneId("home", "t", queue)))

    sent = [dispatcher.sendable("home", NOW, 1 << 20) for _ in range(2)]

    assert [len(each) for each in sent] == [BATCHES_MAX, 1]


def test_what_is_stuck_is_told_by_one_look_at_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all topics at the full hour, say: all else would wait for it."""
    dispatcher = dispatcher_with(home=3)
    targets = [TargetId("home", "t", queue) for queue in range(3)]
    for number in range(3):
        dispatcher.due.add(number, ids(number))
    batch = push(dispatcher, dispatcher.lane(LaneId("home", "t", 0)))
    batch.lane.sent(batch)
    batch.lane.answered(batch, FireOutcome.REJECTED, NOW, 0.5, "no")
    looks, lanes = [0], dispatcher.lanes

    def looked_at() -> Iterator[FireLane]:
        looks[0] += 1
        return lanes()

    monkeypatch.setattr(dispatcher, "lanes", looked_at)
    segments = SimpleNamespace(parked_counts=dict)
    scheduler: Any = SimpleNamespace(
        dispatcher=dispatcher, numbers=SimpleNamespace(targets=targets), segments=segments
    )

    found = stuck.find(scheduler)

    assert found == {stuck.Stuck("t", "no"): 4}
    assert looks == [2]


def test_a_lane_is_forgotten_only_where_its_broker_has_forgotten_it_too() -> None:
    """A release that knows nothing of that begins it with epoch 0: FENCED_PRODUCER, for ever."""
    dispatcher = dispatcher_with(home=2)
    dispatcher.lane(LaneId("home", "t", 0)).restart(7)

    def spare(**routes: dict[str, int]) -> list[FireLane]:
        dispatcher.set_routes(routes)
        return dispatcher.spare_lanes(9)

    assert not spare(t={})  # it takes nothing just now
    assert not spare(t={"other": 1}, u={"other": 1})  # it is away, and others serve the topic
    assert not spare(u={"other": 1})
    assert not spare()
    assert [each.id.topic for each in spare(u={"home": 1})] == ["t"]
