"""MessageAdmin of one broker: look-ups step by step, and what groups made of a message."""

import asyncio
import struct
import threading
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from duemq.errors import (
    Corrupt,
    InvalidArgument,
    OffsetOutOfRange,
    Overloaded,
    QueueNotFound,
    TopicNotFound,
    TopicReplaced,
    Unavailable,
)
from duemq.protocol.record_bytes import text_hash
from duemq.transport import status
from duemq.v1 import broker_pb2, message_admin_pb2, message_pb2, view_pb2
from duemq_server.broker.edge import message_admin_servicer, send_requests
from duemq_server.broker.reading import lookup
from tests.service.running_broker import Client, running_broker, topic_name
from tests.service.running_cluster import WAIT_S, until
from tests.unit.broker.reading.test_lookup import COLLIDING

OTHER_QUEUE = lookup.Cursor(0, lookup.LookupStart(1, 0))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with running_broker(tmp_path) as (_, made):
        yield made


async def send(
    client: Client, topic: str, *records: message_pb2.Record, arrays: bool = True, **fields: Any
) -> broker_pb2.BatchResult:
    made = broker_pb2.Batch(topic=topic, records=message_pb2.RecordBatch(records=records), **fields)
    if arrays:
        for record in records:
            made.sizes.append(message_pb2.RecordBatch(records=[record]).ByteSize())
            made.tag_hashes.append(text_hash(record.tag.encode()))
            made.key_hashes.append(text_hash(record.key.encode()))
    [result] = await client.send(made)
    return result


def record(message_id: str, key: str = "", body: bytes = b"body") -> message_pb2.Record:
    return message_pb2.Record(message_id=message_id, key=key, body=body)


async def step(client: Client, topic: str, **fields: Any) -> message_admin_pb2.FindMessagesResponse:
    request = message_admin_pb2.FindMessagesRequest(topic=topic, **fields)
    return await status.answer(client.message_admin.FindMessages(request))


async def find(client: Client, topic: str, **fields: Any) -> list[tuple[int, int, str]]:
    """(queue, offset, id) of all steps."""
    found: list[tuple[int, int, str]] = []
    cursor = b""
    while True:
        answer = await step(client, topic, cursor=cursor, **fields)
        found += [
            (each.queue.queue_id, each.offset, each.record.message_id) for each in answer.messages
        ]
        cursor = answer.cursor
        if not cursor:
            return found


async def test_by_key_with_colliding_hashes_over_queues(client: Client) -> None:
    assert len({zlib.crc32(word.encode()) for word in COLLIDING}) == 1
    topic, (one, other) = topic_name(), COLLIDING
    await send(client, topic, record("a", one), record("b", other), record("c", one))
    await send(client, topic, record("d", other), record("e", one), queue_id=2, arrays=False)
    assert await find(client, topic, key=one) == [(0, 0, "a"), (0, 2, "c"), (2, 1, "e")]
    assert await find(client, topic, key=other) == [(0, 1, "b"), (2, 0, "d")]
    assert await find(client, topic, key=one, limit=1) == [(0, 0, "a"), (0, 2, "c"), (2, 1, "e")]
    assert await find(client, topic, key=one, queue_id=2) == [(2, 1, "e")]
    assert await find(client, topic, key="nobody") == []


async def test_an_answer_has_all_of_the_message(client: Client) -> None:
    topic = topic_name()
    sent = record("a", "k", b"the body")
    sent.properties["color"] = "red"
    stored = await send(client, topic, sent)
    [found] = (await step(client, topic, message_id="a")).messages
    assert found.record == sent
    assert (found.queue.topic, found.queue.broker, found.queue.queue_id) == (topic, "b1", 0)
    assert (found.offset, found.store_ms) == (stored.base_offset, stored.store_ms)


async def test_by_id_where_bodies_name_it_too(client: Client) -> None:
    topic = topic_name()
    decoy = record("x", body=lookup.message_id_field("wanted"))
    await send(client, topic, decoy, record("wanted"), decoy)
    await send(client, topic, record("wanted-too"), record("wanted"), queue_id=3)
    assert await find(client, topic, message_id="wanted") == [
        (0, 1, "wanted"),
        (3, 1, "wanted"),
    ]


