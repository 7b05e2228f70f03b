import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from duemq.errors import (
    DuemqError,
    ErrorCode,
    FencedProducer,
    InvalidArgument,
    OutOfSequence,
    Overloaded,
    QueueNotFound,
    TooLarge,
    TopicNotFound,
)
from duemq.protocol.limits import FIRE_AHEAD_MS_MAX
from duemq.transport import status
from duemq.v1 import admin_pb2, broker_pb2
from duemq_server.broker.edge import commits, send_requests
from duemq_server.broker.process import now_ms
from duemq_server.broker.records.batch import IncomingBatch
from duemq_server.broker.store.store import Accepted, Store
from tests.service.running_broker import Client, batch, running_broker, topic_name
from tests.service.running_cluster import until


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with running_broker(tmp_path) as (_, made):
        yield made


@pytest.mark.parametrize("arrays", [True, False])
async def test_a_batch_comes_back_as_it_was_sent(client: Client, arrays: bool) -> None:
    topic = topic_name()
    bodies = [b"a", b"", b"c" * 300]
    [result] = await client.send(batch(topic, bodies, arrays=arrays))
    assert (result.queue_id, result.base_offset, result.duplicate) == (0, 0, False)
    response = await client.pull(topic)
    [records] = response.queues
    assert [record.body for record in records.records.records] == bodies
    assert (list(records.run_offsets), list(records.run_counts)) == ([0], [3])
    assert list(records.run_store_ms) == [result.store_ms]
    assert (records.next_offset, records.min_offset, records.max_offset) == (3, 0, 3)


async def test_offsets_have_no_gaps_and_queues_their_own(client: Client) -> None:
    topic = topic_name()
    for expected in (0, 2, 4):
        [result] = await client.send(batch(topic, [b"a", b"b"], queue_id=1))
        assert result.base_offset == expected
    results = await client.send(batch(topic, [b"c"], queue_id=0), batch(topic, [b"d"], queue_id=1))
    assert [result.base_offset for result in results] == [0, 6]


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"queue_id": 4}, QueueNotFound, "queue_id"),
        ({"queue_id": -1}, QueueNotFound, "queue_id"),
        ({"sequence": 1}, InvalidArgument, "producer_id"),
        ({"delays_ms": [-1]}, InvalidArgument, "delays_ms"),
        ({"due_ms": [1, 2, 3]}, InvalidArgument, "due_ms"),
        ({"delay_levels": [19]}, InvalidArgument, "delay_levels"),
        ({"delays_ms": [1], "due_ms": [1]}, InvalidArgument, "due_ms"),
        ({"delays_ms": [1], "queue_id": -2}, QueueNotFound, "queue_id"),
    ],
)
async def test_refusals_name_the_field(
    client: Client, fields: dict, error: type[DuemqError], field: str
) -> None:
    with pytest.raises(error) as caught:
        await client.send(batch(topic_name(), [b"a", b"b"], **fields))
    assert caught.value.field == field
    assert caught.value.limit


@pytest.mark.parametrize("topic", ["", "a b", "x" * 128, "%NOPE%", "%TIMER%"])
async def test_topics_that_may_not_be_sent_to(client: Client, topic: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await client.send(batch(topic, [b"a"]))
    assert caught.value.field == "topic"


async def test_arrays_that_do_not_fit_the_records_are_refused(client: Client) -> None:
    wrong = batch(topic_name(), [b"a", b"bb"])
    wrong.sizes[0] += 1
    wrong.sizes[1] -= 1
    with pytest.raises(InvalidArgument) as caught:
        await client.send(wrong)
    assert caught.value.field == "sizes"
    missing = batch(topic_name(), [b"a", b"bb"])
    missing.key_hashes.pop()
    with pytest.raises(InvalidArgument) as caught:
        await client.send(missing)
    assert caught.value.field == "key_hashes"


async def test_a_topics_own_limit_on_bodies(client: Client) -> None:
    topic = topic_name()
    config = admin_pb2.TopicConfig(name=topic, queues=1, message_bytes_max=100)
    await client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=config))
    await client.send(batch(topic, [b"x" * 100]))
    with pytest.raises(TooLarge) as caught:
        await client.send(batch(topic, [b"x" * 101]))
    error = caught.value
    assert (error.field, error.value, error.limit) == ("body", "101", "100")


async def test_without_automatic_topics_a_topic_must_be_made(tmp_path: Path) -> None:
    async with running_broker(tmp_path, auto_create_topics=False) as (_, client):
        with pytest.raises(TopicNotFound) as caught:
            await client.send(batch("orders", [b"a"]))
        assert (caught.value.field, caught.value.value) == ("topic", "orders")
        config = admin_pb2.TopicConfig(name="orders")
        request = admin_pb2.CreateTopicRequest(topic=config, if_missing=True)
        with pytest.raises(TopicNotFound):
            await status.answer(client.admin.CreateTopic(request))
        await client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=config))
        await client.send(batch("orders", [b"a"]))


