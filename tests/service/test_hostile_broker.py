"""What a broken or hostile client may send: it is refused or served, and the broker goes on.

Each test ends by sending and reading something ordinary at the same broker.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from duemq.errors import DuemqError, InvalidArgument, Overloaded, TopicNotFound
from duemq.protocol.record_bytes import varint
from duemq.transport import channel, status
from duemq.v1 import admin_pb2, broker_pb2, message_pb2, view_pb2
from duemq_server.broker.edge.pull_stream import UNWRITTEN_MAX
from duemq_server.broker.process import Broker
from duemq_server.broker.store import recovery
from duemq_server.broker.store.offsets import Offsets
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.disk import RealDisk
from tests.service.running_broker import Client, batch, running_broker, topic_name
from tests.service.running_cluster import until

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
    request = broker_pb2.PullRequest(queues=[queue, queue], wait_ms=30_000)
    pull = asyncio.ensure_future(status.answer(client.broker.Pull(request, timeout=60)))
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


@pytest.mark.parametrize("generation", [INT64_MAX, (1 << 62) + 1, 1 << 62, 1 << 50])
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


async def test_offsets_beyond_their_number_are_refused_and_not_logged(tmp_path: Path) -> None:
    """A start replays what the log says: it must not hold more than there is room for."""
    topic = topic_name()
    async with running_broker(tmp_path) as (broker, client):
        await client.send(batch(topic, [b"a"]))
        broker.store.offsets = Offsets(entries_max=3)
        broker._pulls._offsets._store.offsets = broker.store.offsets
        commits = [broker_pb2.OffsetCommit(topic=topic, queue_id=number) for number in range(4)]
        request = broker_pb2.CommitOffsetsRequest(group="g", commits=commits)
        with pytest.raises(Overloaded):
            await status.answer(client.broker.CommitOffsets(request))
        assert broker.store.offsets.groups() == []
        request = broker_pb2.CommitOffsetsRequest(group="g", commits=commits[:3])
        await status.answer(client.broker.CommitOffsets(request))


async def test_a_topic_deleted_while_a_checkpoint_is_made_keeps_its_files_until_the_next(
    tmp_path: Path,
) -> None:
    """The checkpoint still knows it: a start from it needs them."""
    topic = topic_name()
    async with running_broker(tmp_path, checkpoint_interval=3600.0) as (broker, client):
        await client.send(batch(topic, [b"a"]))
        await broker._checkpoints.save()
        await client.send(batch(topic, [b"b"]))
        saving = asyncio.create_task(broker._checkpoints.save())
        await asyncio.sleep(0)  # the state is taken, and waits for the disk
        delete = admin_pb2.DeleteTopicRequest(name=topic)
        await asyncio.gather(saving, status.answer(client.admin.DeleteTopic(delete)))
        before = copy_of(tmp_path)
    opened = await asyncio.to_thread(recovery.open_store, str(before), RealDisk(), StoreSettings())
    assert opened.checkpoint_position > 0
    assert opened.replayed_entries < 4  # not from the whole log
    assert topic not in opened.store.topics
    opened.store.close()


async def test_after_retention_and_a_restart_the_oldest_offset_can_be_read(tmp_path: Path) -> None:
    topic = topic_name()
    settings = {"segment_bytes": 1 << 16, "retention_bytes": 1, "checkpoint_interval": 3600.0}
    async with running_broker(tmp_path, **settings) as (broker, client):
        for _ in range(8):
            await client.send(batch(topic, [b"x" * 20_000]))
        await broker._checkpoints.save()
        assert await broker._upkeep.retain() > 0
        low = (await client.pull(topic, offset=8)).queues or broker.store.queue(topic, 0).min_offset
        assert low
        before = broker.store.queue(topic, 0).min_offset
        assert len(await client.bodies(topic, offset=before)) == 8 - before
    async with running_broker(tmp_path, **settings) as (broker, client):
        assert broker.store.queue(topic, 0).min_offset == before > 0
        assert len(await client.bodies(topic, offset=before)) == 8 - before


async def test_who_does_not_read_his_answers_holds_no_more_than_a_few(
    pair: tuple[Broker, Client],
) -> None:
    broker, client = pair
    topic = topic_name()
    await client.send(batch(topic, [b"x" * 1_000_000]))
    written = asyncio.Event()
    made: list[int] = []

    async def write(answer: bytes) -> None:
        made.append(len(answer))
        await written.wait()

    async def requests() -> AsyncIterator[broker_pb2.PullRequest]:
        for number in range(50):
            yield broker_pb2.PullRequest(
                request_id=number + 1, queues=[broker_pb2.QueuePull(topic=topic)]
            )

    reads = broker._pulls._read
    read = 0

    async def counted(*arguments: Any) -> Any:
        nonlocal read
        read += 1
        return await reads(*arguments)

    broker._pulls._read = counted  # type: ignore[method-assign]
    stream = asyncio.create_task(broker._pulls.stream(requests(), write))
    await until(lambda: bool(made))
    for _ in range(1_000):
        await asyncio.sleep(0)
    assert len(made) == 1
    assert read <= UNWRITTEN_MAX
    written.set()
    await stream
    assert len(made) == 50


async def test_a_send_stream_whose_answer_fails_ends_with_an_error(
    pair: tuple[Broker, Client],
) -> None:
    """The client waits for answers and sends nothing: it must hear of it."""
    broker, _ = pair

    async def write(_: object) -> None:
        raise OSError("broken")

    async def requests() -> AsyncIterator[Any]:
        yield view_pb2.SendRequestView(
            batches=[view_pb2.BatchView(topic=topic_name(), records=b"\x0a\x00")]
        )
        await asyncio.Event().wait()

    with pytest.raises(OSError, match="broken"):
        async with asyncio.timeout(60):
            await broker._sends.stream(requests(), write)


def copy_of(data_dir: Path) -> Path:
    """What a kill at this moment leaves."""
    return Path(shutil.copytree(data_dir, data_dir.with_name(f"{data_dir.name}-copy")))


async def test_a_batch_that_takes_seconds_to_check_holds_nobody_up(client: Client) -> None:
    """Half a million fields in one record: the broker looks into it, beside its other work."""
    record = b"\x38\x01" * (1 << 19)
    entry = b"\x0a" + _varint(len(record)) + record
    view = view_pb2.BatchView(topic=topic_name(), records=entry)
    request = view_pb2.SendRequestView(batches=[view]).SerializeToString()
    slow = asyncio.ensure_future(status.answer(client.raw_send(request)))
    answered = 0
    while not slow.done():
        await client.pull("unknown")
        answered += 1
    assert answered > 3
    assert view_pb2.SendResponseView.FromString(await slow).results


async def test_a_topic_deleted_before_its_last_batch_is_durable_spoils_no_checkpoint(
    tmp_path: Path,
) -> None:
    topic = topic_name()
    async with running_broker(tmp_path, checkpoint_interval=3600.0) as (broker, client):
        await client.send(batch(topic, [b"a"]))
        await broker._checkpoints.save()  # the one that a start begins is over
        view = view_pb2.BatchView(topic=topic, records=b"\x0a\x00")
        broker.store.send(view, 1)
        saving = asyncio.create_task(broker._checkpoints.save())
        await asyncio.sleep(0)  # the state is taken, with the batch in it
        broker.store.delete_topic(topic)
        await saving
        before = copy_of(tmp_path)
    opened = await asyncio.to_thread(recovery.open_store, str(before), RealDisk(), StoreSettings())
    assert opened.replayed_entries == 1  # the deletion
    assert topic not in opened.store.topics
    opened.store.close()


NONSENSE = b"\x0b" * 50  # begins a group that never ends


def pull_of(topic: str) -> bytes:
    request = broker_pb2.PullRequest(request_id=1, queues=[broker_pb2.QueuePull(topic=topic)])
    return request.SerializeToString()


def send_of(topic: str) -> bytes:
    request = broker_pb2.SendRequest(request_id=1, batches=[batch(topic, [b"a"])])
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("method", "good"), [("Broker/PullStream", pull_of), ("Broker/SendStream", send_of)]
)
async def test_a_stream_answers_what_was_right_and_then_ends_with_a_status(
    pair: tuple[Broker, Client], method: str, good: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broker, client = pair
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))

    async def one(connection: grpc.aio.Channel) -> int:
        stream: Any = connection.stream_stream(f"/duemq.v1.{method}")()
        for request in (good(topic), good(topic).replace(b"\x08\x01", b"\x08\x02"), NONSENSE):
            await stream.write(request)
        for _ in range(2):
            assert isinstance(await status.answer(stream.read()), bytes)
        with pytest.raises(InvalidArgument, match="cannot be decoded"):
            await status.answer(stream.read())
        return 1

    async with channel.connect(broker.server.address) as connection:
        done = await asyncio.wait_for(asyncio.gather(*(one(connection) for _ in range(50))), 30)
    assert sum(done) == 50
    assert not [line for line in caplog.records if line.levelname == "ERROR"]


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("size", [1, 100_000])
async def test_a_record_that_generated_clients_cannot_decode_is_refused(
    client: Client, size: int, arrays: bool
) -> None:
    record = b"\x12\x02\xff\xfe" + message_pb2.Record(body=b"x" * size).SerializeToString()
    records = b"\x0a" + varint(len(record)) + record
    view = view_pb2.BatchView(topic=topic_name(), records=records)
    if arrays:
        view.sizes = len(records).to_bytes(4, "little")
        view.tag_hashes = view.key_hashes = bytes(4)
    request = view_pb2.SendRequestView(batches=[view])
    with pytest.raises(InvalidArgument) as refused:
        await status.answer(client.raw_send(request.SerializeToString()))
    assert refused.value.field == "records"
