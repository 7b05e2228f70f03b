"""`duemq tail`: the end of a topic, without a group."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from duemq import Message
from duemq.aio import Admin
from duemq.descriptions import TopicDescription
from duemq.errors import TopicNotFound
from duemq.protocol.balance import MessageQueue
from duemq.v1 import admin_pb2
from duemq_cli.commands import tail as tail_command
from duemq_cli.commands.tail import _Reader
from duemq_cli.exits import Exit
from duemq_cli.printing import MessagePrinter
from duemq_cli.session import Session
from tests.service.cli.commands import rows, run, start
from tests.service.running_cluster import Cluster, running_cluster, until

TOPIC = "orders"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two brokers with messages in turns, each stored in a millisecond of its own."""
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        for number in range(12):
            broker = ("b0", "b1")[number % 2]
            await cluster.send(
                TOPIC, [str(number).encode()], broker=broker, queue_id=number % 3 % 2
            )
            await asyncio.sleep(0.002)  # or two are of one millisecond, and no time orders them
        yield cluster


async def bodies(cluster: Cluster, *arguments: str) -> list[str]:
    done = await run(cluster.nameserver, "tail", TOPIC, *arguments, "--json")
    assert done.exit_code == 0, done.stdout
    return [row["body"] for row in rows(done)]


async def described(cluster: Cluster) -> TopicDescription:
    async with Admin(cluster.nameserver) as admin:
        return await admin.describe_topic(TOPIC)


async def purge_b0(cluster: Cluster, found: TopicDescription) -> None:
    """Of all that it had then."""
    cuts = [
        admin_pb2.QueueCut(queue_id=queue.queue, before_offset=queue.max_offset)
        for queue in found.queues
        if queue.broker == "b0"
    ]
    await cluster.clients["b0"].admin.PurgeTopic(admin_pb2.PurgeTopicRequest(name=TOPIC, cuts=cuts))


async def test_the_last_messages_of_all_queues_come_by_time(cluster: Cluster) -> None:
    assert await bodies(cluster) == [str(number) for number in range(2, 12)]
    assert await bodies(cluster, "-n", "3") == ["9", "10", "11"]
    assert await bodies(cluster, "-n", "0") == []
    assert len(await bodies(cluster, "-n", "1000")) == 12


async def test_nothing_is_committed_and_no_group_is_made(cluster: Cluster) -> None:
    await bodies(cluster)
    assert rows(await run(cluster.nameserver, "group", "list", "--system", "--json")) == []


async def test_what_comes_is_followed(cluster: Cluster) -> None:
    process = await start(cluster.nameserver, "tail", TOPIC, "-n", "1", "-f", "--json")
    assert process.stdout is not None
    try:
        assert json.loads(await process.stdout.readline())["body"] == "11"
        for number in (12, 13):
            await cluster.send(TOPIC, [str(number).encode()], broker=("b0", "b1")[number % 2])
            assert json.loads(await process.stdout.readline())["body"] == str(number)
    finally:
        process.terminate()
        await process.wait()


async def test_a_topic_that_is_made_anew_is_followed_from_its_beginning(cluster: Cluster) -> None:
    process = await start(cluster.nameserver, "tail", TOPIC, "-n", "1", "-f", "--json")
    assert process.stdout is not None
    try:
        assert json.loads(await process.stdout.readline())["body"] == "11"
        await cluster.send(TOPIC, [b"12"])  # it follows
        assert json.loads(await process.stdout.readline())["body"] == "12"
        for broker in cluster.brokers.values():
            broker.store.delete_topic(TOPIC)
            broker.store.create_topic(TOPIC, 2)
        sent = set()
        for number in range(16):
            bodies = [f"new {number} {n}" for n in range(10)]
            await cluster.send(
                TOPIC,
                [body.encode() for body in bodies],
                broker=("b0", "b1")[number % 2],
                queue_id=number // 2 % 2,
            )
            sent.update(bodies)
        came = [json.loads(await process.stdout.readline())["body"] for _ in sent]
        assert sorted(came) == sorted(sent)
    finally:
        process.terminate()
        await process.wait()


async def test_filters_and_raw_bodies(cluster: Cluster) -> None:
    await cluster.send(TOPIC, [b"\x1b[31mred\nblue"])
    raw = await run(cluster.nameserver, "tail", TOPIC, "-n", "1", "--raw")
    assert raw.stdout_bytes == b"\x1b[31mred\nblue\n"
    people = await run(cluster.nameserver, "tail", TOPIC, "-n", "1")
    assert people.stdout.rstrip().endswith(r"\x1b[31mred\nblue")
    assert await bodies(cluster, "-n", "100", "--tag", "nobody") == []


