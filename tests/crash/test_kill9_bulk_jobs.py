"""kill -9 of the timer shard while jobs shift and cancel what is pending: each timer once.

CRASH_ROUNDS and CRASH_SEED as in test_kill9_timers.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq.errors import DuemqError
from duemq.transport import channel, status
from duemq.v1 import timer_pb2, timer_pb2_grpc
from tests.crash.test_kill9_timers import ROUNDS, SEED
from tests.crash.timer_cluster import CALL_TIMEOUT_S, RETRY_S, TOPIC, TimerCluster
from tests.service.running_broker import batch

TIMERS = 6_000
BATCH = 500
HOUR_MS = 3_600_000
JOBS = 4

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(params=range(ROUNDS))
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TimerCluster]:
    running = TimerCluster(tmp_path, SEED + request.param)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


async def change(
    cluster: TimerCluster, request: timer_pb2.ChangePendingRequest
) -> timer_pb2.ChangePendingResponse:
    """Asked until it is over."""
    while True:
        try:
            async with channel.connect(cluster.timer.address) as connection:
                stub = timer_pb2_grpc.TimerStub(connection)
                answer = await status.answer(stub.ChangePending(request, timeout=CALL_TIMEOUT_S))
        except DuemqError:
            await asyncio.sleep(RETRY_S)
            continue
        if answer.over:
            return answer


def request_of(cluster: TimerCluster, **change: object) -> timer_pb2.ChangePendingRequest:
    request = timer_pb2.ChangePendingRequest(topic=TOPIC, **change)  # type: ignore[arg-type]
    request.request_id = cluster.random.randbytes(16)
    return request


async def test_each_job_touches_each_timer_once(cluster: TimerCluster) -> None:
    print(f"CRASH_SEED={SEED}")
    names = [f"m-{n}".encode() for n in range(TIMERS)]
    for sequence, at in enumerate(range(0, TIMERS, BATCH)):
        bodies = names[at : at + BATCH]
        # Those of the last batch are cancelled at the end.
        delay_ms = 9 * HOUR_MS if at + BATCH == TIMERS else HOUR_MS
        one = batch(
            TOPIC, bodies, producer_id=1, sequence=sequence, delays_ms=[delay_ms] * len(bodies)
        )
        await cluster._send_until_stored(cluster.brokers[0], one)
    await until_accepted(cluster)
    asked = []
    for n in range(JOBS):
        sooner = n == JOBS - 1
        request = request_of(cluster, shift_ms=-(HOUR_MS + (JOBS - 1) * 1000) if sooner else 1000)
        job = asyncio.create_task(change(cluster, request))
        await asyncio.sleep(cluster.random.uniform(0, 0.4))
        await cluster.restart(cluster.timer)
        answer = await job
        assert answer.count == TIMERS
        asked.append(request)
    for request in asked:
        assert (await change(cluster, request)).count == TIMERS
    rest = request_of(cluster, cancel=True)
    job = asyncio.create_task(change(cluster, rest))
    await cluster.restart(cluster.timer)
    cancelled = (await job).count
    stats = await cluster.settled()
    found, wrong = await cluster.delivered()
    assert not wrong
    assert set(found.values()) == {1}
    assert BATCH <= cancelled == stats.cancelled
    assert len(found) == TIMERS - cancelled == stats.fired
    assert set(names[-BATCH:]).isdisjoint(found)
    assert (stats.replaced, stats.accepted) == (JOBS * TIMERS, (JOBS + 1) * TIMERS)


async def until_accepted(cluster: TimerCluster) -> None:
    while True:
        stats = await cluster.stats()
        if stats is not None and stats.accepted == TIMERS:
            return
        await asyncio.sleep(RETRY_S)
