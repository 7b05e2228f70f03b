"""Real partitions: links between brokers and nameservers are cut, and groups work on.

Two nameservers and two brokers.  The broker that coordinates the group is cut off from the second
nameserver, so that the two list different brokers.
"""

import asyncio
import socket
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import pytest

from duemq.aio import PushConsumer
from duemq.consumer.fetching.offset_client import OffsetClient
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import Timeout
from duemq.protocol import balance
from duemq.protocol.balance import MessageQueue
from duemq_server.nameserver.clock import SteadyClock
from duemq_server.nameserver.edge.servicer import OVERRIDES, SERVICE, NameserverServicer
from duemq_server.nameserver.expiry import Expiry
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.reports import BrokerReport, Version
from duemq_server.nameserver.settings import Settings
from duemq_server.serving.server import Server
from tests.service.cut_link import Link, link_to
from tests.service.running_broker import topic_name
from tests.service.running_cluster import Cluster, until

GROUP = "billing"
TOP = balance.coordinator(GROUP, ["a", "c"]) or ""
OTHER = "a" if TOP == "c" else "c"
QUEUES = 4
# Nobody's session ends during a test: what moves was said, not waited for.
PATIENT_S = 300.0


class Patient(Registry):
    """Waits for an hour for who is silent: nobody is given up because the machine is busy."""

    def register(self, *arguments, **named):
        version, report, now_ms, *_ = arguments
        return super().register(version, report, now_ms, 3_600_000)


class Nameserver:
    """One that forgets who is silent, when it is told that the time is over."""

    def __init__(self) -> None:
        self.clock = SteadyClock()
        self.registry = Patient(self.clock.now_ms())
        self.address = ""

    def hears_no_more_from(self, name: str) -> None:
        """Its report runs out."""
        known = self.registry._instances
        for key in [key for key, one in known.items() if one.report.name == name]:
            known[key] = replace(known[key], expires_ms=0)

    async def start(self, stack: AsyncExitStack) -> None:
        settings = Settings(listen="127.0.0.1:0", ready_after=0.0, drain_timeout=0.0)
        server = Server(settings)
        servicer = NameserverServicer(
            self.registry, self.clock.now_ms, settings.watchers_max, server.unsent
        )
        server.add(SERVICE, servicer, OVERRIDES)
        await server.start(announced=False)
        self.address = server.address
        stack.push_async_callback(server.stop)
        stack.callback(servicer.close)
        expiry = asyncio.create_task(Expiry(self.registry, servicer, self.clock.now_ms).run())
        stack.push_async_callback(_ended, expiry)

    @property
    def lists(self) -> list[str]:
        return [one.report.name for one in self.registry.brokers]


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


class Split:
    """The cluster, the link that can be cut, and a group that consumes from it."""

    def __init__(self, cluster: Cluster, link: Link, one: Nameserver, two: Nameserver) -> None:
        self.cluster = cluster
        self.one, self.two = one, two
        self.topic = topic_name()
        self.received: Counter[bytes] = Counter()
        self.overlaps: list[MessageQueue] = []
        self.members: list[PushConsumer] = []
        self._link = link
        self._running: set[MessageQueue] = set()

    async def cut(self, how: str) -> None:
        """Returns when the second nameserver has given the broker up."""
        getattr(self._link, how)()

        def given_up() -> bool:
            self.two.hears_no_more_from(TOP)  # also if a heartbeat was under way
            return self.two.lists == [OTHER]

        await until(given_up)

    async def heal(self) -> None:
        self._link.heal()
        await until(lambda: self.two.lists == ["a", "c"])

    async def join(self, *nameservers: Nameserver) -> None:
        member = PushConsumer(
            GROUP,
            self.topic,
            self._receive,
            nameserver=[each.address for each in nameservers],
            settings=ConsumerSettings(start_from="earliest", session_timeout_s=PATIENT_S),
            order="queue",
        )
        self.members.append(member)
        await member.start()

    async def _receive(self, message) -> None:
        queue = MessageQueue(self.topic, message.broker, message.queue)
        if queue in self._running:
            self.overlaps.append(queue)
        self._running.add(queue)
        await asyncio.sleep(0.002)
        self._running.discard(queue)
        self.received[message.body] += 1

    async def shared(self) -> None:
        """Returns when each queue is with one member, and each member has some."""
        wanted = sorted(MessageQueue(self.topic, b, q) for b in ("a", "c") for q in range(QUEUES))

        def each_has_one() -> bool:
            owned = [q for m in self.members for q in m.queues if q.topic == self.topic]
            return sorted(owned) == wanted and all(m.queues for m in self.members)

        await until(each_has_one)

    async def send(self, mark: str) -> None:
        """Ten messages into each queue; returns when all have come."""
        for broker in ("a", "c"):
            for queue_id in range(QUEUES):
                bodies = [f"{mark} {broker}/{queue_id} {n}".encode() for n in range(10)]
                await self.cluster.send(self.topic, bodies, broker=broker, queue_id=queue_id)
                self.received.update(dict.fromkeys(bodies, 0))
        await until(lambda: all(self.received.values()))


