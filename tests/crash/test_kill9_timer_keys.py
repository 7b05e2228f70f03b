"""kill -9 of the timer shard, its replicas and brokers while owners of timer keys are at work.

Each answer holds: what was replaced or cancelled is never delivered, all else exactly once, never
early.  CRASH_ROUNDS and CRASH_SEED as in test_kill9_timers.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest

from duemq.aio import Producer
from duemq.settings import ClientSettings, ProducerSettings
from tests.crash.keyed_owners import Owner, check_end
from tests.crash.test_kill9_timer_replicas import ReplicatedCluster
from tests.crash.test_kill9_timers import ROUNDS, SEED, disturb
from tests.crash.timer_cluster import END_TIMEOUT_S, TimerCluster

OWNERS = 6
STEPS = 60
KILLS = 3
LONG, LESS = pytest.mark.long, ("timer", "sleepers")
SETTINGS = ProducerSettings(
    send_timeout_s=END_TIMEOUT_S, client=ClientSettings(request_timeout_s=END_TIMEOUT_S)
)

C = TypeVar("C", bound=TimerCluster)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(params=range(ROUNDS))
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TimerCluster]:
    async for running in started(TimerCluster(tmp_path, SEED + request.param)):
        yield running


@pytest.fixture(params=range(ROUNDS))
async def replicated(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[ReplicatedCluster]:
    async for running in started(ReplicatedCluster(tmp_path, SEED + request.param)):
        yield running


async def started(running: C) -> AsyncIterator[C]:
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


@pytest.mark.parametrize("victims", [*(pytest.param(each, marks=LONG) for each in LESS), "both"])
async def test_answers_about_keys_hold(cluster: TimerCluster, victims: str) -> None:
    async with Producer(cluster.nameserver.address, settings=SETTINGS) as producer:
        owners = owners_of(cluster, producer)
        work = (owner.work(STEPS) for owner in owners)
        await asyncio.gather(disturb(cluster, victims), *work)
        await asyncio.gather(*(owner.hurry() for owner in owners))
    await check_end(cluster, owners)


@pytest.mark.long
@pytest.mark.parametrize("what", ["leader", "sleeper", "hand-over"])
async def test_answers_about_keys_hold_with_replicas(
    replicated: ReplicatedCluster, what: str
) -> None:
    async with Producer(replicated.nameserver.address, settings=SETTINGS) as producer:
        owners = owners_of(replicated, producer)
        work = [asyncio.create_task(owner.work(STEPS)) for owner in owners]
        for _ in range(KILLS):
            await asyncio.sleep(replicated.random.uniform(0.1, 1.2))
            await replicated.disturb(what)
        await asyncio.gather(*work)
        await asyncio.gather(*(owner.hurry() for owner in owners))
    await check_end(replicated, owners)


def owners_of(cluster: TimerCluster, producer: Producer) -> list[Owner]:
    print(f"CRASH_SEED={SEED}")
    return [Owner(f"o{n}", producer, Random(f"{SEED}-{n}")) for n in range(OWNERS)]
