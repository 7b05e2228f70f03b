"""A topic that is deleted and made anew before anybody hears of its end, under who reads it."""

import asyncio
import json
import threading
from collections import Counter

import pytest

from duemq.aio import Admin, Producer, PullConsumer, PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import TopicReplaced, Unavailable
from duemq.protocol.balance import MessageQueue
from duemq.transport import channel, status
from duemq.v1 import admin_pb2, broker_pb2, error_pb2, message_pb2, nameserver_pb2
from duemq.v1.stubs import NameserverStub
from duemq_analytics.options import Options
from duemq_analytics.source import plan
from duemq_analytics.source.client import QueueClient
from duemq_server.broker.reading import time_search
from duemq_server.broker.store.changes import offset_changes
from tests.service.running_broker import Client, topic_name
from tests.service.running_cluster import Cluster, running_cluster, until

GROUP = "billing"
QUEUES = 2


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        yield cluster


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    name = topic_name()
    await cluster.create_topic(name, queues=QUEUES)
    return name


def make_anew(cluster: Cluster, topic: str) -> None:
    """In one step of the event loop: no report of it is sent, and no pull looks between.

    As for a member whose stream is broken just then, or whose queues rest.
    """
    for broker in cluster.brokers.values():
        broker.store.delete_topic(topic)
        broker.store.create_topic(topic, QUEUES)


async def fill(cluster: Cluster, topic: str, each: int, mark: str) -> list[bytes]:
    """`each` messages to every queue."""
    sent = []
    for broker in sorted(cluster.clients):
        for queue_id in range(QUEUES):
            bodies = [f"{mark} {broker}/{queue_id}/{n}".encode() for n in range(each)]
            if bodies:
                await cluster.send(topic, bodies, broker=broker, queue_id=queue_id)
            sent += bodies
    return sent


async def committed(cluster: Cluster, topic: str) -> set[int]:
    request = broker_pb2.GetOffsetsRequest(group=GROUP, topic=topic)
    answers = [await client.broker.GetOffsets(request) for client in cluster.clients.values()]
    return {queue.offset for answer in answers for queue in answer.queues}


@pytest.mark.parametrize("order", [None, "queue"])
@pytest.mark.parametrize("start_from", ["earliest", "latest"])
@pytest.mark.parametrize("each", [4, 10, 25])
async def test_a_group_gets_every_message_of_a_topic_made_anew_once(
    cluster, topic, each, start_from, order
) -> None:
    """With fewer messages than the group had consumed of the old one, as many, and more."""
    received: list[bytes] = []
    consumer = PushConsumer(
        GROUP,
        topic,
        lambda message: received.append(message.body),
        order=order,
        nameserver=cluster.nameserver,
        settings=ConsumerSettings(start_from=start_from, commit_interval_s=0.02),
    )
    await consumer.start()
    try:
        await until(lambda: len(consumer.queues) == 2 * QUEUES)
        old = await fill(cluster, topic, 10, "old")
        await until(lambda: len(received) == len(old))
        make_anew(cluster, topic)
        new = await fill(cluster, topic, each, "new")
        await until(lambda: len(received) >= len(old) + len(new))
        assert Counter(received) == Counter(old + new)
        await until(lambda: is_at(cluster, topic, each))
    finally:
        await consumer.close()
    assert await committed(cluster, topic) == {each}
    assert Counter(received) == Counter(old + new)


async def test_a_member_that_takes_over_what_another_one_had_of_the_old_topic_leaves_nothing_out(
    cluster, topic
) -> None:
    """The new topic's queues have no offset, and what is sent before they are taken over counts."""
    received: list[bytes] = []
    first, second = (
        PushConsumer(
            GROUP,
            topic,
            lambda message: received.append(message.body),
            nameserver=cluster.nameserver,
            settings=ConsumerSettings(start_from="latest"),
        )
        for _ in range(2)
    )
    await first.start()  # has had all queues when the other one comes
    try:
        await second.start()
        await until(lambda: len(first.queues) == len(second.queues) == QUEUES)
        for broker in cluster.brokers.values():
            broker.store.delete_topic(topic)
        await until(lambda: not second.queues)
        await first.close()
        for broker in cluster.brokers.values():
            broker.store.on_report = lambda: None  # nobody hears of the topic before it is full
            broker.store.create_topic(topic, QUEUES)
        new = await fill(cluster, topic, 3, "new")
        await until(lambda: len(second.queues) == 2 * QUEUES)  # the next heartbeats tell
        await until(lambda: len(received) >= len(new))
        assert Counter(received) == Counter(new)
    finally:
        await first.close()
        await second.close()


