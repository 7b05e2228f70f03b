"""SendBack of a real broker, and what a group sees of it afterwards.

The timer service is played by the test: it fetches frames and sends them on.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from duemq.errors import (
    GroupNotFound,
    InvalidArgument,
    Overloaded,
    PermissionDenied,
)
from duemq.transport import status
from duemq.v1 import admin_pb2, broker_pb2, error_pb2, message_pb2
from duemq_server.broker.edge import send_back_requests
from duemq_server.broker.process import Broker
from duemq_server.broker.reading import reader
from duemq_server.broker.store.changes import group_changes
from duemq_server.storage import record
from tests.service.played_timer import fire, records_in, timed_frames
from tests.service.running_broker import Client, batch, records_of, running_broker, topic_name

GROUP = "billing"
RETRY, DEAD = f"%RETRY%{GROUP}", f"%DLQ%{GROUP}"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[Broker, Client]]:
    async with running_broker(tmp_path) as made:
        yield made


@pytest.fixture
def client(running: tuple[Broker, Client]) -> Client:
    return running[1]


async def filled(client: Client, count: int = 10, **fields: Any) -> str:
    topic = topic_name()
    await client.send(batch(topic, [b"m%d" % n for n in range(count)], **fields))
    return topic


def failed(topic: str, offset: int, **fields: Any) -> broker_pb2.FailedMessage:
    return broker_pb2.FailedMessage(topic=topic, offset=offset, **fields)


async def send_back(
    client: Client, *messages: broker_pb2.FailedMessage, group: str = GROUP
) -> list[broker_pb2.SendBackResult]:
    request = broker_pb2.SendBackRequest(group=group, member_id="m", messages=messages)
    response = await status.answer(client.broker.SendBack(request, timeout=30))
    assert [(each.topic, each.queue_id, each.offset) for each in response.results] == [
        (each.topic, each.queue_id, each.offset) for each in messages
    ]
    return list(response.results)


def outcome(result: broker_pb2.SendBackResult) -> str:
    if result.HasField("error"):
        return error_pb2.ErrorCode.Name(result.error.code)
    if result.duplicate:
        return "duplicate"
    return "dead letter" if result.dead_letter else "retry"


async def outcomes(client: Client, *messages: broker_pb2.FailedMessage) -> list[str]:
    return [outcome(each) for each in await send_back(client, *messages)]


async def fire_all(client: Client) -> None:
    """What the timer service does, again and again."""
    for number, timed in enumerate(await timed_frames(client)):
        await fire(client, timed, number)


async def pulled(client: Client, topic: str) -> list[message_pb2.Record]:
    response = await client.pull(topic)
    return [each for queue in response.queues for each in queue.records.records]


async def acquire(client: Client, topic: str, generation: int) -> broker_pb2.OffsetResult:
    request = broker_pb2.AcquireQueuesRequest(
        group=GROUP,
        member_id="m",
        generation=generation,
        queues=[message_pb2.QueueRef(topic=topic, broker="b1")],
        start_from=broker_pb2.LATEST if topic == RETRY else broker_pb2.EARLIEST,
    )
    [result] = (await status.answer(client.broker.AcquireQueues(request))).queues
    return result


async def test_a_failed_message_comes_again_with_its_story(client: Client) -> None:
    topic = topic_name()
    sent = message_pb2.Record(
        body=b"body",
        message_id="id-1",
        key="k",
        tag="t",
        ordering_key="o",
        properties={"a": "1"},
        born_ms=5,
    )
    await client.send(broker_pb2.Batch(topic=topic, records={"records": [sent]}))
    [result] = await send_back(client, failed(topic, 0, error="no money"))
    [first] = await timed_frames(client)
    assert outcome(result) == "retry"
    assert result.due_ms == first.store_ms + 10_000 == int(first.due_ms[0])
    await fire_all(client)
    [again] = await pulled(client, RETRY)
    place = message_pb2.QueueRef(topic=topic, broker="b1")
    story = message_pb2.Retry(
        group=GROUP,
        origin=place,
        first_failed_ms=first.store_ms,
        last_failed_ms=first.store_ms,
        error="no money",
        source=place,
    )
    expected = message_pb2.Record()
    expected.CopyFrom(sent)
    expected.attempt = 1
    expected.retry.CopyFrom(story)
    assert again == expected
    # And once more, to the dead letters.
    assert await outcomes(client, failed(RETRY, 0, dead_letter=True)) == ["dead letter"]
    [dead] = await pulled(client, DEAD)
    assert (dead.body, dead.message_id, dead.attempt) == (b"body", "id-1", 2)
    assert (dead.retry.origin.topic, dead.retry.source.topic) == (topic, RETRY)
    assert dead.retry.first_failed_ms == first.store_ms


async def test_a_repeat_is_told_so_and_stored_once(client: Client) -> None:
    topic = await filled(client)
    message = failed(topic, 3)
    assert await outcomes(client, message, failed(topic, 4)) == ["retry", "retry"]
    assert await outcomes(client, message, failed(topic, 5), message) == [
        "duplicate",
        "retry",
        "duplicate",
    ]
    assert sum(each.count for each in await timed_frames(client)) == 3


async def test_what_was_sent_back_is_not_delivered_to_the_next_owner(client: Client) -> None:
    topic = await filled(client)
    assert list((await acquire(client, topic, 1)).settled) == []
    await send_back(
        client, failed(topic, 6, generation=1), failed(topic, 2, generation=1, dead_letter=True)
    )
    taken = await acquire(client, topic, 2)
    assert (taken.offset, list(taken.settled)) == (0, [2, 6])
    commit = broker_pb2.OffsetCommit(topic=topic, offset=3, generation=2)
    request = broker_pb2.CommitOffsetsRequest(group=GROUP, commits=[commit])
    await status.answer(client.broker.CommitOffsets(request))
    for wanted in (topic, ""):
        request = broker_pb2.GetOffsetsRequest(group=GROUP, topic=wanted)
        answer = await status.answer(client.broker.GetOffsets(request))
        found = {(each.topic, each.queue_id): each for each in answer.queues}[topic, 0]
        assert (found.offset, list(found.settled)) == (3, [6])
    assert await outcomes(client, failed(topic, 2, generation=2)) == ["duplicate"]


async def test_a_client_that_stopped_at_once_finds_what_it_sent_back(client: Client) -> None:
    """It committed nothing yet, neither there nor in its queue of retries."""
    topic = await filled(client)
    await send_back(client, failed(topic, 6), failed(topic, 2))
    request = broker_pb2.GetOffsetsRequest(group=GROUP)
    answer = await status.answer(client.broker.GetOffsets(request))
    found = [(each.topic, each.queue_id, each.offset, *each.settled) for each in answer.queues]
    assert found == [(RETRY, 0, -1), (topic, 0, -1, 2, 6)]


async def test_a_zombie_cannot_send_back(client: Client) -> None:
    topic = await filled(client)
    await acquire(client, topic, 1)
    await acquire(client, topic, 2)
    assert await outcomes(
        client, failed(topic, 1, generation=1), failed(topic, 1, generation=2)
    ) == ["FENCED_MEMBER", "retry"]


async def test_retry_topics_are_read_from_their_start(client: Client) -> None:
    topic = await filled(client)
    await send_back(client, failed(topic, 1))
    await fire_all(client)
    assert (await acquire(client, RETRY, 1)).offset == 0


async def test_sent_back_together_at_the_same_time_it_is_stored_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records are read by threads that wait for one another."""
    topic = await filled(client)
    calls = 4
    barrier = asyncio.Event()
    reading = 0
    whole = send_back_requests.SendBackRequests._read

    async def read(self: Any, places: Any) -> Any:
        nonlocal reading
        records = await whole(self, places)
        reading += 1
        if reading == calls:
            barrier.set()
        await barrier.wait()
        return records

    monkeypatch.setattr(send_back_requests.SendBackRequests, "_read", read)
    found = await asyncio.gather(*(outcomes(client, failed(topic, 5)) for _ in range(calls)))
    assert sorted(each for [each] in found) == ["duplicate"] * (calls - 1) + ["retry"]
    assert sum(each.count for each in await timed_frames(client)) == 1


