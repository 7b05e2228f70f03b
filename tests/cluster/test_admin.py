"""The admin client against real processes: what each broker says, joined."""

from __future__ import annotations

import pytest

from duemq import Admin, Producer, PushConsumer
from duemq.errors import GroupNotFound, InvalidArgument, TopicExists, TopicNotFound, Unavailable
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import topic_name, until


def test_a_topics_life(cluster: EmbeddedCluster) -> None:
    name = topic_name()
    with Admin(cluster.nameserver) as admin, Producer(cluster.nameserver) as producer:
        made = admin.create_topic(name, queues=3, message_bytes_max=1_000)
        assert (made.name, made.queues, made.message_bytes_max) == (name, 6, 1_000)
        assert len(made.brokers) == 2
        with pytest.raises(TopicExists) as exists:
            admin.create_topic(name)
        assert (exists.value.field, exists.value.value) == ("name", name)
        producer.send_many(name, [b"x"] * 10)
        described = admin.describe_topic(name)
        assert described.messages == 10
        assert [(q.broker, q.queue) for q in described.queues] == [
            (broker, queue) for broker in made.brokers for queue in range(3)
        ]
        assert any(queue.last_store_ms for queue in described.queues)
        assert name in {topic.name for topic in admin.topics()}
        assert all(not topic.name.startswith("%") for topic in admin.topics())
        assert any(topic.name == "%TIMER%" for topic in admin.topics(system=True))
        admin.delete_topic(name)
        for call in (admin.describe_topic, admin.delete_topic):
            with pytest.raises(TopicNotFound):
                call(name)


def test_a_topic_of_one_queue_on_one_broker(cluster: EmbeddedCluster) -> None:
    name = topic_name()
    with Admin(cluster.nameserver) as admin:
        made = admin.create_topic(name, queues=1, brokers=["broker-1"])
        assert (made.queues, made.brokers) == (1, ("broker-1",))
        with pytest.raises(InvalidArgument):
            admin.create_topic(topic_name(), brokers=[])
        with pytest.raises(Unavailable):
            admin.create_topic(topic_name(), brokers=["broker-77"])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"name": "no spaces"}, "topic"), ({"queues": 1_025}, "queues"), ({"queues": -1}, "queues")],
)
def test_illegal_topics(cluster: EmbeddedCluster, arguments: dict[str, object], field: str) -> None:
    with Admin(cluster.nameserver) as admin, pytest.raises(InvalidArgument) as raised:
        admin.create_topic(**{"name": topic_name(), **arguments})  # type: ignore[arg-type]
    assert field in raised.value.field
    assert raised.value.limit


def test_a_groups_progress(cluster: EmbeddedCluster) -> None:
    name, seen = topic_name(), []
    with Admin(cluster.nameserver) as admin, Producer(cluster.nameserver) as producer:
        admin.create_topic(name)
        producer.send_many(name, [b"x"] * 40, tag="b")
        with PushConsumer(
            name,
            {name: "a || b"},
            seen.append,
            start_from="earliest",
            nameserver=cluster.nameserver,
        ) as consumer:
            until(lambda: sum(queue.topic == name for queue in consumer.queues) == 8)
            group = admin.describe_group(name)
            assert group.members[0].topics[name] == "a || b"
            assert len([q for q in group.members[0].queues if q[0] == name]) == 8
            producer.send_many(name, [b"y"] * 8, tag="a")
            until(lambda: len(seen) == 48)
            summary = next(found for found in admin.groups() if found.name == name)
            assert (summary.members, summary.coordinator) == (1, group.coordinator)
            consumer.close()
        group = admin.describe_group(name)
        assert group.lag == 0
        assert sum(queue.offset or 0 for queue in group.progress if queue.topic == name) == 48
        with pytest.raises(GroupNotFound):
            admin.describe_group(topic_name())


def test_the_cluster(cluster: EmbeddedCluster) -> None:
    with Admin(cluster.nameserver) as admin:
        found = admin.cluster()
    assert [server.error for server in found.nameservers] == [None]
    assert [broker.error for broker in found.brokers] == [None, None]
    assert all(broker.delay_levels_ms[0] == 1_000 for broker in found.brokers)
    assert all(broker.store_id and broker.started_ms for broker in found.brokers)
    (timer,) = found.timers
    assert timer.error is None
    assert timer.accepted == timer.pending + timer.fired + timer.cancelled
