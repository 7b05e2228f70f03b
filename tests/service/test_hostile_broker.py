"""What a broken or hostile client may send: it is refused or served, and the broker goes on.

Each test ends by sending and reading something ordinary at the same broker.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.process import Broker
from duemq.errors import DuemqError, InvalidArgument, TopicNotFound
from duemq.rpc import status
from duemq.v1 import admin_pb2, broker_pb2, group_pb2, message_pb2
from tests.service.running_broker import Client, batch, running_broker, topic_name

INT64_MAX = (1 << 63) - 1
UINT64_MAX = (1 << 64) - 1


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Broker, Client]]:
    async with running_broker(tmp_path) as made:
        yield made
        await check_alive(*made)


@pytest.fixture
def client(pair: tuple[Broker, Client]) -> Client:
    return pair[1]


async def check_alive(broker: Broker, client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"after"]))
    assert await client.bodies(topic) == [b"after"]
    assert not any(task.done() for task in broker._tasks)


async def test_the_last_sequence_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its successor would not fit into the checkpoint."""
    topic = topic_name()
    async with running_broker(tmp_path) as (broker, client):
        with pytest.raises(InvalidArgument) as refused:
            await client.send(batch(topic, [b"a"], producer_id=1, sequence=UINT64_MAX))
        assert refused.value.field == "sequence"
        [result] = await client.send(batch(topic, [b"b"], producer_id=1, sequence=UINT64_MAX - 1))
        await broker._checkpoints.save()
        [again] = await client.send(batch(topic, [b"b"], producer_id=1, sequence=UINT64_MAX - 1))
        assert again.duplicate
        assert again.base_offset == result.base_offset
    async with running_broker(tmp_path) as made:
        await check_alive(*made)


async def test_a_pull_may_name_a_queue_twice(client: Client) -> None:
    topic = topic_name()
    await client.admin.CreateTopic(
        admin_pb2.CreateTopicRequest(topic=admin_pb2.TopicConfig(name=topic))
    )
    queue = broker_pb2.QueuePull(topic=topic)
    request = broker_pb2.PullRequest(queues=[queue, queue], wait_ms=10_000)
    pull = asyncio.ensure_future(status.answer(client.broker.Pull(request, timeout=20)))
    await client.send(batch(topic, [b"wakes"]))
    response = await pull
    assert [record.body for record in response.queues[0].records.records] == [b"wakes"]


@pytest.mark.parametrize("offset", [-1, -(1 << 63), INT64_MAX])
async def test_an_impossible_offset_is_an_error_of_its_queue(client: Client, offset: int) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    for name in (topic, "unknown"):
        [answer] = (await client.pull(name, 0, offset)).queues
        assert answer.error.code
        assert answer.next_offset == offset


@pytest.mark.parametrize("queue_id", [-1, -(1 << 31), (1 << 31) - 1])
async def test_an_impossible_queue_is_an_error_of_its_queue(client: Client, queue_id: int) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    [answer] = (await client.pull(topic, queue_id, 0)).queues
    assert answer.queue_id == queue_id
    assert answer.error.field == "queue_id"


async def test_a_refused_batch_makes_no_topic(client: Client) -> None:
    topic = topic_name()
    for wrong in (
        batch(topic, [b"a"], queue_id=99),
        batch(topic, [b"a"], delays_ms=[-1]),
        broker_pb2.Batch(topic=topic),
    ):
        with pytest.raises(DuemqError):
            await client.send(wrong)
    with pytest.raises(TopicNotFound):
        await status.answer(client.admin.DescribeTopic(admin_pb2.DescribeTopicRequest(name=topic)))


async def test_a_long_foreign_name_comes_back_as_a_readable_error(client: Client) -> None:
    """The error must fit into a trailer, however many bytes its characters take."""
    for name in ("é" * 5_000, "\N{GRINNING FACE}" * 5_000, "\0" * 5_000):
        with pytest.raises(TopicNotFound):
            await status.answer(
                client.admin.DescribeTopic(admin_pb2.DescribeTopicRequest(name=name))
            )
        with pytest.raises(InvalidArgument):
            await client.send(batch(name, [b"a"]))


@pytest.mark.parametrize("generation", [INT64_MAX, 1 << 62])
async def test_an_absurd_generation_is_refused(client: Client, generation: int) -> None:
    """It could never be overtaken: the group would be fenced out for ever."""
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    ref = message_pb2.QueueRef(topic=topic)
    request = broker_pb2.AcquireQueuesRequest(
        group="g", member_id="m", generation=generation, queues=[ref]
    )
    with pytest.raises(InvalidArgument) as refused:
        await status.answer(client.broker.AcquireQueues(request))
    assert refused.value.field == "generation"
    commit = broker_pb2.OffsetCommit(topic=topic, generation=generation)
    [result] = (
        await client.broker.CommitOffsets(
            broker_pb2.CommitOffsetsRequest(group="g", commits=[commit])
        )
    ).queues
    assert result.error.field == "generation"


async def test_too_many_tiny_records_are_refused_at_once(client: Client) -> None:
    """Four million of them, to be counted by the broker; it must not do so to the end."""
    records = b"\x0a\x00" * (4 << 20)
    request = broker_pb2.Batch(topic=topic_name()).SerializeToString()
    request += b"\x32" + _varint(len(records)) + records
    send = broker_pb2.SendRequest().SerializeToString() + b"\x12" + _varint(len(request)) + request
    call = client.raw_send(send)
    with pytest.raises(InvalidArgument) as refused:
        await status.answer(call)
    assert refused.value.field == "sizes"


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
