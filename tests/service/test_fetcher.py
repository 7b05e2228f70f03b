"""How consumers pull: standing requests, their credit, and what leaves and joins them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from duemq.aio import PullConsumer, PushConsumer
from duemq.consumer.fetching.fetcher import REQUESTS_TO_MERGE
from duemq.consumer.settings import ConsumerSettings
from duemq.protocol.balance import MessageQueue
from duemq.transport.retrying import Backoff
from duemq.v1 import broker_pb2
from duemq_server.broker.edge import pull_stream
from tests.service.running_broker import topic_name
from tests.service.running_cluster import Cluster, running_cluster, until

QUEUES = 8
WAITS_SHORT = 40  # 2 s: longer than gRPC's own between two attempts


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0") as cluster:
        yield cluster


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    name = topic_name()
    await cluster.create_topic(name, queues=QUEUES)
    return name


@pytest.fixture
def asked(monkeypatch) -> list[broker_pb2.PullRequest]:
    """What brokers are asked from now on, but for cancels and credit."""
    requests: list[broker_pb2.PullRequest] = []
    parse = pull_stream.parse

    def noting(request: broker_pb2.PullRequest, *compiled: object) -> object:
        requests.append(request)
        return parse(request, *compiled)

    monkeypatch.setattr(pull_stream, "parse", noting)
    return requests


async def polled(consumer: PullConsumer, count: int) -> list[int]:
    numbers: list[int] = []
    async with asyncio.timeout(30):
        while len(numbers) < count:
            numbers += [int(message.body) for message in await consumer.poll(1.0)]
    return numbers


async def test_a_consumer_that_keeps_up_asks_once(cluster, topic, asked) -> None:
    async with PullConsumer(nameserver=cluster.nameserver) as consumer:
        await consumer.assign(topic, start_from="earliest")
        for number in range(100):
            await cluster.send(topic, [b"%d" % number], queue_id=number % QUEUES)
            assert await polled(consumer, 1) == [number]
    assert len(asked) == 1


async def test_credit_is_added_while_there_is_room(cluster, topic, asked) -> None:
    settings = ConsumerSettings(queue_messages_max=40)
    async with PullConsumer(nameserver=cluster.nameserver, settings=settings) as consumer:
        await consumer.assign(topic, start_from="earliest")
        for number in range(400):
            await cluster.send(topic, [b"%d" % number])
            assert await polled(consumer, 1) == [number]
    assert len(asked) < 400 / 40


async def test_no_queue_is_given_more_than_its_window(cluster, topic, asked) -> None:
    settings = ConsumerSettings(queue_messages_max=50, batch_messages_max=1, threads=1)
    release = asyncio.Event()
    seen: list[int] = []

    async def callback(message) -> None:
        await release.wait()
        seen.append(int(message.body))

    consumer = PushConsumer(
        "g", [topic], callback, nameserver=cluster.nameserver, settings=settings
    )
    async with consumer:
        await until(lambda: len(consumer.queues) == QUEUES and bool(asked))
        for first in range(0, 400, 10):
            numbers = range(first, first + 10)
            await cluster.send(
                topic, [b"%d" % number for number in numbers], queue_id=first // 10 % 4
            )
        pending = {
            holding.queue.queue_id: holding.source.pending
            for holding in consumer._share._holdings.all
            if holding.queue.topic == topic
        }
        await until(lambda: all(pending[number].unfinished >= 25 for number in range(4)))
        # What comes after all that could have come: the last queue's, behind the others'.
        await cluster.send(topic, [b"400"], queue_id=QUEUES - 1)
        await until(lambda: pending[QUEUES - 1].unfinished == 1)
        assert max(each.unfinished for each in pending.values()) <= 50
        release.set()
        await until(lambda: len(seen) >= 401)
    assert sorted(seen) == list(range(401))


async def test_pausing_and_resuming_under_way_loses_nothing(cluster, topic) -> None:
    queues = [MessageQueue(topic, "b0", number) for number in range(QUEUES)]
    count = 2_000

    async def send() -> None:
        for first in range(0, count, 10):
            bodies = [b"%d" % number for number in range(first, first + 10)]
            await cluster.send(topic, bodies, queue_id=first // 10 % QUEUES)

    async with PullConsumer(nameserver=cluster.nameserver) as consumer:
        await consumer.assign(topic, start_from="earliest")
        sending = asyncio.create_task(send())
        numbers: list[int] = []
        turn = 0
        async with asyncio.timeout(60):
            while len(numbers) < count:
                turn += 1
                chosen = queues[turn % QUEUES]
                consumer.pause(chosen)
                numbers += [int(message.body) for message in await consumer.poll(0.005)]
                consumer.resume(chosen)
        await sending
    assert sorted(numbers) == list(range(count))


async def test_seeking_back_under_way_brings_everything_once_more(cluster, topic) -> None:
    queue = MessageQueue(topic, "b0", 0)
    async with PullConsumer(nameserver=cluster.nameserver) as consumer:
        await consumer.assign(topic, start_from="earliest")
        for number in range(20):
            await cluster.send(topic, [b"%d" % number])
            await cluster.send(topic, [b"-1"], queue_id=1)
            while number not in await polled(consumer, 1):
                pass
            await consumer.seek(queue, 0)
            again: list[int] = []
            while len(again) <= number:
                again += [each for each in await polled(consumer, 1) if each >= 0]
            assert again == list(range(number + 1))


async def test_queues_that_came_one_by_one_are_asked_for_together_in_the_end(
    cluster, topic, asked
) -> None:
    queues = [MessageQueue(topic, "b0", number) for number in range(QUEUES)]
    async with PullConsumer(nameserver=cluster.nameserver) as consumer:
        await consumer.assign(topic, start_from="earliest")
        consumer.pause(*queues)
        await until(lambda: not consumer._fetcher("b0")._open)
        for number, queue in enumerate(queues):
            consumer.resume(queue)
            await cluster.send(topic, [b"%d" % number], queue_id=number)
            assert await polled(consumer, 1) == [number]
        fetcher = consumer._fetcher("b0")
        await until(
            lambda: (
                sum(len(each.sources) for each in fetcher._open.values()) == QUEUES
                and len(fetcher._open) <= REQUESTS_TO_MERGE
            )
        )
    assert max(len(request.queues) for request in asked[1:]) > 1


async def test_a_consumer_whose_next_attempt_is_far_comes_at_once_when_its_broker_is_back(
    cluster, topic, monkeypatch
) -> None:
    """Nothing but the routes wakes it: the waits that an outage has made long do not end."""
    waits: list[int] = []

    def next_s(backoff: Backoff) -> float:
        backoff.attempts += 1
        waits.append(backoff.attempts)
        return 0.05 if backoff.attempts < WAITS_SHORT else 3_600.0

    async with PullConsumer(nameserver=cluster.nameserver) as consumer:
        await consumer.assign(topic, start_from="earliest")
        await cluster.send(topic, [b"0"])
        assert await polled(consumer, 1) == [0]
        monkeypatch.setattr(Backoff, "next_s", next_s)
        await cluster.stop_broker("b0")
        await until(lambda: WAITS_SHORT in waits)
        await cluster.start_broker("b0")
        await cluster.send(topic, [b"1"])
        assert await polled(consumer, 1) == [1]
