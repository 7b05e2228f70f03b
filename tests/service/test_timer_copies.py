"""A broker or a timer shard that goes on with an older copy of its data directory.

Where no nameserver knows how far the broker's log went; else: test_older_copies.py.
"""

import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.service.running_cluster import Cluster, no_log_ends_known, running_cluster, until
from tests.service.test_timer_service import (
    HOUR_MS,
    TOPIC,
    bodies_of,
    delivered,
    running_shard,
    send,
)


async def put_back(cluster: Cluster, copy: Path, data: Path) -> None:
    """The broker goes on with what it had when the copy was made."""
    await cluster.stop_broker("b0")
    shutil.rmtree(data)
    shutil.move(copy, data)
    await cluster.start_broker("b0")


async def told_and_remedied(cluster: Cluster, tmp_path: Path, count: int) -> None:
    """So many messages come under offsets that were taken over: none is lost, as is told."""
    new = [b"new-%d" % n for n in range(count)]
    for body in new:
        await send(cluster, [body], [0], queue_id=0, producer_id=0)
    await another_second()
    async with running_shard(cluster, tmp_path) as shard:
        await shard.until(lambda stats: any("from a copy" in each for each in stats.problems))
        await cluster.stop_broker("b0")
        (tmp_path / "b0" / "store_id").unlink()
        await cluster.start_broker("b0")

        await until_delivered(cluster, new)
        assert not (await shard.stats()).problems


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    no_log_ends_known(monkeypatch)
    async with running_cluster(tmp_path, "b0", timer_queues=1) as running:
        await running.create_topic(TOPIC, queues=2)
        yield running


async def another_second() -> None:
    """Two starts within one are not told apart; nobody puts anything back so soon."""
    second = time.time() // 1
    await until(lambda: time.time() // 1 != second)


async def until_delivered(cluster: Cluster, bodies: list[bytes]) -> None:
    async def holds() -> bool:
        return bodies_of(await delivered(cluster)) == bodies

    await until(holds)


async def test_what_comes_to_a_broker_that_was_put_back_from_a_copy_is_not_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Before a claim, under offsets that were taken over: it must not pass for what had them."""
    data, copy = tmp_path / "b0", tmp_path / "copy"
    async with running_shard(cluster, tmp_path) as shard:

        async def takes_over(bodies: list[bytes]) -> None:
            before = (await shard.stats()).accepted
            await send(cluster, bodies, [HOUR_MS] * len(bodies), queue_id=0, producer_id=0)
            await shard.until(lambda stats: stats.accepted == before + len(bodies))

        await takes_over([b"kept"])
        await cluster.stop_broker("b0")
        shutil.copytree(data, copy)
        await cluster.start_broker("b0")
        await takes_over([b"lost", b"lost too", b"and this", b"and that"])
    await put_back(cluster, copy, data)
    await told_and_remedied(cluster, tmp_path, 3)


async def test_messages_that_are_as_many_as_those_that_a_copy_lacks_are_not_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    """They have just the offsets that were taken over, and more follow: nothing is out of range."""
    data, copy = tmp_path / "b0", tmp_path / "copy"
    async with running_shard(cluster, tmp_path) as shard:
        await cluster.stop_broker("b0")
        shutil.copytree(data, copy)
        await cluster.start_broker("b0")
        for _ in range(2):
            await send(cluster, [b"old"], [HOUR_MS], queue_id=0, producer_id=0)
        await shard.until(lambda stats: stats.accepted == 2)
    await put_back(cluster, copy, data)
    await told_and_remedied(cluster, tmp_path, 4)


async def test_what_a_shard_that_was_put_back_from_a_copy_fires_is_no_repeat(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its next batches are not those that went under the next numbers before."""
    data, copy = tmp_path / "t0", tmp_path / "copy"

    async def fires(bodies: list[bytes]) -> None:
        await another_second()
        async with running_shard(cluster, tmp_path) as shard:
            before = (await shard.stats()).fired
            for count, body in enumerate(bodies, 1):
                await send(cluster, [body], [0], queue_id=0, producer_id=0)
                await shard.until(
                    lambda stats, at_least=before + count: (
                        stats.fired >= at_least and not stats.in_flight
                    )
                )

    await fires([b"a"])
    shutil.copytree(data, copy)
    await fires([b"b", b"c", b"d"])
    shutil.rmtree(data)
    copy.rename(data)
    await fires([b"e", b"f", b"g"])

    async with running_shard(cluster, tmp_path):

        async def are_there() -> bool:
            there = set(bodies_of(await delivered(cluster)))
            return there == {bytes([each]) for each in b"abcdefg"}

        await until(are_there)


async def test_a_copy_that_lacks_what_its_broker_keeps_no_more_goes_on_with_the_rest(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention waits for who has the queue, and that had more, before it was put back."""
    data, copy = tmp_path / "t0", tmp_path / "copy"
    async with running_shard(cluster, tmp_path) as shard:
        await send(cluster, [b"0"], [0])
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
    shutil.copytree(data, copy)
    for number in range(1, 4):
        await send(cluster, [b"%d" % number], [0])
    await another_second()
    async with running_shard(cluster, tmp_path) as shard:
        await shard.until(lambda stats: stats.fired == 4 and not stats.in_flight)
    shutil.rmtree(data)
    copy.rename(data)
    queue = cluster.brokers["b0"].store.queue("%TIMER%", 0)
    queue.drop_before(3)
    await another_second()
    async with running_shard(cluster, tmp_path) as shard:
        await send(cluster, [b"4"], [0])
        await shard.until(lambda stats: stats.fired == 3 and not stats.in_flight)
        assert b"4" in bodies_of(await delivered(cluster))
        assert "has lost the timers at offsets 1 to 2" in caplog.text
