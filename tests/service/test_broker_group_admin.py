"""GroupAdmin of one broker: settings, progress, offsets moved under a member's feet."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from duemq.errors import (
    DuemqError,
    GroupNotFound,
    InvalidArgument,
    ReadOnly,
    TopicNotFound,
)
from duemq.transport import status
from duemq.v1 import admin_pb2, broker_pb2, error_pb2, group_admin_pb2, group_pb2, message_pb2
from duemq_server.broker.process import Broker
from duemq_server.broker.reading import time_search
from duemq_server.broker.store.queues import Queue
from duemq_server.serving.clock import now_ms
from tests.service.running_broker import Client, batch, running_broker, topic_name
from tests.service.running_cluster import until

GROUP = "billing"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[Broker, Client]]:
    async with running_broker(tmp_path) as made:
        yield made


@pytest.fixture
async def client(running: tuple[Broker, Client]) -> Client:
    return running[1]


@pytest.fixture
async def topic(client: Client) -> str:
    """Five records in queue 0, seven in queue 1."""
    name = topic_name()
    await client.send(batch(name, [b"a"] * 5), batch(name, [b"b"] * 7, queue_id=1))
    return name


async def acquire(
    client: Client, topic: str, generation: int, *, group: str = GROUP, **fields: Any
) -> list[broker_pb2.OffsetResult]:
    request = broker_pb2.AcquireQueuesRequest(
        group=group,
        member_id="m",
        generation=generation,
        queues=[
            message_pb2.QueueRef(topic=topic, broker="b1", queue_id=queue_id) for queue_id in (0, 1)
        ],
        **{"start_from": broker_pb2.EARLIEST, **fields},
    )
    return list((await status.answer(client.broker.AcquireQueues(request))).queues)


async def commit(client: Client, topic: str, offset: int, generation: int) -> error_pb2.Error:
    commits = [broker_pb2.OffsetCommit(topic=topic, offset=offset, generation=generation)]
    request = broker_pb2.CommitOffsetsRequest(group=GROUP, member_id="m", commits=commits)
    return (await status.answer(client.broker.CommitOffsets(request))).queues[0].error


async def progress(client: Client, group: str = GROUP) -> group_admin_pb2.GroupProgress:
    request = group_admin_pb2.DescribeProgressRequest(group=group)
    return await status.answer(client.group_admin.DescribeProgress(request))


async def reset(
    client: Client, topic: str, group: str = GROUP, **to: Any
) -> list[group_admin_pb2.OffsetChange]:
    request = group_admin_pb2.ResetOffsetsRequest(group=group, topic=topic, **to)
    return list((await status.answer(client.group_admin.ResetOffsets(request))).changes)


async def put(client: Client, group: str, **policy: Any) -> group_admin_pb2.GroupConfig:
    config = group_admin_pb2.GroupConfig(group=group, retry=group_admin_pb2.RetryPolicy(**policy))
    request = group_admin_pb2.PutGroupRequest(group=config)
    return await status.answer(client.group_admin.PutGroup(request))


def moves(changes: list[group_admin_pb2.OffsetChange]) -> list[tuple[int, int, int]]:
    return [(each.queue_id, each.before, each.after) for each in changes]


async def test_progress_tells_offsets_lag_and_what_is_in_flight(client: Client, topic: str) -> None:
    with pytest.raises(GroupNotFound):
        await progress(client)
    await acquire(client, topic, 5)
    await client.pull(topic, group=GROUP, generation=5, max_records=4)
    await commit(client, topic, 1, 5)
    first, second = (await progress(client)).queues
    assert (first.topic, first.queue_id, first.offset, first.generation) == (topic, 0, 1, 5)
    assert (first.min_offset, first.max_offset) == (0, 5)
    assert first.pulled_offset == 4
    assert first.lag_ms >= 0
    assert first.last_commit_ms > 0
    assert (second.offset, second.pulled_offset, second.last_commit_ms) == (0, 0, 0)
    await commit(client, topic, 5, 5)
    assert (await progress(client)).queues[0].lag_ms == 0


async def test_what_a_filter_leaves_out_is_not_in_flight(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"no"] * 3, tags=["n"] * 3))
    await acquire(client, topic, 5)
    fields = {"group": GROUP, "generation": 5, "filter": "y"}
    [left_out] = (await client.pull(topic, **fields)).queues
    assert left_out.next_offset == 3
    assert (await progress(client)).queues[0].pulled_offset == 0
    await client.send(batch(topic, [b"yes"], tags=["y"]))
    await client.pull(topic, offset=3, **fields)
    assert (await progress(client)).queues[0].pulled_offset == 4


async def test_rates_are_told_after_two_samples(running: tuple[Broker, Client], topic: str) -> None:
    broker, client = running
    await acquire(client, topic, 5)
    await broker._sampler.sample()
    await client.send(batch(topic, [b"a"] * 3))
    await commit(client, topic, 4, 5)
    await asyncio.sleep(0.002)  # the rates' clock has milliseconds
    assert (await progress(client)).queues[0].consumed_per_s > 0
    described = await client.admin.DescribeTopic(admin_pb2.DescribeTopicRequest(name=topic))
    assert described.queues[0].in_per_s > 0
    assert described.queues[2].in_per_s == 0


async def test_a_dry_run_changes_nothing(client: Client, topic: str) -> None:
    await acquire(client, topic, 5)
    await commit(client, topic, 3, 5)
    before = [(q.offset, q.generation, q.settled) for q in (await progress(client)).queues]
    changes = await reset(client, topic, latest=True, dry_run=True)
    assert moves(changes) == [(0, 3, 5), (1, 0, 7), (2, -1, 0), (3, -1, 0)]
    after = [(q.offset, q.generation, q.settled) for q in (await progress(client)).queues]
    assert after == before
    assert (await commit(client, topic, 4, 5)).code == error_pb2.ERROR_CODE_UNSPECIFIED


@pytest.mark.parametrize(
    ("to", "after"),
    [
        ({"earliest": True}, [0, 0]),
        ({"latest": True}, [5, 7]),
        ({"offset": 4}, [4, 4]),
        ({"at_ms": 0}, [0, 0]),
        ({"at_ms": 1 << 60}, [5, 7]),
    ],
)
async def test_a_reset_moves_and_fences_members(
    client: Client, topic: str, to: dict[str, Any], after: list[int]
) -> None:
    await acquire(client, topic, 5)
    await commit(client, topic, 3, 5)
    changes = await reset(client, topic, queue_ids=[0, 1], **to)
    assert moves(changes) == [(0, 3, after[0]), (1, 0, after[1])]
    assert (await commit(client, topic, 4, 5)).code == error_pb2.FENCED_MEMBER
    assert [each.error.code for each in await acquire(client, topic, 5)] == [
        error_pb2.FENCED_MEMBER
    ] * 2
    assert [each.offset for each in await acquire(client, topic, 6)] == after


async def test_a_reset_wakes_a_parked_pull_and_leaves_other_queues(
    running: tuple[Broker, Client], topic: str
) -> None:
    broker, client = running
    await acquire(client, topic, 5)
    pulls = [
        asyncio.ensure_future(
            client.pull(topic, queue_id, end, generation=5, group=GROUP, wait_ms=20_000)
        )
        for queue_id, end in ((0, 5), (1, 7))
    ]
    await until(lambda: len(broker._pulls) == len(pulls))
    await reset(client, topic, earliest=True, queue_ids=[0])
    [refused] = (await pulls[0]).queues
    assert refused.error.code == error_pb2.FENCED_MEMBER
    assert not pulls[1].done()
    await client.send(batch(topic, [b"b"], queue_id=1))
    [records] = (await pulls[1]).queues
    assert records.next_offset == 8


async def test_a_reset_survives_a_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send(batch("orders", [b"a"] * 5))
        await acquire(client, "orders", 5)
        await commit(client, "orders", 5, 5)
        await reset(client, "orders", earliest=True)
    async with running_broker(tmp_path) as (_, client):
        assert (await commit(client, "orders", 5, 5)).code == error_pb2.FENCED_MEMBER
        assert (await acquire(client, "orders", 6))[0].offset == 0


async def test_what_cannot_be_reset_says_why(client: Client, topic: str) -> None:
    await acquire(client, topic, 5)
    refused = await reset(client, topic, offset=6, queue_ids=[0, 1, 9])
    assert [each.error.code for each in refused] == [
        error_pb2.OFFSET_OUT_OF_RANGE,
        error_pb2.ERROR_CODE_UNSPECIFIED,
        error_pb2.QUEUE_NOT_FOUND,
    ]
    assert (refused[0].error.value, refused[0].error.limit) == ("6", "0 to 5")
    for to, field in (
        ({}, "to"),
        ({"earliest": False}, "to"),
        ({"at_ms": -1}, "at_ms"),
        ({"latest": True, "queue_ids": range(2_000)}, "queue_ids"),
        ({"latest": True, "group": "%TIMER%"}, "group"),
        ({"latest": True, "group": "a b"}, "group"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            await reset(client, topic, **to)
        assert caught.value.field == field
    with pytest.raises(TopicNotFound):
        await reset(client, "nowhere", latest=True)


async def test_a_topic_made_anew_while_its_times_are_searched_is_not_reset(
    client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()

    async def make_anew() -> None:
        await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name=topic))
        config = admin_pb2.TopicConfig(name=topic, queues=4)
        await client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=config))

    def search(queue: Queue, at_ms: int) -> int:
        if not queue.dropped:
            asyncio.run_coroutine_threadsafe(make_anew(), loop).result(30)
        return queue.max_offset

    await acquire(client, topic, 5)
    monkeypatch.setattr(time_search, "first_stored_since", search)
    changes = await reset(client, topic, queue_ids=[0], at_ms=1)
    assert [each.error.code for each in changes] == [error_pb2.TOPIC_REPLACED]
    assert [each.after for each in changes] == [each.before for each in changes]


async def test_a_group_that_was_never_here_can_be_told_where_to_start(
    client: Client, topic: str
) -> None:
    assert moves(await reset(client, topic, offset=2, queue_ids=[0])) == [(0, -1, 2)]
    first, second = await acquire(client, topic, 5, start_from=broker_pb2.LATEST)
    assert (first.offset, second.offset) == (2, 7)


async def test_unknown_groups_are_refused_where_they_must_be_put(tmp_path: Path) -> None:
    async with running_broker(tmp_path, auto_create_groups=False) as (_, client):
        await client.send(batch("orders", [b"a"] * 5))
        assert moves(await reset(client, "orders", latest=True, dry_run=True))[0] == (0, -1, 5)
        with pytest.raises(GroupNotFound):
            await reset(client, "orders", latest=True)
        await put(client, GROUP)
        assert moves(await reset(client, "orders", latest=True))[0] == (0, -1, 5)


async def test_offsets_are_cloned(client: Client, topic: str) -> None:
    await acquire(client, topic, 5)
    await commit(client, topic, 3, 5)

    async def clone(**fields: Any) -> list[group_admin_pb2.OffsetChange]:
        given = {"group": GROUP, "to_group": "billing-2", **fields}
        request = group_admin_pb2.CloneOffsetsRequest(**given)
        return list((await status.answer(client.group_admin.CloneOffsets(request))).changes)

    assert moves(await clone(dry_run=True)) == [(0, -1, 3), (1, -1, 0)]
    with pytest.raises(GroupNotFound):
        await progress(client, "billing-2")
    assert moves(await clone(topic=topic)) == [(0, -1, 3), (1, -1, 0)]
    assert [q.offset for q in (await progress(client, "billing-2")).queues] == [3, 0]
    for wrong, kind in (
        ({"to_group": GROUP}, InvalidArgument),
        ({"group": "nobody"}, GroupNotFound),
        ({"topic": "nowhere"}, TopicNotFound),
        ({"to_group": "%TIMER%"}, InvalidArgument),
    ):
        with pytest.raises(kind):
            await clone(**wrong)


async def test_a_group_is_put_described_listed_and_deleted(client: Client) -> None:
    made = await put(client, GROUP, retries_max=3, delays_ms=[1_000, 5_000])
    assert (made.retry.retries_max, list(made.retry.delays_ms)) == (3, [1_000, 5_000])
    assert (await progress(client)).config == made
    listed = await client.groups.ListGroups(group_pb2.ListGroupsRequest())
    assert GROUP in {each.group for each in listed.groups}
    exponential = group_admin_pb2.ExponentialDelays(initial_ms=5, multiplier=2, max_ms=50)
    changed = await put(client, GROUP, exponential=exponential)
    assert changed.retry.exponential == exponential
    assert changed.retry.retries_max == 16
    delete = group_admin_pb2.DeleteGroupRequest(group=GROUP)
    await status.answer(client.group_admin.DeleteGroup(delete))
    with pytest.raises(GroupNotFound):
        await status.answer(client.group_admin.DeleteGroup(delete))
    with pytest.raises(GroupNotFound):
        await progress(client)


async def test_a_late_word_of_a_member_does_not_bring_a_deleted_group_back(
    client: Client, topic: str
) -> None:
    """It slept while its session ended and the group was deleted."""
    await acquire(client, topic, 5)
    delete = group_admin_pb2.DeleteGroupRequest(group=GROUP)
    await status.answer(client.group_admin.DeleteGroup(delete))
    assert (await commit(client, topic, 4, 5)).code == error_pb2.FENCED_MEMBER
    failed = broker_pb2.FailedMessage(topic=topic, offset=1, generation=5)
    request = broker_pb2.SendBackRequest(group=GROUP, member_id="m", messages=[failed])
    [refused] = (await status.answer(client.broker.SendBack(request))).results
    assert refused.error.code == error_pb2.FENCED_MEMBER
    assert {each.error.code for each in await acquire(client, topic, 5)} == {
        error_pb2.FENCED_MEMBER
    }
    with pytest.raises(GroupNotFound):
        await progress(client)
    # Who is no member says where the group is, as ever.
    assert (await commit(client, topic, 4, 0)).code == error_pb2.ERROR_CODE_UNSPECIFIED


async def test_a_group_that_a_full_disk_keeps_is_kept_whole(
    running: tuple[Broker, Client], topic: str
) -> None:
    """Its coordinator knows it as before, also the newest processes of its static members."""
    broker, client = running
    await acquire(client, topic, 5)
    table = broker._groups._coordinator.table
    group = table.make(GROUP, now_ms())
    delete = group_admin_pb2.DeleteGroupRequest(group=GROUP)
    broker.store.log.disk_full = True
    with pytest.raises(ReadOnly):
        await status.answer(client.group_admin.DeleteGroup(delete))
    assert table.find(GROUP) is group
    broker.store.log.disk_full = False
    await status.answer(client.group_admin.DeleteGroup(delete))
    assert table.find(GROUP) is None
    with pytest.raises(GroupNotFound):
        await progress(client)


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"retries_max": 1_001}, "retries_max"),
        ({"delays_ms": [-1]}, "delays_ms"),
        ({"delays_ms": [1] * 257}, "delays_ms"),
        (
            {"exponential": group_admin_pb2.ExponentialDelays(initial_ms=1, multiplier=0.5)},
            "multiplier",
        ),
    ],
)
async def test_illegal_settings_are_refused(
    client: Client, policy: dict[str, Any], field: str
) -> None:
    with pytest.raises(DuemqError) as caught:
        await put(client, GROUP, **policy)
    assert caught.value.field == field


async def test_a_new_group_starts_at_a_time(running: tuple[Broker, Client], topic: str) -> None:
    _, client = running
    await asyncio.sleep(0.005)
    [result] = await client.send(batch(topic, [b"c"] * 2, queue_id=1))
    first, second = await acquire(
        client, topic, 5, start_from=broker_pb2.AT_TIME, start_ms=result.store_ms
    )
    assert (first.offset, second.offset) == (5, 7)
    # Only a new group: where it was stays.
    again = await acquire(client, topic, 6, start_from=broker_pb2.AT_TIME, start_ms=1)
    assert [each.offset for each in again] == [5, 7]
    with pytest.raises(InvalidArgument) as caught:
        await acquire(client, topic, 7, start_from=broker_pb2.AT_TIME, start_ms=-1)
    assert caught.value.field == "start_ms"


async def test_metrics_tell_how_groups_are(running: tuple[Broker, Client], topic: str) -> None:
    broker, client = running
    await acquire(client, topic, 5)
    await client.pull(topic, group=GROUP, generation=5)
    await commit(client, topic, 2, 5)
    labels = {"group": GROUP, "topic": topic}
    value = broker.server.registry.get_sample_value
    assert value("duemq_broker_in_flight", labels) == 3
    assert (value("duemq_broker_consumer_lag_seconds", labels) or 0) >= 0
    assert value("duemq_broker_consumer_lag", labels) == 10
