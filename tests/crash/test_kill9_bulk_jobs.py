"""kill -9 and failover of a shard while jobs shift and cancel what is pending: each timer once.

Of a shard alone, and of one of three replicas whose leader dies, or hands over.  What a job answers
in the end is what happened: each timer that it shifted is due so much later, or sooner, and is
delivered once; one that it cancelled is nowhere.
CRASH_ROUNDS and CRASH_SEED as in test_kill9_timers.py; with more rounds jobs are disturbed more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq.errors import DuemqError
from duemq.transport import channel, status
from duemq.v1 import stubs, timer_inspector_pb2, timer_pb2
from tests.crash.test_kill9_timer_replicas import ReplicatedCluster
from tests.crash.test_kill9_timers import ROUNDS, SEED
from tests.crash.timer_cluster import CALL_TIMEOUT_S, RETRY_S, TOPIC, TimerCluster
from tests.service.running_broker import batch

TIMERS = 8_000
BATCH = 500
HOUR_MS = 3_600_000
KILLS = 2 if ROUNDS == 1 else 5  # of a shard while a job goes on
LONG = pytest.mark.long
VICTIMS = (pytest.param("alone", marks=LONG), pytest.param("leader", marks=LONG), "hand-over")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(params=range(ROUNDS))
def seed(request: pytest.FixtureRequest) -> int:
    return SEED + int(request.param)


@pytest.fixture
async def cluster(what: str, seed: int, tmp_path: Path) -> AsyncIterator[TimerCluster]:
    print(f"CRASH_SEED={seed}")
    running = (TimerCluster if what == "alone" else ReplicatedCluster)(tmp_path, seed)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


class Jobs:
    """Asks for jobs, and disturbs the shard meanwhile; knows when each timer must be due."""

    def __init__(self, cluster: TimerCluster, what: str) -> None:
        self.due_ms: dict[bytes, int] = {}
        self.cancelled: set[bytes] = set()
        self._cluster = cluster
        self._what = what
        self._asked: list[tuple[timer_pb2.ChangePendingRequest, int]] = []

    async def send(self, names: list[bytes], delay_ms: int) -> None:
        for at in range(0, len(names), BATCH):
            bodies = names[at : at + BATCH]
            delays = [delay_ms + 7 * n for n in range(len(bodies))]
            one = batch(
                TOPIC, bodies, producer_id=1, sequence=len(self.due_ms) // BATCH, delays_ms=delays
            )
            result, _ = await self._cluster._send_until_stored(self._cluster.brokers[0], one)
            self.due_ms |= zip(bodies, result.due_ms, strict=True)

    async def shift(self, by_ms: int) -> None:
        await self._run(timer_pb2.ChangePendingRequest(shift_ms=by_ms), len(self.due_ms))
        self.due_ms = {body: due_ms + by_ms for body, due_ms in self.due_ms.items()}

    async def cancel_from(self, from_ms: int) -> None:
        gone = {body for body, due_ms in self.due_ms.items() if due_ms >= from_ms}
        await self._run(timer_pb2.ChangePendingRequest(cancel=True, from_ms=from_ms), len(gone))
        self.cancelled |= gone
        self.due_ms = {body: at for body, at in self.due_ms.items() if body not in gone}

    async def ask_again(self) -> None:
        """Each answer is what it was."""
        for request, count in self._asked:
            assert (await self._change(request)).count == count

    async def listed(self) -> dict[bytes, int]:
        """Due times of what waits, by body."""
        found: dict[bytes, int] = {}
        request = timer_inspector_pb2.ListTimersRequest(topic=TOPIC, limit=1_000, with_bodies=True)
        while True:
            leader = await self._cluster.leader()
            try:
                async with channel.connect(leader.address) as connection:
                    stub = stubs.TimerInspectorStub(connection)
                    page = await status.answer(stub.ListTimers(request, timeout=CALL_TIMEOUT_S))
            except DuemqError:
                await asyncio.sleep(RETRY_S)
                continue
            for each in page.timers:
                assert each.record.body not in found
                found[each.record.body] = each.handle.due_ms
            if not page.token:
                return found
            request.token = page.token

    async def _run(self, request: timer_pb2.ChangePendingRequest, count: int) -> None:
        request.topic, request.request_id = TOPIC, self._cluster.random.randbytes(16)
        job = asyncio.create_task(self._change(request))
        for _ in range(KILLS if self._what == "alone" else KILLS - 1):
            await asyncio.sleep(self._cluster.random.uniform(0, 0.4))
            await self._disturb()
        assert (await job).count == count
        self._asked.append((request, count))

    async def _disturb(self) -> None:
        if isinstance(self._cluster, ReplicatedCluster):
            await self._cluster.disturb(self._what)
        else:
            await self._cluster.restart(self._cluster.timer)

    async def _change(
        self, request: timer_pb2.ChangePendingRequest
    ) -> timer_pb2.ChangePendingResponse:
        """Asked until it is over."""
        while True:
            leader = await self._cluster.leader()
            try:
                async with channel.connect(leader.address) as connection:
                    stub = stubs.TimerStub(connection)
                    call = stub.ChangePending(request, timeout=CALL_TIMEOUT_S)
                    answer = await status.answer(call)
            except DuemqError:
                await asyncio.sleep(RETRY_S)
                continue
            if answer.over:
                return answer


@pytest.mark.parametrize("what", VICTIMS)
async def test_jobs_do_what_they_answer(cluster: TimerCluster, what: str) -> None:
    jobs = Jobs(cluster, what)
    half = TIMERS // 2
    names = [f"m-{n}".encode() for n in range(TIMERS)]
    await jobs.send(names[:half], HOUR_MS)
    await jobs.send(names[half:], 9 * HOUR_MS)
    await until_accepted(cluster)

    await jobs.shift(60_000)
    assert await jobs.listed() == jobs.due_ms
    await jobs.cancel_from(min(jobs.due_ms[each] for each in names[half:]))
    assert await jobs.listed() == jobs.due_ms
    await jobs.shift(-HOUR_MS - 60_000)
    stats = await cluster.settled()
    await jobs.ask_again()

    found, wrong = await cluster.delivered(jobs.due_ms)
    assert not wrong
    assert set(found.values()) == {1}
    assert found.keys() == jobs.due_ms.keys()
    assert jobs.cancelled == set(names[half:])
    assert (stats.fired, stats.cancelled, stats.replaced) == (half, half, TIMERS + half)
    assert stats.accepted == 2 * TIMERS + half


async def until_accepted(cluster: TimerCluster) -> None:
    while True:
        stats = await cluster.stats()
        if stats is not None and stats.accepted == TIMERS:
            return
        await asyncio.sleep(RETRY_S)
