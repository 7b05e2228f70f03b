"""Pull consumers against brokers in this process."""

import asyncio
import time
from collections import Counter
from datetime import UTC, datetime

import pytest

import duemq
from duemq.aio import PullConsumer
from duemq.errors import (
    Closed,
    Corrupt,
    Internal,
    InvalidArgument,
    OffsetOutOfRange,
    QueueNotFound,
    TopicNotFound,
    Unavailable,
)
from duemq.protocol.balance import MessageQueue
from duemq.settings import ClientSettings
from duemq_server.broker.edge.pull_requests import PullRequests
from duemq_server.broker.reading import time_search
from duemq_server.storage.errors import CorruptFile
from tests.service.running_broker import topic_name
from tests.service.running_cluster import WAIT_S, Cluster, running_cluster, until


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        yield cluster


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    name = topic_name()
    await cluster.create_topic(name, queues=2)
    return name


def consumer(cluster: Cluster, group: str | None = None) -> PullConsumer:
    return PullConsumer(group, nameserver=cluster.nameserver)


async def polled(consumer: PullConsumer, count: int) -> list[bytes]:
    """At least `count` bodies."""
    bodies: list[bytes] = []
    async with asyncio.timeout(30):
        while len(bodies) < count:
            bodies += [message.body for message in await consumer.poll(1.0)]
    return bodies


async def test_a_topic_is_read_from_its_beginning(cluster, topic) -> None:
    await cluster.send(topic, [b"1", b"2"], broker="b0", queue_id=0)
    await cluster.send(topic, [b"3"], broker="b1", queue_id=1)
    async with consumer(cluster) as reader:
        assert await reader.queues(topic) == [
            MessageQueue(topic, broker, number) for broker in ("b0", "b1") for number in (0, 1)
        ]
        await reader.assign(topic, start_from="earliest")
        assert Counter(await polled(reader, 3)) == Counter([b"1", b"2", b"3"])
        assert await reader.poll(0.01) == []
        assert reader.position(MessageQueue(topic, "b0", 0)) == 2
        await cluster.send(topic, [b"4"], broker="b1", queue_id=0)
        assert await polled(reader, 1) == [b"4"]


async def test_what_is_assigned_while_the_consumer_closes_is_not_read(
    cluster, topic, monkeypatch
) -> None:
    """Nobody would end what reads it."""
    ranges = PullConsumer._ranges

    async def slow(self: PullConsumer, queues):
        found = await ranges(self, queues)
        await self.close()
        return found

    monkeypatch.setattr(PullConsumer, "_ranges", slow)
    async with consumer(cluster) as reader:
        with pytest.raises(Closed):
            await reader.assign(topic)
        assert not reader._tasks


async def test_a_topic_is_read_from_its_end(cluster, topic) -> None:
    await cluster.send(topic, [b"old"])
    async with consumer(cluster) as reader:
        await reader.assign(topic)
        await cluster.send(topic, [b"new"])
        assert await polled(reader, 1) == [b"new"]


async def test_a_topic_is_read_from_a_time(cluster, topic) -> None:
    await cluster.send(topic, [b"old"], broker="b0", queue_id=0)
    await cluster.send(topic, [b"old"], broker="b1", queue_id=1)
    begin_ms = round(time.time() * 1000) + 1
    await until(lambda: time.time() * 1000 > begin_ms)
    await cluster.send(topic, [b"new"], broker="b0", queue_id=0)
    begin = datetime.fromtimestamp(begin_ms / 1000, UTC)
    async with consumer(cluster) as reader:
        await reader.assign(topic, start_from=begin_ms)
        assert reader.position(MessageQueue(topic, "b1", 1)) == 1
        assert await polled(reader, 1) == [b"new"]
        queue = MessageQueue(topic, "b0", 0)
        await reader.seek(queue, begin)
        assert reader.position(queue) == 1
        with pytest.raises(InvalidArgument) as refused:
            await reader.assign(topic, start_from="newest")
        assert refused.value.field == "start_from"
    async with consumer(cluster, "billing") as reader:
        await reader.assign(topic, start_from=begin)
        assert await polled(reader, 1) == [b"new"]
        await reader.commit()
        await reader.assign(topic, start_from="earliest")  # the group's offsets have the say
        assert await reader.poll(0.01) == []


