"""Random faults while messages are sent: each is stored once, those of a key in order."""

import asyncio
import random

import pytest

from duemq import aio
from duemq.settings import ProducerSettings
from duemq.v1 import error_pb2
from tests.service.fake_cluster import FakeBroker, FakeCluster, refusal
from tests.service.running_cluster import until

MESSAGES = 1_500
KEYS = 7
RETRYABLE = [error_pb2.OVERLOADED, error_pb2.READ_ONLY, error_pb2.NOT_READY]


class Trouble:
    """Breaks things by a seeded die until it is told to stop."""

    def __init__(self, cluster: FakeCluster, seed: int) -> None:
        self.dice = random.Random(seed)
        self.brokers = list(cluster.brokers.values())
        for broker in self.brokers:
            broker.refuse = broker.refuse_unseen = self.refuse

    def refuse(self, batch):
        if self.dice.random() < 0.1:
            return refusal(self.dice.choice(RETRYABLE), retryable=True)
        return None

    async def make(self, rounds: int) -> None:
        for _ in range(rounds):
            broker = self.dice.choice(self.brokers)
            faults = [self.lose, self.restart, self.stall, self.vanish]
            await self.dice.choice(faults)(broker)
            await asyncio.sleep(self.dice.random() / 50)

    async def lose(self, broker: FakeBroker) -> None:
        broker.lose_answers = self.dice.randint(1, 3)

    async def restart(self, broker: FakeBroker) -> None:
        await broker.stop()
        await broker.start()

    async def vanish(self, broker: FakeBroker) -> None:
        """Long enough away for the nameservers to forget it."""
        broker.cluster.gone.add(broker.name)
        broker.cluster.push()
        await self.restart(broker)
        await asyncio.sleep(self.dice.random() / 50)
        broker.cluster.gone.discard(broker.name)
        broker.cluster.push()

    async def stall(self, broker: FakeBroker) -> None:
        broker.gate.clear()
        await asyncio.sleep(self.dice.random() / 50)
        broker.gate.set()


@pytest.mark.parametrize("seed", range(6))
async def test_each_message_is_stored_once_and_keys_keep_their_order(seed):
    cluster = FakeCluster()
    await cluster.start("a", "b")
    cluster.topic("t")
    trouble = Trouble(cluster, seed)
    settings = ProducerSettings(frame_bytes=2_000, buffer_bytes=50_000)
    async with aio.Producer(cluster.nameserver, settings=settings) as producer:
        making = asyncio.create_task(trouble.make(rounds=12))
        pending = []
        for number in range(MESSAGES):
            key = number % (KEYS + 1)
            ordering_key = f"k{key}" if key < KEYS else None
            body = b"%d/%d" % (key, number)
            await producer.ready("t")
            pending.append(producer.submit("t", body, ordering_key=ordering_key))
        await making
        receipts = [await each for each in pending]
    try:
        stored = [body for broker in trouble.brokers for body in broker.bodies("t")]
        assert len(stored) == len(set(stored)) == MESSAGES
        for key in range(KEYS):
            mine = receipts[key :: KEYS + 1]
            assert len({(receipt.broker, receipt.queue) for receipt in mine}) == 1
            assert [r.offset for r in mine] == sorted(r.offset for r in mine)
        for number, receipt in enumerate(receipts):
            queue = cluster.brokers[receipt.broker].stored["t", receipt.queue]
            assert queue[receipt.offset] == b"%d/%d" % (number % (KEYS + 1), number)
    finally:
        await cluster.stop()


async def test_a_broker_that_is_where_another_one_was_is_not_taken_for_that():
    """It has other batches under the same numbers, and would be believed that these are stored."""
    cluster = FakeCluster()
    await cluster.start("a", "b")
    a, b = cluster.brokers.values()
    b.topics["t"] = 1
    async with aio.Producer(cluster.nameserver) as producer:
        bodies = [b"%d" % number for number in range(20)]
        for body in bodies[:10]:
            await producer.send("t", body)
        cluster.topic("t", queues=1)  # at both, and at the one with numbers that the other had
        for body in bodies[10:]:
            await producer.send("t", body)
        await a.stop()
        await b.stop()
        seen = len(b.requests)
        elsewhere, b.address = b.address, a.address
        await b.start()
        more = [b"%d" % number for number in range(20, 24)]
        sends = [asyncio.create_task(producer.send("t", body)) for body in more]
        await until(lambda: len(b.requests) > seen)
        a.address = elsewhere
        await a.start()
        cluster.push()
        await asyncio.gather(*sends)
    stored = [body for broker in (a, b) for some in broker.stored.values() for body in some]
    await cluster.stop()
    assert set(stored) == {*bodies, *more}
