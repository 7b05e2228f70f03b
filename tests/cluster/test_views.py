"""One of two nameservers does not hear one broker; all else hears all.

The broker coordinates the group.  Clients are told of the one nameserver, of the other, or of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from duemq import Admin, Producer, PushConsumer
from duemq.consumer.settings import ConsumerSettings
from duemq.protocol import balance
from duemq.settings import ProducerSettings
from duemq_server.bench.harness.topic_reader import read_topic
from tests.cluster.checker import judge
from tests.cluster.harness import topic_name, until
from tests.cluster.history import History
from tests.cluster.network import Network, ProxiedCluster, between

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

BROKERS = FAR, NEAR = "broker-0", "broker-1"
GROUP = next(f"g{n}" for n in range(99) if balance.coordinator(f"g{n}", BROKERS) == FAR)
# Nobody's session ends because the machine is busy: what moves was said.
PATIENT = ConsumerSettings(start_from="earliest", session_timeout_s=300.0)
REFUSED = ProducerSettings(send_timeout_s=2.0)
QUEUES = 4


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


class Clients:
    """Of a cluster whose nameserver-0 can be cut off from the broker FAR."""

    def __init__(self, cluster: ProxiedCluster, running: ExitStack) -> None:
        self.topic, self.history = topic_name(), History()
        self.blind, self.sees = cluster.nameserver.split(",")
        self.views = (self.blind, self.sees, cluster.nameserver)
        self._running = running
        self.admin = running.enter_context(Admin(cluster.nameserver))
        self.told = running.enter_context(Admin(self.blind))
        self.admin.create_topic(self.topic, queues=QUEUES)
        self.members: list[PushConsumer] = []
        for at in self.views:
            self.join(at)
        self._keyed = running.enter_context(Producer(self.blind, settings=REFUSED))
        self.producers = {at: running.enter_context(Producer(at)) for at in self.views}

    def join(self, at: str, group: str = GROUP, **more: bool) -> None:
        receive = self.history.receiver(group)
        member = PushConsumer(group, self.topic, receive, nameserver=at, settings=PATIENT, **more)
        self.members.append(self._running.enter_context(member))

    def shared(self, members: int) -> int:
        """The group's generation, once so many share all queues."""

        def all_have_some() -> bool:
            found = self.admin.describe_group(GROUP)
            held = [len(each.queues) for each in found.members]
            return len(held) == members and 0 not in held and sum(held) == 2 * QUEUES

        until(all_have_some)
        found = self.admin.describe_group(GROUP)
        assert found.coordinator == FAR
        return found.generation

    def lists(self) -> set[str]:
        """The brokers that a client of the one nameserver takes for alive."""
        return {each.name for each in self.told.cluster().brokers if each.lost_ms is None}

    def place_of(self, key: str) -> str:
        """The broker that takes an ordering key, for who has seen all; empty: none does now."""
        id = f"key-{key}-{self.history.count('sent')}"
        receipt = self.history.send(self._keyed, self.topic, id, ordering_key=key)
        return receipt.broker if receipt is not None else ""

    def all_came_to(self, group: str) -> bool:
        count = self.history.count
        return count("received", group=group) == count("acked")

    def came_from(self, group: str) -> set[str]:
        """The brokers of what the group has received."""
        received = [each for each in self.history.events if each["event"] == "received"]
        return {each["broker"] for each in received if each["group"] == group}

    def send(self, mark: str) -> dict[str, set[str]]:
        """At once and delayed, by each; all come.  The brokers that took them, by view."""
        brokers: dict[str, set[str]] = {}
        for at, producer in self.producers.items():
            brokers[at] = set()
            for number in range(12):
                id = f"{mark}-{self.views.index(at)}-{number}"
                delay = 0.2 if number % 3 == 0 else None
                receipt = self.history.send(producer, self.topic, id, delay=delay)
                assert receipt is not None
                if delay is None:
                    brokers[at].add(receipt.broker)
        until(lambda: self.all_came_to(GROUP))
        return brokers


@pytest.fixture
def clients(tmp_path: Path, network: Network) -> Iterator[Clients]:
    with (
        ProxiedCluster(tmp_path / "cluster", network, nameservers=2, brokers=2) as cluster,
        ExitStack() as running,
    ):
        yield Clients(cluster, running)


def test_a_broker_that_one_nameserver_does_not_hear_is_lost_for_who_asks_that_one_alone(
    clients: Clients, network: Network
) -> None:
    both = set(BROKERS)
    generation = clients.shared(3)
    assert clients.send("whole") == dict.fromkeys(clients.views, both)
    key = next(key for key in map(str, range(99)) if clients.place_of(key) == FAR)
    clients.join(clients.blind, "before", broadcast=True)
    until(lambda: clients.all_came_to("before"))
    with network.silent(*between(FAR, "nameserver-0")):
        until(lambda: clients.lists() == {NEAR})
        for mark in ("cut", "still cut"):
            sent = clients.send(mark)
            assert sent == dict.fromkeys(clients.views, both) | {clients.blind: {NEAR}}
            assert clients.shared(3) == generation
        for at, held in ((clients.blind, {NEAR}), (clients.sees, both)):
            with Admin(at) as admin:
                assert {each.broker for each in admin.describe_group(GROUP).progress} == held
        assert clients.place_of(key) != NEAR  # its order would be lost
        clients.join(clients.blind)
        generation = clients.shared(4)
        clients.send("joined")
        until(lambda: clients.all_came_to("before"))  # it knows where the broker is
        clients.join(clients.blind, "meanwhile", broadcast=True)
        until(lambda: clients.history.count("received", group="meanwhile") > 0)
        assert clients.came_from("meanwhile") == {NEAR}
    until(lambda: clients.lists() == both)
    clients.send("healed")
    assert clients.shared(4) == generation
    for group in ("before", "meanwhile"):
        until(lambda group=group: clients.all_came_to(group))
    clients.history.stored(read_topic(clients.views[2], clients.topic))
    groups = [GROUP, "before", "meanwhile"]
    verdict = judge(clients.history.events, groups)
    assert verdict.faults == []
    assert verdict.repeated == dict.fromkeys(groups, 0)