async def test_a_queue_that_cannot_be_searched_holds_up_no_other(
    cluster, topic, monkeypatch
) -> None:
    """Its error names it, and comes once; nothing is committed there before a seek."""
    damaged, sound = (MessageQueue(topic, "b0", number) for number in (0, 1))
    for queue in (damaged, sound):
        await cluster.send(topic, [b"%d" % queue.queue_id], broker="b0", queue_id=queue.queue_id)
    find = time_search.first_stored_since

    def found(queue, at_ms):
        if queue.key == (topic, damaged.queue_id):
            raise CorruptFile("0", 0, "entries are missing", "")
        return find(queue, at_ms)

    monkeypatch.setattr(time_search, "first_stored_since", found)
    async with consumer(cluster, "g") as reader:
        await reader.assign([damaged, sound], start_from=1)
        with pytest.raises(Corrupt, match=rf"{topic}/b0/0: .*entries are missing"):
            await reader.poll(30.0)
        reader.pause(damaged)
        reader.resume(damaged)
        assert await polled(reader, 1) == [b"1"]
        assert reader.position(damaged) == -1
        await reader.commit()
        assert [await reader.committed(each) for each in (damaged, sound)] == [None, 1]
        with pytest.raises(Corrupt, match=f"{topic}/b0/0"):
            await reader.seek(damaged, datetime.fromtimestamp(1, UTC))
        await reader.seek(damaged, "earliest")
        assert await polled(reader, 1) == [b"0"]


async def test_a_poll_answers_no_more_than_asked(cluster, topic) -> None:
    bodies = [str(number).encode() for number in range(10)]
    await cluster.send(topic, bodies)
    queue = MessageQueue(topic, "b0", 0)
    async with consumer(cluster) as reader:
        await reader.assign([queue], start_from="earliest")
        found = [message.body for message in await reader.poll(30.0, messages_max=4)]
        assert found == bodies[:4]
        assert reader.position(queue) == 4
        assert await polled(reader, 6) == bodies[4:]


async def test_seek_goes_anywhere(cluster, topic) -> None:
    await cluster.send(topic, [b"0", b"1", b"2", b"3"])
    queue = MessageQueue(topic, "b0", 0)
    async with consumer(cluster) as reader:
        await reader.assign([queue], start_from="earliest")
        await polled(reader, 4)
        await reader.seek(queue, 2)
        assert await polled(reader, 2) == [b"2", b"3"]
        await reader.seek(queue, "earliest")
        assert reader.position(queue) == 0
        assert await polled(reader, 4) == [b"0", b"1", b"2", b"3"]
        await reader.seek(queue, "latest")
        assert reader.position(queue) == 4


async def test_paused_queues_are_left_out(cluster, topic) -> None:
    first, second = MessageQueue(topic, "b0", 0), MessageQueue(topic, "b1", 0)
    await cluster.send(topic, [b"first"], broker="b0")
    await cluster.send(topic, [b"second"], broker="b1")
    async with consumer(cluster) as reader:
        await reader.assign([first, second], start_from="earliest")
        reader.pause(first)
        assert await polled(reader, 1) == [b"second"]
        assert await reader.poll(0.05) == []
        reader.resume(first)
        assert await polled(reader, 1) == [b"first"]


async def test_of_queues_that_are_not_all_assigned_none_is_paused(cluster, topic) -> None:
    queue, other = MessageQueue(topic, "b0", 0), MessageQueue(topic, "b9", 0)
    await cluster.send(topic, [b"1"], broker="b0", queue_id=0)
    async with consumer(cluster) as reader:
        await reader.assign([queue], start_from="earliest")
        for change in (reader.pause, reader.resume):
            with pytest.raises(InvalidArgument) as refused:
                change(queue, other)
            assert refused.value.field == "queue"
        assert await polled(reader, 1) == [b"1"]
        assert reader._fetchers.keys() == {"b0"}  # nothing looks for a broker of that name


async def test_a_filter_applies(cluster, topic) -> None:
    await cluster.send(topic, [b"a", b"b", b"c"], tags=["a", "b", "c"])
    async with consumer(cluster) as reader:
        await reader.assign(topic, filter="a || c", start_from="earliest")
        assert await polled(reader, 2) == [b"a", b"c"]


