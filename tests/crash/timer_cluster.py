"""Real processes for killing: a nameserver, two brokers, a timer shard; senders and cancellers.

The clients do what the SDK does: they repeat, with the same sequence, whatever has no answer.  All
that was answered is written down, and compared with the brokers' logs at the end.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from duemq.errors import DuemqError
from duemq.transport import channel, status
from duemq.v1 import (
    admin_pb2,
    broker_pb2,
    message_pb2,
    stubs,
    timer_inspector_pb2,
    timer_pb2,
)
from tests.service.running_broker import batch

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 5.0
RETRY_S = 0.05
# Registrations expire after 0.6 s, leases of replicas after 1 s.
SLEEP_S_MIN, SLEEP_S_MAX = 1.2, 2.5
NEWEST_SHARE = 0.3  # of cancels: perhaps on its way to a shard
TOPIC = "orders"
QUEUES = 2


class Member:
    """A service's process, to be killed and started again; a new port every time."""

    def __init__(self, module: str, directory: Path, *arguments: str) -> None:
        self.name = directory.name
        self.module = module
        self.address = ""
        self._directory = directory
        self._arguments = arguments
        self._process: Process | None = None

    async def start(self, *arguments: str) -> None:
        """`arguments`: instead of those of the start before."""
        self._arguments = arguments or self._arguments
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "stderr").open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "duemq_server.local_cluster.child"),
                *(self.module, "--listen", "127.0.0.1:0"),
                *self._arguments,
                stdin=PIPE,  # it ends with this process
                stdout=PIPE,
                stderr=errors,
            )
        assert self._process.stdout
        line = await asyncio.wait_for(self._process.stdout.readline(), START_TIMEOUT_S)
        assert line, (self._directory / "stderr").read_text()[-4_000:]
        self.address = line.split(b'"')[-2].decode()

    def send_signal(self, number: int) -> None:
        """SIGSTOP or SIGCONT."""
        assert self._process is not None
        self._process.send_signal(number)

    async def stop(self, number: int = signal.SIGKILL) -> int:
        """The exit status."""
        if self._process is None or self._process.returncode is not None:
            return 0
        self._process.send_signal(number)
        return await self._process.wait()


@dataclass
class Sent:
    """A message that a broker acknowledged."""

    body: bytes
    broker: str
    handle: message_pb2.TimerHandle


@dataclass
class History:
    """What the cluster has answered."""

    accepted: dict[bytes, Sent] = field(default_factory=dict)
    cancelled: set[bytes] = field(default_factory=set)  # answered CANCELLED
    fired: set[bytes] = field(default_factory=set)  # answered FIRED
    in_doubt: set[bytes] = field(default_factory=set)  # a cancel without an answer