async def test_a_topic_that_is_not_there_is_exit_4(cluster: Cluster) -> None:
    done = await run(cluster.nameserver, "tail", "nowhere")
    assert done.exit_code == Exit.NOT_FOUND


def test_raw_bytes_are_not_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    from duemq_cli.output import Output
    from duemq_cli.printing import MessagePrinter

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(click.UsageError, match="not to a terminal"):
        MessagePrinter(Output(False), raw=True)


async def test_what_was_printed_is_not_printed_again_once_a_broker_is_back(
    cluster: Cluster,
) -> None:
    """It was away as retention took what the other one had."""
    session = Session(address=cluster.nameserver, json=True)
    found = await described(cluster)
    reader = _Reader(session, MessagePrinter(session.output, raw=False), found, "")
    ends = {MessageQueue(TOPIC, q.broker, q.queue): q.max_offset for q in found.queues}

    def fall_behind() -> None:
        reader.consumer.start()
        reader.consumer.assign(list(ends))
        for queue in ends:
            if queue.broker == "b0":
                reader.consumer.seek(queue, 0)

    try:
        await asyncio.to_thread(fall_behind)
        await purge_b0(cluster, found)
        await cluster.stop_broker("b1")
        await asyncio.to_thread(reader.go_on)
        assert {queue: reader.consumer.position(queue) for queue in ends} == ends
    finally:
        await asyncio.to_thread(reader.consumer.close)


class Ended(Exception):
    """Enough was printed."""


class Printed(MessagePrinter):
    """Keeps what is to be printed, up to a last body."""

    def __init__(self, session: Session, last: str) -> None:
        super().__init__(session.output, raw=False)
        self.bodies: list[str] = []
        self._last = last

    def print(self, message: Message) -> None:
        self.bodies.append(message.body.decode())
        if self.bodies[-1] == self._last:
            raise Ended


async def test_new_queues_are_followed_while_a_broker_is_away(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_command, "LOOK_EVERY_S", 0.05)
    session = Session(address=cluster.nameserver, json=True)
    printed = Printed(session, last="back")
    found = await described(cluster)
    reader = _Reader(session, printed, found, "")

    def follow() -> None:
        with reader.consumer:
            reader.follow(())

    following = asyncio.create_task(asyncio.to_thread(follow))
    await until(lambda: len(reader.consumer.assignment) == 4 or following.done())
    await cluster.stop_broker("b1")
    await cluster.start_broker("b2")
    await cluster.create_topic(TOPIC, queues=2)
    await cluster.send(TOPIC, [b"new"], broker="b2")
    await until(lambda: "new" in printed.bodies or following.done())
    assert printed.bodies == ["new"]
    await cluster.start_broker("b1")
    await cluster.send(TOPIC, [b"back"], broker="b1")
    with pytest.raises(Ended):
        await following
    assert printed.bodies == ["new", "back"]


async def test_a_topic_is_followed_while_all_its_brokers_are_away(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_command, "LOOK_EVERY_S", 0.05)
    session = Session(address=cluster.nameserver, json=True)
    printed = Printed(session, last="back")
    found = await described(cluster)
    reader = _Reader(session, printed, found, "")
    client = reader.consumer._consumer._client
    looks: list[str] = []
    queues = reader.consumer.queues

    def looked(topic: str) -> list[MessageQueue]:
        try:
            return queues(topic)
        except TopicNotFound:
            looks.append("nobody")
            raise

    monkeypatch.setattr(reader.consumer, "queues", looked)

    def follow() -> None:
        with reader.consumer:
            reader.follow(())

    following = asyncio.create_task(asyncio.to_thread(follow))
    await until(lambda: len(reader.consumer.assignment) == 4 or following.done())
    # Who looks for a topic in vain knows it sooner; the start has its time.
    client.settings = replace(client.settings, request_timeout_s=1.0)
    for name in ("b0", "b1"):
        await cluster.stop_broker(name)
    await until(lambda: len(looks) > 1 or following.done())
    await cluster.start_broker("b0")
    await cluster.send(TOPIC, [b"back"])
    with pytest.raises(Ended):
        await following


async def test_what_retention_takes_while_the_last_are_read_is_not_among_them(
    cluster: Cluster,
) -> None:
    session = Session(address=cluster.nameserver, json=True)
    found = await described(cluster)
    await purge_b0(cluster, found)
    printed = Printed(session, last="")
    reader = _Reader(session, printed, found, "")

    def read() -> object:
        with reader.consumer:
            return reader.print_last(20)

    assert await asyncio.to_thread(read) == ()
    assert printed.bodies == [str(number) for number in range(1, 12, 2)]
