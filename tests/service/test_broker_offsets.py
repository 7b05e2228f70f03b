from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq.errors import DuemqError, InvalidArgument
from duemq.transport import status
from duemq.v1 import broker_pb2, error_pb2, message_pb2
from tests.service.running_broker import Client, batch, running_broker, topic_name

GROUP = "billing"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with running_broker(tmp_path) as (_, made):
        yield made


async def acquire(
    client: Client, topic: str, generation: int, start: int = broker_pb2.EARLIEST, queue_id: int = 0
) -> broker_pb2.OffsetResult:
    request = broker_pb2.AcquireQueuesRequest(
        group=GROUP,
        member_id="m",
        generation=generation,
        queues=[message_pb2.QueueRef(topic=topic, broker="b1", queue_id=queue_id)],
        start_from=start,  # type: ignore[arg-type]
    )
    [result] = (await status.answer(client.broker.AcquireQueues(request))).queues
    return result


async def commit(
    client: Client, topic: str, offset: int, generation: int
) -> broker_pb2.OffsetResult:
    offsets = [broker_pb2.OffsetCommit(topic=topic, offset=offset, generation=generation)]
    request = broker_pb2.CommitOffsetsRequest(group=GROUP, member_id="m", commits=offsets)
    [result] = (await status.answer(client.broker.CommitOffsets(request))).queues
    return result


async def committed(client: Client, topic: str = "") -> dict[tuple[str, int], int]:
    request = broker_pb2.GetOffsetsRequest(group=GROUP, topic=topic)
    response = await status.answer(client.broker.GetOffsets(request))
    return {(each.topic, each.queue_id): each.offset for each in response.queues}


async def test_a_queue_of_another_broker_is_not_had_here(client: Client) -> None:
    """That one was at this address, as far as the member knows: somebody else has the queue."""
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    request = broker_pb2.AcquireQueuesRequest(
        group=GROUP,
        member_id="m",
        generation=1,
        queues=[message_pb2.QueueRef(topic=topic, broker="b7", queue_id=0)],
    )
    [result] = (await status.answer(client.broker.AcquireQueues(request))).queues
    assert result.error.code == error_pb2.UNAVAILABLE
    assert result.error.retryable
    assert set((await committed(client, topic)).values()) == {-1}