async def test_a_group_goes_on_from_what_was_committed(cluster, topic) -> None:
    await cluster.send(topic, [b"0", b"1", b"2", b"3"])
    queue = MessageQueue(topic, "b0", 0)
    async with consumer(cluster, "g") as reader:
        assert await reader.committed(queue) is None
        await reader.assign([queue], start_from="earliest")
        await reader.poll(30.0, messages_max=3)
        await reader.commit()
        assert await reader.committed(queue) == 3
    async with consumer(cluster, "g") as reader:
        await reader.assign([queue], start_from="earliest")
        assert await polled(reader, 1) == [b"3"]
        await reader.commit({queue: 1})
        assert await reader.committed(queue) == 1


async def test_what_a_broker_refuses_is_raised_once(cluster, topic) -> None:
    await cluster.send(topic, [b"0"])
    queue = MessageQueue(topic, "b0", 0)
    async with consumer(cluster, "g") as reader:
        await reader.assign([queue], start_from="earliest")
        await reader.seek(queue, 17)
        with pytest.raises(OffsetOutOfRange):
            await reader.poll(30.0)
        await reader.seek(queue, 0)
        assert await polled(reader, 1) == [b"0"]
        with pytest.raises(OffsetOutOfRange):
            await reader.commit({queue: 17})


async def test_a_queue_whose_broker_could_not_answer_just_then_is_read_on(
    cluster, topic, monkeypatch
) -> None:
    """As one that stops while it reads old messages from its disk."""
    monkeypatch.setattr("duemq.consumer.fetching.fetcher.REFUSED_WAIT_S", 0.01)
    queue_of, refused = PullRequests._queue_of, []

    def stopping(self, group, read):
        if not refused:
            refused.append(read.key)
            raise Unavailable("the broker is stopping")
        return queue_of(self, group, read)

    monkeypatch.setattr(PullRequests, "_queue_of", stopping)
    await cluster.send(topic, [b"0"])
    async with consumer(cluster, "g") as reader:
        await reader.assign([MessageQueue(topic, "b0", 0)], start_from="earliest")
        assert await polled(reader, 1) == [b"0"]
    assert refused


async def test_wrong_use_is_refused_by_field(cluster, topic) -> None:
    queue = MessageQueue(topic, "b0", 0)
    async with consumer(cluster) as reader:
        with pytest.raises(InvalidArgument) as refused:
            reader.position(queue)
        assert refused.value.field == "queue"
        await reader.assign([queue])
        with pytest.raises(InvalidArgument) as refused:
            await reader.commit()
        assert refused.value.field == "group"
        with pytest.raises(TopicNotFound):
            await reader._client.topic_route("no-such-topic", timeout_s=0.05)


@pytest.mark.parametrize("to", [-1, 1 << 63, True, 2.5, "soon", None, datetime(2026, 1, 1)])
async def test_a_seek_to_no_place_is_refused_and_reading_goes_on(cluster, topic, to) -> None:
    queue = MessageQueue(topic, "b0", 0)
    await cluster.send(topic, [b"1", b"2"], broker="b0", queue_id=0)
    async with consumer(cluster) as reader:
        await reader.assign([queue], start_from="earliest")
        with pytest.raises(InvalidArgument) as refused:
            await reader.seek(queue, to)
        assert refused.value.field == "to"
        assert await polled(reader, 2) == [b"1", b"2"]


@pytest.mark.parametrize("offset", [-1, 1 << 63, None, 2.5, True])
async def test_a_commit_of_no_offset_is_refused(cluster, topic, offset) -> None:
    queue = MessageQueue(topic, "b0", 0)
    async with consumer(cluster, "readers") as reader:
        await reader.assign([queue])
        await reader.commit({queue: 0})
        with pytest.raises(InvalidArgument) as refused:
            await reader.commit({queue: offset})
        assert refused.value.field == "offset"
        assert await reader.committed(queue) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("timeout_s", -1), ("timeout_s", float("nan")), ("messages_max", 0), ("messages_max", 2.5)],
)
async def test_a_poll_out_of_bounds_is_refused(cluster, topic, field, value) -> None:
    async with consumer(cluster) as reader:
        with pytest.raises(InvalidArgument) as refused:
            await reader.poll(**{field: value})
        assert refused.value.field == field


@pytest.mark.parametrize("group", ["", 5])
def test_a_name_of_no_group_is_refused(group) -> None:
    with pytest.raises(InvalidArgument) as refused:
        PullConsumer(group)
    assert refused.value.field == "group"


async def test_a_queue_that_is_not_there_is_refused(cluster, topic) -> None:
    async with consumer(cluster) as reader:
        with pytest.raises(QueueNotFound) as refused:
            await reader.assign([MessageQueue(topic, "b0", 77)])
        assert refused.value.value == "77"


