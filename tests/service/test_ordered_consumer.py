"""Consumers in order against brokers in this process: rebalances, failures, dead letters."""

import asyncio
import threading
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

import duemq
from duemq.aio import Producer, PushConsumer
from duemq.consumer import push
from duemq.consumer.settings import ConsumerSettings
from duemq.protocol.balance import MessageQueue
from duemq.v1 import broker_pb2
from duemq_server.broker.edge.coordinator_servicer import CoordinatorServicer
from duemq_server.broker.store.offsets import GENERATION_MARKS
from tests.service.running_broker import topic_name
from tests.service.running_cluster import Cluster, running_cluster, until

GROUP = "billing"
KEYS = [f"k{number}" for number in range(12)]

orders = pytest.mark.parametrize("order", ["queue", "key"])


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        yield cluster


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    name = topic_name()
    await cluster.create_topic(name)
    return name


class Journal:
    """What members processed, key by key, in the order it ended."""

    def __init__(self) -> None:
        self.of: defaultdict[str, list[int]] = defaultdict(list)
        self.running: Counter[str] = Counter()
        self.overlaps = 0
        self._lock = threading.Lock()

    def receive(self, message) -> None:
        key = message.ordering_key
        with self._lock:
            self.running[key] += 1
            self.overlaps += self.running[key] > 1
        with self._lock:
            self.running[key] -= 1
            self.of[key].append(int(message.body))

    def check(self, sent: range) -> None:
        """Each key alone, complete and in order.

        After a hand-over, keys may go back behind what another one had not finished, and then on
        again without a gap.
        """
        assert self.overlaps == 0
        assert self.of.keys() == set(KEYS)
        for numbers in self.of.values():
            assert set(numbers) == set(sent)
            assert all(after <= before + 1 for before, after in pairwise(numbers))

    def count(self) -> int:
        return sum(map(len, self.of.values()))


def settings(**given) -> ConsumerSettings:
    return ConsumerSettings(**{"start_from": "earliest", "suspend_s": 0.001, **given})


def member(cluster: Cluster, topic: str, callback, order, **given) -> PushConsumer:
    options = {name: given.pop(name) for name in ("batch", "threads") if name in given}
    return PushConsumer(
        GROUP,
        topic,
        callback,
        order=order,
        nameserver=cluster.nameserver,
        settings=settings(**given),
        **options,
    )


async def send(cluster: Cluster, topic: str, numbers: range) -> None:
    async with Producer(cluster.nameserver) as producer:
        for number in numbers:
            for key in KEYS:
                producer.submit(topic, b"%d" % number, ordering_key=key)
        await producer.flush()


async def end_offsets(cluster: Cluster, topic: str) -> tuple[int, int]:
    """Sums over all queues: committed, stored."""
    committed = stored = 0
    for client in cluster.clients.values():
        request = broker_pb2.GetOffsetsRequest(group=GROUP, topic=topic)
        for each in (await client.broker.GetOffsets(request)).queues:
            committed += max(0, each.offset)
            stored += each.max_offset
    return committed, stored


@orders
async def test_each_key_comes_in_order_while_members_come_and_go(cluster, topic, order) -> None:
    journal = Journal()
    sending = asyncio.create_task(send(cluster, topic, range(200)))
    first = member(cluster, topic, journal.receive, order)
    await first.start()
    async with member(cluster, topic, journal.receive, order) as second:
        await until(lambda: len(second.queues) >= 3)
        await first.close()
        async with member(cluster, topic, journal.receive, order):
            await until(lambda: journal.count() > 100 * len(KEYS))
        await sending
        await until(lambda: all(199 in journal.of[key] for key in KEYS))
    if order == "queue":
        assert dict(journal.of) == {key: list(range(200)) for key in KEYS}
    journal.check(range(200))
    assert await end_offsets(cluster, topic) == (200 * len(KEYS),) * 2


@orders
async def test_coroutines_in_order(cluster, topic, order) -> None:
    journal = Journal()

    async def receive(message) -> None:
        await asyncio.sleep(0)
        journal.receive(message)

    await send(cluster, topic, range(50))
    async with member(cluster, topic, receive, order):
        await until(lambda: journal.count() >= 50 * len(KEYS))
    assert dict(journal.of) == {key: list(range(50)) for key in KEYS}