async def test_a_new_group_starts_at_either_end(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"] * 5), batch(topic, [b"a"] * 7, queue_id=1))
    first = await acquire(client, topic, 1)
    assert (first.offset, first.min_offset, first.max_offset) == (0, 0, 5)
    latest = await acquire(client, topic, 1, broker_pb2.LATEST, queue_id=1)
    assert latest.offset == 7
    # Where it started stays, although nothing was consumed.
    await client.send(batch(topic, [b"a"], queue_id=1))
    assert (await acquire(client, topic, 2, broker_pb2.LATEST, queue_id=1)).offset == 7


async def test_the_next_owner_continues_and_the_last_one_is_fenced(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"] * 5))
    await acquire(client, topic, 1)
    assert (await commit(client, topic, 3, 1)).offset == 3
    assert (await acquire(client, topic, 2)).offset == 3
    stale = await commit(client, topic, 4, 1)
    assert stale.error.code == error_pb2.FENCED_MEMBER
    assert (stale.error.field, stale.error.value, stale.error.limit) == ("generation", "1", "2")
    assert (await acquire(client, topic, 1)).error.code == error_pb2.FENCED_MEMBER
    assert await committed(client) == {(topic, 0): 3}


async def test_a_commit_that_comes_late_is_answered_with_what_stands(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"] * 5))
    await acquire(client, topic, 1)
    assert (await commit(client, topic, 4, 1)).offset == 4
    late = await commit(client, topic, 2, 1)
    assert (late.HasField("error"), late.offset) == (False, 4)
    assert await committed(client) == {(topic, 0): 4}
    # Who is no member says where the group is, also that it is to go back.
    assert (await commit(client, topic, 1, 0)).offset == 1
    assert await committed(client) == {(topic, 0): 1}


async def test_a_pull_of_an_old_generation_is_refused(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    await acquire(client, topic, 2)
    [refused] = (await client.pull(topic, generation=1, group=GROUP)).queues
    assert refused.error.code == error_pb2.FENCED_MEMBER
    [records] = (await client.pull(topic, generation=2, group=GROUP)).queues
    assert records.next_offset == 1


async def test_commits_ride_along_on_a_pull(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"] * 5))
    await acquire(client, topic, 1)
    commits = [broker_pb2.OffsetCommit(topic=topic, offset=4, generation=1)]
    response = await client.pull(topic, offset=4, group=GROUP, commits=commits)
    assert [each.offset for each in response.commits] == [4]
    assert await committed(client, topic) == {
        (topic, 0): 4,
        (topic, 1): -1,
        (topic, 2): -1,
        (topic, 3): -1,
    }


async def test_an_offset_that_does_not_exist_is_refused(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"] * 5))
    await acquire(client, topic, 1)
    refused = await commit(client, topic, 6, 1)
    assert refused.error.code == error_pb2.OFFSET_OUT_OF_RANGE
    assert (await commit(client, "nowhere", 0, 1)).error.code == error_pb2.TOPIC_NOT_FOUND


@pytest.mark.parametrize("group", ["", "a b", "x" * 128])
async def test_illegal_groups_are_refused(client: Client, group: str) -> None:
    request = broker_pb2.GetOffsetsRequest(group=group)
    with pytest.raises(InvalidArgument) as caught:
        await status.answer(client.broker.GetOffsets(request))
    assert caught.value.field == "group"


async def test_a_pull_is_answered_though_its_commits_cannot_be_stored(tmp_path: Path) -> None:
    """Who reads may go on while the disk is full."""
    async with running_broker(tmp_path) as (broker, client):
        topic = topic_name()
        await client.send(batch(topic, [b"a"] * 5))
        commits = [broker_pb2.OffsetCommit(topic=topic, offset=4)]
        broker.store.log.disk_full = True
        response = await client.pull(topic, offset=4, group=GROUP, commits=commits)
        broker.store.log.disk_full = False
        [refused] = response.commits
        assert (refused.topic, refused.queue_id, refused.offset) == (topic, 0, -1)
        assert refused.error.code == error_pb2.READ_ONLY
        assert refused.error.retryable
        assert response.queues[0].next_offset == 5


async def test_offsets_and_fences_survive_restarts(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send(batch("orders", [b"a"] * 5))
        await acquire(client, "orders", 7)
        await commit(client, "orders", 2, 7)
    async with running_broker(tmp_path) as (_, client):
        assert (await acquire(client, "orders", 6)).error.code == error_pb2.FENCED_MEMBER
        assert (await acquire(client, "orders", 8)).offset == 2


async def test_generation_of_an_acquire_must_be_one(client: Client) -> None:
    with pytest.raises(DuemqError) as caught:
        await acquire(client, "orders", 0)
    assert caught.value.field == "generation"


async def test_a_start_that_is_not_known_is_refused(client: Client) -> None:
    """It is not taken for the end of the queue: what lies there would be left out."""
    topic = topic_name()
    await client.send(batch(topic, [b"a"] * 5))
    with pytest.raises(InvalidArgument) as caught:
        await acquire(client, topic, 1, start=9)
    assert caught.value.field == "start_from"
    # Not said, it is the end.
    assert (await acquire(client, topic, 1, broker_pb2.START_FROM_UNSPECIFIED)).offset == 5


async def test_commits_of_one_request_do_not_go_back_either(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"] * 9))
    await acquire(client, topic, 5)
    told = [(7, 5), (3, 5), (4, 4), (9, 5)]
    offsets = [
        broker_pb2.OffsetCommit(topic=topic, offset=offset, generation=generation)
        for offset, generation in told
    ]
    for count, stands in ((2, 7), (4, 9)):
        request = broker_pb2.CommitOffsetsRequest(group=GROUP, commits=offsets[:count])
        results = (await status.answer(client.broker.CommitOffsets(request))).queues
        assert results[1].offset >= 7
        assert (await committed(client))[topic, 0] == stands
    assert results[2].error.code == error_pb2.FENCED_MEMBER


@pytest.mark.parametrize("count", [0, 4_097])
async def test_a_request_says_of_what_it_has_too_few_or_too_many(
    client: Client, count: int
) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    ref = message_pb2.QueueRef(topic=topic, broker="b1")
    commits = [broker_pb2.OffsetCommit(topic=topic)] * count
    acquire = broker_pb2.AcquireQueuesRequest(group=GROUP, generation=1, queues=[ref] * count)
    commit = broker_pb2.CommitOffsetsRequest(group=GROUP, commits=commits)
    with pytest.raises(InvalidArgument) as caught:
        await status.answer(client.broker.AcquireQueues(acquire))
    assert (caught.value.field, caught.value.value) == ("queues", str(count))
    with pytest.raises(InvalidArgument) as caught:
        await status.answer(client.broker.CommitOffsets(commit))
    assert (caught.value.field, caught.value.value) == ("commits", str(count))
