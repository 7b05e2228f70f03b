"""Groups over real processes with replicas: the one that leads is killed, and nobody moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from queue import SimpleQueue

import grpc
import pytest

from duemq import ConsumerSettings, Message, Producer, PushConsumer
from duemq.consumer.group.membership import Membership
from duemq.errors import FencedMember
from duemq.protocol import balance
from duemq.transport import status
from duemq.v1 import group_pb2, stubs
from duemq_server.local_cluster import EmbeddedCluster
from tests.cluster.harness import WAIT_S, duemq, leader_of, rows, topic_name, until

MEMBERS = 3
QUEUES = 8  # of both brokers together
SETTINGS = ConsumerSettings(start_from="earliest", commit_interval_s=0.2)


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """One nameserver, two brokers of three replicas each."""
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), brokers=2, replicas=3) as embedded:
        yield embedded


class Heard:
    """What members hear of their coordinator, and what they tell it that they have released."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.assigned: list[tuple[str, frozenset[balance.MessageQueue], int]] = []
        self.released: list[balance.MessageQueue] = []
        hear, release = Membership._assigned, Membership.released

        def assigned(member, assignment, coordinator) -> None:
            queues = (
                balance.MessageQueue(q.topic, q.broker, q.queue_id) for q in assignment.queues
            )
            self.assigned.append((member.member_id, frozenset(queues), assignment.generation))
            hear(member, assignment, coordinator)

        async def released(member, generation, queues) -> None:
            queues = list(queues)
            self.released += queues
            await release(member, generation, queues)

        patch.setattr(Membership, "_assigned", assigned)
        patch.setattr(Membership, "released", released)

    @property
    def newest(self) -> dict[str, frozenset[balance.MessageQueue]]:
        """Each member's last assignment."""
        return {member: queues for member, queues, _ in self.assigned}


def coordinator_of(cluster: EmbeddedCluster, group: str) -> str:
    """The broker."""
    brokers = sorted({name.split("/")[0] for name in cluster.names("broker")})
    return balance.coordinator(group, brokers) or ""


def fail_over(cluster: EmbeddedCluster, broker: str) -> None:
    """kill -9 of the replica that leads; returns when another one does, and that one follows."""
    before = leader_of(cluster, broker)
    cluster.kill(before, restart=False)
    until(lambda: cluster.leader(broker) not in ("", before))
    cluster.start_member(before)
    cluster.wait_ready()


@pytest.mark.long
def test_members_keep_their_queues_when_the_coordinators_leader_dies(
    replicated: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = group = topic_name()
    rows(duemq(replicated.nameserver, "topic", "create", topic, "--queues", "4", "--json"))
    heard = Heard(monkeypatch)
    received: list[bytes] = []

    def receive(message: Message) -> None:
        received.append(message.body)

    with ExitStack() as stack:
        producer = stack.enter_context(Producer(replicated.nameserver))
        sent: list[bytes] = []

        def send(count: int) -> None:
            bodies = [b"%d" % number for number in range(len(sent), len(sent) + count)]
            receipts = [
                producer.submit(topic, body, ordering_key=f"key-{body!r}") for body in bodies
            ]
            for receipt in receipts:
                receipt.result(WAIT_S)
            sent.extend(bodies)
            until(lambda: len(received) >= len(sent))

        members = [
            stack.enter_context(
                PushConsumer(
                    group, topic, receive, nameserver=replicated.nameserver, settings=SETTINGS
                )
            )
            for _ in range(MEMBERS)
        ]
        until(lambda: sorted(len(each.queues) for each in members) == [2, 3, 3])
        send(200)
        before = heard.newest
        settled = len(heard.assigned)
        heard.released.clear()

        fail_over(replicated, coordinator_of(replicated, group))
        send(200)
        until(lambda: {each[0] for each in heard.assigned[settled:]} == before.keys())
        send(200)  # all are back: nobody is waited for any more
        newest = max(generation for _, _, generation in heard.assigned[:settled])
        assert all(generation > newest for _, _, generation in heard.assigned[settled:])

        moved = [
            queues ^ before[member]
            for member, queues, _ in heard.assigned[settled:]
            if queues != before[member]
        ]
        assert moved == []
        assert heard.released == []
    assert Counter(received) == Counter(sent)


def test_a_static_member_that_was_replaced_stays_out_under_the_next_leader(
    replicated: EmbeddedCluster,
) -> None:
    """Who was the newest process is known to nobody but the coordinator."""
    topic = group = topic_name()
    rows(duemq(replicated.nameserver, "topic", "create", topic, "--queues", "4", "--json"))
    broker = coordinator_of(replicated, group)

    def join(incarnation: int) -> None:
        """Returns when it has all queues."""
        hello = group_pb2.Hello(
            group=group,
            member_id="place",
            incarnation=incarnation,
            subscriptions=[group_pb2.Subscription(topic=topic)],
        )
        with grpc.insecure_channel(replicated.address(leader_of(replicated, broker))) as channel:
            stub = stubs.GroupCoordinatorStub(channel)
            said: SimpleQueue[group_pb2.MemberEvent | None] = SimpleQueue()
            said.put(group_pb2.MemberEvent(hello=hello))
            try:
                for event in stub.Join(iter(said.get, None), timeout=WAIT_S, wait_for_ready=True):
                    if len(event.assignment.queues) == QUEUES:
                        return
            finally:
                said.put(None)
        pytest.fail("the stream has ended")

    join(5)
    fail_over(replicated, broker)
    with pytest.raises(grpc.RpcError) as refused:
        join(4)
    error = status.from_rpc_error(refused.value)
    assert isinstance(error, FencedMember)
    assert (error.field, error.limit) == ("incarnation", "5")
    join(6)
