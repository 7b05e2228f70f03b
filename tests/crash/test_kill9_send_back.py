"""kill -9 of a real broker while groups send messages back.

What was acknowledged lies in %TIMER% or %DLQ% exactly once and is settled; what was not is there
and settled, or neither; and a consumer that repeats whatever it has no answer for gets all of it
stored once.  CRASH_ROUNDS and CRASH_SEED as in test_kill9_broker.py.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest

from duemq.errors import TopicNotFound
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.transport import channel, status
from duemq.v1 import broker_pb2, message_pb2
from duemq_server.storage import frame, record
from tests.crash.test_kill9_broker import ROUNDS, SEED, BrokerProcess
from tests.service.played_timer import claim_queues
from tests.service.running_broker import Client, batch

TOPIC = "orders"
KILLS = 3
GROUPS = ("billing", "mail")
MESSAGES = 4_000
REQUEST_MESSAGES_MAX = 12


class Group:
    """One group whose consumers fail at everything, each message once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.randomness = random.Random(f"{SEED}-{name}")
        self.next = 0
        self.acknowledged: set[int] = set()
        self.asked: set[int] = set()
        self.committed = 0

    def message(self, offset: int) -> broker_pb2.FailedMessage:
        """The same however often it is sent."""
        dead_letter = offset % 3 == 0
        return broker_pb2.FailedMessage(
            topic=TOPIC, offset=offset, dead_letter=dead_letter, error=f"failed at {offset}"
        )

    async def send_back(self, client: Client, offsets: list[int]) -> None:
        self.asked |= set(offsets)
        request = broker_pb2.SendBackRequest(
            group=self.name, messages=[self.message(offset) for offset in offsets]
        )
        answer = await client.broker.SendBack(request, timeout=30)
        assert not any(each.HasField("error") for each in answer.results), answer
        self.acknowledged |= set(offsets)

    async def consume(self, client: Client) -> None:
        """Until the broker is gone."""
        with suppress(grpc.aio.AioRpcError):
            while self.next < MESSAGES:
                count = self.randomness.randint(1, REQUEST_MESSAGES_MAX)
                offsets = list(range(self.next, min(self.next + count, MESSAGES)))
                self.next = offsets[-1] + 1
                # Two requests at the same time with the same messages: stored once.
                await asyncio.gather(
                    self.send_back(client, offsets), self.send_back(client, offsets[::-1])
                )
                if self.randomness.random() < 0.2:
                    await self.commit(client, offsets[0])

    async def commit(self, client: Client, offset: int) -> None:
        commit = broker_pb2.OffsetCommit(topic=TOPIC, offset=offset)
        request = broker_pb2.CommitOffsetsRequest(group=self.name, commits=[commit])
        await client.broker.CommitOffsets(request, timeout=30)
        self.committed = offset

    async def check(self, client: Client) -> None:
        stored = await self.stored(client)
        assert not stored or max(stored.values()) == 1
        assert self.acknowledged <= set(stored) <= self.asked
        offset, settled = await self.progress(client)
        assert offset >= self.committed
        assert settled == {each for each in stored if each >= offset}
        for each in sorted(self.asked - self.acknowledged):
            await self.send_back(client, [each])
        assert await self.stored(client) == Counter(self.asked)

    async def progress(self, client: Client) -> tuple[int, set[int]]:
        request = broker_pb2.GetOffsetsRequest(group=self.name, topic=TOPIC)
        result, *_ = (await status.answer(client.broker.GetOffsets(request))).queues
        return max(result.offset, 0), set(result.settled)

    async def stored(self, client: Client) -> Counter[int]:
        """Source offsets of the records in %TIMER% and %DLQ%."""
        found: Counter[int] = Counter()
        for records in await timed_records(client, f"%RETRY%{self.name}"):
            found.update(each.retry.source_offset for each in records)
        offset = 0
        with suppress(TopicNotFound):
            while True:
                answer = await client.pull(f"%DLQ%{self.name}", offset=offset)
                if not answer.queues:
                    break
                [queue] = answer.queues
                if queue.HasField("error"):
                    raise status.from_proto(queue.error)
                found.update(each.retry.source_offset for each in queue.records.records)
                offset = queue.next_offset
        return found


async def timed_records(client: Client, target: str) -> list[list[message_pb2.Record]]:
    await claim_queues(client, 1)
    found = []
    offset = 0
    while True:
        request = broker_pb2.FetchFramesRequest(
            topic="%TIMER%", offset=offset, timer_id=SERVICE_IDS_FROM
        )
        answer = await status.answer(client.broker.FetchFrames(request))
        at = 0
        while at < len(answer.frames):
            entry = record.decode(memoryview(answer.frames), at)
            timed = frame.decode(bytes(entry.body))
            assert timed.send_back
            if timed.target_topic == target:
                batch_of = message_pb2.RecordBatch.FromString(bytes(timed.payload))
                found.append(list(batch_of.records))
            at += entry.end - entry.position
        if answer.next_offset == offset:
            return found
        offset = answer.next_offset


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[BrokerProcess]:
    made = BrokerProcess(tmp_path, "--timer-queues", "1")
    yield made
    if made.status is None:
        await made.kill()


@pytest.mark.cluster
@pytest.mark.parametrize("round", range(ROUNDS))
async def test_kill9_keeps_messages_and_what_is_settled_together(
    broker: BrokerProcess, round: int
) -> None:
    print(f"CRASH_SEED={SEED}")
    randomness = random.Random(f"{SEED}-{round}")
    groups = [Group(name) for name in GROUPS]
    await broker.start()
    async with channel.connect(broker.address) as connection:
        for number in range(0, MESSAGES, 500):
            bodies = [b"%d" % n for n in range(number, number + 500)]
            await Client(connection).send(batch(TOPIC, bodies))
    for _ in range(KILLS):
        async with channel.connect(broker.address) as connection:
            client = Client(connection)
            consuming = [asyncio.create_task(group.consume(client)) for group in groups]
            await asyncio.sleep(randomness.uniform(0.05, 0.6))
            await broker.kill()
            await asyncio.gather(*consuming)
        await broker.start()
        assert broker.address, broker.log
        async with channel.connect(broker.address) as connection:
            for group in groups:
                await group.check(Client(connection))
    assert sum(len(group.acknowledged) for group in groups)