@orders
async def test_lists_in_order(cluster, topic, order) -> None:
    journal, sizes = Journal(), []

    def receive(messages) -> None:
        sizes.append(len(messages))
        if order == "key":
            assert len({message.ordering_key for message in messages}) == 1
        for message in messages:
            journal.receive(message)

    await send(cluster, topic, range(50))
    async with member(cluster, topic, receive, order, batch=True, batch_messages_max=7):
        await until(lambda: journal.count() >= 50 * len(KEYS))
    assert dict(journal.of) == {key: list(range(50)) for key in KEYS}
    assert max(sizes) <= 7


@orders
async def test_a_failure_is_tried_again_before_the_next_of_its_key(cluster, topic, order) -> None:
    journal, failed = Journal(), Counter()

    def receive(message) -> None:
        if message.body == b"7" and failed[message.ordering_key] < 3:
            failed[message.ordering_key] += 1
            assert message.deliveries == failed[message.ordering_key] - 1
            raise duemq.RetryLater("1ms") if failed.total() % 2 else ValueError("not yet")
        journal.receive(message)

    await send(cluster, topic, range(20))
    async with member(cluster, topic, receive, order):
        await until(lambda: journal.count() >= 20 * len(KEYS))
    assert dict(journal.of) == {key: list(range(20)) for key in KEYS}
    assert failed == Counter(dict.fromkeys(KEYS, 3))


@orders
async def test_what_keeps_failing_is_a_dead_letter_and_the_key_goes_on(
    cluster, topic, order
) -> None:
    journal, calls = Journal(), Counter()

    def receive(message) -> None:
        if message.body == b"7":
            calls[message.ordering_key] += 1
            raise ValueError("never")
        if message.body == b"8" and message.ordering_key == "k0":
            raise duemq.DeadLetter("useless")
        journal.receive(message)

    await send(cluster, topic, range(20))
    async with member(cluster, topic, receive, order, retries_in_order_max=2):
        expected = 19 * len(KEYS) - 1
        await until(lambda: journal.count() >= expected)
    without = [number for number in range(20) if number != 7]
    of_k0 = [number for number in without if number != 8]
    assert dict(journal.of) == dict.fromkeys(KEYS, without) | {"k0": of_k0}
    assert calls == Counter(dict.fromkeys(KEYS, 3))
    assert await end_offsets(cluster, topic) == (20 * len(KEYS),) * 2
    dead = [
        record
        for client in cluster.clients.values()
        for pulled in (await client.pull(f"%DLQ%{GROUP}")).queues
        for record in pulled.records.records
    ]
    assert Counter(record.ordering_key for record in dead) == Counter([*KEYS, "k0"])
    assert {record.retry.error for record in dead} == {"ValueError: never", "useless"}
    assert {record.attempt for record in dead if record.body == b"7"} == {3}


async def test_keys_of_one_queue_run_side_by_side(cluster, topic) -> None:
    async with Producer(cluster.nameserver) as producer:
        places = defaultdict(list)
        for number in range(64):
            receipt = await producer.send(topic, b"0", ordering_key=f"k{number}")
            places[receipt.broker, receipt.queue].append(f"k{number}")
    together = next(keys for keys in places.values() if len(keys) > 1)[:2]
    meeting = threading.Barrier(2)
    met = []

    def receive(message) -> None:
        if message.ordering_key in together:
            meeting.wait(60)
            met.append(message.ordering_key)

    async with member(cluster, topic, receive, "key"):
        await until(lambda: len(met) == 2)


@orders
async def test_a_queue_is_handed_over_only_when_its_callback_has_ended(
    cluster, topic, order
) -> None:
    """Although that takes longer than a release waits otherwise."""
    entered, leave = threading.Event(), threading.Event()
    calls: list[tuple[str, bytes]] = []

    def slow(message) -> None:
        calls.append(("slow", message.body))
        entered.set()
        leave.wait(60)

    def quick(message) -> None:
        calls.append(("quick", message.body))

    async with Producer(cluster.nameserver) as producer:
        await producer.send(topic, b"1", ordering_key="key")
        await producer.send(topic, b"2", ordering_key="key")
    first = member(cluster, topic, slow, order, threads=1, release_timeout_s=0.01)
    await first.start()
    await until(entered.is_set)
    async with member(cluster, topic, quick, order) as second:
        # All that it shall have, but perhaps the busy one: queues do not wait for one another.
        await until(lambda: len(second.queues) >= 3)
        closing = asyncio.create_task(first.close())
        await asyncio.sleep(0.1)
        assert calls == [("slow", b"1")]
        leave.set()
        await closing
        await until(lambda: calls[-1][1] == b"2")
    assert calls == [("slow", b"1"), ("quick", b"2")]


