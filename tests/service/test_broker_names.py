"""Two processes with one broker's name, as after a volume was mixed up."""

import asyncio
import shutil

import pytest

from duemq.aio import Producer, PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import InvalidArgument
from duemq.transport import channel, status
from duemq.v1 import admin_pb2, nameserver_pb2, stubs
from duemq_server.broker import process as broker_process
from duemq_server.serving.clock import now_ms
from duemq_server.serving.registration import Registration
from tests.service.running_broker import batch, running_broker, topic_name
from tests.service.running_cluster import Cluster, running_cluster, until

HOUR_MS = 3_600_000


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b1") as cluster:
        yield cluster


def second(cluster: Cluster, directory):
    return running_broker(
        directory, name="b1", nameservers=(cluster.nameserver,), heartbeat_period=0.1
    )


async def test_a_second_process_with_a_brokers_name_never_serves(cluster, tmp_path) -> None:
    topic = topic_name()
    await cluster.send(topic, [b"kept"], broker="b1")
    started: list[str] = []
    with pytest.raises(InvalidArgument) as refused:
        async with second(cluster, tmp_path / "other") as (broker, _):
            started.append(broker.server.address)
    assert not started
    first = cluster.brokers["b1"]
    assert first.server.address in str(refused.value)
    assert f"{first._opened.store_id:016x}" in str(refused.value)
    assert (await cluster.clients["b1"].bodies(topic)) == [b"kept"]
    assert not first.registration.refused.done()


async def test_a_copy_of_a_brokers_data_does_not_serve_under_another_name(
    cluster, tmp_path
) -> None:
    """A timer service would take what it stores for what the other one had stored."""
    await cluster.stop_broker("b1")
    shutil.copytree(tmp_path / "b1", tmp_path / "copy")
    await cluster.start_broker("b1")
    started: list[str] = []
    with pytest.raises(InvalidArgument, match="one is a copy of the other") as refused:
        async with running_broker(
            tmp_path / "copy", name="b2", nameservers=(cluster.nameserver,), heartbeat_period=0.1
        ) as (broker, _):
            started.append(broker.server.address)
    assert not started
    assert cluster.brokers["b1"].server.address in str(refused.value)


async def test_one_that_comes_later_to_its_nameserver_ends(cluster, tmp_path, monkeypatch) -> None:
    """It could not ask before it served: the nameservers were out of reach."""

    async def unasked(self) -> int:
        return 0

    monkeypatch.setattr("duemq_server.serving.registration.Registration.check_free", unasked)
    async with second(cluster, tmp_path / "other") as (broker, _):
        with pytest.raises(InvalidArgument, match="another data directory"):
            await broker.run(asyncio.Event())
    assert cluster.brokers["b1"]._routes.cache.broker("b1") is not None


async def test_who_was_elected_with_a_loss_has_the_name_of_whom_it_replaces(cluster) -> None:
    """The nameserver still believes in the former leader: its last report holds for an hour."""
    version = nameserver_pb2.Version(epoch=1, counter=9)
    report = nameserver_pb2.BrokerReport(name="b2", address="127.0.0.1:1", store_id=11)
    async with channel.connect(cluster.nameserver) as connection:
        last_words = nameserver_pb2.RegisterRequest(
            version=version, broker=report, expiry_ms=HOUR_MS
        )
        register = stubs.NameserverStub(connection).Register
        assert (await status.answer(register(last_words))).accepted
        elected = nameserver_pb2.BrokerReport(name="b2", address="127.0.0.1:2", store_id=22)
        registration = Registration((cluster.nameserver,), 1.0, 2, lambda: elected, formers=[7, 11])
        await registration.check_free()
        registration.start()
        await until(
            lambda: (
                [one.report.store_id for one in cluster.registry.brokers][1:] == [22]
                or registration.refused.done()
            )
        )
        assert not registration.refused.done()
        assert not (await status.answer(register(last_words))).accepted
        await registration.stop()


@pytest.mark.parametrize("killed", [False, True])
async def test_a_restart_is_newer_though_the_clock_was_set_back(
    cluster, monkeypatch, killed
) -> None:
    async def unsaid(self, address) -> None:
        pass

    last_words = cluster.brokers["b1"].registration._request()
    with monkeypatch.context() as end:
        if killed:
            end.setattr("duemq_server.serving.registration.Registration._deregister", unsaid)
        await cluster.stop_broker("b1")
    monkeypatch.setattr(broker_process, "now_ms", lambda: now_ms() - HOUR_MS)
    await cluster.start_broker("b1")
    address = cluster.brokers["b1"].server.address
    await until(lambda: [one.report.address for one in cluster.registry.brokers] == [address])
    async with channel.connect(cluster.nameserver) as connection:
        late = stubs.NameserverStub(connection).Register(last_words)
        assert not (await status.answer(late)).accepted
    assert [one.report.address for one in cluster.registry.brokers] == [address]


async def test_another_store_takes_the_name_over_once_the_first_has_stopped(
    cluster, tmp_path
) -> None:
    await cluster.stop_broker("b1")
    async with second(cluster, tmp_path / "other") as (_, client):
        await client.send(batch(topic_name(), [b"a"]))


async def test_clients_of_the_store_before_go_on_with_the_next_one(cluster, tmp_path) -> None:
    """What the first one stored is gone; what is sent from then on comes once."""
    topic = topic_name()
    await cluster.create_topic(topic, queues=1)
    received: list[bytes] = []
    settings = ConsumerSettings(start_from="earliest", pull_wait_s=0.05, commit_interval_s=0.05)
    async with (
        Producer(nameserver=cluster.nameserver) as producer,
        PushConsumer(
            "billing",
            topic,
            lambda message: received.append(message.body),
            nameserver=cluster.nameserver,
            settings=settings,
        ),
    ):
        for number in range(20):
            await producer.send(topic, b"old %d" % number)
        await until(lambda: len(received) == 20)
        await cluster.stop_broker("b1")
        async with second(cluster, tmp_path / "other") as (_, client):
            config = admin_pb2.TopicConfig(name=topic, queues=1)
            await client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=config))
            new = [b"new %d" % number for number in range(10)]
            for body in new:
                await producer.send(topic, body)
            await until(lambda: sorted(received[20:]) == new)
