"""kill -9 of timer service and brokers at any moment: delivered exactly once, never early.

Every message that a broker acknowledged is in the topic once, at one of the brokers, and not before
it was due; unless its cancel was answered CANCELLED: then it is nowhere, ever.
CRASH_ROUNDS sets how often each case is repeated, CRASH_SEED when the processes are killed.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.crash.timer_cluster import TimerCluster

ROUNDS = int(os.environ.get("CRASH_ROUNDS", "1"))
SEED = int(os.environ.get("CRASH_SEED", str(random.randrange(1 << 32))))
KILLS = 4
BATCHES = 40
LONG = pytest.mark.long
VICTIMS = (
    pytest.param("timer", marks=LONG),
    pytest.param("broker", marks=LONG),
    "both",
    pytest.param("sleepers", marks=LONG),
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(params=range(ROUNDS))
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TimerCluster]:
    seed = SEED + request.param
    print(f"CRASH_SEED={seed}")
    running = TimerCluster(tmp_path, seed)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


async def disturb(cluster: TimerCluster, victims: str) -> None:
    for _ in range(KILLS):
        await asyncio.sleep(cluster.random.uniform(0.1, 1.2))
        broker = cluster.random.choice(cluster.brokers)
        members = {
            "timer": [cluster.timer],
            "broker": [broker],
            "both": [cluster.timer, broker],
        }
        if victims == "sleepers":
            await cluster.sleep(*members[cluster.random.choice(sorted(members))])
        else:
            await cluster.restart(*members[victims])


@pytest.mark.parametrize("victims", VICTIMS)
async def test_every_accepted_message_is_delivered_once(
    cluster: TimerCluster, victims: str
) -> None:
    over = asyncio.Event()
    cancels = asyncio.create_task(cluster.cancel_some(over))
    senders = [
        cluster.send(broker, BATCHES, producer_id, queue_id)
        for broker in cluster.brokers
        for producer_id, queue_id in ((1, -1), (2, 0))
    ]
    await asyncio.gather(disturb(cluster, victims), *senders)
    over.set()
    await cancels

    await cluster.check_end()
