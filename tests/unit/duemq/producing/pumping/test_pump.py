"""What the pump says when: by events and times alone."""

import pytest

from duemq.errors import (
    Closed,
    Internal,
    InvalidArgument,
    QueueNotFound,
    ReadOnly,
    Timeout,
    TooLarge,
    TopicNotFound,
    Unavailable,
)
from duemq.producing.pumping.in_flight import Answer
from duemq.producing.pumping.pump import HOLD_BYTES, HOLD_MS, NEVER
from duemq.protocol.limits import BATCHES_MAX
from duemq.protocol.route import BrokerQueues, Route
from tests.unit.duemq.producing.pumping.played_brokers import (
    SEND_TIMEOUT_S,
    WAIT_S,
    PlayedCluster,
    StoredBatch,
    overloaded,
    too_large,
)


@pytest.fixture
def cluster():
    """One broker with one queue, connected."""
    return connected(PlayedCluster())


@pytest.fixture
def two():
    return connected(PlayedCluster(("a", "b")))


def connected(cluster):
    cluster.open()
    for name in cluster.brokers:
        cluster.connect(name)
    return cluster


def frames(cluster, name="a"):
    """The batches' numbers, by frame, that are on their way."""
    return [[sent.number for sent in batches] for _, batches in cluster.brokers[name].frames]


def test_a_batch_makes_the_pump_want_its_broker_and_leaves_when_the_stream_stands():
    cluster = PlayedCluster()
    batch = cluster.offer()
    assert cluster.run().want == {"a"}
    assert frames(cluster) == []
    cluster.connect()
    assert frames(cluster) == [[batch.number]]
    cluster.serve_all()
    assert (batch.broker, batch.queue_id, batch.base_offset, batch.store_id) == ("a", 0, 0, 7)
    assert cluster.outbox.used_bytes == 0


def test_the_first_answer_to_a_batch_is_not_that_of_another_one(cluster):
    """Its numbers were given out before: a machine was set back to what it had been, say."""
    first = cluster.offer()
    cluster.run()
    cluster.serve_all()
    broker = cluster.brokers["a"]
    [lane] = broker.lanes.values()
    lane.placed[1], lane.next_sequence = StoredBatch(0, 99), 2
    batch = cluster.offer()
    cluster.run()
    cluster.serve_all()
    assert broker.stored == [first.number, batch.number]
    assert (batch.epoch, batch.base_offset) == (1, 1)


def test_a_broker_that_is_up_is_not_wanted_again(cluster):
    cluster.offer()
    assert cluster.run().want == set()


def test_a_lone_batch_leaves_at_once_and_what_comes_meanwhile_leaves_together(cluster):
    batches = [cluster.submit("k") for _ in range(3)]
    assert frames(cluster) == [[batches[0].number]]
    cluster.serve_all()
    assert all(each.done for each in batches)
    cluster.submit("k")
    late = [cluster.submit("k") for _ in range(2)]
    cluster.brokers["a"].arrive()
    cluster.answer()
    assert frames(cluster) == [[late[0].number]]  # a lane is in a frame once


