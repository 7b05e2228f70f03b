"""A broker that goes on with an older copy of its data directory: what nameservers know of it."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq import Message, aio
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_timer_service import (
    HOUR_MS,
    TOPIC,
    running_shard,
    send,
)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0", timer_queues=1) as running:
        await running.create_topic(TOPIC, queues=1)
        yield running


async def restarted_on(data: Path, copy: Path, cluster: Cluster) -> None:
    """The broker goes on with what it had when the copy was made."""
    store = cluster.brokers["b0"].store
    store_id = cluster.brokers["b0"]._opened.store_id
    end = store.log.durable_position
    await until(lambda: cluster.registry.log_end(store_id) == end)
    await cluster.stop_broker("b0")
    shutil.rmtree(data)
    shutil.copytree(copy, data)
    await cluster.start_broker("b0")


async def polled(consumer: aio.PullConsumer, count: int) -> list[bytes]:
    bodies: list[bytes] = []

    async def holds() -> bool:
        bodies.extend(message.body for message in await consumer.poll(0.1))
        return len(bodies) >= count

    await until(holds)
    return bodies


async def test_who_has_read_what_a_copy_has_not_misses_nothing_that_comes_after_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Twice, so that what was left out is no end of its own."""
    data, copy = tmp_path / "b0", tmp_path / "copy"
    await cluster.send(TOPIC, [b"kept"])
    await cluster.stop_broker("b0")
    shutil.copytree(data, copy)
    await cluster.start_broker("b0")
    async with aio.PullConsumer(nameserver=cluster.nameserver) as consumer:
        await consumer.assign(TOPIC, start_from="earliest")
        await cluster.send(TOPIC, [b"lost"] * 3)
        assert await polled(consumer, 4) == [b"kept", b"lost", b"lost", b"lost"]
        for turn in range(2):
            await restarted_on(data, copy, cluster)
            new = [b"new-%d-%d" % (turn, number) for number in range(5)]
            await cluster.send(TOPIC, new)
            assert await polled(consumer, 5) == new


async def test_producers_and_members_that_were_there_all_along_go_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    data, copy = tmp_path / "b0", tmp_path / "copy"
    bodies: list[bytes] = []

    async def take(message: Message) -> None:
        bodies.append(message.body)

    where = {"nameserver": cluster.nameserver}
    async with (
        aio.Producer(**where) as producer,
        aio.PushConsumer("group", TOPIC, take, start_from="earliest", **where),
    ):
        await producer.send(TOPIC, b"kept")
        await until(lambda: bodies == [b"kept"])
        await cluster.stop_broker("b0")
        shutil.copytree(data, copy)
        await cluster.start_broker("b0")
        lost = [b"lost-%d" % number for number in range(3)]
        for body in lost:
            await producer.send(TOPIC, body)
        await until(lambda: {*lost} <= {*bodies})
        await restarted_on(data, copy, cluster)
        new = [b"new-%d" % number for number in range(5)]
        for body in new:
            await producer.send(TOPIC, body)
        await until(lambda: {*new} <= {*bodies})
    assert [body for body in bodies if body in new] == new


async def test_a_timer_shard_that_took_over_more_than_a_copy_has_delivers_what_comes(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Also where it says so later than messages come: nobody has to help."""
    data, copy = tmp_path / "b0", tmp_path / "copy"
    await cluster.send(TOPIC, [b"kept"])
    await send(cluster, [b"kept"], [HOUR_MS], queue_id=0, producer_id=0)
    await cluster.stop_broker("b0")
    shutil.copytree(data, copy)
    await cluster.start_broker("b0")
    async with running_shard(cluster, tmp_path) as shard:
        await send(cluster, [b"old"] * 3, [HOUR_MS] * 3, queue_id=0, producer_id=0)
        await shard.until(lambda stats: stats.accepted == 4)
    await restarted_on(data, copy, cluster)
    await send(cluster, [b"new"] * 5, [0] * 5, queue_id=0, producer_id=0)
    async with running_shard(cluster, tmp_path) as shard:
        await shard.until(lambda stats: stats.fired == 5 and not stats.in_flight)
        assert not (await shard.stats()).problems
    async with aio.PullConsumer(nameserver=cluster.nameserver) as consumer:
        await consumer.assign(TOPIC, start_from="earliest")
        assert await polled(consumer, 6) == [b"kept", *[b"new"] * 5]