async def is_at(cluster: Cluster, topic: str, offset: int) -> bool:
    return await committed(cluster, topic) == {offset}


@pytest.mark.parametrize("verb", ["delete", "purge"])
async def test_an_admin_whose_answer_was_lost_spares_what_was_made_anew_since(
    cluster, topic, verb, monkeypatch
) -> None:
    """A repetition is for the topic that was meant, and not for whichever has its name by then."""
    await fill(cluster, topic, 2, "old")
    store = cluster.brokers["b0"].store
    owner, name = {"delete": (store, "delete_topic"), "purge": (offset_changes, "purge")}[verb]
    done = getattr(owner, name)

    def lose(*arguments: object) -> None:
        monkeypatch.undo()
        done(*arguments)
        if verb == "purge":
            store.delete_topic(topic)
        store.create_topic(topic, QUEUES)
        raise Unavailable("the answer is lost")

    monkeypatch.setattr(owner, name, lose)
    async with Admin(cluster.nameserver) as admin:
        await (admin.delete_topic(topic) if verb == "delete" else admin.purge_topic(topic))
        found = await admin.describe_topic(topic)
    brokers = {queue.broker for queue in found.queues}
    assert brokers == ({"b0"} if verb == "delete" else {"b0", "b1"})
    assert found.messages == 0


@pytest.mark.parametrize("verb", ["DeleteTopic", "PurgeTopic"])
async def test_a_topic_is_not_deleted_or_purged_in_place_of_its_predecessor(
    cluster, topic, verb
) -> None:
    client = cluster.clients["b0"]
    before = await topic_id(client, topic)
    make_anew(cluster, topic)
    await fill(cluster, topic, 1, "new")
    request = {
        "DeleteTopic": admin_pb2.DeleteTopicRequest(name=topic, topic_id=before),
        "PurgeTopic": admin_pb2.PurgeTopicRequest(
            name=topic, topic_id=before, cuts=[admin_pb2.QueueCut(queue_id=0, before_offset=1)]
        ),
    }[verb]
    with pytest.raises(TopicReplaced) as caught:
        await status.answer(getattr(client.admin, verb)(request))
    assert (caught.value.field, caught.value.value) == ("topic_id", str(before))
    described = await client.admin.DescribeTopic(admin_pb2.DescribeTopicRequest(name=topic))
    assert [queue.messages for queue in described.queues] == [1] * QUEUES


# --- on the wire --------------------------------------------------------------------------------


async def acquire(client: Client, topic: str, **fields) -> broker_pb2.OffsetResult:
    queues = [message_pb2.QueueRef(topic=topic, broker="b0")]
    given = {"group": GROUP, "generation": 1, "queues": queues, **fields}
    answer = await client.broker.AcquireQueues(broker_pb2.AcquireQueuesRequest(**given))
    return answer.queues[0]


async def topic_id(client: Client, topic: str) -> int:
    request = admin_pb2.DescribeTopicRequest(name=topic)
    return (await client.admin.DescribeTopic(request)).topic_id


async def test_whoever_says_of_which_topic_an_offset_is_does_nothing_to_another_one(
    cluster, topic
) -> None:
    client = cluster.clients["b0"]
    old = await topic_id(client, topic)
    make_anew(cluster, topic)
    await cluster.send(topic, [b"a", b"b"], queue_id=0)
    new = await topic_id(client, topic)
    assert old != new
    for known, code in ((old, error_pb2.TOPIC_REPLACED), (new, 0), (0, 0)):
        pulled = await client.pull(topic, topic_id=known)
        commit = broker_pb2.OffsetCommit(topic=topic, offset=1, topic_id=known)
        request = broker_pb2.CommitOffsetsRequest(group=GROUP, commits=[commit])
        committed = await client.broker.CommitOffsets(request)
        failed = broker_pb2.FailedMessage(topic=topic, offset=1, topic_id=known)
        request = broker_pb2.SendBackRequest(group=GROUP, messages=[failed])
        sent_back = await client.broker.SendBack(request)
        for answer in (*pulled.queues, *committed.queues, *sent_back.results):
            assert answer.error.code == code, answer
            if code:
                error = status.from_proto(answer.error)
                assert isinstance(error, TopicReplaced)
                assert (error.field, error.value, error.limit) == ("topic_id", str(old), str(new))
        if code:  # nothing was done
            request = broker_pb2.GetOffsetsRequest(group=GROUP, topic=topic)
            known_offsets = (await client.broker.GetOffsets(request)).queues
            assert [(each.offset, list(each.settled)) for each in known_offsets] == [(-1, [])] * 2


