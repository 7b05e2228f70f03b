"""A timer shard that sleeps is given up, and wakes beside its successor.

It holds what it had taken over, and finds in its sockets what it was to fetch, fire and commit.
What it had fired within the last second or so before it slept may come twice, and what it holds is
lost ("A lost data directory" in timer_service/README.md).  All else comes once: a broker takes
nothing of it any more.  CRASH_ROUNDS sets how often this is repeated, CRASH_SEED when it sleeps.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from duemq.errors import InvalidArgument
from duemq.transport import channel, status
from duemq.v1 import stubs, timer_admin_pb2
from tests.crash.test_kill9_timers import ROUNDS, SEED
from tests.crash.timer_cluster import Member, TimerCluster
from tests.service.running_cluster import until

BATCHES = 40
REFUSED = "was released by an operator"

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(300)]


class SucceededCluster(TimerCluster):
    """Its brokers let a timer service be given up when it was silent for a second."""

    broker_module = "tests.crash.impatient_broker"

    async def start_timers(self, common: tuple[str, ...]) -> None:
        await super().start_timers(common)
        self._common, self.sleeper = common, self.timer

    async def succeed(self) -> None:
        """Gives the first one up; another data directory under the same name gets its queues."""
        formers = {id for broker in self.brokers for id in await self._owners(broker)}
        for broker in self.brokers:
            for id in formers:
                await until(lambda broker=broker, id=id: self._is_released(broker, id))
        folder = self._directory / "t2"
        data = ("--name", "t1", "--data-dir", str(folder), "--near-window", "2")
        self.timer = Member("duemq_server.timer_service", folder, *data, *self._common)
        await self.timer.start()
        for broker in self.brokers:
            await until(lambda broker=broker: self._has_others(broker, formers))

    async def _owners(self, broker: Member) -> set[int]:
        """Ids; 0: a queue is nobody's."""
        async with channel.connect(broker.address) as connection:
            stub = stubs.TimerAdminStub(connection)
            request = timer_admin_pb2.ListTimerOwnersRequest()
            return {each.owner.id for each in (await stub.ListTimerOwners(request)).queues}

    async def _is_released(self, broker: Member, id: int) -> bool:
        async with channel.connect(broker.address) as connection:
            stub = stubs.TimerAdminStub(connection)
            request = timer_admin_pb2.ReleaseTimerQueuesRequest(id=id)
            try:
                await status.answer(stub.ReleaseTimerQueues(request))
            except InvalidArgument as error:
                if "stop it first" not in str(error):
                    raise
                return False
            return True

    async def _has_others(self, broker: Member, formers: set[int]) -> bool:
        return (await self._owners(broker)).isdisjoint({0, *formers})

    async def says_that_it_is_refused(self) -> bool:
        return REFUSED in (self._directory / "t1" / "stderr").read_text()

    async def send_all(self, producer_ids: Iterable[int]) -> set[bytes]:
        """What was sent by producers of these ids, to each broker."""
        before = set(self.history.accepted)
        lanes = [(broker, id) for broker in self.brokers for id in producer_ids]
        await asyncio.gather(*(self.send(broker, BATCHES, id, id % 2) for broker, id in lanes))
        return set(self.history.accepted) - before

    async def stop(self) -> None:
        await asyncio.gather(super().stop(), self.sleeper.stop())


@pytest.fixture(params=range(ROUNDS))
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[SucceededCluster]:
    seed = SEED + request.param
    print(f"CRASH_SEED={seed}")
    running = SucceededCluster(tmp_path, seed)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


async def test_what_comes_after_a_shard_was_given_up_comes_once(cluster: SucceededCluster) -> None:
    first = asyncio.create_task(cluster.send_all((1, 2, 3)))
    count = cluster.random.randrange(1_000)
    await until(lambda: len(cluster.history.accepted) > count)
    cluster.sleeper.send_signal(signal.SIGSTOP)
    await first
    later = await cluster.send_all((4, 5))
    given_up_ms = time.time_ns() // 1_000_000
    await cluster.succeed()
    cluster.sleeper.send_signal(signal.SIGCONT)
    await until(cluster.says_that_it_is_refused)
    later |= await cluster.send_all((6, 7))

    async def all_came() -> bool:
        stats = await cluster.stats()
        idle = stats is not None and not stats.pending and not stats.in_flight
        return idle and later <= (await cluster.delivered())[0].keys()

    await until(all_came)
    stored = defaultdict(list)
    for each, store_ms in await cluster.stored():
        assert store_ms >= each.due_ms
        stored[each.body].append(store_ms)
    twice = {body for body, times in stored.items() if len(times) > 1}
    assert not twice & later
    assert [body for body in twice if min(stored[body]) >= given_up_ms] == []
    assert max(map(len, stored.values())) <= 2