async def test_a_good_batch_beside_a_bad_one_is_stored(client: Client) -> None:
    topic = topic_name()
    bad, good = await client.send(batch(topic, [b"a"], queue_id=9), batch(topic, [b"b"]))
    assert bad.error.field == "queue_id"
    assert not good.HasField("error")
    assert await client.bodies(topic) == [b"b"]


async def test_a_repeated_batch_is_stored_once(client: Client) -> None:
    topic = topic_name()
    sent = batch(topic, [b"a", b"b"], producer_id=7)
    [first] = await client.send(sent)
    [second] = await client.send(sent)
    assert not first.duplicate
    assert second.duplicate
    assert (second.base_offset, second.store_ms) == (first.base_offset, first.store_ms)
    assert await client.bodies(topic) == [b"a", b"b"]


async def test_a_repeat_in_flight_waits_for_the_first_one(client: Client) -> None:
    topic = topic_name()
    sent = batch(topic, [b"a"], producer_id=7)
    answers = await asyncio.gather(*(client.send(sent) for _ in range(20)))
    assert sorted(answer[0].duplicate for answer in answers) == [False] + [True] * 19
    assert await client.bodies(topic) == [b"a"]


async def test_a_gap_and_an_old_epoch_are_refused(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"], producer_id=7, producer_epoch=2))
    with pytest.raises(OutOfSequence) as gap:
        await client.send(batch(topic, [b"c"], producer_id=7, producer_epoch=2, sequence=2))
    assert (gap.value.field, gap.value.limit) == ("sequence", "1")
    with pytest.raises(FencedProducer) as fenced:
        await client.send(batch(topic, [b"b"], producer_id=7, producer_epoch=1, sequence=1))
    assert (fenced.value.value, fenced.value.limit) == ("1", "2")


async def test_a_refused_batch_does_not_use_up_its_sequence(client: Client) -> None:
    topic = topic_name()
    with pytest.raises(InvalidArgument):
        await client.send(batch(topic, [b"a"], producer_id=7, delays_ms=[-1]))
    wrong = batch(topic, [b"a"], producer_id=7)
    wrong.sizes[0] += 1
    with pytest.raises(InvalidArgument):
        await client.send(wrong)
    [result] = await client.send(batch(topic, [b"a"], producer_id=7))
    assert result.base_offset == 0


async def test_repeats_are_known_after_a_clean_restart(tmp_path: Path) -> None:
    sent = [batch("orders", [b"%d" % n], producer_id=7, sequence=n) for n in range(5)]
    timed = batch("orders", [b"later"], producer_id=7, delays_ms=[60_000], queue_id=-1)
    async with running_broker(tmp_path) as (_, client):
        first = [(await client.send(each))[0] for each in [*sent, timed]]
    async with running_broker(tmp_path) as (_, client):
        again = [(await client.send(each))[0] for each in [*sent, timed]]
        assert [each.duplicate for each in again] == [True] * 6
        assert [each.base_offset for each in again] == [each.base_offset for each in first]
        assert list(again[5].due_ms) == list(first[5].due_ms)
        assert await client.bodies("orders") == [b"0", b"1", b"2", b"3", b"4"]


async def test_due_times_are_resolved_once(client: Client) -> None:
    topic = topic_name()
    sent = batch(topic, [b"a", b"b"], producer_id=7, queue_id=-1, delays_ms=[1_000, 2_000])
    [first] = await client.send(sent)
    assert [due - first.store_ms for due in first.due_ms] == [1_000, 2_000]
    [second] = await client.send(sent)
    assert second.duplicate
    assert list(second.due_ms) == list(first.due_ms)
    assert await client.bodies(topic) == []
    assert await client.bodies("%TIMER%", first.queue_id) == [b"a", b"b"]


async def test_timed_and_plain_batches_are_numbered_apart(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"], producer_id=7))
    [timed] = await client.send(batch(topic, [b"b"], producer_id=7, due_ms=[0]))
    assert not timed.duplicate
    assert list(timed.due_ms) == [0]


async def test_a_stream_answers_in_the_order_of_its_requests(client: Client) -> None:
    topic = topic_name()
    stream = client.broker.SendStream()
    for number in range(200):
        sent = batch(topic, [b"%d" % number], producer_id=7, sequence=number)
        await stream.write(broker_pb2.SendRequest(request_id=number + 1, batches=[sent]))
    await stream.done_writing()
    answers = [answer async for answer in stream]
    assert [answer.request_id for answer in answers] == list(range(1, 201))
    assert [answer.results[0].base_offset for answer in answers] == list(range(200))
    assert {answer.broker for answer in answers} == {"b1"}


async def test_an_error_in_a_stream_ends_neither_the_stream_nor_its_order(client: Client) -> None:
    topic = topic_name()
    stream = client.broker.SendStream()
    for number, queue_id in enumerate((0, 9, 1)):
        sent = batch(topic, [b"x"], queue_id=queue_id)
        await stream.write(broker_pb2.SendRequest(request_id=number + 1, batches=[sent]))
    answers = [await stream.read() for _ in range(3)]
    assert [answer.results[0].error.field for answer in answers] == ["", "queue_id", ""]
    await stream.done_writing()


async def test_a_stream_that_ends_while_nothing_is_committed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "LEFT_MIN", 1)
    async with running_broker(tmp_path) as (broker, client):
        waiting = broker._commits
        monkeypatch.setattr(broker._log_loop, "_synced", lambda position: None)
        stream = client.broker.SendStream()
        sent = batch(topic_name(), [b"x"])
        for number in range(8):
            await stream.write(broker_pb2.SendRequest(request_id=number + 1, batches=[sent]))
        await until(lambda: len(waiting._waiting) >= 8)
        stream.cancel()
        await until(lambda: len(waiting._waiting) < 8)
        monkeypatch.undo()


@pytest.mark.parametrize("ahead_ms", [-5, 0, 60])
async def test_a_batch_is_stored_when_the_brokers_clock_says_so(
    client: Client, ahead_ms: int
) -> None:
    not_before_ms = now_ms() + ahead_ms
    [result] = await client.send(batch(topic_name(), [b"a"], not_before_ms=not_before_ms))
    assert result.store_ms >= not_before_ms


@pytest.mark.parametrize("ahead_ms", [3, 12])
async def test_who_waits_for_a_batch_ahead_of_its_time_gets_it_then_and_not_before(
    client: Client, ahead_ms: int
) -> None:
    """One message, and nothing else that would wake anybody."""
    topic = topic_name()
    await client.send(batch(topic, [b"before"]))
    waiting = asyncio.create_task(client.pull(topic, offset=1, wait_ms=30_000))
    not_before_ms = now_ms() + ahead_ms
    [result] = await client.send(batch(topic, [b"a"], not_before_ms=not_before_ms))
    response = await waiting
    assert now_ms() >= not_before_ms
    assert result.store_ms >= not_before_ms
    [pulled] = response.queues
    assert list(pulled.run_store_ms) == [result.store_ms]


async def test_each_record_of_a_batch_is_seen_when_its_time_comes_and_no_sooner(
    client: Client,
) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"before"]))
    fetch = broker_pb2.FetchFramesRequest(topic=topic, offset=1, wait_ms=30_000)
    fetching = asyncio.ensure_future(client.broker.FetchFrames(fetch))
    last_ms, early_ms = now_ms() + 50, (4, 4, 2, 0)
    sent = batch(topic, [b"a", b"b", b"c", b"d"], not_before_ms=last_ms, early_ms=early_ms)
    sending = asyncio.create_task(client.send(sent))
    offset = 1
    while offset <= len(early_ms):
        response = await client.pull(topic, offset=offset, wait_ms=30_000)
        seen_ms = now_ms()
        [pulled] = response.queues
        assert pulled.next_offset > offset
        offset = pulled.next_offset
        assert seen_ms >= last_ms - early_ms[offset - 2]
    assert (await fetching).next_offset == 5  # whole frames
    assert now_ms() >= last_ms
    [result] = await sending
    assert result.store_ms >= last_ms