async def test_every_answer_about_a_topic_tells_which_one_it_is(cluster, topic) -> None:
    client = cluster.clients["b0"]

    async def told() -> set[int]:
        request = broker_pb2.GetOffsetsRequest(group=GROUP, topic=topic)
        offsets = await client.broker.GetOffsets(request)
        commit = broker_pb2.OffsetCommit(topic=topic)
        request = broker_pb2.CommitOffsetsRequest(group=GROUP, commits=[commit])
        return {
            await topic_id(client, topic),
            (await acquire(client, topic)).topic_id,
            *(each.topic_id for each in offsets.queues),
            *(each.topic_id for each in (await client.broker.CommitOffsets(request)).queues),
        }

    async def in_routes(known: int) -> bool:
        async with channel.connect(cluster.nameserver) as connection:
            request = nameserver_pb2.GetRouteRequest(topic=topic)
            route = await NameserverStub(connection).GetRoute(request)
        cached = cluster.brokers["b1"]._routes.cache.route(topic)
        ids = (route.brokers[0].topic_id, cached.brokers[0].topic_id)
        return ids == (known, known)

    [old] = await told()
    await until(lambda: in_routes(old))
    make_anew(cluster, topic)
    [new] = await told()
    assert new not in (0, old)
    await until(lambda: in_routes(new))


async def test_a_group_that_begins_at_a_time_leaves_nothing_of_a_topic_that_is_made_meanwhile(
    cluster, topic, monkeypatch
) -> None:
    """The look for the time reads the disk: nobody waits for it."""
    looks, go = threading.Event(), threading.Event()

    def late(queue, start_ms: int) -> int:
        looks.set()
        go.wait(30)
        return 0

    monkeypatch.setattr(time_search, "first_stored_since", late)
    client = cluster.clients["b0"]
    asked = asyncio.ensure_future(
        acquire(client, topic, start_from=broker_pb2.AT_TIME, start_ms=1_790_000_000_000)
    )
    try:
        await asyncio.to_thread(looks.wait, 30)
        make_anew(cluster, topic)
        await cluster.send(topic, [b"new"], queue_id=0)
    finally:
        go.set()
    assert (await asked).offset == 0


# --- who holds positions ------------------------------------------------------------------------


async def test_what_fails_of_a_topic_that_is_gone_settles_nothing_of_the_new_one(
    cluster, topic
) -> None:
    """The callback still has a message of the old one, with an offset that there is in both."""
    received: list[bytes] = []
    busy, go = threading.Event(), threading.Event()

    def receive(message) -> None:
        if message.body.startswith(b"old"):
            busy.set()
            go.wait(30)
            raise ValueError("no")
        received.append(message.body)

    consumer = PushConsumer(
        GROUP,
        topic,
        receive,
        nameserver=cluster.nameserver,
        settings=ConsumerSettings(start_from="earliest", commit_interval_s=0.02),
    )
    await consumer.start()
    try:
        await cluster.send(topic, [b"old"], queue_id=0)
        await asyncio.to_thread(busy.wait, 30)
        make_anew(cluster, topic)
        new = await fill(cluster, topic, 3, "new")
        go.set()
        await until(lambda: len(received) >= len(new))
        await until(lambda: is_at(cluster, topic, 3))
    finally:
        go.set()
        await consumer.close()
    assert Counter(received) == Counter(new)
    store = cluster.brokers["b0"].store
    assert f"%RETRY%{GROUP}" not in store.topics


