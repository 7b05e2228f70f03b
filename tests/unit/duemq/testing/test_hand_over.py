"""What a member of a group leaves in the twin, and who has its name."""

import pytest

from duemq import ConsumerSettings, Outgoing, RetryLater
from duemq.errors import InvalidArgument
from duemq.testing import MemoryCluster

EARLIEST = ConsumerSettings(start_from="earliest", retries_in_order_max=2)


@pytest.fixture
def cluster():
    cluster = MemoryCluster()
    cluster.create_topic("t", queues=1)
    with cluster.producer() as producer:
        first, other = Outgoing(b"bad", ordering_key="a"), Outgoing(b"good", ordering_key="b")
        producer.send_many("t", [first, other, b"free"])
    return cluster


@pytest.fixture
def got():
    return []


@pytest.fixture
def note(got):
    def note(message):
        got.append((message.body, message.deliveries))
        if message.body == b"bad":
            raise RetryLater("1h")

    return note


@pytest.mark.parametrize("place", [{"order": "key"}, {"broadcast": True, "member_name": "m"}])
def test_from_what_is_not_finished_on_all_comes_again_and_at_once(cluster, got, note, place):
    for _ in range(4):  # more often than it may be tried at a stretch
        with cluster.push_consumer("g", "t", note, settings=EARLIEST, **place):
            cluster.deliver()
        assert sorted(got) == [(b"bad", 0), (b"free", 0), (b"good", 0)]
        got.clear()
    assert cluster.dead_letters("g") == []


def test_so_it_does_for_a_member_that_takes_a_queue_over(cluster, got, note):
    def consumer(name):
        return cluster.push_consumer(
            "g", "t", note, order="queue", settings=EARLIEST, member_name=name
        )

    with consumer("b"):
        cluster.deliver()
        assert got == [(b"bad", 0)]
        with consumer("a"):
            cluster.deliver()
            assert got == [(b"bad", 0)] * 2
            cluster.advance("1h")
            assert got == [(b"bad", 0)] * 2 + [(b"bad", 1)]


def test_a_newer_member_of_a_name_takes_it_over(cluster, got):
    def consumer(mine):
        return cluster.push_consumer(
            "g", "t", lambda message: mine.append(message.body), settings=EARLIEST, member_name="m"
        )

    older = []
    with consumer(older) as first, consumer(got) as second:
        assert (len(first.queues), len(second.queues)) == (0, 1)
        cluster.deliver()
    assert (older, len(got)) == ([], 3)


def test_in_broadcast_a_name_is_one_consumer_s(cluster):
    def consumer(group):
        return cluster.push_consumer(group, "t", print, broadcast=True, member_name="m")

    with consumer("g"), consumer("other"):
        with pytest.raises(InvalidArgument) as refused, consumer("g"):
            pass
        assert refused.value.field == "member_name"
    with consumer("g"):
        pass