async def test_a_cold_record_is_read_in_a_thread(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await filled(client)
    whole = reader.read_each

    def cold(*args: Any, nowait: bool = False) -> Any:
        if nowait:
            raise BlockingIOError
        return whole(*args)

    monkeypatch.setattr(reader, "read_each", cold)
    assert await outcomes(client, failed(topic, 5)) == ["retry"]


async def test_what_was_read_of_a_topic_that_is_made_anew_meanwhile_settles_nothing_there(
    running: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever does not say of which topic it was, nor of which generation."""
    broker, client = running
    topic = await filled(client)
    whole = send_back_requests.SendBackRequests._read

    async def read(self: Any, places: Any) -> Any:
        records = await whole(self, places)
        broker.store.delete_topic(topic)
        await client.send(batch(topic, [b"new"] * 10))
        return records

    with monkeypatch.context() as slow:
        slow.setattr(send_back_requests.SendBackRequests, "_read", read)
        assert await outcomes(client, failed(topic, 5)) == ["TOPIC_REPLACED"]
    assert await outcomes(client, failed(topic, 5)) == ["retry"]


async def test_a_disk_that_is_behind_is_waited_for_a_while(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await filled(client)
    with monkeypatch.context() as behind:
        behind.setattr(send_back_requests, "PENDING_BYTES_HIGH", -1)
        behind.setattr(send_back_requests, "ROOM_TIMEOUT_S", 0.01)
        with pytest.raises(Overloaded):
            await send_back(client, failed(topic, 5))
    assert await outcomes(client, failed(topic, 5)) == ["retry"]


@pytest.mark.parametrize("count", [0, 1_025])
async def test_the_number_of_messages_is_bounded(client: Client, count: int) -> None:
    topic = await filled(client)
    with pytest.raises(InvalidArgument) as caught:
        await send_back(client, *(failed(topic, 0) for _ in range(count)))
    assert (caught.value.field, caught.value.value, caught.value.limit) == (
        "messages",
        str(count),
        "1 to 1024",
    )


async def test_as_many_messages_as_allowed(client: Client) -> None:
    topic = await filled(client, 1_024)
    messages = [failed(topic, offset, dead_letter=offset % 2 == 0) for offset in range(1_024)]
    assert await outcomes(client, *messages) == ["dead letter", "retry"] * 512
    assert await outcomes(client, *reversed(messages)) == ["duplicate"] * 1_024
    # The rest of the way: one frame each.
    assert [each.count for each in await timed_frames(client)] == [512]
    assert [each.message_id for each in await pulled(client, DEAD)] == [
        f"m{number}" for number in range(0, 1_024, 2)
    ]


async def test_a_large_request_is_stored_in_pieces(client: Client) -> None:
    topic = topic_name()
    bodies = [bytes([number]) * (1 << 20) for number in range(10)]
    for body in bodies:
        await client.send(batch(topic, [body]))
    messages = [failed(topic, offset) for offset in range(10)]
    assert await outcomes(client, *messages) == ["retry"] * 10
    frames = await timed_frames(client)
    assert len(frames) > 1
    assert all(
        each.payload_length <= send_back_requests.PIECE_BYTES_MAX + (1 << 20) for each in frames
    )
    assert [found.body for each in frames for found in records_in(each)] == bodies


@pytest.mark.parametrize("group", ["", "a b", "x" * 128, "%TIMER%"])
async def test_an_illegal_group_is_refused(client: Client, group: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await send_back(client, failed("t", 0), group=group)
    assert caught.value.field == "group"


async def test_every_illegal_message_has_its_own_error(client: Client) -> None:
    topic = await filled(client)
    delays = [
        failed(topic, 0, delay_ms=-1),
        failed(topic, 0, delay_ms=(1 << 63) - 1),
        failed(topic, 0, deliveries=-1),
        failed(topic, 0, generation=-1),
    ]
    assert await outcomes(
        client,
        failed("nowhere", 0),
        failed(topic, 0, queue_id=99),
        failed(topic, 0, queue_id=-1),
        failed(topic, 10),
        failed(topic, -1),
        failed(topic, (1 << 63) - 1),
        *delays,
        failed("", 0),
        failed("ä\0", 0),
        failed(topic, 9),
    ) == [
        "TOPIC_NOT_FOUND",
        "QUEUE_NOT_FOUND",
        "QUEUE_NOT_FOUND",
        "OFFSET_OUT_OF_RANGE",
        "OFFSET_OUT_OF_RANGE",
        "OFFSET_OUT_OF_RANGE",
        *["INVALID_ARGUMENT"] * 4,
        "TOPIC_NOT_FOUND",
        "TOPIC_NOT_FOUND",
        "retry",
    ]
    assert sum(each.count for each in await timed_frames(client)) == 1


async def test_numbers_at_their_limits(client: Client) -> None:
    topic = await filled(client)
    longest = 366 * 86_400_000
    results = await send_back(
        client,
        failed(topic, 0, delay_ms=0),
        failed(topic, 1, delay_ms=longest),
        failed(topic, 2, delay_ms=longest + 1),
        failed(topic, 3, deliveries=(1 << 31) - 1),
        failed(topic, 4, deliveries=16),
    )
    assert [outcome(each) for each in results] == [
        "retry",
        "retry",
        "INVALID_ARGUMENT",
        "dead letter",
        "retry",
    ]
    assert results[1].due_ms - results[0].due_ms == longest
    assert results[4].due_ms - results[0].due_ms == 7_200_000
    assert (results[2].error.field, results[2].error.limit) == ("delay_ms", f"0 to {longest}")


async def test_a_huge_error_text_is_cut(client: Client) -> None:
    topic = await filled(client)
    await send_back(client, failed(topic, 0, error="ü" * 3_000_000))
    [timed] = await timed_frames(client)
    [found] = records_in(timed)
    assert found.retry.error == "ü" * 1_024


async def test_a_message_at_every_limit_is_retried_and_pulled(tmp_path: Path) -> None:
    limits = {"message_bytes_max": 1 << 20, "batch_bytes_max": (1 << 20) + 2_000}
    async with running_broker(tmp_path, **limits) as (_, client):
        topic = topic_name()
        made = records_of([bytes(1 << 20)])
        made.records[0].properties["p"] = "x" * 1_900
        await client.send(broker_pb2.Batch(topic=topic, records=made))
        assert await outcomes(client, failed(topic, 0, error="€" * 1_024)) == ["retry"]
        await fire_all(client)
        [again] = await pulled(client, RETRY)
        assert (len(again.body), again.properties["p"]) == (1 << 20, "x" * 1_900)
        assert await outcomes(client, failed(RETRY, 0, dead_letter=True)) == ["dead letter"]
        [dead] = await pulled(client, DEAD)
        assert len(dead.body) == 1 << 20


async def test_the_longest_names(client: Client) -> None:
    topic, group = "t" * 127, "g" * 127
    await client.send(batch(topic, [b"a"]))
    [result] = await send_back(client, failed(topic, 0), group=group)
    assert outcome(result) == "retry"
    await fire_all(client)
    [again] = await pulled(client, f"%RETRY%{group}")
    assert again.retry.group == group
    request = admin_pb2.DescribeTopicRequest(name=f"%RETRY%{group}")
    described = await status.answer(client.admin.DescribeTopic(request))
    assert described.topic.queues == 1


@pytest.mark.parametrize("topic", [RETRY, DEAD])
async def test_a_producer_cannot_write_there(client: Client, topic: str) -> None:
    with pytest.raises(PermissionDenied) as caught:
        await client.send(batch(topic, [b"forged"]))
    assert caught.value.field == "topic"
    with pytest.raises(PermissionDenied):
        await client.send(batch(topic, [b"forged"], delays_ms=[5]))


async def test_a_group_must_be_put_where_that_is_the_rule(tmp_path: Path) -> None:
    async with running_broker(tmp_path, auto_create_groups=False) as (broker, client):
        topic = await filled(client)
        commit = broker_pb2.OffsetCommit(topic=topic, offset=1)
        calls = (
            partial(send_back, client, failed(topic, 0)),
            partial(acquire, client, topic, 1),
            lambda: status.answer(
                client.broker.CommitOffsets(
                    broker_pb2.CommitOffsetsRequest(group=GROUP, commits=[commit])
                )
            ),
            lambda: status.answer(
                client.broker.Pull(
                    broker_pb2.PullRequest(
                        group=GROUP,
                        queues=[broker_pb2.QueuePull(topic=topic)],
                        commits=[commit],
                    )
                )
            ),
        )
        for call in calls:
            with pytest.raises(GroupNotFound) as caught:
                await call()
            assert (caught.value.field, caught.value.value) == ("group", GROUP)
        assert broker.store.offsets.groups() == []
        group_changes.put(broker.store, broker.store.groups.effective(GROUP))
        for call in calls:
            await call()
        # The timer service's own group is always there.
        commit = broker_pb2.OffsetCommit(topic="%TIMER%", offset=0)
        request = broker_pb2.CommitOffsetsRequest(group="%TIMER%", commits=[commit])
        await status.answer(client.broker.CommitOffsets(request))


async def test_the_brokers_retry_settings(tmp_path: Path) -> None:
    async with running_broker(tmp_path, retries_max=2, retry_delays="0s 2m") as (_, client):
        topic = await filled(client)
        results = await send_back(client, *(failed(topic, n, deliveries=n + 1) for n in range(3)))
        assert [outcome(each) for each in results] == ["retry", "retry", "dead letter"]
        assert results[1].due_ms - results[0].due_ms == 120_000


async def test_it_is_known_after_a_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        topic = await filled(client)
        await send_back(client, failed(topic, 3), failed(topic, 4, dead_letter=True))
    async with running_broker(tmp_path) as (_, client):
        assert await outcomes(client, failed(topic, 3), failed(topic, 4), failed(topic, 5)) == [
            "duplicate",
            "duplicate",
            "retry",
        ]
        assert list((await acquire(client, topic, 1)).settled) == [3, 4, 5]
        assert [each.body for each in await pulled(client, DEAD)] == [b"m4"]


async def test_a_full_disk_refuses_and_settles_nothing(running: tuple[Broker, Client]) -> None:
    broker, client = running
    topic = await filled(client)
    broker.store.read_only = True
    assert await outcomes(client, failed(topic, 1), failed(topic, 2, dead_letter=True)) == [
        "READ_ONLY",
        "READ_ONLY",
    ]
    assert list((await acquire(client, topic, 1)).settled) == []
    broker.store.read_only = False
    assert await outcomes(client, failed(topic, 1)) == ["retry"]


async def test_a_damaged_record_is_its_own_error(
    running: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = running
    topic = await filled(client)
    await client.send(batch(topic, [b"second frame"]))
    position = broker.store.queue(topic, 0).frame_at(0)
    read = broker.store.log.read

    def damaged(at: int, length: int, nowait: bool = False) -> memoryview:
        data = bytearray(read(at, length, nowait))
        if at <= position < at + length:
            data[position - at + record.HEADER_BYTES + 100] ^= 1
        return memoryview(bytes(data))

    monkeypatch.setattr(broker.store.log, "read", damaged)
    assert await outcomes(client, failed(topic, 0), failed(topic, 10)) == ["CORRUPT", "retry"]


async def test_the_first_dead_letter_is_an_increase(running: tuple[Broker, Client]) -> None:
    """Of a count that begins with it Prometheus sees none, so no alert either."""
    broker, client = running
    topic = await filled(client)
    await send_back(client, failed(topic, 1))
    value = broker.server.registry.get_sample_value
    assert value("duemq_broker_dead_letters_total", {"group": GROUP}) == 0
    await send_back(client, failed(topic, 2, dead_letter=True))
    assert value("duemq_broker_dead_letters_total", {"group": GROUP}) == 1


async def test_metrics_count_by_group(running: tuple[Broker, Client]) -> None:
    broker, client = running
    topic = await filled(client)
    await send_back(client, failed(topic, 1), failed(topic, 2), failed(topic, 3))
    await send_back(client, failed(topic, 4, dead_letter=True))
    value = broker.server.registry.get_sample_value
    assert value("duemq_broker_sent_back_total", {"group": GROUP}) == 3
    assert value("duemq_broker_dead_letters_total", {"group": GROUP}) == 1


async def test_random_requests_are_answered_and_the_process_lives(client: Client) -> None:
    topic = await filled(client)
    randomness = random.Random(11)
    for _ in range(200):
        messages = [
            failed(
                randomness.choice([topic, RETRY, DEAD, "%TIMER%", "", "x"]),
                randomness.choice([-1, 0, 5, 1 << 62]),
                queue_id=randomness.choice([-1, 0, 1 << 30]),
                generation=randomness.choice([-5, 0, 1 << 62]),
                deliveries=randomness.choice([-5, 0, 1 << 30]),
                delay_ms=randomness.choice([-5, 0, 1 << 62]),
                error=randomness.choice(["", "\0", "x" * 2_000]),
            )
            for _ in range(randomness.randrange(1, 5))
        ]
        await send_back(client, *messages)
    assert await outcomes(client, failed(topic, 7)) == ["retry"]
