"""Filters at a broker: what they take, how far a pull gets, what is read for it."""

import asyncio
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from random import Random

import pytest

from duemq.errors import InvalidArgument
from duemq.transport import status
from duemq.v1 import broker_pb2, group_pb2, message_pb2
from duemq_server.broker import slices
from duemq_server.broker.edge import send_requests
from duemq_server.broker.edge.members import messages
from duemq_server.broker.filtering import sql_filter
from duemq_server.broker.process import Broker
from duemq_server.broker.reading import filtered_read, reader
from tests.service.running_broker import Client, batch, running_broker, topic_name

WAIT_MS = 20_000
SQL = broker_pb2.FILTER_TYPE_SQL92


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[tuple[Broker, Client]]:
    async with running_broker(tmp_path) as made:
        yield made


@pytest.fixture
def client(both: tuple[Broker, Client]) -> Client:
    return both[1]


async def parked(broker: Broker, count: int) -> None:
    async with asyncio.timeout(60):
        while len(broker._pulls) != count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def store(client: Client, topic: str, records: list[message_pb2.Record], queue: int = 0):
    made = broker_pb2.Batch(
        topic=topic, queue_id=queue, records=message_pb2.RecordBatch(records=records)
    )
    return await client.send(made)


def orders(count: int, first: int = 0) -> list[message_pb2.Record]:
    return [
        message_pb2.Record(
            body=b"%d" % number,
            message_id=f"m{number}",
            tag="odd" if number % 2 else "even",
            key=f"k{number}",
            properties={"price": str(number), "region": ("eu", "us", "uk")[number % 3]},
        )
        for number in range(first, first + count)
    ]


async def drained(client: Client, topic: str, expression: str, **fields) -> list[int]:
    """All that a filter takes of queue 0, pull after pull; the offsets that were told."""
    found, offset, end = [], 0, 1
    while offset < end:
        response = await client.pull(
            topic, offset=offset, filter=expression, filter_type=SQL, wait_ms=1, **fields
        )
        [records] = response.queues
        assert not records.HasField("error")
        runs = zip(records.run_offsets, records.run_counts, strict=True)
        offsets = [first + n for first, count in runs for n in range(count)]
        assert [int(each.body) for each in records.records.records] == offsets
        assert records.next_offset > max([offset - 1, *offsets])
        found += offsets
        offset, end = records.next_offset, records.max_offset
    return found


@pytest.mark.parametrize(
    "fields", [{}, {"max_records": 7}, {"max_bytes": 200}, {"max_records": 1, "max_bytes": 1}]
)
async def test_an_expression_takes_exactly_what_matches_under_any_limit(
    client: Client, fields: dict[str, int]
) -> None:
    topic = topic_name()
    for first in range(0, 600, 100):
        await store(client, topic, orders(100, first))
    expression = "price BETWEEN 100 AND 500 AND region IN ('eu', 'us') AND TAGS = 'odd'"
    expected = [n for n in range(100, 501) if n % 3 != 2 and n % 2]
    assert await drained(client, topic, expression, **fields) == expected


async def test_records_of_any_size_and_frames_of_any_length_are_looked_at(client: Client) -> None:
    topic = topic_name()
    random = Random(4)
    number = 0
    while number < 400:
        records = orders(random.choice([1, 2, 50]), number)
        for record in records:
            # Beyond 16 KiB the body is left out before it is decoded; its place may vary.
            filler = b"f" * random.choice([0, 100, 20_000])
            record.properties["size"] = str(len(filler))
            record.message_id = record.message_id.ljust(64, "m")
            record.ordering_key = filler.decode()[:100]
            record.body = record.body.ljust(len(filler))
        number += len(records)
        await store(client, topic, records)
    found = await drained(client, topic, "size > 0 AND price < 300")
    assert set(found) < set(range(300))
    assert found == sorted(found)
    assert await drained(client, topic, "size >= 0") == list(range(number))
    assert await drained(client, topic, "KEYS = 'k17'") == [17]


async def test_a_filter_that_takes_nothing_is_told_how_far_it_is(client: Client) -> None:
    topic = topic_name()
    count = 3 * filtered_read.RECORDS_MAX
    await store(client, topic, orders(count))
    # Without a wait one read's worth; with one, all.
    [records] = (await client.pull(topic, filter="price < 0", filter_type=SQL)).queues
    assert 0 < records.next_offset < count
    [records] = (
        await client.pull(topic, filter="price < 0", filter_type=SQL, wait_ms=WAIT_MS)
    ).queues
    assert (records.next_offset, records.max_offset) == (count, count)
    assert not records.records.records