def test_much_that_waits_does_not_wait_for_an_answer():
    cluster = connected(PlayedCluster(queues=2))
    for _ in range(2):
        cluster.submit()
        cluster.serve_all()
    cluster.submit()
    much = cluster.submit(bodies=HOLD_BYTES // 100)
    assert frames(cluster)[1:] == [[much.number]]


def test_no_more_frames_are_in_flight_than_allowed():
    cluster = connected(PlayedCluster(queues=8, in_flight=3))
    for _ in range(8):
        cluster.submit()
        cluster.serve_all()
    for _ in range(5):
        cluster.submit(bodies=HOLD_BYTES // 100)
    assert len(frames(cluster)) == 3
    cluster.brokers["a"].arrive()
    cluster.answer()
    assert len(frames(cluster)) == 3


@pytest.mark.parametrize("queues", [1, BATCHES_MAX + 1])
def test_a_frame_has_no_more_batches_than_a_broker_takes(queues):
    """Little for each of many topics, or of a topic's queues."""
    names = [f"t{number}" for number in range(BATCHES_MAX + 1 if queues == 1 else 1)]
    cluster = PlayedCluster()
    cluster.serve(*(Route(name, (BrokerQueues("a", "h:1", queues),)) for name in names))
    for name in names:
        target = cluster.open(name)
        for queue in target.queues:
            cluster.outbox.add_list(target, queue if queues > 1 else None, [b""], None, None, 1)
    cluster.run()
    cluster.connect()
    assert [len(each) for each in frames(cluster)] == [BATCHES_MAX]
    cluster.serve_all()
    assert len(cluster.brokers["a"].stored) == BATCHES_MAX + 1


def test_an_answer_of_another_broker_is_waited_for_but_not_for_long(two):
    two.submit()
    (busy,) = [name for name in "ab" if frames(two, name)]
    (free,) = {"a", "b"} - {busy}
    over_ms = two.now_ms + HOLD_MS
    two.now_ms += 1
    held = two.submit()
    assert frames(two, free) == []
    assert two.next_ms == over_ms
    two.pass_ms(over_ms - two.now_ms)
    assert frames(two, free) == [[held.number]]


def test_brokers_and_queues_take_turns():
    cluster = connected(PlayedCluster(("a", "b"), queues=2))
    places = []
    for _ in range(8):
        batch = cluster.submit()
        for name in "ab":
            cluster.serve_all(name)
        places.append((batch.broker, batch.queue_id))
    assert sorted(places) == sorted([(b, q) for b in "ab" for q in (0, 1)] * 2)


def test_a_slow_broker_is_passed_over(two):
    def broker_of_next():
        batch = two.submit()
        return next(name for name in "ab" if frames(two, name)), batch

    slow, _ = broker_of_next()
    two.now_ms += 6_000
    two.serve_all(slow)
    for _ in range(4):
        name, _ = broker_of_next()
        assert name != slow
        two.serve_all(name)


def test_a_keyed_batch_waits_for_its_broker(two):
    two.break_stream("a")
    two.break_stream("b")
    keys = {two.open().queue_for(f"k{i}").broker: f"k{i}" for i in range(20)}
    for_a = two.submit(keys["a"])
    two.connect("b")
    assert (frames(two, "a"), frames(two, "b")) == ([], [])
    two.connect("a")
    assert frames(two, "a") == [[for_a.number]]


def test_what_was_on_its_way_when_the_stream_broke_is_sent_again_first(cluster):
    cluster.submit("k")
    cluster.serve_all()
    lost = cluster.submit("k")
    cluster.break_stream()
    later = cluster.submit("k")
    cluster.connect()
    assert frames(cluster)[0] == [lost.number]
    cluster.serve_all()
    assert (lost.base_offset, later.base_offset) == (1, 2)


def test_a_repeat_of_what_was_stored_is_stored_once(cluster):
    batch = cluster.submit("k")
    cluster.brokers["a"].arrive()  # and the answer is lost
    cluster.break_stream()
    cluster.connect()
    cluster.serve_all()
    assert cluster.brokers["a"].stored == [batch.number]
    assert batch.done
    assert batch.error is None


def test_a_broker_that_refuses_is_left_in_peace_and_gets_the_batch_again(cluster):
    batch = cluster.submit("k")
    cluster.serve_all(refusal=overloaded())
    assert frames(cluster) == []
    assert cluster.next_ms == cluster.now_ms + WAIT_S * 1000
    cluster.pass_ms(WAIT_S * 1000 - 1)
    assert frames(cluster) == []
    cluster.pass_ms(1)
    assert frames(cluster) == [[batch.number]]


def test_a_pooled_batch_that_is_refused_goes_to_another_broker(two):
    batch = two.submit()
    (first,) = [name for name in "ab" if frames(two, name)]
    (other,) = {"a", "b"} - {first}
    two.serve_all(first, refusal=ReadOnly("disk full", retryable=True))
    assert frames(two, other) == [[batch.number]]


def test_a_batch_that_can_never_be_stored_fails(cluster):
    wrong, right = cluster.submit("k"), cluster.submit("k")
    cluster.serve_all(refusal=InvalidArgument("no"))
    cluster.serve_all()
    assert isinstance(wrong.error, InvalidArgument)
    assert right.done
    assert right.error is None
    assert cluster.outbox.used_bytes == 0


def test_a_refused_repeat_is_kept_and_goes_nowhere_else(two):
    batch = two.submit()
    (name,) = [name for name in "ab" if frames(two, name)]
    two.break_stream(name)
    two.connect(name)
    two.serve_all(name, refusal=overloaded())
    assert not batch.done
    assert (frames(two, "a"), frames(two, "b")) == ([], [])
    two.pass_ms(WAIT_S * 1000)
    assert frames(two, name) == [[batch.number]]
    two.serve_all(name)
    assert batch.error is None
    assert two.brokers[name].stored == [batch.number]


def test_a_repeat_whose_topic_is_gone_says_that_it_may_be_stored(cluster):
    """With the topic went what the broker knew of it."""
    batch = cluster.submit("k")
    cluster.break_stream()
    cluster.connect()
    cluster.serve_all(refusal=TopicNotFound("no"))
    assert isinstance(batch.error, TopicNotFound)
    assert "an earlier attempt may have been stored" in str(batch.error)


@pytest.mark.parametrize("first", [overloaded(), None])
def test_a_repeat_that_is_refused_for_what_it_is_fails_and_those_behind_it_go_on(cluster, first):
    """A copy of it that comes late is refused as well."""
    cluster.submit("k")
    cluster.serve_all()
    wrong, *behind = (cluster.submit("k", bodies=HOLD_BYTES // 100) for _ in range(3))
    cluster.break_stream()
    cluster.connect()
    if first is not None:  # then all of them are in doubt, and kept
        cluster.serve_all(refusal=first)
        cluster.pass_ms(WAIT_S * 1000)
    cluster.serve_all(refusal=InvalidArgument("no"))
    assert str(wrong.error) == "no"
    assert [(each.error, each.base_offset) for each in behind] == [(None, 1), (None, 2)]
    assert cluster.pump.to("a").idle


def test_a_topic_that_is_gone_is_asked_for_anew(cluster):
    cluster.submit("k")
    cluster.serve_all(refusal=QueueNotFound("smaller"))
    assert "t" not in cluster.pump.targets


def test_a_topic_whose_end_was_heard_of_is_asked_for_anew_and_one_that_is_away_is_not(cluster):
    cluster.submit("k")
    cluster.serve()
    assert "t" in cluster.pump.targets
    cluster.serve(Route("other", (BrokerQueues("a", "h:1", 1),)))
    cluster.serve(Route("t", (BrokerQueues("a", "h:1", 1),)))
    cluster.open()
    cluster.serve(Route("other", (BrokerQueues("a", "h:1", 1),)))
    assert "t" not in cluster.pump.targets


def test_what_is_not_sent_in_time_says_so():
    cluster = PlayedCluster()
    batch = cluster.submit()
    cluster.pump.broke("a", Unavailable("h:1: cannot connect"), cluster.now_ms)
    assert cluster.next_ms == cluster.now_ms + SEND_TIMEOUT_S * 1000
    cluster.pass_ms(SEND_TIMEOUT_S * 1000)
    assert isinstance(batch.error, Timeout)
    assert "not sent within 10.0 s (a: h:1: cannot connect)" in str(batch.error)
    cluster.connect()
    assert frames(cluster) == []


@pytest.mark.parametrize("key", ["k", None])
def test_what_was_given_up_while_no_broker_is_there_is_not_kept(key):
    cluster = PlayedCluster()
    for _ in range(20):
        cluster.submit(key)
        cluster.pass_ms(SEND_TIMEOUT_S * 1000)
    backlog = cluster.pump._backlog
    waiting = [*backlog._pools.values(), *(lane.waiting for lane in backlog._lanes.values())]
    assert sum(map(len, waiting)) == 0
    assert not backlog
    later = cluster.submit(key)
    cluster.connect()
    cluster.serve_all()
    assert later.error is None


def test_a_broker_is_avoided_no_longer_though_nothing_else_happens():
    """The other one does not answer."""
    cluster = connected(PlayedCluster(("a", "b"), in_flight=1))
    cluster.submit()
    slow, frozen = "ab" if frames(cluster, "a") else "ba"
    cluster.now_ms += 2_000
    cluster.serve_all(slow)
    cluster.submit()
    assert len(frames(cluster, frozen)) == 1
    waiting = cluster.submit()
    for _ in range(2):
        assert frames(cluster, slow) == []
        cluster.pass_ms(cluster.next_ms - cluster.now_ms)
    assert frames(cluster, slow) == [[waiting.number]]


def test_what_nobody_serves_says_so(cluster):
    cluster.break_stream()
    batch = cluster.offer()
    cluster.serve()
    cluster.run()
    cluster.pass_ms(SEND_TIMEOUT_S * 1000)
    assert "no broker serves topic 't' now" in str(batch.error)


def test_what_is_served_by_read_only_brokers_alone_does_not_pass_for_served_by_nobody(cluster):
    cluster.break_stream()
    batch = cluster.offer()
    cluster.serve(Route("t", (BrokerQueues("a", "h:1", 1, writable=False),)))
    cluster.run()
    cluster.pass_ms(SEND_TIMEOUT_S * 1000)
    assert "no broker takes messages of topic 't' now" in str(batch.error)


def test_what_is_not_answered_in_time_may_be_stored_and_costs_the_stream(cluster):
    batch = cluster.submit("k")
    step_at = cluster.now_ms + SEND_TIMEOUT_S * 1000
    cluster.pass_ms(step_at - cluster.now_ms)
    assert "whether the message is stored is unknown" in str(batch.error)
    assert not cluster.brokers["a"].up
    later = cluster.submit("k")
    cluster.connect()
    cluster.serve_all()
    assert later.error is None
    assert (later.epoch, later.sequence) == (1, 0)


def test_what_was_on_its_way_to_a_broker_that_is_gone_and_is_given_up_is_not_kept(cluster):
    first = cluster.submit("k")
    cluster.break_stream()
    in_flight = cluster.pump.to("a")
    assert (in_flight.idle, in_flight.bytes) == (False, first.size)
    cluster.pass_ms(SEND_TIMEOUT_S * 1000)
    cluster.break_stream()  # it did not come up
    assert (in_flight.idle, in_flight.bytes) == (True, 0)
    later = cluster.submit("k")
    cluster.connect()
    cluster.serve_all()
    assert (later.error, later.epoch) == (None, 1)


def test_an_answer_that_fits_no_frame_is_an_error(cluster):
    batch = cluster.submit()
    with pytest.raises(Internal, match="which is not next"):
        cluster.pump.answered("a", Answer(99, "a", 7, []), cluster.now_ms)
    with pytest.raises(Internal, match="answered 0 batches of 1"):
        cluster.pump.answered("a", Answer(batch.number, "a", 7, []), cluster.now_ms)
    cluster.break_stream()
    cluster.connect()
    cluster.serve_all()
    assert batch.error is None


def test_what_waits_for_a_topic_leaves_in_order_when_it_is_found():
    cluster = PlayedCluster()
    target = cluster.pump.seek("t", traced=False)
    assert cluster.pump.sought("t") is target
    keyed, other = (cluster.outbox.add(target, key, b"x", None, None, 1)[0] for key in ("k", None))
    step = cluster.run()
    assert (step.want, step.next_ms) == (set(), NEVER)
    assert cluster.pump.found("t", cluster.now_ms, traced=False) is target
    assert cluster.pump.sought("t") is None
    cluster.run()
    cluster.connect()
    cluster.serve_all()
    assert keyed.queue.broker == "a"
    assert keyed.error is other.error is None


def test_what_waits_for_a_topic_that_is_not_found_fails():
    cluster = PlayedCluster()
    target = cluster.pump.seek("gone", traced=False)
    batch, _ = cluster.outbox.add(target, None, b"x", None, None, 1)
    cluster.run()
    cluster.pump.not_found("gone", TopicNotFound("gone"))
    assert cluster.run().done == [batch]
    assert isinstance(batch.error, TopicNotFound)


def test_new_queues_are_known_to_the_next_keys(cluster):
    cluster.serve(Route("t", (BrokerQueues("a", "h:1", 5),)))
    assert len(cluster.open().queues) == 5
    cluster.serve()
    assert len(cluster.open().queues) == 5  # those that were known


def test_a_close_fails_what_is_left_and_says_what_is_known_of_it(cluster):
    sent, waiting = cluster.submit("k"), cluster.offer("k")
    assert cluster.pump.close(cluster.now_ms).done == [sent, waiting]
    assert isinstance(sent.error, Closed)
    assert "its outcome is unknown" in str(sent.error)
    assert "it was not sent" in str(waiting.error)
    assert cluster.outbox.used_bytes == 0


def test_nothing_to_do_needs_no_timer(cluster):
    cluster.submit()
    cluster.serve_all()
    assert cluster.next_ms == NEVER


@pytest.mark.parametrize("key", ["k", None])
def test_a_batch_goes_on_without_what_is_too_large(key):
    """In its place, with what was on its way behind it."""
    cluster = connected(PlayedCluster())
    first = cluster.submit(key)
    cluster.serve_all()
    mixed = cluster.submit(key, bodies=HOLD_BYTES // 100, large=2)
    last = cluster.submit(key, bodies=HOLD_BYTES // 100)
    assert frames(cluster) == [[mixed.number], [last.number]]
    cluster.serve_all(refusal=too_large())
    stored = cluster.brokers["a"].stored
    assert sorted(stored) == [first.number, mixed.number, last.number]
    if key:
        assert stored == sorted(stored)
    assert (mixed.epoch, last.epoch, first.error, last.error) == (1, 1, None, None)
    assert [type(mixed.error_of(index)) for index in (0, 1)] == [TooLarge] * 2
    assert [mixed.error_of(index) for index in (2, 3)] == [None] * 2
    assert [mixed.place_of(index) for index in (2, 3)] == [0, 1]
    assert cluster.outbox.used_bytes == 0


def test_what_was_sent_before_goes_on_without_what_is_too_large(cluster):
    cluster.submit("k")
    cluster.serve_all()
    mixed = cluster.submit("k", bodies=HOLD_BYTES // 100, large=1)
    behind = cluster.submit("k")
    cluster.break_stream()
    cluster.connect()
    cluster.serve_all(refusal=too_large())
    assert str(mixed.error_of(0)) == "body: 200 bytes, at most 100"
    assert mixed.error_of(1) is behind.error is None
    assert cluster.brokers["a"].stored[1:] == [mixed.number, behind.number]
