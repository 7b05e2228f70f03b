"""What the Spark sources plan, without Spark: who serves the topic, and who is lost."""

import logging
from dataclasses import replace

import pytest

from duemq.errors import PartialAnswer, TopicNotFound, TopicReplaced, Unavailable
from duemq.protocol.route import Broker
from duemq.v1.message_pb2 import Record
from duemq.v1.nameserver_pb2 import BrokerInstance
from duemq_analytics.options import Options
from duemq_analytics.source import stream_offsets
from duemq_analytics.source.client import QueueClient
from duemq_analytics.source.plan import QueueRange
from duemq_analytics.source.stream_reader import RangeStreamReader
from tests.service.blocking_cluster import FakeCluster, FakeQueue, serving

LOST = BrokerInstance(name="broker-1", address="h:1", lost_ms=1_700_000_000_000)
ORDERS = Options("orders")
DEAD = "127.0.0.1:1"


@pytest.fixture
def cluster():
    with serving(FakeCluster()) as cluster:
        cluster.topics["orders"] = [FakeQueue([Record()] * 3), FakeQueue([])]
        yield cluster


def planned(options, *nameservers, patient_s=60.0):
    patient_s = 0.1 if nameservers == (DEAD,) else patient_s
    with QueueClient(nameservers, timeout_s=patient_s) as client:
        return [(q.broker, q.queue, q.past) for q in client.queues(options)]


def test_the_queues_are_those_of_the_nameservers_that_answer(cluster):
    expected = [("broker-0", 0, 3), ("broker-0", 1, 0)]
    assert planned(ORDERS, cluster.address) == expected
    assert planned(ORDERS, DEAD, cluster.address) == expected
    with pytest.raises(TopicNotFound, match="'nowhere' does not exist"):
        planned(Options("nowhere"), cluster.address)
    with pytest.raises(Unavailable, match=f"connection refused at {DEAD}: is it started"):
        planned(ORDERS, DEAD)


def test_a_topic_is_not_read_in_part_while_a_broker_is_lost(cluster, caplog):
    cluster.lost = [LOST]
    with pytest.raises(PartialAnswer, match="broker-1: it was at h:1, fell silent at 2023-11-1"):
        planned(ORDERS, cluster.address, patient_s=0.1)
    with caplog.at_level(logging.WARNING):
        assert len(planned(replace(ORDERS, fail_on_data_loss=False), cluster.address)) == 2
    assert "broker-1: it was at h:1" in caplog.text


def test_a_topic_that_only_a_lost_broker_may_have_is_not_called_missing(cluster):
    cluster.lost = [LOST]
    with pytest.raises(PartialAnswer, match="broker-1"):
        planned(Options("nowhere"), cluster.address, patient_s=0.1)


def test_a_broker_that_is_started_anew_is_waited_for(cluster, monkeypatch):
    cluster.lost = [LOST]
    routes, asked = QueueClient._routes, []

    def back_soon(client, topic):
        found = routes(client, topic)
        asked.append(found)
        if len(asked) == 2:
            cluster.lost = []
        return found

    monkeypatch.setattr(QueueClient, "_routes", back_soon)
    assert len(planned(ORDERS, cluster.address)) == 2
    assert len(asked) == 3


def test_a_broker_that_was_given_up_is_not_missed(cluster):
    cluster.lost = [given_up()]
    assert len(planned(ORDERS, cluster.address)) == 2


def given_up():
    broker = BrokerInstance()
    broker.CopyFrom(LOST)
    broker.forgotten = True
    return broker


@pytest.fixture
def micro_batch(cluster):
    """Of two brokers, planned while both were there, by a stream that may lose data."""

    def ranges(patient_s=0.1):
        settings = replace(ORDERS, nameservers=(cluster.address,), fail_on_data_loss=False)
        reader = RangeStreamReader(replace(settings, timeout_s=patient_s), None)
        start = stream_offsets.canonical({("broker-0", 0): 1, ("broker-1", 0): 4}, {})
        end = stream_offsets.canonical({("broker-0", 0): 3, ("broker-1", 0): 9}, {})
        return [(p.piece.broker, p.piece.start, p.piece.end) for p in reader.partitions(start, end)]

    return ranges


def test_what_was_planned_of_a_broker_is_not_passed_over_while_it_is_lost(
    cluster, micro_batch, caplog
):
    cluster.lost = [LOST]
    with pytest.raises(PartialAnswer, match=r"broker-1: .*give it up \(duemq cluster forget\)$"):
        micro_batch()
    cluster.lost = [given_up()]
    assert micro_batch() == [("broker-0", 1, 3)]
    assert "orders/0 on broker 'broker-1' is not there: 4 to 9 are passed over" in caplog.text
    assert caplog.text.endswith('startingOffsets {"broker-1": {"0": 4}}\n')


def test_a_broker_with_planned_messages_is_waited_for_where_nobody_knows_of_it_yet(
    cluster, micro_batch, monkeypatch
):
    """As after a power failure: nameserver and one broker are there first."""
    with serving(FakeCluster("broker-1")) as slower:
        slower.topics["orders"] = [FakeQueue([Record()] * 9)]
        routes, asked = QueueClient._routes, []

        def there_at_last(client, topic):
            asked.append(topic)
            if len(asked) == 3:
                client._client.nameservers += (slower.address,)
            return routes(client, topic)

        monkeypatch.setattr(QueueClient, "_routes", there_at_last)
        assert micro_batch(patient_s=60) == [("broker-0", 1, 3), ("broker-1", 4, 9)]


def test_one_nameserver_that_lost_a_broker_which_another_hears_loses_nothing(cluster):
    with serving(FakeCluster("broker-1")) as other:
        cluster.lost = [LOST]
        other.topics["orders"] = [FakeQueue([Record()] * 5)]
        found = planned(ORDERS, cluster.address, other.address)
    assert found == [("broker-0", 0, 3), ("broker-0", 1, 0), ("broker-1", 0, 5)]


def test_a_broker_that_has_moved_is_found_where_it_is_now(cluster, monkeypatch):
    wanted = QueueRange("broker-0", DEAD, 0, 0, 3)
    with QueueClient((cluster.address,), timeout_s=60) as client:
        assert sum(len(run.records) for run in client.read("orders", wanted)) == 3

    routes, asked = QueueClient._routes, []

    def as_it_was(client, topic):
        found = routes(client, topic)
        asked.append(found)
        if len(asked) == 1:
            found._brokers = {"broker-0": Broker("broker-0", DEAD)}
        return found

    monkeypatch.setattr(QueueClient, "_routes", as_it_was)
    with QueueClient((cluster.address,), timeout_s=60) as client:
        assert {queue.address for queue in client.queues(ORDERS)} == {cluster.address}
    assert len(asked) == 2


def test_another_broker_of_the_name_is_not_taken_for_the_one_that_was_planned(cluster):
    cluster.store_id = 8
    wanted = QueueRange("broker-0", DEAD, 0, 0, 3, store_id=7)
    with (
        QueueClient((cluster.address,), timeout_s=60) as client,
        pytest.raises(TopicReplaced, match="came back with another store"),
    ):
        list(client.read("orders", wanted))