class TimerCluster:
    """The processes and their clients."""

    broker_module = "duemq_server.broker"

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = Random(seed)
        self.history = History()
        self._directory = directory
        self.nameserver = Member("duemq_server.nameserver", directory / "ns", "--ready-after", "0")
        self.brokers: list[Member] = []

    async def start(self) -> None:
        await self.nameserver.start()
        common = ("--nameservers", self.nameserver.address, "--heartbeat-period", "0.2")
        for name in ("b1", "b2"):
            folder = self._directory / name
            data = ("--name", name, "--data-dir", str(folder), "--checkpoint-interval", "0.5")
            self.brokers.append(Member(self.broker_module, folder, *data, *common))
        await asyncio.gather(
            *(member.start() for member in self.brokers), self.start_timers(common)
        )
        for broker in self.brokers:
            await self._create_topic(broker)

    async def start_timers(self, common: tuple[str, ...]) -> None:
        """The shard, with these flags beside its own."""
        folder = self._directory / "t1"
        data = ("--name", "t1", "--data-dir", str(folder), "--near-window", "2")
        small = ("--memtable-rows-max", "64", "--checkpoint-interval", "0.3")
        self.timer = Member("duemq_server.timer_service", folder, *data, *small, *common)
        await self.timer.start()

    async def stop(self) -> None:
        members = (self.timer, *self.brokers, self.nameserver)
        await asyncio.gather(*(member.stop() for member in members))

    async def leader(self) -> Member:
        """The process that answers for the shard, or will."""
        return self.timer

    async def restart(self, *members: Member) -> None:
        """kill -9 of all at once, then all again."""
        await asyncio.gather(*(member.stop() for member in members))
        await asyncio.sleep(self.random.uniform(0, 0.3))
        await asyncio.gather(*(member.start() for member in members))

    async def sleep(self, *members: Member) -> None:
        """SIGSTOP of all at once, longer than they are awaited, and SIGCONT."""
        for member in members:
            member.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self.random.uniform(SLEEP_S_MIN, SLEEP_S_MAX))
        for member in members:
            member.send_signal(signal.SIGCONT)

    async def _create_topic(self, broker: Member) -> None:
        config = admin_pb2.TopicConfig(name=TOPIC, queues=QUEUES)
        async with channel.connect(broker.address) as connection:
            stub = stubs.BrokerAdminStub(connection)
            await status.answer(stub.CreateTopic(admin_pb2.CreateTopicRequest(topic=config)))

    # -- clients

    async def send(self, broker: Member, batches: int, producer_id: int, queue_id: int) -> None:
        """An idempotent producer of one lane."""
        for sequence in range(batches):
            names = range(self.random.randint(1, 20))
            bodies = [f"{broker.name}-{producer_id}-{sequence}-{n}".encode() for n in names]
            delays = [self.random.choice((0, 30, 300, 1_500, 5_000)) for _ in bodies]
            one = batch(
                TOPIC,
                bodies,
                queue_id=queue_id,
                producer_id=producer_id,
                sequence=sequence,
                delays_ms=delays,
            )
            result, store_id = await self._send_until_stored(broker, one)
            for n, body in enumerate(bodies):
                handle = message_pb2.TimerHandle(
                    store_id=store_id,
                    queue_id=result.queue_id,
                    offset=result.base_offset + n,
                    due_ms=result.due_ms[n],
                )
                self.history.accepted[body] = Sent(body, broker.name, handle)
            await asyncio.sleep(self.random.uniform(0, 0.05))

    async def _send_until_stored(
        self, broker: Member, one: broker_pb2.Batch
    ) -> tuple[broker_pb2.BatchResult, int]:
        request = broker_pb2.SendRequest(request_id=1, batches=[one])
        while True:
            try:
                async with channel.connect(broker.address) as connection:
                    stub = stubs.BrokerStub(connection)
                    call = stub.Send(request, timeout=CALL_TIMEOUT_S)
                    answer = await status.answer(call)
                    return answer.results[0], answer.store_id
            except DuemqError:
                await asyncio.sleep(RETRY_S)

    async def cancel_some(self, until: asyncio.Event) -> None:
        """Cancels what is not yet due, what is, and what was sent just now."""
        while not until.is_set():
            await asyncio.sleep(0.02)
            accepted = self.history.accepted
            known = accepted.keys() - self.history.cancelled - self.history.fired
            newest = next(reversed(accepted), b"")
            if newest in known and self.random.random() < NEWEST_SHARE:
                await self._cancel(accepted[newest])
            elif known:
                await self._cancel(accepted[self.random.choice(sorted(known))])

    async def _cancel(self, sent: Sent) -> None:
        request = timer_pb2.CancelRequest(handles=[sent.handle])
        self.history.in_doubt.add(sent.body)
        try:
            async with channel.connect(self.timer.address) as connection:
                stub = stubs.TimerStub(connection)
                call = stub.Cancel(request, timeout=CALL_TIMEOUT_S)
                [result] = (await status.answer(call)).results
        except DuemqError:
            return
        if result.HasField("error"):
            return
        assert result.outcome != timer_pb2.UNKNOWN, (sent, __import__("time").time())
        if result.outcome == timer_pb2.CANCELLED:
            self.history.cancelled.add(sent.body)
        else:
            self.history.fired.add(sent.body)

    # -- the end

    async def stats(self) -> timer_pb2.TimerStats | None:
        try:
            async with channel.connect(self.timer.address) as connection:
                stub = stubs.TimerStub(connection)
                call = stub.GetStats(timer_pb2.GetStatsRequest(), timeout=CALL_TIMEOUT_S)
                return await status.answer(call)
        except DuemqError:
            return None

    async def counts(self) -> list[timer_inspector_pb2.TopicTimers]:
        async with channel.connect(self.timer.address) as connection:
            stub = stubs.TimerInspectorStub(connection)
            request = timer_inspector_pb2.CountTimersRequest()
            return list((await status.answer(stub.CountTimers(request))).topics)

    async def settled(self) -> timer_pb2.TimerStats:
        """Returns when everything accepted was fired or cancelled."""
        async with asyncio.timeout(END_TIMEOUT_S):
            while True:
                stats = await self.stats()
                done = stats and not stats.pending and not stats.in_flight
                if stats and done and stats.accepted >= len(self.history.accepted):
                    return stats
                await asyncio.sleep(0.1)

    async def check_end(self) -> None:
        """Delivered once, not too soon, unless cancelled: then never."""
        stats = await self.settled()
        found, wrong = await self.all_delivered(stats)
        history = self.history
        accepted = history.accepted.keys()
        assert not wrong
        assert stats.accepted == len(accepted) == stats.fired + stats.cancelled
        assert found.keys() <= accepted
        assert [body for body, count in found.items() if count > 1] == []
        missing = accepted - found.keys()
        assert missing <= history.in_doubt
        assert history.cancelled <= missing
        assert history.fired <= found.keys()
        assert len(missing) == stats.cancelled
        [counted] = await self.counts()
        assert (counted.topic, counted.pending, counted.lost) == (TOPIC, 0, 0)
        assert counted.accepted == stats.accepted
        assert (counted.fired, counted.cancelled) == (stats.fired, stats.cancelled)

    async def all_delivered(self, stats: timer_pb2.TimerStats) -> tuple[Counter[bytes], list[str]]:
        """As `delivered`, once that is as many as were fired, or never will be.

        What a broker has confirmed ahead of its due time it shows only when that has come.
        """
        deadline = time.monotonic() + END_TIMEOUT_S
        while True:
            found, wrong = await self.delivered()
            if found.total() >= stats.fired or time.monotonic() > deadline:
                return found, wrong
            await asyncio.sleep(RETRY_S)

    async def delivered(
        self, due_ms: Mapping[bytes, int] = MappingProxyType({})
    ) -> tuple[Counter[bytes], list[str]]:
        """Messages in the topic of all brokers, and what is wrong with any of them.

        `due_ms`: when some must be due, by body, or later if that was past.
        """
        found: Counter[bytes] = Counter()
        wrong: list[str] = []
        for each, store_ms in await self.stored():
            found[each.body] += 1
            if store_ms < each.due_ms:
                wrong.append(f"{each.body!r} is {each.due_ms - store_ms} ms early")
            if each.due_ms < due_ms.get(each.body, 0):
                wrong.append(f"{each.body!r} was due at {each.due_ms}")
        return found, wrong

    async def stored(self) -> list[tuple[message_pb2.Record, int]]:
        """All that is in the topic, and when it was stored."""
        found = []
        for broker in self.brokers:
            async with channel.connect(broker.address) as connection:
                stub = stubs.BrokerStub(connection)
                for queue_id in range(QUEUES):
                    found += [each async for each in _read(stub, queue_id)]
        return found


async def _read(stub: Any, queue_id: int) -> Any:
    offset = 0
    while True:
        queue = broker_pb2.QueuePull(topic=TOPIC, queue_id=queue_id, offset=offset)
        request = broker_pb2.PullRequest(request_id=1, queues=[queue])
        answer = await status.answer(stub.Pull(request, timeout=END_TIMEOUT_S))
        if not answer.queues:
            return
        [found] = answer.queues
        stores = zip(found.run_counts, found.run_store_ms, strict=True)
        store_ms = [at for count, at in stores for _ in range(count)]
        for each, at in zip(found.records.records, store_ms, strict=True):
            yield each, at
        offset = found.next_offset
