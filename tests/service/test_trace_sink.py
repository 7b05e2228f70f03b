"""Trace batches on their way to a broker that misbehaves."""

import math
from contextlib import closing

import pytest

from duemq.errors import DuemqError, InvalidArgument, ReadOnly, Unavailable
from duemq.protocol.names import TRACE_TOPIC
from duemq.telemetry.sink import TraceSink
from duemq.v1 import nameserver_pb2
from tests.service.blocking_cluster import FakeCluster, FakeQueue, serving

TIMEOUT_S = 60.0


@pytest.fixture
def cluster():
    with serving(FakeCluster()) as served:
        served.topics[TRACE_TOPIC] = [FakeQueue([]), FakeQueue([])]
        yield served


@pytest.fixture
def sink(cluster):
    opened = TraceSink(cluster.address, TRACE_TOPIC, TIMEOUT_S)
    yield opened
    opened.close()


def stored(cluster):
    queues = cluster.topics[TRACE_TOPIC]
    return sorted(record.body for queue in queues for record in queue.records)


def bodies(count):
    return [b"%03d" % i for i in range(count)]


def test_batches_go_to_all_queues_in_turn(cluster, sink):
    for body in bodies(6):
        sink.send(body)
    assert stored(cluster) == bodies(6)
    assert [len(queue.records) for queue in cluster.topics[TRACE_TOPIC]] == [3, 3]
    ids = [record.message_id for batch in cluster.batches for record in batch.records.records]
    assert len(set(ids)) == 6


def test_the_topic_is_made_where_it_is_missing(cluster, sink):
    del cluster.topics[TRACE_TOPIC]
    sink.send(b"x")
    assert stored(cluster) == [b"x"]


def test_a_broker_that_cannot_make_the_topic_keeps_no_other_from_it(cluster):
    del cluster.topics[TRACE_TOPIC]
    gone = nameserver_pb2.BrokerInstance(name="broker-1", address="127.0.0.1:1")
    cluster.before = [gone]
    with closing(TraceSink(cluster.address, TRACE_TOPIC, TIMEOUT_S)) as sink:
        sink.send(b"x")
    assert stored(cluster) == [b"x"]


def test_a_batch_whose_answer_is_lost_is_stored_once(cluster, sink):
    cluster.lost_answers = 2
    for body in bodies(5):
        sink.send(body)
    assert stored(cluster) == bodies(5)


def test_servers_that_stumble_and_refuse_for_now_are_asked_again(cluster, sink):
    cluster.unavailable_calls = 3
    cluster.refusals = [ReadOnly("disk full"), ReadOnly("disk full")]
    sink.send(b"x")
    assert stored(cluster) == [b"x"]


def test_a_second_nameserver_helps(cluster):
    sink = TraceSink(f"127.0.0.1:1, {cluster.address}", TRACE_TOPIC, TIMEOUT_S)
    sink.send(b"x")
    sink.close()
    assert stored(cluster) == [b"x"]


def test_without_a_nameserver_batches_go_where_they_went(cluster, sink):
    sink.send(b"a")
    sink._client.nameservers = ("127.0.0.1:1",)
    sink._timeout_s = 5.0
    sink._lanes_at = -math.inf  # as after ROUTE_AGE_S_MAX
    sink.send(b"b")
    cluster.refusals = [InvalidArgument("no")]
    with pytest.raises(InvalidArgument):
        sink.send(b"c")
    sink.send(b"d")
    assert stored(cluster) == [b"a", b"b", b"d"]


def test_what_is_refused_for_good_is_raised_at_once_and_the_next_batch_goes_on(cluster, sink):
    sink.send(b"a")
    cluster.refusals = [InvalidArgument("no")]
    with pytest.raises(InvalidArgument):
        sink.send(b"b")
    sink.send(b"c")
    sink.send(b"d")
    assert stored(cluster) == [b"a", b"c", b"d"]
    assert {batch.producer_epoch for batch in cluster.batches} == {0, 1}


def test_a_broker_that_comes_back_at_another_address_takes_nothing_for_a_repeat(cluster, sink):
    for body in bodies(4):
        sink.send(body)
    cluster.address = cluster.address.replace("127.0.0.1", "localhost")
    sink._lanes_at = -math.inf  # as after ROUTE_AGE_S_MAX
    for body in bodies(8)[4:]:
        sink.send(body)
    assert stored(cluster) == bodies(8)


def test_another_broker_at_an_address_can_tell_that_a_batch_is_not_for_it(cluster, sink):
    cluster.store_id = 7
    sink.send(b"x")
    assert cluster.meant == {"7"}


def test_when_nobody_is_there_the_time_is_bounded():
    sink = TraceSink("127.0.0.1:1", TRACE_TOPIC, timeout_s=0.2)
    with pytest.raises(Unavailable):
        sink.send(b"x")
    sink.close()


def test_a_broker_that_vanished_lets_the_batch_down_with_a_duemq_error(cluster):
    sink = TraceSink(cluster.address, TRACE_TOPIC, TIMEOUT_S)
    sink.send(b"a")
    cluster.unavailable_calls = 10_000
    sink._timeout_s = 0.3
    with pytest.raises(DuemqError):
        sink.send(b"b")
    cluster.unavailable_calls = 0
    sink._timeout_s = TIMEOUT_S
    sink.send(b"c")
    sink.close()
    assert stored(cluster) == [b"a", b"c"]