async def test_by_offset_and_time(client: Client) -> None:
    topic = topic_name()
    first = await send(client, topic, *(record(f"a{number}") for number in range(5)))
    last = await send(client, topic, record("b"))
    assert await find(client, topic, queue_id=0, offset=3) == [
        (0, 3, "a3"),
        (0, 4, "a4"),
        (0, 5, "b"),
    ]
    assert await find(client, topic, queue_id=0, offset=99) == []
    assert len(await find(client, topic, from_ms=first.store_ms)) == 6
    assert len(await find(client, topic, from_ms=last.store_ms + 1)) == 0
    early = await find(client, topic, to_ms=last.store_ms)
    assert early in ([], [(0, number, f"a{number}") for number in range(5)])


async def test_an_answer_is_bounded_in_messages_and_bytes(client: Client) -> None:
    topic = topic_name()
    for number in range(3):
        await send(client, topic, record(f"a{number}", "k", bytes(lookup.ANSWER_BYTES_MAX - 100)))
    answer = await step(client, topic, key="k")
    assert [each.offset for each in answer.messages] == [0]
    assert await find(client, topic, key="k") == [(0, n, f"a{n}") for n in range(3)]
    await send(client, topic, *(record(f"b{number}") for number in range(70)), queue_id=1)
    assert len((await step(client, topic, queue_id=1)).messages) == 64


async def test_a_start_again_finds_the_same_from_the_disk(tmp_path: Path) -> None:
    async with running_broker(tmp_path, segment_bytes=1 << 16) as (broker, client):
        for number in range(30):
            await send(client, "orders", record(f"a{number}", f"k{number % 3}", bytes(9_000)))
        await broker._checkpoints.save()
        cursor = (await step(client, "orders", key="k1", limit=4)).cursor
    async with running_broker(tmp_path, segment_bytes=1 << 16) as (_, client):
        wanted = [(0, number, f"a{number}") for number in range(1, 30, 3)]
        assert await find(client, "orders", key="k1") == wanted
        rest = await step(client, "orders", key="k1", cursor=cursor)
        assert [each.offset for each in rest.messages] == [offset for _, offset, _ in wanted[4:]]


async def test_what_is_no_record_is_passed_by_or_shown_as_a_body(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        send_requests, "_check_decodable", lambda batch: None
    )  # as older brokers did
    topic = topic_name()
    torn = view_pb2.BatchView(
        topic=topic,
        records=b"\x0a\x02\x12\x05",  # a message id of five bytes that are not there
        sizes=struct.pack("<I", 4),
        tag_hashes=bytes(4),
        key_hashes=struct.pack("<I", text_hash(b"k")),
    )
    await client.raw_send(view_pb2.SendRequestView(batches=[torn]).SerializeToString())
    await send(client, topic, record("a", "k"))
    assert await find(client, topic, key="k") == [(0, 1, "a")]
    assert await find(client, topic) == [(0, 0, ""), (0, 1, "a")]
    shown = (await step(client, topic, queue_id=0, offset=0)).messages[0]
    assert shown.record.body == torn.records
    assert await find(client, topic, queue_id=0, offset=1) == [(0, 1, "a")]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"message_id": "a", "key": "b"}, "key"),
        ({"message_id": "a" * 256}, "message_id"),
        ({"key": "a" * 5_000}, "key"),
        ({"limit": 1_001}, "limit"),
        ({"limit": -1}, "limit"),
        ({"from_ms": -1}, "from_ms"),
        ({"to_ms": -1}, "to_ms"),
        ({"offset": 1}, "offset"),
        ({"cursor": b"nonsense"}, "cursor"),
        ({"queue_id": 0, "cursor": lookup.encode_cursor(OTHER_QUEUE)}, "cursor"),
    ],
)
async def test_illegal_requests_are_refused_by_field(
    client: Client, fields: dict[str, Any], field: str
) -> None:
    topic = topic_name()
    await send(client, topic, record("a"))
    with pytest.raises(InvalidArgument) as caught:
        await step(client, topic, **fields)
    assert caught.value.field == field
    assert caught.value.limit


@pytest.mark.parametrize("of_one_queue", [False, True])
async def test_pages_are_of_one_topic_though_it_was_made_anew(
    tmp_path: Path, of_one_queue: bool
) -> None:
    fields = {"queue_id": 0} if of_one_queue else {}
    async with running_broker(tmp_path) as (broker, client):
        topic = topic_name()
        await send(client, topic, record("a"), record("b"), record("c"))
        first = await step(client, topic, limit=1, **fields)
        again = await step(client, topic, limit=1, cursor=first.cursor, **fields)
        assert [each.record.message_id for each in again.messages] == ["b"]
        broker.store.delete_topic(topic)
        with pytest.raises(TopicNotFound):
            await step(client, topic, limit=1, cursor=first.cursor, **fields)
        await send(client, topic, record("d"), record("e"), record("f"))
        with pytest.raises(TopicReplaced) as caught:
            await step(client, topic, limit=1, cursor=first.cursor, **fields)
        assert caught.value.field == "topic_id"
        anew = await step(client, topic, limit=1, **fields)
        assert [each.record.message_id for each in anew.messages] == ["d"]


