"""Nameservers come and go; clients and brokers do not notice."""

from __future__ import annotations

from duemq import Admin, Producer, PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq_server.bench.harness.topic_reader import read_topic
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.checker import judge
from tests.cluster.harness import topic_name, until
from tests.cluster.history import History

EARLIEST = ConsumerSettings(start_from="earliest")


def test_clients_outlive_their_nameservers(two_nameservers: EmbeddedCluster) -> None:
    cluster = two_nameservers
    topic, history = topic_name(), History()

    def phase(name: str, producer: Producer) -> None:
        """Twenty plain and delayed messages arrive."""
        for number in range(20):
            delay = 0.2 if number % 2 else None
            assert history.send(producer, topic, f"{name}-{number}", delay=delay) is not None
        until(lambda: history.count("received", group=topic) == history.count("sent"))

    receive = history.receiver(topic)
    with (
        Producer(cluster.nameserver) as producer,
        PushConsumer(topic, topic, receive, nameserver=cluster.nameserver, settings=EARLIEST),
    ):
        phase("both", producer)
        cluster.kill("nameserver-0", restart=False)
        phase("one", producer)
        cluster.kill("nameserver-1", restart=False)
        phase("none", producer)
        cluster.start_member("nameserver-0")
        cluster.start_member("nameserver-1")
        cluster.wait_ready()
        phase("again", producer)
    with Admin(cluster.nameserver) as admin:
        fresh = topic_name()
        admin.create_topic(fresh)
        assert fresh in {found.name for found in admin.topics()}
    history.stored(read_topic(cluster.nameserver, topic))
    assert judge(history.events, [topic]).faults == []