@pytest.fixture
async def split(tmp_path):
    async with AsyncExitStack() as stack:
        one, two = Nameserver(), Nameserver()
        for nameserver in (one, two):
            await nameserver.start(stack)
        link = await stack.enter_async_context(link_to(two.address))
        cluster = Cluster(tmp_path, stack, {"heartbeat_period": 0.5})
        await cluster.start_broker(OTHER, [one.address, two.address])
        await cluster.start_broker(TOP, [one.address, link.address])
        made = Split(cluster, link, one, two)
        await cluster.create_topic(made.topic, QUEUES)
        await until(lambda: one.lists == two.lists == ["a", "c"])
        yield made
        for member in made.members:
            await member.close()


@pytest.fixture
def taken(monkeypatch) -> Counter[MessageQueue]:
    """How often each queue was taken over."""
    counted: Counter[MessageQueue] = Counter()
    acquire = OffsetClient.acquire

    async def count(self, broker, queues, *rest, **named):
        answers = await acquire(self, broker, queues, *rest, **named)
        counted.update(answers.keys())
        return answers

    monkeypatch.setattr(OffsetClient, "acquire", count)
    return counted


@pytest.mark.parametrize("how", ["cut", "swallow"])
async def test_nameservers_that_disagree_make_no_second_coordinator(split, taken, how) -> None:
    """Whichever of them a member follows, it joins, and no queue goes to and fro."""
    await split.cut(how)
    await split.join(split.one)
    await split.join(split.two)
    await split.join(split.one, split.two)
    await split.shared()
    taken.clear()
    await split.send("cut")
    await split.heal()
    await split.shared()
    await split.send("healed")
    assert not split.overlaps
    assert set(split.received.values()) == {1}
    assert not taken


@pytest.mark.parametrize("how", ["cut", "swallow"])
async def test_a_group_goes_on_while_its_coordinator_is_cut_off_and_comes_back(split, how) -> None:
    for nameservers in ((split.one,), (split.two,), (split.one, split.two)):
        await split.join(*nameservers)
    await split.shared()
    await split.send("whole")
    await split.cut(how)
    await split.send("cut")
    await split.join(split.two)
    await split.shared()
    await split.send("cut, with one more")
    await split.heal()
    await split.send("healed")
    assert not split.overlaps
    assert set(split.received.values()) == {1}


async def test_a_join_that_fails_names_what_each_nameserver_lists(split) -> None:
    await split.cut("cut")
    group = next(g for n in range(99) if balance.coordinator(g := f"g{n}", ["a", "b", "c"]) == "b")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        report = BrokerReport("b", f"{host}:{port}")
        split.two.registry.register(Version(1, 1), report, split.two.clock.now_ms(), 3_600_000)
        consumer = PushConsumer(
            group,
            split.topic,
            print,
            nameserver=[split.one.address, split.two.address],
            settings=ConsumerSettings(start_timeout_s=5.0),
        )
        with pytest.raises(Timeout) as failed:
            await consumer.start()
    text = str(failed.value)
    assert f"{split.one.address} lists a, c" in text
    assert f"{split.two.address} lists {', '.join(sorted(('b', OTHER)))}" in text
