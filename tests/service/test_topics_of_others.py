"""A topic that a producer does not see, and somebody has: it is not made anew."""

import asyncio

import pytest

from duemq import aio
from duemq.errors import TopicNotFound
from duemq.settings import ProducerSettings
from duemq.transport import cluster_client
from tests.listening import listening
from tests.service.running_cluster import running_cluster


class Held:
    """What nameservers tell a client is kept back while it looks for a topic."""

    def __init__(self, client):
        self._client, self._watcher, self._told = client, client._watcher, []
        self._said, self._create = self._watcher._said, client._create
        self._watcher._said = lambda *told: self._told.append(told)
        client._create = self._created

    async def _created(self, topic, timeout_s):
        try:
            return await self._create(topic, timeout_s)
        finally:
            self._watcher._said = self._said
            for told in self._told:
                self._said(*told)


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        yield cluster


@pytest.fixture
async def admin(cluster):
    async with aio.Admin(cluster.nameserver) as admin:
        yield admin


async def test_a_topic_stays_on_the_broker_that_it_was_made_on(cluster, admin, monkeypatch):
    monkeypatch.setattr(cluster_client, "CREATE_GRACE_S", 0.1)
    async with aio.Producer(cluster.nameserver) as producer:
        Held(producer._client)
        await admin.create_topic("ordered", queues=1, brokers=["b0"])
        receipts = [await producer.send("ordered", b"%d" % number) for number in range(4)]
    assert {(receipt.broker, receipt.queue) for receipt in receipts} == {("b0", 0)}
    assert "ordered" not in cluster.brokers["b1"].store.topics


async def test_producers_that_make_a_topic_at_once_make_it_on_all_brokers(cluster):
    async with aio.Producer(cluster.nameserver) as one, aio.Producer(cluster.nameserver) as other:
        Held(other._client)
        await asyncio.gather(one.send("new", b"x"), other.send("new", b"y"))
        assert {each.broker for each in other._client.routes.route("new").brokers} == {"b0", "b1"}


async def test_a_topic_whose_broker_is_away_is_waited_for(cluster, admin):
    await admin.create_topic("ordered", queues=1, brokers=["b0"])
    await cluster.stop_broker("b0")
    settings = ProducerSettings(send_timeout_s=0.5)
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        with pytest.raises(TopicNotFound, match="lost lately: b0"):
            await producer.send("ordered", b"x")
    async with aio.Producer(cluster.nameserver) as producer:
        asked, ask = asyncio.Event(), producer._client._made_by_others

        async def noticed(topic):
            try:
                return await ask(topic)
            finally:
                asked.set()

        producer._client._made_by_others = noticed
        sending = asyncio.create_task(producer.send("ordered", b"x"))
        await asked.wait()
        await cluster.start_broker("b0")
        assert (await sending).broker == "b0"
    assert "ordered" not in cluster.brokers["b1"].store.topics


async def test_a_topic_of_a_broker_that_was_given_up_is_made_on_the_others(cluster, admin):
    await admin.create_topic("ordered", queues=1, brokers=["b0"])
    await cluster.stop_broker("b0")
    await admin.forget("b0")
    async with aio.Producer(cluster.nameserver) as producer:
        assert (await producer.send("ordered", b"x")).broker == "b1"


async def test_a_nameserver_that_says_nothing_keeps_no_topic_from_being_made(cluster, monkeypatch):
    async def silent(reader, writer):
        await reader.read()

    monkeypatch.setattr(cluster_client, "CREATE_GRACE_S", 0.1)
    async with listening(silent) as address:
        async with aio.Producer([cluster.nameserver, address]) as producer:
            await producer.send("new", b"x")
        assert all("new" in each.store.topics for each in cluster.brokers.values())
