import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq.errors import (
    Internal,
    InvalidArgument,
    ReadOnly,
    TopicExists,
    TopicNotFound,
)
from duemq.transport import status
from duemq.v1 import admin_pb2
from duemq_server.broker.store import recovery
from duemq_server.storage.disk import RealFile
from duemq_server.storage.errors import DiskFailed, DiskFull
from tests.service.running_broker import Client, batch, running_broker, topic_name


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with running_broker(tmp_path) as (_, made):
        yield made


async def create(client: Client, name: str, **fields: object) -> admin_pb2.TopicDescription:
    if_missing = bool(fields.pop("if_missing", False))
    config = admin_pb2.TopicConfig(name=name, **fields)  # type: ignore[arg-type]
    request = admin_pb2.CreateTopicRequest(topic=config, if_missing=if_missing)
    return await status.answer(client.admin.CreateTopic(request))


async def names(client: Client, *, system: bool = False) -> list[str]:
    listed = await client.admin.ListTopics(admin_pb2.ListTopicsRequest(system=system))
    return [topic.name for topic in listed.topics]


async def test_a_topic_is_made_described_listed_and_deleted(client: Client) -> None:
    topic = topic_name()
    made = await create(client, topic, queues=2, message_bytes_max=500)
    assert (made.broker, made.topic.queues, made.topic.message_bytes_max) == ("b1", 2, 500)
    [result] = await client.send(batch(topic, [b"a"], queue_id=1))
    described = await client.admin.DescribeTopic(admin_pb2.DescribeTopicRequest(name=topic))
    assert [(q.queue_id, q.min_offset, q.max_offset) for q in described.queues] == [
        (0, 0, 0),
        (1, 0, 1),
    ]
    assert described.queues[1].last_store_ms == result.store_ms
    assert await names(client) == [topic]
    assert await names(client, system=True) == ["%TIMER%", topic]
    await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name=topic))
    assert await names(client) == []
    for call in (
        client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name=topic)),
        client.admin.DescribeTopic(admin_pb2.DescribeTopicRequest(name=topic)),
    ):
        with pytest.raises(TopicNotFound):
            await status.answer(call)


async def test_a_topic_that_exists_is_refused_or_answered_as_it_is(client: Client) -> None:
    topic = topic_name()
    await create(client, topic, queues=2)
    with pytest.raises(TopicExists) as caught:
        await create(client, topic, queues=3)
    assert caught.value.value == topic
    assert (await create(client, topic, queues=3, if_missing=True)).topic.queues == 2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "a/b"}, "topic"),
        ({"name": "a", "queues": 1_025}, "queues"),
        ({"name": "a", "message_bytes_max": 1 << 30}, "message_bytes_max"),
    ],
)
async def test_illegal_topics_are_refused(client: Client, fields: dict, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await create(client, **fields)
    assert caught.value.field == field
    assert caught.value.limit


async def test_the_timer_topic_cannot_be_deleted(client: Client) -> None:
    request = admin_pb2.DeleteTopicRequest(name="%TIMER%")
    with pytest.raises(InvalidArgument):
        await status.answer(client.admin.DeleteTopic(request))


async def test_topics_survive_restarts_and_deleted_ones_do_not(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await create(client, "kept", queues=3)
        await create(client, "gone")
        await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name="gone"))
        before = await client.admin.DescribeBroker(admin_pb2.DescribeBrokerRequest())
    async with running_broker(tmp_path) as (_, client):
        assert await names(client) == ["kept"]
        after = await client.admin.DescribeBroker(admin_pb2.DescribeBrokerRequest())
    assert after.store_id == before.store_id != 0
    assert len(after.delay_levels_ms) == 18
    assert after.checkpoint_position <= after.log_durable_position


def folders(data_dir: Path) -> list[str]:
    return [folder.name for folder in (data_dir / "consumequeue").iterdir()]


async def test_files_of_a_deleted_topic_go_with_the_next_checkpoint(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send(batch("gone", [b"a"]))
        await broker._checkpoints.save()
        assert f"gone.{broker.store.topics.find('gone').id}" in folders(tmp_path)
        await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name="gone"))
        await broker._checkpoints.save()
        assert folders(tmp_path) == []


async def test_little_free_space_refuses_sends_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send(batch("orders", [b"a"]))
        free = broker._disk.free_bytes
        broker._disk.free_bytes = lambda path: 0  # type: ignore[method-assign]
        broker._upkeep._watch_space()
        with pytest.raises(ReadOnly) as caught:
            await client.send(batch("orders", [b"b"]))
        assert caught.value.retryable
        with pytest.raises(ReadOnly):
            await create(client, "other")
        described = await client.admin.DescribeBroker(admin_pb2.DescribeBrokerRequest())
        assert described.read_only
        assert await client.bodies("orders") == [b"a"]
        assert "retention_bytes" in caplog.text
        broker._disk.free_bytes = free  # type: ignore[method-assign]
        broker._upkeep._watch_space()
        await client.send(batch("orders", [b"b"]))
        assert await client.bodies("orders") == [b"a", b"b"]


