"""What consumers keep, lose and get when members and coordinators come and go."""

import asyncio
from collections import Counter

import pytest

from duemq.aio import PushConsumer
from duemq.consumer import push
from duemq.consumer.fetching.offset_client import OffsetClient
from duemq.consumer.group import membership
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import FencedMember, InvalidArgument
from duemq.protocol import balance
from duemq.protocol.balance import MessageQueue
from tests.service.running_broker import topic_name
from tests.service.running_cluster import Cluster, running_cluster, until

BROKERS = ("b0", "b1", "b2")
GROUP = "billing"
HERE = balance.coordinator(GROUP, BROKERS) or ""
OTHERS = [name for name in BROKERS if name != HERE]
# Nobody's session ends during a test: what moves was said, not waited for.
PATIENT_S = 300.0


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, *BROKERS) as cluster:
        yield cluster


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    name = topic_name()
    await cluster.create_topic(name, queues=2)
    return name


class Group:
    """Members of one group, and which queues they took over."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.cluster = cluster
        self.topic = topic
        self.received: Counter[bytes] = Counter()
        self.taken_over: Counter[MessageQueue] = Counter()
        self._open: list[PushConsumer] = []

    async def start(self, *, topics=None, settings=None, **options) -> PushConsumer:
        def receive(message) -> None:
            self.received[message.body] += 1

        given = {"start_from": "earliest", "session_timeout_s": PATIENT_S, "strategy": "sticky"}
        consumer = PushConsumer(
            GROUP,
            topics or self.topic,
            receive,
            nameserver=self.cluster.nameserver,
            settings=ConsumerSettings(**{**given, **(settings or {})}),
            **options,
        )
        self._open.append(consumer)
        await consumer.start()
        return consumer

    async def close(self) -> None:
        for consumer in self._open:
            await consumer.close()

    async def send(self, mark: str) -> None:
        """One message to every queue of the brokers that are there."""
        for broker in list(self.cluster.brokers):
            for queue_id in (0, 1):
                body = f"{mark} {broker}/{queue_id}".encode()
                await self.cluster.send(self.topic, [body], broker=broker, queue_id=queue_id)
                self.received[body] += 0

    def has_all(self) -> bool:
        return all(self.received.values())


@pytest.fixture
async def group(cluster: Cluster, topic: str, monkeypatch):
    made = Group(cluster, topic)
    acquire = OffsetClient.acquire

    async def counted(self, broker, queues, *rest, **named):
        queues = list(queues)
        answers = await acquire(self, broker, queues, *rest, **named)
        made.taken_over.update(queue for queue in queues if queue.topic == topic)
        return answers

    monkeypatch.setattr(OffsetClient, "acquire", counted)
    # A goodbye that is given up is never said again.
    monkeypatch.setattr(membership, "LEAVE_TIMEOUT_S", PATIENT_S)
    monkeypatch.setattr(push, "LEAVE_TIMEOUT_S", PATIENT_S)
    yield made
    await made.close()


async def two(group: Group, **options) -> tuple[PushConsumer, PushConsumer]:
    """Members with three queues each, of every broker some."""
    first = await group.start(**options)
    second = await group.start(**options)
    await until(lambda: len(first.queues) == len(second.queues) == 3)
    group.taken_over.clear()
    return first, second


async def test_a_member_that_leaves_hands_over_at_once(group: Group) -> None:
    first, second = await two(group)
    left = second.queues
    await second.close()
    await until(lambda: len(first.queues) == 6)
    assert group.taken_over == Counter(left)
    await group.send("after")
    await until(group.has_all)
    assert set(group.received.values()) == {1}


async def test_a_member_that_leaves_with_its_coordinator_says_so_to_the_next(group: Group) -> None:
    first, second = await two(group)
    _, _ = await asyncio.gather(group.cluster.stop_broker(HERE), second.close())
    await until(lambda: {queue.broker for queue in first.queues} == set(OTHERS))
    await until(lambda: len(first.queues) == 4)
    await group.send("after")
    await until(group.has_all)


async def test_members_consume_on_while_their_coordinator_leaves(group: Group) -> None:
    first, second = await two(group)
    members = {first: first.queues, second: second.queues}
    stopping = asyncio.create_task(group.cluster.stop_broker(HERE))
    rounds = 0
    while not stopping.done() or rounds < 20:
        for queue_id in (0, 1):
            for broker in OTHERS:
                body = f"{rounds} {broker}/{queue_id}".encode()
                await group.cluster.send(group.topic, [body], broker=broker, queue_id=queue_id)
                group.received[body] += 0
        for member, queues in members.items():
            assert member.queues >= {queue for queue in queues if queue.broker != HERE}
        await until(group.has_all)
        rounds += 1
    await stopping
    await until(lambda: len(first.queues) == len(second.queues) == 2)
    stayed = {queue for queue in [*members[first], *members[second]] if queue.broker != HERE}
    # Three and one become two and two; nothing else is touched.
    uneven = {len([q for q in queues if q.broker != HERE]) for queues in members.values()}
    assert group.taken_over.total() == (0 if uneven == {2} else 1)
    assert first.queues | second.queues == stayed
    assert set(group.received.values()) == {1}


async def test_a_static_member_that_restarts_gets_its_queues_back(group: Group) -> None:
    first = await group.start(member_name="pod-0")
    second = await group.start(member_name="pod-1")
    await until(lambda: len(first.queues) == len(second.queues) == 3)
    group.taken_over.clear()
    kept, away = first.queues, second.queues
    await second.close()
    await group.send("meanwhile")
    again = await group.start(member_name="pod-1")
    await until(lambda: again.queues == away)
    await until(group.has_all)
    assert first.queues == kept
    assert group.taken_over == Counter(away)
    assert set(group.received.values()) == {1}


async def test_a_static_member_that_starts_twice_runs_once(group: Group) -> None:
    old = await group.start(member_name="pod-0")
    new = await group.start(member_name="pod-0")
    with pytest.raises(FencedMember) as ended:
        await old.run()
    assert ended.value.field == "incarnation"
    await until(lambda: len(new.queues) == 6)
    await group.send("after")
    await until(group.has_all)


async def test_members_read_the_same(group: Group) -> None:
    await group.start(topics={group.topic: "a || b"})
    await group.start(topics={group.topic: "b||a"})
    with pytest.raises(InvalidArgument) as refused:
        await group.start(topics={group.topic: "c"})
    assert refused.value.field == "subscriptions"
    assert refused.value.limit == f"{group.topic}: filter 'a || b'"


@pytest.mark.parametrize("strategy", ["average", "average-by-circle", "consistent-hash", "sticky"])
async def test_every_strategy_shares_all_queues(group: Group, strategy: str) -> None:
    members = [await group.start(settings={"strategy": strategy}) for _ in range(3)]
    await until(lambda: sum(len(member.queues) for member in members) == 6)
    await group.send("now")
    await until(group.has_all)
    await members.pop().close()
    await until(lambda: sum(len(member.queues) for member in members) == 6)
    await group.send("then")
    await until(group.has_all)
    assert set(group.received.values()) == {1}
