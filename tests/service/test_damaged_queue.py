"""A consume queue that cannot be read is the error of that queue, and of no other in a request."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from duemq.errors import Corrupt
from duemq.transport import status
from duemq.v1 import (
    admin_pb2,
    broker_pb2,
    error_pb2,
    group_admin_pb2,
    message_admin_pb2,
    message_pb2,
)
from duemq_server.broker.process import Broker
from tests.service.running_broker import Client, batch, running_broker, topic_name

GROUP = "billing"
SOUND = (0, 2, 3)
DAMAGED = 1


class World(NamedTuple):
    broker: Broker
    client: Client
    topic: str
    path: Path


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Four queues of three records each, the second one unreadable."""
    topic = topic_name()
    async with running_broker(tmp_path) as (broker, client):
        await client.send(*(batch(topic, [b"a"] * 3, queue_id=number) for number in range(4)))
        broker.store.queue(topic, DAMAGED).sync()
        [path] = (tmp_path / "consumequeue").glob(f"{topic}.*/{DAMAGED}/*")
        os.truncate(path, 0)
        yield World(broker, client, topic, path)


async def acquire(world: World, **fields: Any) -> dict[int, broker_pb2.OffsetResult]:
    request = broker_pb2.AcquireQueuesRequest(
        group=GROUP,
        member_id="m",
        generation=1,
        queues=[
            message_pb2.QueueRef(topic=world.topic, broker="b1", queue_id=number)
            for number in range(4)
        ],
        **fields,
    )
    answer = await status.answer(world.client.broker.AcquireQueues(request))
    return {each.queue_id: each for each in answer.queues}


async def test_a_member_gets_all_others(world: World) -> None:
    results = await acquire(world, start_from=broker_pb2.AT_TIME, start_ms=1)
    assert results[DAMAGED].error.code == error_pb2.CORRUPT
    assert [results[number].HasField("error") for number in SOUND] == [False] * 3
    assert [results[number].offset for number in SOUND] == [0, 0, 0]
    # Nothing is kept of the one: whoever asks again begins at that time when it can be read.
    committed = await status.answer(
        world.client.broker.GetOffsets(broker_pb2.GetOffsetsRequest(group=GROUP))
    )
    assert {each.queue_id for each in committed.queues} == set(SOUND)


async def test_a_reset_to_a_time_moves_all_others(world: World) -> None:
    await acquire(world, start_from=broker_pb2.LATEST)
    request = group_admin_pb2.ResetOffsetsRequest(group=GROUP, topic=world.topic, at_ms=1)
    answer = await status.answer(world.client.group_admin.ResetOffsets(request))
    changes = {each.queue_id: each for each in answer.changes}
    assert (changes[DAMAGED].error.code, changes[DAMAGED].after) == (error_pb2.CORRUPT, 3)
    assert [changes[number].after for number in SOUND] == [0, 0, 0]


async def test_how_far_a_group_is_lacks_one_age(world: World) -> None:
    await acquire(world, start_from=broker_pb2.EARLIEST)
    request = group_admin_pb2.DescribeProgressRequest(group=GROUP)
    answer = await status.answer(world.client.group_admin.DescribeProgress(request))
    assert [each.lag for each in answer.queues] == [3] * 4
    assert [each.queue_id for each in answer.queues if each.lag_ms < 0] == [DAMAGED]


async def test_a_topic_lacks_one_time(world: World) -> None:
    request = admin_pb2.DescribeTopicRequest(name=world.topic)
    answer = await status.answer(world.client.admin.DescribeTopic(request))
    assert [each.messages for each in answer.queues] == [3] * 4
    assert [each.queue_id for each in answer.queues if not each.last_store_ms] == [DAMAGED]


async def test_a_look_up_finds_what_the_others_have(world: World) -> None:
    request = message_admin_pb2.FindMessagesRequest(topic=world.topic, limit=4)
    found: list[int] = []
    with pytest.raises(Corrupt):
        await look_up(world, request, found)
    assert found == [number for number in SOUND for _ in range(3)]


async def look_up(
    world: World, request: message_admin_pb2.FindMessagesRequest, found: list[int]
) -> None:
    while True:
        answer = await status.answer(world.client.message_admin.FindMessages(request))
        found += [each.queue.queue_id for each in answer.messages]
        if not answer.cursor:
            return
        request.cursor = answer.cursor


async def test_a_file_that_is_gone_is_not_what_retention_removed(world: World) -> None:
    """A consumer goes on at once after that, where it was: it would come back for ever."""
    world.path.unlink()
    world.broker.store.log._files.forget(str(world.path))
    pulled = await world.client.pull(world.topic, DAMAGED)
    assert [each.error.code for each in pulled.queues] == [error_pb2.CORRUPT]
