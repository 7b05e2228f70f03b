"""kill -9 of replicas of a timer shard at any moment: delivered exactly once, never early.

As test_kill9_timers.py, with a shard of three replicas, of which two must have what counts.  A
replica's directory may also be emptied: it is another disk then, and gets everything anew.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq.errors import DuemqError
from duemq.transport import channel, status
from duemq.v1 import stubs, timer_pb2
from duemq_server.local_cluster.layout import bind_port
from tests.crash.test_kill9_timers import BATCHES, ROUNDS, SEED
from tests.crash.timer_cluster import CALL_TIMEOUT_S, Member, Sent, TimerCluster

KILLS = 3
REPLICAS = ("a", "b", "c")
# The others are less than these, or elsewhere in short; `make crash` has all.
VICTIMS = ("leader", "sleeper", "disk", "hand-over") + (("follower", "all") if ROUNDS > 1 else ())

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(300)]


class ReplicatedCluster(TimerCluster):
    """`timer` is the replica that leads, as far as is known."""

    async def start_timers(self, common: tuple[str, ...]) -> None:
        folder = self._directory / "t1"
        group = ("--replicas", ",".join(REPLICAS), "--lease-store", f"file:{folder / 'leases'}")
        self.replicas = {}
        self._ports = [bind_port(0) for _ in REPLICAS]  # held, so that nobody else gets them
        for name, port in zip(REPLICAS, self._ports, strict=True):
            listen = ("--listen", f"127.0.0.1:{port.getsockname()[1]}", "--lease-duration", "1")
            data = ("--name", "t1", "--data-dir", str(folder / name), "--near-window", "2")
            small = ("--memtable-rows-max", "64", "--checkpoint-interval", "0.3")
            self.replicas[name] = Member(
                "duemq_server.timer_service", folder / name, *data, "--replica", name, *group,
                *small, *listen, *common,
            )  # fmt: skip
        await asyncio.gather(*(member.start() for member in self.replicas.values()))
        self.timer = await self.leader()

    async def leader(self) -> Member:
        """Waits for one that answers."""
        while True:
            for member in self.replicas.values():
                if await self._stats_of(member) is not None:
                    return member
            await asyncio.sleep(0.05)

    async def stats(self) -> timer_pb2.TimerStats | None:
        self.timer = await self.leader()
        return await self._stats_of(self.timer)

    async def _stats_of(self, member: Member) -> timer_pb2.TimerStats | None:
        try:
            async with channel.connect(member.address) as connection:
                stub = stubs.TimerStub(connection)
                call = stub.GetStats(timer_pb2.GetStatsRequest(), timeout=CALL_TIMEOUT_S)
                return await status.answer(call)
        except DuemqError:
            return None

    async def _cancel(self, sent: Sent) -> None:
        self.timer = await self.leader()
        await super()._cancel(sent)

    async def disturb(self, what: str) -> None:
        leader = await self.leader()
        others = [member for member in self.replicas.values() if member is not leader]
        if what == "leader":
            await self.restart(leader)
        elif what == "follower":
            await self.restart(self.random.choice(others))
        elif what == "sleeper":  # another one leads before it wakes
            await self.sleep(leader)
        elif what == "all":
            await self.restart(*self.replicas.values())
        elif what == "hand-over":
            assert await leader.stop(signal.SIGTERM) == 0
            await leader.start()
        else:
            victim = self.random.choice(others)
            await victim.stop()
            shutil.rmtree(self._directory / "t1" / victim.name)
            await victim.start()

    async def stop(self) -> None:
        await asyncio.gather(*(member.stop() for member in self.replicas.values()))
        for port in self._ports:
            port.close()
        await super().stop()


@pytest.fixture(params=range(ROUNDS))
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[ReplicatedCluster]:
    seed = SEED + request.param
    print(f"CRASH_SEED={seed}")
    running = ReplicatedCluster(tmp_path, seed)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


@pytest.mark.parametrize("what", VICTIMS)
async def test_every_accepted_message_is_delivered_once(
    cluster: ReplicatedCluster, what: str
) -> None:
    over = asyncio.Event()
    cancels = asyncio.create_task(cluster.cancel_some(over))
    senders = [
        asyncio.create_task(cluster.send(broker, BATCHES, producer_id, queue_id))
        for broker in cluster.brokers
        for producer_id, queue_id in ((1, -1), (2, 0))
    ]
    for _ in range(KILLS):
        await asyncio.sleep(cluster.random.uniform(0.1, 1.2))
        await cluster.disturb(what)
    await asyncio.gather(*senders)
    over.set()
    await cancels
    await cluster.check_end()
