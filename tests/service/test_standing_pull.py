"""Standing pulls at a broker: one request, many answers, as far as its credit goes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from duemq.errors import InvalidArgument
from duemq.transport import status
from duemq.v1 import admin_pb2, broker_pb2, error_pb2, message_pb2
from duemq_server.broker.edge.pull_stream import ParkedPull
from duemq_server.broker.process import Broker
from duemq_server.broker.reading.pull import CREDIT_RECORDS_MAX, parse
from tests.service.running_broker import Client, batch, running_broker, topic_name
from tests.service.running_cluster import until

WAIT_MS = 20_000
GROUP = "g"


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[tuple[Broker, Client]]:
    async with running_broker(tmp_path) as made:
        yield made


@pytest.fixture
def broker(both: tuple[Broker, Client]) -> Broker:
    return both[0]


@pytest.fixture
def client(both: tuple[Broker, Client]) -> Client:
    return both[1]


@pytest.fixture
async def topic(client: Client) -> str:
    name = topic_name()
    config = admin_pb2.TopicConfig(name=name, queues=2)
    await client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=config))
    return name


class Stream:
    """A PullStream with one standing pull, number 1, of the topic's two queues."""

    def __init__(self, client: Client) -> None:
        self._call = client.broker.PullStream()
        # gRPC takes one write at a time; the broker may hear of it before its writer does.
        self._writing = asyncio.Lock()

    async def ask(self, topic: str, *, credit: int, **fields: Any) -> None:
        of_queue = {name: fields.pop(name) for name in ("generation", "filter") if name in fields}
        request = broker_pb2.PullRequest(
            request_id=1,
            queues=[
                broker_pb2.QueuePull(topic=topic, queue_id=number, **of_queue) for number in (0, 1)
            ],
            credit_records=credit,
            **{"wait_ms": WAIT_MS, **fields},
        )
        await self._write(request)

    async def tell(self, **fields: Any) -> None:
        await self._write(broker_pb2.PullRequest(**fields))

    async def _write(self, request: broker_pb2.PullRequest) -> None:
        async with self._writing:
            await self._call.write(request)

    async def answer(self) -> broker_pb2.PullResponse:
        response = await asyncio.wait_for(status.answer(self._call.read()), 30)
        assert response.request_id == 1
        return response

    async def bodies(self) -> tuple[list[bytes], bool]:
        response = await self.answer()
        records = [record for queue in response.queues for record in queue.records.records]
        return [record.body for record in records], response.open


@pytest.fixture
async def stream(client: Client) -> AsyncIterator[Stream]:
    made = Stream(client)
    yield made
    made._call.cancel()


async def parked(broker: Broker, count: int) -> None:
    await until(lambda: len(broker._pulls) == count)


async def test_one_request_is_answered_by_each_append(client, stream, topic) -> None:
    await stream.ask(topic, credit=100)
    for number in range(10):
        await client.send(batch(topic, [b"%d" % number], queue_id=number % 2))
        assert await stream.bodies() == ([b"%d" % number], True)


async def test_each_answer_goes_on_where_the_last_one_ended(client, stream, topic) -> None:
    await client.send(batch(topic, [b"%d" % number for number in range(10)]))
    await stream.ask(topic, credit=100, max_records=4)
    answers = [await stream.answer() for _ in range(3)]
    assert [answer.queues[0].next_offset for answer in answers] == [4, 8, 10]
    assert all(answer.open for answer in answers)


async def test_each_of_two_pulls_gives_all_its_queues_a_turn(broker, client, topic) -> None:
    """Also where they are answered in turns: none has every second turn of all."""
    for number in (0, 1):
        await client.send(batch(topic, [b"x"] * 20, queue_id=number))
    queues = [broker_pb2.QueuePull(topic=topic, queue_id=number) for number in (0, 1)]
    request = broker_pb2.PullRequest(queues=queues, max_records=2, credit_records=100)
    both = [ParkedPull(pull=parse(request), peer="p") for _ in range(2)]
    began: list[list[int]] = [[], []]
    for _ in range(4):
        for number, parked in enumerate(both):
            [answer] = await broker._pulls.answer(parked)
            began[number].append(answer.queue_id)
            parked.give_place()
    assert [sorted(each) for each in began] == [[0, 0, 1, 1]] * 2