def sessions(cluster: Cluster) -> list[tuple[str, str]]:
    """Group and member of each stream that is heard."""
    return [key for broker in cluster.brokers.values() for key in broker._groups._sessions]


def pass_time(cluster: Cluster, time_ms: int) -> None:
    """For whoever coordinates."""
    for broker in cluster.brokers.values():
        groups, clock = broker._groups, broker._groups._clock
        groups._clock = lambda clock=clock: clock() + time_ms
        groups._earlier.set()


async def test_a_callback_that_hangs_at_close_keeps_its_queues_until_the_session_is_over(
    cluster, topic
) -> None:
    entered, leave = threading.Event(), threading.Event()
    received: list[bytes] = []

    def stuck(message) -> None:
        entered.set()
        leave.wait(60)

    async with Producer(cluster.nameserver) as producer:
        await producer.send(topic, b"1", ordering_key="key")

    def receive(message) -> None:
        received.append(message.body)

    first = member(
        cluster, topic, stuck, "key", threads=1, close_timeout_s=0.01, session_timeout_s=60
    )
    await first.start()
    await until(entered.is_set)
    async with member(cluster, topic, receive, "key", session_timeout_s=300) as last:
        await until(lambda: len(last.queues) >= 3)
        await first.close()
        assert received == []
        # Its last heartbeat may still be on its way: its session would be counted from there.
        await until(lambda: len(sessions(cluster)) == 1)
        pass_time(cluster, 61_000)
        leave.set()
        await until(lambda: received == [b"1"])


async def test_a_queue_that_ends_as_a_close_with_a_hanging_callback_ends_is_given_away(
    cluster, topic, monkeypatch
) -> None:
    """Also where its coordinator is not quick: the stream ends behind what was told."""
    monkeypatch.setattr(push, "LEAVE_TIMEOUT_S", 60.0)
    let_go = CoordinatorServicer._let_go

    async def slow(servicer, *released):
        await until(lambda: first._share._membership._standing.left)
        await asyncio.sleep(0.05)
        await let_go(servicer, *released)

    monkeypatch.setattr(CoordinatorServicer, "_let_go", slow)
    gates = {b"stuck": threading.Event(), b"late": threading.Event()}
    entered: set[bytes] = set()

    def receive(message) -> None:
        entered.add(message.body)
        gates[message.body].wait(60)

    stuck, late = (MessageQueue(topic, "b0", number) for number in (0, 1))
    for queue, body in ((stuck, b"stuck"), (late, b"late")):
        await cluster.send(topic, [body], broker="b0", queue_id=queue.queue_id)
    limits = {"close_timeout_s": 0.01, "session_timeout_s": 300}
    first = member(cluster, topic, receive, "queue", threads=2, **limits)
    await first.start()
    await until(lambda: entered == gates.keys())
    share = first._share
    commit = share._committer.commit

    async def last(holdings):
        sources = {each.queue: each.source for each in holdings}
        if sources.keys() >= {stuck, late}:
            await until(lambda: not share._holdings._wanted)  # they hear that it leaves
            gates[b"late"].set()
            await share._dispatcher.quiet(sources[late])
        return await commit(holdings)

    share._committer.commit = last
    try:
        await first.close()
        async with member(cluster, topic, receive, "queue", session_timeout_s=300) as second:
            await until(lambda: late in second.queues)
            assert stuck not in second.queues
    finally:
        gates[b"stuck"].set()


async def test_a_queue_that_is_fenced_and_taken_over_again_keeps_its_order(cluster, topic) -> None:
    journal, dice = Journal(), iter(range(1_000))

    async def fence() -> None:
        """As an operator's reset does: generations go up, offsets stay."""
        generation = GENERATION_MARKS * (2_000_000_000_000 + 1_000 * next(dice))  # in 2033
        for name, client in cluster.clients.items():
            request = broker_pb2.AcquireQueuesRequest(
                group=GROUP, member_id="other", generation=generation
            )
            for queue_id in range(4):
                request.queues.add(topic=topic, broker=name, queue_id=queue_id)
            request.start_from = broker_pb2.EARLIEST
            await client.broker.AcquireQueues(request)

    async with member(cluster, topic, journal.receive, "key", commit_interval_s=0.02) as consumer:
        for first in range(0, 100, 10):
            await send(cluster, topic, range(first, first + 10))
            await fence()
            await until(lambda: len(consumer.queues) == 8)
        await until(lambda: all(99 in journal.of[key] for key in KEYS))
    journal.check(range(100))
