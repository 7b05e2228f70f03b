"""What members have consumed is saved at a broker that stops, and does not come again."""

import asyncio

import pytest

from duemq.aio import PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import Unavailable
from duemq.transport import status
from duemq.v1 import broker_pb2, error_pb2
from duemq_server.broker import process
from duemq_server.broker.edge.pull_stream import ParkedPull
from duemq_server.broker.reading.pull import parse
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import offset_changes
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.errors import DiskFull
from tests.service.running_broker import batch, running_broker, topic_name
from tests.service.running_cluster import running_cluster, until


@pytest.mark.parametrize("stopped", ["b0", "b1"])  # one of them coordinates the group
async def test_what_was_consumed_does_not_come_again(tmp_path, monkeypatch, stopped) -> None:
    monkeypatch.setattr(process, "FAREWELL_S", 60.0)
    received: list[bytes] = []
    async with running_cluster(tmp_path, "b0", "b1", drain_timeout=60.0) as cluster:
        topic = topic_name()
        await cluster.create_topic(topic, queues=2)
        consumer = PushConsumer(
            "billing",
            topic,
            lambda message: received.append(message.body),
            nameserver=cluster.nameserver,
            settings=ConsumerSettings(start_from="earliest", commit_interval_s=3_600),
        )
        await consumer.start()
        try:
            for queue_id in (0, 1):
                bodies = [b"%d" % number for number in range(5)]
                await cluster.send(topic, bodies, broker=stopped, queue_id=queue_id)
            await until(lambda: len(received) == 10)
            await cluster.stop_broker(stopped)
            await cluster.start_broker(stopped)
            offsets = cluster.brokers[stopped].store.offsets
            kept = {queue_id: at.offset for _, queue_id, at in offsets.of_group("billing", topic)}
            assert kept == {0: 5, 1: 5}
        finally:
            await consumer.close()


async def test_nothing_is_given_to_who_comes_meanwhile(tmp_path) -> None:
    """It could not be committed any more."""
    topic = topic_name()
    async with running_broker(tmp_path) as (broker, client):
        await client.send(batch(topic, [b"1"]))
        broker._pulls.close()
        with pytest.raises(Unavailable, match="stopping"):
            await client.pull(topic)
        call = client.broker.PullStream()
        with pytest.raises(Unavailable, match="stopping"):
            await status.answer(call.read())


async def refusal(broker: process.Broker, parked: ParkedPull) -> str:
    """What a pull of one queue is told, which gets no record."""
    [answer] = await broker._pulls.answer(parked)
    parked.give_place()
    assert not answer.slices
    assert broker._activity.behind(broker.store.offsets.find) == []
    return str(status.from_proto(error_pb2.Error.FromString(answer.error)))


async def test_nothing_is_given_to_who_waited_for_a_commit_meanwhile(tmp_path) -> None:
    topic = topic_name()
    async with running_broker(tmp_path) as (broker, client):
        await client.send(batch(topic, [b"1"]))
        offset_changes.put(broker.store, "g", [(GroupQueue("g", topic, 0), GroupOffset(0, 0))])
        asked = broker_pb2.PullRequest(group="g", queues=[broker_pb2.QueuePull(topic=topic)])
        parked = ParkedPull(pull=parse(asked), peer="p")  # its head is made
        broker._pulls.close()
        assert "stopping" in await refusal(broker, parked)


async def test_nothing_is_given_to_whose_read_was_under_way(tmp_path, monkeypatch) -> None:
    """A thread reads the disk as the stop begins, which knows by then whom it waits for."""
    topic = topic_name()
    async with running_broker(tmp_path) as (broker, client):
        await client.send(batch(topic, [b"1"]))
        offset_changes.put(broker.store, "g", [(GroupQueue("g", topic, 0), GroupOffset(0, 0))])
        asked = broker_pb2.PullRequest(group="g", queues=[broker_pb2.QueuePull(topic=topic)])
        parked = ParkedPull(pull=parse(asked), peer="p")
        read, begun, may_end = broker._pulls._disk.read, asyncio.Event(), asyncio.Event()

        async def slow_read(*arguments):
            begun.set()
            await may_end.wait()
            return await read(*arguments)

        monkeypatch.setattr(broker._pulls._disk, "read", slow_read)
        answering = asyncio.create_task(refusal(broker, parked))
        await begun.wait()
        broker._pulls.close()
        may_end.set()
        assert "stopping" in await answering


async def test_a_group_that_commits_nothing_is_not_waited_for_for_ever(tmp_path) -> None:
    topic = topic_name()
    async with running_broker(tmp_path, drain_timeout=0.05) as (broker, client):
        await client.send(batch(topic, [b"1"]))
        offset_changes.put(broker.store, "g", [(GroupQueue("g", topic, 0), GroupOffset(0, 0))])
        await client.pull(topic, group="g")
        async with asyncio.timeout(30):
            await broker._say_farewell()
        assert broker._activity.behind(broker.store.offsets.find) == [GroupQueue("g", topic, 0)]


async def test_a_stop_that_cannot_say_that_it_was_clean_ends_with_a_checkpoint(
    tmp_path, monkeypatch, caplog
) -> None:
    """As where a copy-on-write file system is full."""

    def unlink(_: RealDisk, path: str) -> None:
        raise DiskFull(f"remove {path}: no space")

    async with running_broker(tmp_path, flush_mode="async") as (broker, client):
        await client.send(batch(topic_name(), [b"1"]))
        monkeypatch.setattr(RealDisk, "unlink", unlink)
    assert broker.store.checkpoint_position == broker.store.log.end_position
    assert "unclean" in caplog.text
    assert (tmp_path / recovery.UNSYNCED).exists()