async def test_a_batch_ahead_of_its_time_is_shown_though_what_came_with_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_broker(tmp_path) as (_, client):
        send = Store.send

        def failing(store: Store, sent: IncomingBatch, *args: Any) -> Accepted:
            if sent.topic != "orders":
                raise RuntimeError("a mistake")
            return send(store, sent, *args)

        monkeypatch.setattr(Store, "send", failing)
        early = batch("orders", [b"a"], not_before_ms=now_ms() + FIRE_AHEAD_MS_MAX + 50)
        with pytest.raises(DuemqError):
            await client.send(early, batch("others", [b"b"]))
        response = await client.pull("orders", wait_ms=30_000)
        assert len(response.queues) == 1


async def test_a_batch_that_is_far_ahead_of_the_brokers_clock_is_refused(client: Client) -> None:
    topic = topic_name()
    early = batch(topic, [b"a"], not_before_ms=now_ms() + 60_000)
    [result, other] = await client.send(early, batch(topic, [b"b"]))
    assert result.error.code == ErrorCode.NOT_READY
    assert result.error.field == "not_before_ms"
    assert not other.HasField("error")
    assert await client.bodies(topic) == [b"b"]


async def test_a_request_without_batches_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await client.send()
    assert caught.value.field == "batches"


async def test_async_flush_answers_and_keeps(tmp_path: Path) -> None:
    async with running_broker(tmp_path, flush_mode="async") as (_, client):
        await client.send(batch("orders", [b"a"]))
        assert await client.bodies("orders") == [b"a"]
    async with running_broker(tmp_path) as (_, client):
        assert await client.bodies("orders") == [b"a"]


async def test_a_repeat_is_answered_while_the_disk_is_too_far_behind_for_more(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topic_name()
    [first] = await client.send(batch(topic, [b"a"], producer_id=7))
    monkeypatch.setattr(send_requests, "PENDING_BYTES_HIGH", -1)
    monkeypatch.setattr(send_requests, "ROOM_TIMEOUT_S", 0.01)
    [again] = await client.send(batch(topic, [b"a"], producer_id=7))
    assert (again.duplicate, again.base_offset) == (True, first.base_offset)
    with pytest.raises(Overloaded):
        await client.send(batch(topic, [b"b"], producer_id=7, sequence=1))
    assert await client.bodies(topic) == [b"a"]