async def test_unknown_topics_and_queues(client: Client) -> None:
    topic = topic_name()
    await send(client, topic, record("a"))
    with pytest.raises(TopicNotFound):
        await step(client, "nowhere")
    with pytest.raises(QueueNotFound):
        await step(client, topic, queue_id=9)


def flip(path: str, position: int) -> None:
    with Path(path).open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


async def test_damage_is_told_and_other_queues_go_on(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await send(client, "orders", record("a", "k", bytes(5_000)))
        await send(client, "orders", record("b", "k"), queue_id=1)
        [segment] = broker.store.log.segments
        position = broker.store.queue("orders", 0).entry(0)[0] - segment.start + 1_000
        flip(segment.path, position)
        with pytest.raises(Corrupt):
            await find(client, "orders", key="k")
        assert await find(client, "orders", key="k", queue_id=1) == [(1, 0, "b")]


async def test_what_groups_made_of_a_message(client: Client) -> None:
    topic = topic_name()
    await send(client, topic, *(record(f"a{number}") for number in range(3)))

    async def deliveries(offset: int) -> dict[str, str]:
        request = message_admin_pb2.DescribeDeliveryRequest(topic=topic, offset=offset)
        answer = await status.answer(client.message_admin.DescribeDelivery(request))
        return {
            each.group: message_admin_pb2.DeliveryState.Name(each.state) for each in answer.groups
        }

    assert await deliveries(0) == {}
    for group in ("billing", "audit"):
        await status.answer(
            client.broker.AcquireQueues(
                broker_pb2.AcquireQueuesRequest(
                    group=group,
                    member_id="m",
                    generation=1,
                    queues=[message_pb2.QueueRef(topic=topic, broker="b1")],
                    start_from=broker_pb2.EARLIEST,
                )
            )
        )
    await client.pull(topic, group="billing", generation=1)
    commits = [broker_pb2.OffsetCommit(topic=topic, offset=1, generation=1)]
    await client.broker.CommitOffsets(
        broker_pb2.CommitOffsetsRequest(group="billing", member_id="m", commits=commits)
    )
    failed = broker_pb2.FailedMessage(topic=topic, offset=1, generation=1, error="boom")
    await status.answer(
        client.broker.SendBack(
            broker_pb2.SendBackRequest(group="billing", member_id="m", messages=[failed])
        )
    )
    assert await deliveries(0) == {"audit": "WAITING", "billing": "CONSUMED"}
    assert await deliveries(1) == {"audit": "WAITING", "billing": "SENT_BACK"}
    assert await deliveries(2) == {"audit": "WAITING", "billing": "IN_FLIGHT"}
    with pytest.raises(OffsetOutOfRange):
        await deliveries(3)


async def test_look_ups_that_wait_are_bounded(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await send(client, "orders", record("a", "k"))
        broker._messages._lookups = message_admin_servicer.LOOKUPS_MAX
        with pytest.raises(Overloaded) as caught:
            await find(client, "orders", key="k")
        assert caught.value.retryable
        broker._messages._lookups = 0
        assert await find(client, "orders", key="k") == [(0, 0, "a")]
        broker._messages.close()
        with pytest.raises(Unavailable):
            await find(client, "orders", key="k")


async def test_a_look_up_that_waits_for_its_turn_is_told_of_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, begun, go_on = lookup.search, threading.Event(), threading.Event()

    def held(*arguments: Any) -> lookup.LookupStep:
        begun.set()
        go_on.wait(WAIT_S)
        return search(*arguments)

    monkeypatch.setattr(lookup, "search", held)
    async with running_broker(tmp_path) as (broker, client):
        await send(client, "orders", record("a", "k"))
        first = asyncio.ensure_future(find(client, "orders", key="k"))
        await until(begun.is_set)
        second = asyncio.ensure_future(find(client, "orders", key="k"))
        await until(lambda: broker._messages._lookups == 2)
        broker._messages.close()
        with pytest.raises(Unavailable):
            async with asyncio.timeout(WAIT_S):
                await second
        go_on.set()
        assert await first == [(0, 0, "a")]