async def test_the_credit_is_the_end(broker, client, stream, topic) -> None:
    await stream.ask(topic, credit=5)
    await client.send(batch(topic, [b"0", b"1", b"2"]))
    assert await stream.bodies() == ([b"0", b"1", b"2"], True)
    await client.send(batch(topic, [b"3", b"4", b"5"]))
    assert await stream.bodies() == ([b"3", b"4"], False)
    await parked(broker, 0)


async def test_credit_can_be_added(broker, client, stream, topic) -> None:
    await stream.ask(topic, credit=1)
    await parked(broker, 1)
    await stream.tell(credit_request_id=1, credit_records=2)
    await until(
        lambda: any(p.pull.credit_records == 3 for p in broker._pulls._parking.waiters._parked)
    )
    await client.send(batch(topic, [b"0", b"1"]))
    assert await stream.bodies() == ([b"0", b"1"], True)
    await client.send(batch(topic, [b"2", b"3"]))
    assert await stream.bodies() == ([b"2"], False)


async def test_credit_that_is_added_while_a_thread_reads_is_not_given_away_with_it(
    broker, client, stream, topic, monkeypatch
) -> None:
    await client.send(batch(topic, [b"0"]))
    reading, read = broker._pulls._disk.read, asyncio.Event()

    async def slow(*args: Any) -> Any:
        if not read.is_set():
            await stream.tell(credit_request_id=1, credit_records=7)
        await read.wait()
        return await reading(*args)

    monkeypatch.setattr(broker._pulls._disk, "read", slow)
    await stream.ask(topic, credit=3)

    def credit() -> list[int]:
        waiting = [at_broker._waiting.values() for at_broker in broker._pulls._streams]
        return [parked.pull.credit_records for each in waiting for parked in each]

    await until(lambda: credit() == [10])
    read.set()
    assert await stream.bodies() == ([b"0"], True)
    assert credit() == [9]


async def test_credit_for_a_pull_that_is_over_changes_nothing(client, stream, topic) -> None:
    await client.send(batch(topic, [b"0", b"1"]))
    await stream.ask(topic, credit=1)
    assert await stream.bodies() == ([b"0"], False)
    await stream.tell(credit_request_id=1, credit_records=2)
    await stream.ask(topic, credit=1)  # its number is free again
    assert await stream.bodies() == ([b"0"], False)


async def test_bytes_are_credit_as_well_and_one_record_may_go_beyond(client, stream, topic) -> None:
    await client.send(batch(topic, [bytes(1_000)] * 3))
    await stream.ask(topic, credit=100, credit_bytes=1_500)
    assert await stream.bodies() == ([bytes(1_000)], True)
    assert await stream.bodies() == ([bytes(1_000)], False)


async def test_a_cancel_brings_the_last_answer(broker, client, stream, topic) -> None:
    await stream.ask(topic, credit=100)
    await client.send(batch(topic, [b"0"]))
    assert await stream.bodies() == ([b"0"], True)
    await parked(broker, 1)
    await stream.tell(cancel_request_id=1)
    assert await stream.bodies() == ([], False)


async def test_a_wait_with_nothing_to_say_ends_it(client, stream, topic) -> None:
    await client.send(batch(topic, [b"0"]))
    await stream.ask(topic, credit=100, wait_ms=50)
    assert await stream.bodies() == ([b"0"], True)
    assert await stream.bodies() == ([], False)


async def test_an_error_of_a_queue_ends_it_beside_the_others_records(client, stream, topic) -> None:
    other = topic_name()
    await client.send(batch(topic, [b"0"]))
    await stream.tell(
        request_id=1,
        queues=[broker_pb2.QueuePull(topic=topic), broker_pb2.QueuePull(topic=other)],
        credit_records=10,
    )
    response = await stream.answer()
    errors = {queue.topic: queue.error.code for queue in response.queues}
    assert errors == {topic: 0, other: error_pb2.TOPIC_NOT_FOUND}
    assert not response.open


