"""kill -9 of timer shards and brokers while the number of shards changes: 1, 2, 4, 3 and 1 again.

Each message that a broker acknowledged is in the topic once, and not before it was due, unless its
cancel was answered CANCELLED: then it is nowhere.  Cancels go to any shard, whoever has the timer.
CRASH_ROUNDS sets how often this is repeated, CRASH_SEED when the processes are killed.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq.errors import DuemqError
from duemq.transport import channel, status
from duemq.v1 import (
    stubs,
    timer_admin_pb2,
    timer_inspector_pb2,
    timer_pb2,
)
from tests.crash.timer_cluster import CALL_TIMEOUT_S, END_TIMEOUT_S, RETRY_S, Member, TimerCluster

ROUNDS = int(os.environ.get("CRASH_ROUNDS", "1"))
SEED = int(os.environ.get("CRASH_SEED", str(random.randrange(1 << 32))))
NUMBERS = (2, 4, 3, 1)
BATCHES = 100
SUMMED = ("accepted", "pending", "fired", "cancelled", "in_flight")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class ShardedCluster(TimerCluster):
    """With a number of shards that changes."""

    async def start_timers(self, common: tuple[str, ...]) -> None:
        self._common = common
        self.shards = 1
        self.timers: list[Member] = []
        await self._add()

    @property
    def timer(self) -> Member:
        """Any of them."""
        return self.random.choice(self.timers)

    def _arguments(self, number: int) -> tuple[str, ...]:
        folder = self._directory / f"t{number}"
        data = ("--name", f"t{number}", "--data-dir", str(folder), "--near-window", "2")
        small = ("--memtable-rows-max", "64", "--checkpoint-interval", "0.3")
        place = ("--shard", str(number), "--shards", str(self.shards))
        return (*data, *small, *place, *self._common)

    async def _add(self) -> None:
        number = len(self.timers)
        member = Member(
            "duemq_server.timer_service", self._directory / f"t{number}", *self._arguments(number)
        )
        await member.start()
        self.timers.append(member)

    async def change(self, shards: int) -> None:
        """New ones first, then those that there are, each killed."""
        self.shards, before = shards, len(self.timers)
        while len(self.timers) < shards:
            await self._add()
        for number in self.random.sample(range(before), before):
            await asyncio.sleep(self.random.uniform(0, 0.3))
            await self.timers[number].stop()
            await self.timers[number].start(*self._arguments(number))
            if self.random.random() < 0.5:  # perhaps between hand-over and claim
                await asyncio.sleep(self.random.uniform(0, 0.2))
                disturb = self.random.choice((self.restart, self.sleep))
                await disturb(self.timer, self.random.choice(self.brokers))

    async def stop(self) -> None:
        members = (*self.timers, *self.brokers, self.nameserver)
        await asyncio.gather(*(member.stop() for member in members))

    async def stats(self) -> timer_pb2.TimerStats | None:
        summed = timer_pb2.TimerStats()
        for member in self.timers:
            try:
                async with channel.connect(member.address) as connection:
                    stub = stubs.TimerStub(connection)
                    call = stub.GetStats(timer_pb2.GetStatsRequest(), timeout=CALL_TIMEOUT_S)
                    found = await status.answer(call)
            except DuemqError:
                return None
            for name in SUMMED:
                setattr(summed, name, getattr(summed, name) + getattr(found, name))
        return summed

    async def counts(self) -> list[timer_inspector_pb2.TopicTimers]:
        summed: dict[str, timer_inspector_pb2.TopicTimers] = {}
        for member in self.timers:
            async with channel.connect(member.address) as connection:
                stub = stubs.TimerInspectorStub(connection)
                request = timer_inspector_pb2.CountTimersRequest()
                for each in (await status.answer(stub.CountTimers(request))).topics:
                    of = summed.setdefault(
                        each.topic, timer_inspector_pb2.TopicTimers(topic=each.topic)
                    )
                    for name in ("accepted", "pending", "fired", "cancelled", "lost"):
                        setattr(of, name, getattr(of, name) + getattr(each, name))
        return list(summed.values())

    async def owned(self) -> None:
        """Returns when each queue of %TIMER% is its shard's."""
        async with asyncio.timeout(END_TIMEOUT_S):
            while True:
                if all([await self._owned_at(broker) for broker in self.brokers]):
                    return
                await asyncio.sleep(RETRY_S)

    async def _owned_at(self, broker: Member) -> bool:
        async with channel.connect(broker.address) as connection:
            stub = stubs.TimerAdminStub(connection)
            try:
                answer = await status.answer(
                    stub.ListTimerOwners(
                        timer_admin_pb2.ListTimerOwnersRequest(), timeout=CALL_TIMEOUT_S
                    )
                )
            except DuemqError:
                return False
        return all(
            each.owner.id and each.owner.shard == each.queue_id % self.shards
            for each in answer.queues
        )


@pytest.fixture(params=range(ROUNDS))
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ShardedCluster]:
    seed = SEED + request.param
    print(f"CRASH_SEED={seed}")
    running = ShardedCluster(tmp_path, seed)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


@pytest.mark.long
async def test_every_accepted_message_is_delivered_once(cluster: ShardedCluster) -> None:
    over = asyncio.Event()

    async def change() -> None:
        for shards in NUMBERS:
            await cluster.change(shards)
            await cluster.owned()

    cancels = asyncio.create_task(cluster.cancel_some(over))
    senders = [
        cluster.send(broker, BATCHES, producer_id, queue_id)
        for broker in cluster.brokers
        for producer_id, queue_id in ((1, -1), (2, 0), (3, 1))
    ]
    await asyncio.gather(change(), *senders)
    over.set()
    await cancels
    assert len(cluster.timers) == 4

    await cluster.check_end()