async def test_a_failed_sync_stops_the_broker_and_acknowledges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send(batch("orders", [b"a"], producer_id=7))

        def fail(file: RealFile) -> None:
            raise DiskFailed(f"fdatasync {file.path}: input/output error")

        monkeypatch.setattr(RealFile, "fdatasync", fail)
        sent = batch("orders", [b"b"], producer_id=7, sequence=1)
        sending = asyncio.ensure_future(client.send(sent))
        with pytest.raises((Internal, DiskFailed), match="input/output error"):
            await broker.run(asyncio.Event())
        assert not sending.done()
        sending.cancel()
        monkeypatch.undo()
    async with running_broker(tmp_path) as (_, client):
        await client.send(sent)
        assert await client.bodies("orders") == [b"a", b"b"]


async def test_what_was_acknowledged_before_a_sync_that_failed_may_be_lost_and_its_offsets_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fdatasync = RealFile.fdatasync

    def fail(file: RealFile) -> None:
        if "/commitlog/" in file.path:  # after a checkpoint's, the log would be synced at the stop
            raise DiskFailed(f"fdatasync {file.path}: input/output error")
        fdatasync(file)

    async with running_broker(tmp_path, flush_mode="async") as (broker, client):
        await client.send(batch("orders", [b"a"], producer_id=7))
        monkeypatch.setattr(RealFile, "fdatasync", fail)
        sending = asyncio.ensure_future(client.send(batch("orders", [b"b"])))
        with pytest.raises((Internal, DiskFailed), match="input/output error"):
            await broker.run(asyncio.Event())
        sending.cancel()
        monkeypatch.undo()
    async with running_broker(tmp_path, flush_mode="async") as (broker, _):  # in the same run
        assert broker.store.queue("orders", 0).next_offset > 2


@pytest.mark.parametrize("error", [DiskFull, DiskFailed])
async def test_a_stop_without_a_last_checkpoint_is_one_all_the_same(
    error: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A consume queue could not be synced, say: the log has all."""

    async def fail() -> None:
        raise error("as it happens")

    def stays(*_: object) -> None:
        raise error("as it happens")

    async with running_broker(tmp_path) as (broker, client):
        await client.send(batch("orders", [b"a"]))
        await broker._checkpoints.save()  # there is nothing for another one but the last
        monkeypatch.setattr(broker._checkpoints, "save", fail)
        monkeypatch.setattr(recovery, "closed", stays)
    assert "no last checkpoint" in caplog.text
    assert "takes this stop for an unclean one" in caplog.text
    async with running_broker(tmp_path) as (_, client):
        assert await client.bodies("orders") == [b"a"]


async def test_retention_removes_whole_segments_and_moves_the_queues_start(tmp_path: Path) -> None:
    settings = {"segment_bytes": 1 << 16, "retention_bytes": 1 << 17}
    async with running_broker(tmp_path, **settings) as (broker, client):
        for number in range(40):
            await client.send(batch("orders", [b"%d" % number + bytes(10_000)]))
        await broker._checkpoints.save()
        assert await broker._upkeep.retain() >= 2
        described = await client.admin.DescribeTopic(admin_pb2.DescribeTopicRequest(name="orders"))
        oldest = described.queues[0].min_offset
        assert 0 < oldest < 30
        bodies = await client.bodies("orders", offset=oldest)
        assert [int(body.rstrip(b"\0")) for body in bodies] == list(range(oldest, 40))
        [refused] = (await client.pull("orders")).queues
        assert (refused.min_offset, refused.max_offset) == (oldest, 40)
        assert refused.error.limit == f"{oldest} to 40"
    async with running_broker(tmp_path, **settings) as (_, client):
        assert len(await client.bodies("orders", offset=oldest)) == 40 - oldest


async def test_retention_waits_for_the_timer_service(tmp_path: Path) -> None:
    settings = {"segment_bytes": 1 << 16, "retention_bytes": 1 << 16}
    async with running_broker(tmp_path, **settings) as (broker, client):
        await client.send(batch("orders", [b"timer"], delays_ms=[60_000]))
        for _ in range(20):
            await client.send(batch("orders", [bytes(10_000)]))
        await broker._checkpoints.save()
        assert await broker._upkeep.retain() == 0


async def test_metrics_tell_what_happened(client: Client, tmp_path: Path) -> None:
    async with running_broker(tmp_path / "other") as (broker, other):
        await other.send(batch("orders", [b"a", b"b"]))
        await other.bodies("orders")
        value = broker.server.registry.get_sample_value
        assert value("duemq_broker_messages_in_total") == 2
        assert value("duemq_broker_messages_out_total") == 2
        assert value("duemq_broker_topics") == 2
        assert value("duemq_broker_send_seconds_count") == 1
        assert value("duemq_broker_commit_bytes_count") >= 1
        assert value("duemq_broker_parked_pulls") == 0