async def test_an_answer_tells_of_the_queues_beside_it_too(client: Client) -> None:
    topic = topic_name()
    for queue in range(4):
        await store(client, topic, orders(10, 100 * queue), queue)
    queues = [
        broker_pb2.QueuePull(topic=topic, queue_id=n, filter="price >= 300", filter_type=SQL)
        for n in range(4)
    ]
    reached: dict[int, int] = {}
    while len(reached) < 4:
        response = await client.broker.Pull(broker_pb2.PullRequest(queues=queues, wait_ms=1_000))
        for each in response.queues:
            reached[each.queue_id] = each.next_offset
            assert len(each.records.records) == (10 if each.queue_id == 3 else 0)
        queues = [queue for queue in queues if queue.queue_id not in reached]
    assert reached == dict.fromkeys(range(4), 10)


async def test_a_parked_pull_sleeps_on_until_something_matches(
    both: tuple[Broker, Client],
) -> None:
    broker, client = both
    topic = topic_name()
    await store(client, topic, orders(5))
    pull = {"filter": "price > 100", "filter_type": SQL, "wait_ms": WAIT_MS}
    waiting = asyncio.ensure_future(client.pull(topic, offset=5, **pull))
    await parked(broker, 1)
    for first in range(5, 50, 5):
        await store(client, topic, orders(5, first))
        await parked(broker, 1)
    await store(client, topic, orders(1, 101))
    [records] = (await waiting).queues
    assert [each.body for each in records.records.records] == [b"101"]
    assert list(records.run_offsets) == [50]


async def test_a_cancelled_pull_tells_what_was_left_out_meanwhile(
    both: tuple[Broker, Client],
) -> None:
    broker, client = both
    topic = topic_name()
    await store(client, topic, orders(1))
    stream = client.broker.PullStream()
    queue = broker_pb2.QueuePull(topic=topic, offset=1, filter="price > 9", filter_type=SQL)
    await stream.write(broker_pb2.PullRequest(request_id=1, queues=[queue], wait_ms=WAIT_MS))
    await parked(broker, 1)
    await store(client, topic, orders(3))
    await parked(broker, 1)
    await stream.write(broker_pb2.PullRequest(request_id=2, cancel_request_id=1))
    answer = await stream.read()
    assert [each.next_offset for each in answer.queues] == [4]
    stream.cancel()


async def test_a_scan_lets_others_have_a_turn(both: tuple[Broker, Client]) -> None:
    _, client = both
    topic, other = topic_name(), topic_name()
    await store(client, topic, orders(20 * filtered_read.RECORDS_MAX))
    await client.send(batch(other, [b"x"]))
    scan = asyncio.ensure_future(
        client.pull(topic, filter="price < 0", filter_type=SQL, wait_ms=WAIT_MS)
    )
    quick = await client.pull(other)
    assert quick.queues
    assert not scan.done()
    [records] = (await scan).queues
    assert records.next_offset == 20 * filtered_read.RECORDS_MAX


async def test_what_is_no_record_matches_nothing_and_holds_nothing_up(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        send_requests, "_check_decodable", lambda batch: None
    )  # as older brokers did
    topic = topic_name()
    good = orders(1)[0].SerializeToString()
    broken = b"\x32\x7fnot a record"
    entries = [b"\x0a" + bytes([len(each)]) + each for each in (broken, good)]
    made = broker_pb2.Batch(
        topic=topic, sizes=map(len, entries), tag_hashes=[0, 0], key_hashes=[0, 0]
    )
    data = made.SerializeToString() + b"\x32" + bytes([len(b"".join(entries))]) + b"".join(entries)
    request = b"\x12" + bytes([len(data)]) + data
    await status.answer(client.raw_send(request))
    pull = {"filter_type": SQL, "wait_ms": 1}
    [records] = (await client.pull(topic, filter="price = 0", **pull)).queues
    assert list(records.run_offsets) == [1]
    [records] = (await client.pull(topic, filter="nothing IS NULL", **pull)).queues
    assert list(records.run_offsets) == [1]