async def acquire(client: Client, topic: str, generation: int) -> None:
    queues = [message_pb2.QueueRef(topic=topic, broker="b1", queue_id=number) for number in (0, 1)]
    request = broker_pb2.AcquireQueuesRequest(
        group=GROUP,
        member_id="m",
        generation=generation,
        queues=queues,
        start_from=broker_pb2.EARLIEST,
    )
    response = await status.answer(client.broker.AcquireQueues(request))
    assert not any(queue.HasField("error") for queue in response.queues)


async def test_a_member_that_lost_its_queue_is_given_no_more_of_it(client, stream, topic) -> None:
    await acquire(client, topic, generation=1)
    await stream.ask(topic, credit=100, group=GROUP, generation=1)
    await client.send(batch(topic, [b"0"]))
    assert await stream.bodies() == ([b"0"], True)
    await acquire(client, topic, generation=2)
    await client.send(batch(topic, [b"1"]))
    response = await stream.answer()
    codes = {queue.error.code for queue in response.queues}
    assert (codes, response.open) == ({error_pb2.FENCED_MEMBER}, False)


async def test_a_deleted_topic_ends_it_at_once(broker, client, stream, topic) -> None:
    await stream.ask(topic, credit=100)
    await client.send(batch(topic, [b"0"]))
    assert await stream.bodies() == ([b"0"], True)
    await parked(broker, 1)
    await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name=topic))
    response = await stream.answer()
    codes = {queue.error.code for queue in response.queues}
    assert (codes, response.open) == ({error_pb2.TOPIC_NOT_FOUND}, False)


async def test_what_a_filter_leaves_out_is_told_once_and_ends_nothing(
    broker, client, stream, topic
) -> None:
    await client.send(batch(topic, [b"no"] * 3, tags=["n"] * 3))
    await stream.ask(topic, credit=100, filter="y")
    response = await stream.answer()
    assert [(q.next_offset, len(q.records.records)) for q in response.queues] == [(3, 0)]
    assert response.open
    await parked(broker, 1)
    await client.send(batch(topic, [b"no"], tags=["n"], queue_id=1))
    await client.send(batch(topic, [b"yes"], tags=["y"]))
    response = await stream.answer()
    assert {q.queue_id: (q.next_offset, len(q.records.records)) for q in response.queues} == {
        0: (4, 1),
        1: (1, 0),
    }
    await client.send(batch(topic, [b"yes"], tags=["y"]))
    response = await stream.answer()
    assert [(q.queue_id, q.next_offset) for q in response.queues] == [(0, 5)]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"credit_records": -1}, "credit_records"),
        ({"credit_records": CREDIT_RECORDS_MAX + 1}, "credit_records"),
        ({"credit_records": 1, "credit_bytes": -1}, "credit_bytes"),
        ({"credit_request_id": 7}, "credit_request_id"),
    ],
)
async def test_credit_out_of_bounds_is_refused(stream, topic, fields, field) -> None:
    queues = [broker_pb2.QueuePull(topic=topic)]
    await stream.tell(request_id=1, queues=queues, wait_ms=WAIT_MS, **fields)
    with pytest.raises(InvalidArgument) as caught:
        await stream.answer()
    assert caught.value.field == field


@pytest.mark.parametrize(("credit", "more"), [(CREDIT_RECORDS_MAX, 1), (2, -1)])
async def test_credit_cannot_grow_without_end_or_shrink(
    broker, stream, topic, credit, more
) -> None:
    await stream.ask(topic, credit=credit)
    await stream.tell(credit_request_id=1, credit_records=more)
    with pytest.raises(InvalidArgument) as caught:
        await stream.answer()
    assert caught.value.field == "credit_records"
    await parked(broker, 0)


async def test_a_single_pull_cannot_stand(client, topic) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await client.pull(topic, credit_records=1)
    assert caught.value.field == "credit_records"
