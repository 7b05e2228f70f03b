"""Consumers with filters, from the subscription to the callback and the committed offset."""

import pytest

import duemq
from duemq.aio import PullConsumer, PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import InvalidArgument
from duemq.protocol.filters import Sql
from duemq.v1 import broker_pb2, message_pb2
from tests.service.running_broker import topic_name
from tests.service.running_cluster import Cluster, running_cluster, until

GROUP = "billing"
PRICES = range(60)


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        yield cluster


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    """Orders of each price once, spread over brokers and queues; odd ones have tags."""
    name = topic_name()
    await cluster.create_topic(name, queues=2)
    await store(cluster, name, PRICES)
    return name


async def store(cluster: Cluster, topic: str, prices: range) -> None:
    for number, broker in enumerate(("b0", "b1")):
        for queue in range(2):
            records = [
                message_pb2.Record(
                    body=b"%d" % price,
                    message_id=f"m{price}",
                    tag="odd" if price % 2 else "",
                    properties={"price": str(price)} if price % 5 else {"price": "free"},
                )
                for price in prices
                if price % 4 == 2 * number + queue
            ]
            await cluster.clients[broker].send(
                broker_pb2.Batch(
                    topic=topic,
                    queue_id=queue,
                    records=message_pb2.RecordBatch(records=records),
                )
            )


def consumer(cluster: Cluster, topics, received: list[int], **settings) -> PushConsumer:
    return PushConsumer(
        GROUP,
        topics,
        lambda message: received.append(int(message.body)),
        nameserver=cluster.nameserver,
        settings=ConsumerSettings(start_from="earliest", commit_interval_s=0.05, **settings),
    )


async def committed(cluster: Cluster, topic: str) -> int:
    """How many messages the group has behind it."""
    offsets = 0
    for client in cluster.clients.values():
        request = broker_pb2.GetOffsetsRequest(group=GROUP, topic=topic)
        for each in (await client.broker.GetOffsets(request)).queues:
            offsets += max(0, each.offset)
    return offsets


async def test_a_push_consumer_gets_what_an_expression_takes_and_commits_past_the_rest(
    cluster: Cluster, topic: str
) -> None:
    received: list[int] = []
    wanted = [price for price in PRICES if price > 40 and price % 5]
    async with consumer(cluster, {topic: Sql("price > 40")}, received):
        await until(lambda: len(received) >= len(wanted))

        async def all_committed() -> bool:
            return await committed(cluster, topic) == len(PRICES)

        await until(all_committed)
        # Later ones, some of them left out, beside the parked pull.
        await store(cluster, topic, range(60, 70))
        await until(lambda: len(received) >= len(wanted) + 8)
    assert sorted(received) == [*wanted, 61, 62, 63, 64, 66, 67, 68, 69]
    assert await committed(cluster, topic) >= len(PRICES)


async def test_nothing_matches_and_the_offsets_go_on_all_the_same(
    cluster: Cluster, topic: str
) -> None:
    received: list[int] = []

    async def all_committed() -> bool:
        return await committed(cluster, topic) == len(PRICES)

    async with consumer(cluster, {topic: Sql("price < 0 OR nothing = 1")}, received):
        await until(all_committed)
    async with consumer(cluster, {topic: "no || such"}, received):
        await until(all_committed)
    assert received == []


async def test_an_expression_that_is_none_ends_the_start_with_its_place(
    cluster: Cluster, topic: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await consumer(cluster, {topic: Sql("price >> 4")}, []).start()
    assert caught.value.field == "filter"
    assert "line 1, column 8" in caught.value.message


async def test_pull_consumers_take_expressions_and_tags(cluster: Cluster, topic: str) -> None:
    async with PullConsumer(nameserver=cluster.nameserver) as reader:
        expressions = {
            "TAGS = 'odd' AND price BETWEEN 10 AND 20": [11, 13, 17, 19],
            "price = 'free'": list(range(0, 60, 5)),
            "TAGS IS NULL AND NOT price >= 4": [2],
        }
        for expression, wanted in expressions.items():
            await reader.assign(topic, filter=Sql(expression), start_from="earliest")
            assert await drained(reader, len(PRICES)) == wanted
        await reader.assign(topic, filter="odd", start_from="earliest")
        assert await drained(reader, len(PRICES)) == list(range(1, 60, 2))
        before = reader.assignment
        with pytest.raises(InvalidArgument) as caught:
            await reader.assign(topic, filter=Sql("price >"))
        assert "line 1, column 8" in caught.value.message
        assert reader.assignment == before


async def drained(reader: PullConsumer, count: int) -> list[int]:
    """All that comes until the reader is past `count` messages."""
    found: list[int] = []

    async def is_past() -> bool:
        found.extend(int(message.body) for message in await reader.poll(0.01))
        return sum(map(reader.position, reader.assignment)) == count

    await until(is_past)
    return sorted(found)


def test_a_filter_in_sql_is_a_text_of_a_length() -> None:
    assert str(duemq.Sql("a = 1")) == "a = 1"
    for wrong in ("", "  ", "a" * 4_097, 5):
        with pytest.raises(InvalidArgument) as caught:
            Sql(wrong)  # type: ignore[arg-type]
        assert caught.value.field == "filter"