@pytest.mark.parametrize("away", [False, True], ids=["running", "away"])
@pytest.mark.parametrize("each", [4, 10, 25])
async def test_a_broadcast_member_gets_all_of_a_topic_made_anew(
    cluster, topic, tmp_path, each, away
) -> None:
    """Also one that was away meanwhile, and has the old offsets in its file."""
    received: list[bytes] = []
    directory, save_s = tmp_path / "offsets", 3_600 if away else 0.02

    def member() -> PushConsumer:
        return PushConsumer(
            GROUP,
            topic,
            lambda message: received.append(message.body),
            broadcast=True,
            member_name="one",
            nameserver=cluster.nameserver,
            settings=ConsumerSettings(offsets_dir=str(directory), commit_interval_s=save_s),
        )

    def saved() -> set[int]:
        file = json.loads((directory / GROUP / "one.json").read_text())
        return {offset for *_, offset in file["queues"]}

    consumer = member()
    await consumer.start()
    try:
        old = await fill(cluster, topic, 10, "old")
        await until(lambda: len(received) == len(old))
        if away:
            await consumer.close()
        await until(lambda: saved() == {10})
        make_anew(cluster, topic)
        new = await fill(cluster, topic, each, "new")
        if away:
            consumer = member()
            await consumer.start()
        await until(lambda: len(received) >= len(old) + len(new))
        await consumer.close()
        consumer = member()  # and goes on there
        await consumer.start()
        last = await fill(cluster, topic, 1, "last")
        await until(lambda: set(received) >= set(last))
    finally:
        await consumer.close()
    assert Counter(received) == Counter(old + new + last)


async def test_a_pull_consumer_is_told_and_commits_nothing_by_mistake(cluster, topic) -> None:
    await fill(cluster, topic, 10, "old")
    queue = MessageQueue(topic, "b0", 0)
    async with PullConsumer(GROUP, nameserver=cluster.nameserver) as reader:
        await reader.assign([queue], start_from="earliest")
        async with asyncio.timeout(30):
            while reader.position(queue) < 10:
                await reader.poll(1.0)
        make_anew(cluster, topic)
        new = await fill(cluster, topic, 25, "new")
        with pytest.raises(TopicReplaced):
            await reader.commit()
        with pytest.raises(TopicReplaced):
            await reader.poll(30.0)
        assert await reader.committed(queue) is None
        assert reader.position(queue) == 0
        await reader.seek(queue, reader.position(queue))
        bodies: list[bytes] = []
        async with asyncio.timeout(30):
            while len(bodies) < 25:
                bodies += [message.body for message in await reader.poll(1.0)]
        assert bodies == new[:25]
        await reader.commit()
        assert await reader.committed(queue) == 25


async def test_a_reader_of_ranges_reads_nothing_of_another_topic(cluster, topic) -> None:
    await fill(cluster, topic, 3, "old")
    options = Options(topic, nameservers=(cluster.nameserver,))

    def planned() -> list[plan.QueueRange]:
        with QueueClient((cluster.nameserver,), timeout_s=30) as client:
            return plan.partitions(plan.ranges(client.queues(options), options), 2)

    def read(piece: plan.QueueRange) -> list[bytes]:
        with QueueClient((cluster.nameserver,), timeout_s=30) as client:
            return [r.body for run in client.read(topic, piece) for r in run.records]

    pieces = await asyncio.to_thread(planned)
    assert await asyncio.to_thread(read, pieces[0])
    make_anew(cluster, topic)
    await fill(cluster, topic, 3, "new")
    for piece in pieces:
        with pytest.raises(TopicReplaced):
            await asyncio.to_thread(read, piece)


async def test_a_producer_goes_on_in_a_topic_made_anew(cluster, topic) -> None:
    """With its old numbers: none is refused for ever, none taken for a repeat."""
    async with Producer(cluster.nameserver) as producer:
        for number in range(20):
            await producer.send(topic, b"old", ordering_key=str(number))
        make_anew(cluster, topic)
        receipts = [
            producer.submit(topic, b"%d" % number, ordering_key=str(number)) for number in range(40)
        ]
        stored = [await receipt for receipt in receipts]
    assert len({(each.broker, each.queue, each.offset) for each in stored}) == 40
    bodies = [
        body
        for client in cluster.clients.values()
        for queue_id in range(QUEUES)
        for body in await client.bodies(topic, queue_id)
    ]
    assert Counter(bodies) == Counter(b"%d" % number for number in range(40))
