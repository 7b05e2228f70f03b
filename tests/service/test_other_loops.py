"""An asyncio client belongs to the event loop that it was started in: another one is refused.

There nothing would wake who waits, or gRPC's own errors would say nothing of the cause.
"""

import asyncio

import pytest

from duemq import aio
from duemq.errors import Closed, Unavailable
from duemq.settings import ClientSettings
from tests.service.fake_cluster import FakeCluster


@pytest.fixture
async def cluster():
    cluster = FakeCluster()
    await cluster.start("a")
    cluster.topic("t")
    yield cluster
    await cluster.stop()


async def refused(method, *given):
    """Called in another loop, while this one goes on."""

    async def call():
        async with asyncio.timeout(30):
            await method(*given)

    with pytest.raises(Closed, match="belongs to another event loop"):
        await asyncio.to_thread(asyncio.run, call())


async def test_an_admin_client(cluster):
    async with aio.Admin(cluster.nameserver) as admin:
        for method, *given in ((admin.topics,), (admin.create_topic, "u"), (admin.count_timers,)):
            await refused(method, *given)
        await refused(admin.start)
        await refused(admin.close)
        assert not admin._timer_calls._closed
        await admin._client.wait_for(lambda routes: routes.route("t") is not None, 30)


async def test_a_pull_consumer(cluster):
    async with aio.PullConsumer(nameserver=cluster.nameserver) as consumer:
        await refused(consumer.poll)
        await refused(consumer.close)
        assert await consumer.poll(0) == []


async def test_a_push_consumer(cluster):
    async def callback(message):
        raise AssertionError(message)

    consumer = aio.PushConsumer("g", "t", callback, nameserver=cluster.nameserver)
    await consumer._client.start()
    consumer._ended = asyncio.get_running_loop().create_future()  # as of its start
    await refused(consumer.run)
    await refused(consumer.close)
    await consumer.close()


async def test_after_a_failed_start_another_loop_may_start_it():
    async def start(admin):
        with pytest.raises(Unavailable, match="no nameserver answered"):
            await admin.start()

    admin = aio.Admin("127.0.0.1:1", settings=ClientSettings(connect_timeout_s=0.2))
    for _ in range(2):
        await asyncio.to_thread(asyncio.run, start(admin))