async def test_what_is_no_queue_is_refused(cluster, topic) -> None:
    queue = MessageQueue(topic, "b0", 0)
    async with consumer(cluster, "readers") as reader:
        for wrong in (queue, [tuple(queue)], [topic]):
            with pytest.raises(InvalidArgument) as refused:
                await reader.assign(wrong)
            assert refused.value.field == "queue"
        for call in (reader.committed(topic), reader.commit({topic: 0})):
            with pytest.raises(InvalidArgument) as refused:
                await call
            assert refused.value.field == "queue"


@pytest.mark.parametrize("kind", [PullConsumer, duemq.PullConsumer])
async def test_a_start_that_failed_may_be_tried_again(cluster, topic, kind) -> None:
    reader = kind(nameserver="127.0.0.1:1")
    client = getattr(reader, "_consumer", reader)._client
    client.settings = ClientSettings(connect_timeout_s=0.2)

    async def call(method, *arguments):
        if kind is PullConsumer:
            return await method(*arguments)
        return await asyncio.to_thread(method, *arguments)

    with pytest.raises(Unavailable):
        await call(reader.start)
    with pytest.raises(Closed):
        await call(reader.poll, 0.0)
    client.nameservers, client.settings = (cluster.nameserver,), ClientSettings()
    await call(reader.start)
    assert await call(reader.queues, topic)
    await call(reader.close)


async def test_a_consumer_lives_once(cluster, topic) -> None:
    reader = consumer(cluster)
    with pytest.raises(Closed):
        await reader.poll()
    async with reader:
        with pytest.raises(Closed):
            await reader.start()
        waiting = asyncio.create_task(reader.poll(60))
        await asyncio.sleep(0)
    with pytest.raises(Closed):
        await waiting
    with pytest.raises(Closed):
        await reader.start()


async def test_a_bug_that_ends_the_pulling_is_told(cluster, topic, monkeypatch) -> None:
    async def broken(self) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("duemq.consumer.pull.Fetcher.run", broken)
    async with consumer(cluster) as reader:
        await reader.assign(topic)
        for _ in range(2):
            with pytest.raises(Internal, match="a bug"):
                await reader.poll(60)


async def test_a_queue_that_is_assigned_twice_is_read_once(cluster, topic) -> None:
    queue = MessageQueue(topic, "b0", 0)
    await cluster.send(topic, [b"1", b"2"], broker="b0", queue_id=0)
    async with consumer(cluster) as reader:
        await reader.assign([queue, queue], start_from="earliest")
        assert len(reader._fetcher("b0")._sources) == 1
        assert await polled(reader, 2) == [b"1", b"2"]
        await cluster.send(topic, [b"3"], broker="b0", queue_id=0)
        assert await polled(reader, 1) == [b"3"]


async def test_an_error_of_a_place_that_was_left_is_not_told(cluster, topic) -> None:
    queue = MessageQueue(topic, "b0", 0)
    await cluster.send(topic, [b"1"], broker="b0", queue_id=0)
    async with consumer(cluster) as reader:
        await reader.assign([queue], start_from="earliest")
        for leave in (reader.seek, reader.assign):
            await reader.seek(queue, 99)
            await until(lambda: bool(reader._failed))
            await (leave(queue, 0) if leave == reader.seek else leave([queue], start_from=1))
            assert await polled(reader, 1) == [b"1"]


async def test_what_a_poll_took_that_a_signal_interrupts_comes_again(cluster, topic) -> None:
    """The handler raises while the thread waits for what was taken for it."""
    await cluster.send(topic, [b"0", b"1", b"2"], queue_id=0)
    queue = MessageQueue(topic, "b0", 0)

    def program() -> tuple[int, list[bytes]]:
        with duemq.PullConsumer(nameserver=cluster.nameserver) as consumer:
            consumer.assign([queue], start_from="earliest")
            hosted, run = consumer._hosted, consumer._hosted.run

            def interrupted(coroutine):
                hosted.run = run
                assert len(run(coroutine)) == 2
                raise KeyboardInterrupt

            hosted.run = interrupted
            with pytest.raises(KeyboardInterrupt):
                consumer.poll(WAIT_S, 2)
            return consumer.position(queue), [each.body for each in consumer.poll(WAIT_S)]

    assert await asyncio.to_thread(program) == (0, [b"0", b"1", b"2"])
