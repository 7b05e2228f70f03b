"""A topic that is deleted and made anew before anybody hears of its end, under who reads it."""

from collections import Counter

import pytest

from duemq.aio import PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.v1 import broker_pb2
from tests.service.running_broker import topic_name
from tests.service.running_cluster import Cluster, running_cluster, until

GROUP = "billing"
QUEUES = 2


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        yield cluster


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    name = topic_name()
    await cluster.create_topic(name, queues=QUEUES)
    return name


def make_anew(cluster: Cluster, topic: str, queues: int = QUEUES) -> None:
    """In one step of the event loop: no report of it is sent, and no pull looks between.

    As for a member whose stream is broken just then, or whose queues rest.
    """
    for broker in cluster.brokers.values():
        broker.store.delete_topic(topic)
        broker.store.create_topic(topic, queues)


async def fill(cluster: Cluster, topic: str, each: int, mark: str) -> list[bytes]:
    """`each` messages to every queue."""
    sent = []
    for broker in sorted(cluster.clients):
        for queue_id in range(QUEUES):
            bodies = [f"{mark} {broker}/{queue_id}/{n}".encode() for n in range(each)]
            if bodies:
                await cluster.send(topic, bodies, broker=broker, queue_id=queue_id)
            sent += bodies
    return sent


async def committed(cluster: Cluster, topic: str) -> set[int]:
    request = broker_pb2.GetOffsetsRequest(group=GROUP, topic=topic)
    answers = [await client.broker.GetOffsets(request) for client in cluster.clients.values()]
    return {queue.offset for answer in answers for queue in answer.queues}


@pytest.mark.parametrize("order", [None, "queue"])
@pytest.mark.parametrize("start_from", ["earliest", "latest"])
@pytest.mark.parametrize("each", [4, 10, 25])
async def test_a_group_gets_every_message_of_a_topic_made_anew_once(
    cluster, topic, each, start_from, order
) -> None:
    """With fewer messages than the group had consumed of the old one, as many, and more."""
    received: list[bytes] = []
    consumer = PushConsumer(
        GROUP,
        topic,
        lambda message: received.append(message.body),
        order=order,
        nameserver=cluster.nameserver,
        settings=ConsumerSettings(start_from=start_from, commit_interval_s=0.02),
    )
    await consumer.start()
    try:
        await until(lambda: len(consumer.queues) == 2 * QUEUES)
        old = await fill(cluster, topic, 10, "old")
        await until(lambda: len(received) == len(old))
        make_anew(cluster, topic)
        new = await fill(cluster, topic, each, "new")
        await until(lambda: len(received) >= len(old) + len(new))
        assert Counter(received) == Counter(old + new)
        await until(lambda: is_at(cluster, topic, each))
    finally:
        await consumer.close()
    assert await committed(cluster, topic) == {each}
    assert Counter(received) == Counter(old + new)


async def is_at(cluster: Cluster, topic: str, offset: int) -> bool:
    return await committed(cluster, topic) == {offset}
