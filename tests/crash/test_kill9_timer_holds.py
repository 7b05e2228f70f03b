"""kill -9 of the timer shard, or of the replica that leads, while messages are held and resumed.

What was held when it was sent is not delivered before somebody asks for its end, whatever dies
meanwhile; then it is, once.  Owners of other keys are at work all the while.  CRASH_ROUNDS and
CRASH_SEED as in test_kill9_timers.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from duemq.aio import Admin, Producer
from duemq.descriptions import HeldTimers
from duemq.errors import DuemqError
from tests.crash.keyed_owners import Owner, check_end
from tests.crash.test_kill9_timer_keys import (  # noqa: F401  (fixtures)
    KILLS,
    SETTINGS,
    cluster,
    owners_of,
    replicated,
)
from tests.crash.test_kill9_timer_replicas import ReplicatedCluster
from tests.crash.test_kill9_timers import disturb as disturb_shard
from tests.crash.timer_cluster import END_TIMEOUT_S, RETRY_S, TOPIC, TimerCluster

HOLDS = 8
SENT = 5  # while a hold is in force
STEPS = 40

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class Holder(Owner):
    """Holds, sends what is due at once, and looks whether any of it is delivered."""

    def __init__(self, running: TimerCluster, admin: Admin, producer: Producer) -> None:
        super().__init__("holder", producer, running.random)
        self._cluster, self._admin = running, admin

    async def work(self, steps: int) -> None:
        for number in range(steps):
            prefix = f"h{number}/" if number % 2 else ""
            await self._repeat(partial(self._admin.hold_timers, TOPIC, key_prefix=prefix))
            for n in range(SENT):
                name = f"h{number}/{n}"
                await self._producer.send(TOPIC, name.encode(), timer_key=name, delay=0)
                self.fates[name.encode()] = "waits"
                self.stored += 1
            await asyncio.sleep(self._random.uniform(0, 0.6))
            found, _ = await self._cluster.delivered()
            assert not [body for body in found if body.startswith(f"h{number}/".encode())]
            await self._repeat(partial(self._admin.resume_timers, TOPIC, key_prefix=prefix))

    async def _repeat(self, ask: Callable[[], Awaitable[HeldTimers]]) -> None:
        """Until all shards have answered."""
        async with asyncio.timeout(END_TIMEOUT_S):
            while True:
                try:
                    await ask()
                    return
                except DuemqError:
                    await asyncio.sleep(RETRY_S)


async def disturb(running: TimerCluster) -> None:
    if not isinstance(running, ReplicatedCluster):
        await disturb_shard(running, "timer")
        return
    for _ in range(KILLS):
        await asyncio.sleep(running.random.uniform(0.1, 1.2))
        await running.disturb("leader")


async def test_what_is_held_waits_and_then_comes_once(cluster: TimerCluster) -> None:  # noqa: F811
    await hold_and_resume(cluster)


@pytest.mark.long
async def test_with_replicas_too(replicated: ReplicatedCluster) -> None:  # noqa: F811
    await hold_and_resume(replicated)


async def hold_and_resume(running: TimerCluster) -> None:
    address = running.nameserver.address
    async with (
        Producer(address, settings=SETTINGS) as producer,
        Admin(address, settings=SETTINGS.client) as admin,
    ):
        holder, owners = Holder(running, admin, producer), owners_of(running, producer)
        work = [owner.work(STEPS) for owner in owners]
        await asyncio.gather(disturb(running), holder.work(HOLDS), *work)
        await asyncio.gather(*(owner.hurry() for owner in owners))
    await check_end(running, [holder, *owners])