@pytest.mark.parametrize(
    ("expression", "filter_type", "field", "said"),
    [
        ("price >", SQL, "filter", "line 1, column 8"),
        ("", SQL, "filter", "line 1, column 1"),
        ("a ||", 0, "filter", "a || b"),
        ("a", 7, "filter_type", "0 (tags) or 1 (SQL-92)"),
    ],
)
async def test_what_is_no_filter_is_refused_at_pull_and_at_join(
    client: Client, expression: str, filter_type: int, field: str, said: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await client.pull("orders", filter=expression, filter_type=filter_type)
    assert caught.value.field == field
    assert said in caught.value.message
    hello = group_pb2.Hello(
        group="g",
        member_id="m",
        subscriptions=[
            group_pb2.Subscription(topic="orders", filter=expression, filter_type=filter_type)
        ],
    )
    stream = client.groups.Join()
    await stream.write(group_pb2.MemberEvent(hello=hello))
    with pytest.raises(InvalidArgument) as caught:
        await status.answer(stream.read())
    assert caught.value.field == field


@pytest.mark.parametrize("seed", range(6))
async def test_random_expressions_are_answered_or_refused(client: Client, seed: int) -> None:
    topic = topic_name()
    await store(client, topic, orders(20))
    random = Random(seed)
    words = "AND OR NOT IN IS NULL LIKE BETWEEN ( ) , = <> < > ' '' 'a' '%' 1 -2.5 price region"
    alphabet = [*words.split(), "TAGS", "\x00", "é", '"', "||"]

    async def outcome(text: str) -> str:
        try:
            await client.pull(topic, filter=text, filter_type=SQL)
        except InvalidArgument as error:
            return error.field
        return "answered"

    texts = [" ".join(random.choices(alphabet, k=random.randrange(1, 12))) for _ in range(500)]
    assert {await outcome(text) for text in texts} == {"answered", "filter"}


# --- tags: no other body is read ------------------------------------------------------------------


class Reads:
    """Notes which bytes of the log are read."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        log = broker.store.log
        read = log.read

        def noted(position: int, length: int, nowait: bool = False) -> memoryview:
            data = read(position, length, nowait)
            self.bytes += len(data)
            return data

        monkeypatch.setattr(log, "read", noted)


async def test_of_a_sparse_frame_only_what_a_tag_filter_takes_is_read(
    both: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = both
    topic = topic_name()
    tags = ["rare" if n % 500 == 250 else "usual" for n in range(2_000)]
    await client.send(batch(topic, [b"%d" % n + b"x" * 1_000 for n in range(2_000)], tags=tags))
    reads = Reads(broker, monkeypatch)
    [records] = (await client.pull(topic, filter="rare")).queues
    assert list(records.run_offsets) == [250, 750, 1250, 1750]
    assert [each.body[:3] for each in records.records.records] == [b"250", b"750", b"125", b"175"]
    assert reads.bytes == records.records.ByteSize() < 5_000
    # Many of a frame: the frame is read, and verified.
    [records] = (await client.pull(topic, filter="usual")).queues
    assert reads.bytes > 2_000_000


async def test_a_frame_of_an_earlier_process_is_read_and_verified_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = ["rare" if n == 50 else "usual" for n in range(100)]
    async with running_broker(tmp_path) as (_, client):
        await client.send(batch("orders", [b"%d" % n for n in range(100)], tags=tags))
    async with running_broker(tmp_path) as (broker, client):
        reads = Reads(broker, monkeypatch)
        [records] = (await client.pull("orders", filter="rare")).queues
        assert [each.body for each in records.records.records] == [b"50"]
        assert reads.bytes > 1_000


async def test_sparse_and_whole_frames_come_in_order(client: Client) -> None:
    topic = topic_name()
    expected = []
    for frame in range(20):
        tags = ["x" if frame % 2 or n == 30 else "y" for n in range(60)]
        await client.send(batch(topic, [b"%d" % (60 * frame + n) for n in range(60)], tags=tags))
        expected.append([60 * frame + n for n in range(60) if tags[n] == "x"])
    [records] = (await client.pull(topic, filter="x")).queues
    assert [int(each.body) for each in records.records.records] == list(chain(*expected))


def test_a_record_that_is_none_is_not_handed_out() -> None:
    class Log:
        directory = "log"

        def read(self, position: int, length: int, nowait: bool = False) -> memoryview:
            return memoryview(b"\x0a\x05wrong")[:length]

    from duemq.errors import Corrupt
    from duemq_server.broker.reading.selection import FrameRun

    run = FrameRun(0, 1, 100, 106, 50, 0, 10_000)
    with pytest.raises(Corrupt):
        reader._cut_out_filtered(Log(), [run], 0, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", ["pull", "stream", "join"])
async def test_others_have_turns_while_new_expressions_are_compiled(
    client: Client, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    topic = topic_name()
    await store(client, topic, orders(1))
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    turn, turns = 0, []
    parse = sql_filter.parse

    def noted(text: str) -> object:
        turns.append(turn)
        return parse(text)

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    monkeypatch.setattr(sql_filter, "parse", noted)
    counting = asyncio.create_task(count())
    expressions = [f"price >= 0 OR {entry}{number} = 1" for number in range(16)]
    pulls = [broker_pb2.QueuePull(topic=topic, filter=e, filter_type=SQL) for e in expressions]
    if entry == "pull":
        await status.answer(client.broker.Pull(broker_pb2.PullRequest(queues=pulls)))
    elif entry == "stream":
        stream = client.broker.PullStream()
        await stream.write(broker_pb2.PullRequest(request_id=1, queues=pulls))
        await status.answer(stream.read())
    else:
        subscriptions = [
            group_pb2.Subscription(topic=f"{topic}{number}", filter=e, filter_type=SQL)
            for number, e in enumerate(expressions)
        ]
        hello = group_pb2.Hello(group=topic, member_id="m", subscriptions=subscriptions)
        event = group_pb2.MemberEvent(hello=hello)
        await messages.hello_of(event)
    counting.cancel()
    assert len(set(turns)) == len(turns) == len(expressions)
