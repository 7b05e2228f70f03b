"""A replica of a timer shard that was deposed, and claims late, makes nothing fire twice.

While a shard's replicas are started with different numbers of shards, one of them, which leads,
means to hand a queue over.  It is stopped as its claim is on its way.  Another one, which knows of
no second shard, leads on, takes over what comes, and fires it.  Then the claim arrives, and says
how far the queue was taken over *before* that: whoever began there would fire the rest once more.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duemq.errors import DuemqError
from duemq.transport import status
from duemq.v1 import broker_pb2, stubs
from duemq_server.timer_service.edge import broker_link
from tests.service.replica_group import moved, patient_hand_overs
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_timer_replicas import TimerGroup, TimerMember, bodies
from tests.service.test_timer_service import HOUR_MS, TOPIC, running_shard, send

QUEUE = 1  # of %TIMER%; of two shards, the second one's


class Network:
    """What claims go through: some are lost on their way, and some wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loses = False
        """Those of two shards."""
        self.lost: list[broker_pb2.ClaimTimerQueuesRequest] = []
        self.open = asyncio.Event()  # for those of one shard
        self.open.set()
        monkeypatch.setattr(broker_link, "stubs", SimpleNamespace(BrokerStub=self._stub))

    def _stub(self, connection: Any) -> Any:
        stub = stubs.BrokerStub(connection)
        call = stub.ClaimTimerQueues

        async def claim(request: broker_pb2.ClaimTimerQueuesRequest, **how: Any) -> Any:
            if request.service.shards == 1:
                await self.open.wait()
            elif self.loses:
                self.lost.append(request)
                await asyncio.Event().wait()  # for good: its process is stopped meanwhile
            return await call(request, **how)

        stub.ClaimTimerQueues = claim
        return stub


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(monkeypatch)


@pytest.fixture
async def cluster(network: Network, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0", timer_queues=4) as running:
        await running.create_topic(TOPIC, queues=2)
        yield running


@pytest.fixture
async def group(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TimerGroup]:
    patient_hand_overs(monkeypatch)
    replicas = TimerGroup(tmp_path / "t0", cluster.nameserver)
    replicas.start()
    try:
        yield replicas
    finally:
        await replicas.stop()


async def knows_of_two_shards(group: TimerGroup) -> TimerMember:
    """A replica that follows was started anew, and is in sync."""
    leader = await group.in_sync(3)
    one = next(each for each in group.members.values() if each is not leader)
    await one.stop()
    one.settings = dataclasses.replace(one.settings, shards=2)
    one.start()
    await until(lambda: one.role[0] == "follower")
    await group.in_sync(3)
    return one


async def leads(group: TimerGroup, one: TimerMember) -> None:
    leader = await group.in_sync(3)
    await moved(leader, one.name)
    await until(lambda: one.replica is not None and one.term is not None)


def owner(cluster: Cluster) -> int | None:
    """The number of the shard that has the queue."""
    claim = cluster.brokers["b0"].store.timer_owners.claim_of(QUEUE)
    return claim.service.shard if claim is not None else None


async def sent_to(cluster: Cluster, body: bytes, delay_ms: int) -> None:
    [handle] = await send(cluster, [body], [delay_ms], queue_id=QUEUE, producer_id=0)
    assert handle.queue_id == QUEUE


async def come(cluster: Cluster, *expected: bytes) -> None:
    """Returns when they are delivered, one by one."""
    for body in expected:

        async def has_come(body: bytes = body) -> bool:
            return body in await bodies(cluster)

        await until(has_come)


async def arrives(cluster: Cluster, claim: Awaitable[Any]) -> None:
    """Whatever it is answered."""
    with suppress(DuemqError):
        await status.answer(claim)


@pytest.mark.parametrize("anew", [False, True], ids=["the broker knows", "a broker begun anew"])
async def test_a_claim_that_comes_late_makes_nothing_fire_twice(
    cluster: Cluster, group: TimerGroup, network: Network, tmp_path: Path, anew: bool
) -> None:
    one = await knows_of_two_shards(group)
    await until(lambda: owner(cluster) == 0)
    await sent_to(cluster, b"waits", HOUR_MS)  # so that the claim says how far it came
    leader = await group.leader()
    await until(lambda: leader.service.term.shard.scheduler.ledger.accepted == 1)
    network.loses = True
    await leads(group, one)
    await until(lambda: bool(network.lost))
    await one.kill()

    network.loses = False
    await group.leader()
    await sent_to(cluster, b"once", 0)
    await come(cluster, b"once")
    network.open.clear()
    if anew:
        await cluster.stop_broker("b0")
        await cluster.start_broker("b0")
    [late] = network.lost
    assert (QUEUE, 1) in [(each.queue_id, each.offset) for each in late.ends]
    await arrives(cluster, cluster.clients["b0"].broker.ClaimTimerQueues(late))
    async with running_shard(cluster, tmp_path, name="t1", shard=1, shards=2) as second:
        network.open.set()
        await hands_over(cluster, group, one)
        await sent_to(cluster, b"later", 0)
        await come(cluster, b"later")
        assert await bodies(cluster) == [b"later", b"once"]
        assert (await second.stats()).accepted == 1


async def hands_over(cluster: Cluster, group: TimerGroup, one: TimerMember) -> None:
    """Who leads again, and whose claim comes at once: the second shard begins where it says."""
    one.start()
    await until(lambda: one.replica is not None and one.role[0] == "follower")
    await leads(group, one)
    await until(lambda: owner(cluster) == 1)
