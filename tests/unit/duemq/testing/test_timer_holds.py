"""Messages that are kept back in the twin."""

import pytest

from duemq import CancelOutcome
from duemq.descriptions import TimerState
from duemq.errors import InvalidArgument
from duemq.testing import MemoryCluster

TOPIC = "reminders"


@pytest.fixture
def cluster():
    return MemoryCluster()


@pytest.fixture
def producer(cluster):
    with cluster.producer() as producer:
        yield producer


def bodies(cluster):
    return sorted(message.body for message in cluster.messages(TOPIC))


def test_a_held_topic_waits_and_is_resumed(cluster, producer):
    producer.send(TOPIC, b"1", delay="1m")
    assert cluster.hold_timers(TOPIC, dry_run=True).pending == 1
    assert cluster.timer_holds() == []
    assert cluster.hold_timers(TOPIC).was_held is False
    assert cluster.hold_timers(TOPIC).was_held is True
    second = producer.send(TOPIC, b"2", delay="2m")
    third = producer.send(TOPIC, b"3", delay="1h")
    cluster.advance("5m")
    assert bodies(cluster) == []
    [count] = cluster.count_timers(TOPIC)
    assert (count.pending, count.held) == (3, 2)
    states = [each.state for each in cluster.list_timers(TOPIC)]
    assert states == [TimerState.HELD, TimerState.HELD, TimerState.PENDING]
    assert len(cluster.pending()) == 3
    assert producer.cancel(second) is CancelOutcome.CANCELLED
    [held] = cluster.timer_holds()
    assert (held.topic, held.key_prefix) == (TOPIC, "")
    answer = cluster.resume_timers(TOPIC)
    assert (answer.pending, answer.was_held, answer.dropped, answer.done) == (2, True, 0, True)
    assert not cluster.resume_timers(TOPIC).was_held
    assert bodies(cluster) == [b"1"]
    assert str(producer.fire(third)) == "fired"
    assert bodies(cluster) == [b"1", b"3"]


def test_keys_are_held_by_their_beginning(cluster, producer):
    cluster.hold_timers(TOPIC, key_prefix="a/")
    for key in ("a/1", "b", None):
        producer.send(TOPIC, str(key).encode(), timer_key=key, delay="1s")
    cluster.advance("1s")
    assert bodies(cluster) == [b"None", b"b"]
    cluster.hold_timers(TOPIC)
    cluster.resume_timers(TOPIC, key_prefix="a/")
    assert bodies(cluster) == [b"None", b"b"]
    cluster.resume_timers(TOPIC)
    assert bodies(cluster) == [b"None", b"a/1", b"b"]


def test_some_are_dropped(cluster, producer):
    cluster.hold_timers(TOPIC)
    for n, key in enumerate(("k", "k", None, "l")):
        producer.send(TOPIC, b"%d" % n, key=key, delay=n)
    cluster.advance("10s")
    assert cluster.resume_timers(TOPIC, policy="newest").dropped == 1
    assert bodies(cluster) == [b"1", b"2", b"3"]
    cluster.hold_timers(TOPIC)
    old = producer.send(TOPIC, b"old", delay="1s")
    producer.send(TOPIC, b"new", delay="1m")
    cluster.advance("1m")
    answer = cluster.resume_timers(TOPIC, policy="drop_older_than", older_than="30s")
    assert (answer.pending, answer.dropped) == (2, 1)
    assert bodies(cluster) == [b"1", b"2", b"3", b"new"]
    assert producer.cancel(old) is CancelOutcome.CANCELLED
    [count] = cluster.count_timers(TOPIC)
    assert (count.accepted, count.fired, count.cancelled, count.dropped) == (6, 4, 0, 2)


def test_what_a_hold_of_longer_keys_keeps_back_is_not_dropped(cluster, producer):
    cluster.hold_timers(TOPIC)
    cluster.hold_timers(TOPIC, key_prefix="a/")
    for key in ("a/1", "b"):
        producer.send(TOPIC, key.encode(), timer_key=key, delay="1s")
    cluster.advance("1m")
    answer = cluster.resume_timers(TOPIC, policy="drop_older_than", older_than="1s")
    assert (answer.dropped, bodies(cluster)) == (1, [])
    cluster.resume_timers(TOPIC, key_prefix="a/")
    assert bodies(cluster) == [b"a/1"]


def test_what_is_wrong_is_said(cluster):
    with pytest.raises(InvalidArgument, match="older_than"):
        cluster.resume_timers(TOPIC, policy="drop_older_than")
    with pytest.raises(InvalidArgument, match="older_than"):
        cluster.resume_timers(TOPIC, policy="drop_older_than", older_than=-1)
    with pytest.raises(InvalidArgument, match="older_than"):
        cluster.resume_timers(TOPIC, older_than="1s")
    with pytest.raises(InvalidArgument, match="policy"):
        cluster.resume_timers(TOPIC, policy="some")
    with pytest.raises(InvalidArgument, match="topic"):
        cluster.hold_timers("%RETRY%g", key_prefix="a")
