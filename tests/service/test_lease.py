"""What a member claims when its lease is over: against a coordinator that is played here."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from duemq.consumer.delivery.lease import Lease
from duemq.consumer.fetching.subscription import ALL
from duemq.consumer.group.membership import Membership
from duemq.errors import FencedMember
from duemq.protocol.balance import MessageQueue
from duemq.protocol.route import Broker, RouteCache, Update
from duemq.transport import status
from duemq.v1 import group_pb2, message_pb2
from tests.service.playing import PINGS, play
from tests.service.running_cluster import until

SESSION_S = 60.0  # of the played clock; real heartbeats leave every quarter of it
QUEUES = {MessageQueue("orders", "b0", number) for number in range(2)}


class PlayedCoordinator:
    """Notes hellos; answers when it is let."""

    def __init__(self) -> None:
        self.hellos: list[group_pb2.Hello] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.break_stream = asyncio.Event()

    async def Join(
        self, requests: AsyncIterator[group_pb2.MemberEvent], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[group_pb2.CoordinatorEvent]:
        self.hellos.append((await anext(aiter(requests))).hello)
        self.break_stream.clear()
        await self.gate.wait()
        yield self._assignment()
        await self.break_stream.wait()

    def _assignment(self) -> group_pb2.CoordinatorEvent:
        assignment = group_pb2.Assignment(generation=len(self.hellos))
        for queue in QUEUES:
            assignment.queues.add(topic=queue.topic, broker=queue.broker, queue_id=queue.queue_id)
        return group_pb2.CoordinatorEvent(assignment=assignment)


class HearingCoordinator(PlayedCoordinator):
    """Notes heartbeats, too, and acknowledges them when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.heartbeats: list[group_pb2.Heartbeat] = []
        self.acknowledging = asyncio.Semaphore(0)

    async def Join(
        self, requests: AsyncIterator[group_pb2.MemberEvent], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[group_pb2.CoordinatorEvent]:
        self.hellos.append((await anext(aiter(requests))).hello)
        yield group_pb2.CoordinatorEvent(
            assignment=group_pb2.Assignment(
                generation=1,
                queues=[message_pb2.QueueRef(topic=q.topic, queue_id=q.queue_id) for q in QUEUES],
            )
        )
        async for event in requests:
            self.heartbeats.append(event.heartbeat)
            await self.acknowledging.acquire()
            yield group_pb2.CoordinatorEvent(heartbeat_ack=group_pb2.HeartbeatAck())


class FencingCoordinator(PlayedCoordinator):
    """Tells a member that it is another process now, and hears that it has read that."""

    def __init__(self) -> None:
        super().__init__()
        self.fence = asyncio.Event()
        self.holder = Holder()
        self.held: frozenset[MessageQueue] | None = None
        """By the member, when it said goodbye."""

    async def Join(
        self, requests: AsyncIterator[group_pb2.MemberEvent], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[group_pb2.CoordinatorEvent]:
        self.hellos.append((await anext(aiter(requests))).hello)
        yield self._assignment()
        await self.fence.wait()
        fenced = FencedMember("replaced", field="incarnation", value=1, limit=2)
        yield group_pb2.CoordinatorEvent(error=status.to_proto(fenced))
        async for event in requests:
            if event.WhichOneof("event") == "leave":
                self.held = self.holder.held
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "replaced")


class PlayedClient:
    """As much of a Client as a membership needs."""

    def __init__(self, address: str) -> None:
        self.routes = RouteCache()
        self.routes.apply(Update(True, brokers=(Broker("b0", address),)))
        self.connection = grpc.aio.insecure_channel(address)

    def broker(self, name: str) -> Broker:
        return self.routes.broker(name)

    def channel(self, address: str) -> grpc.aio.Channel:
        return self.connection


class Holder:
    """membership.Owner: holds what it is told to."""

    def __init__(self) -> None:
        self.held: frozenset[MessageQueue] = frozenset()
        self.heard = 0
        self.fences = 0

    def claim(self) -> frozenset[MessageQueue]:
        return self.held

    def assigned(
        self, generation: int, queues: frozenset[MessageQueue], reads_for_ms: Mapping[str, int]
    ) -> None:
        self.held = queues
        self.heard += 1

    async def fenced(self) -> None:
        self.fences += 1
        await asyncio.sleep(0)
        self.held = frozenset()


class Scene:
    """One member, its coordinator and its clock."""

    def __init__(self, client: PlayedClient, coordinator: PlayedCoordinator) -> None:
        self.now_s = 1_000.0
        self.coordinator = coordinator
        self.holder = Holder()
        self.lease = Lease(SESSION_S, lambda: self.now_s)
        self.membership = Membership(
            client,
            self.holder,
            self.lease,
            group="billing",
            subscriptions={"orders": ALL},
            session_timeout_s=SESSION_S,
            strategy="",
        )

    @property
    def claims(self) -> list[int]:
        """How many queues each hello claimed."""
        return [len(hello.owned) for hello in self.coordinator.hellos]

    async def joined(self) -> None:
        """Until the last hello is answered."""
        await until(lambda: len(self.holder.held) == len(QUEUES) and not self.lease.over)


@asynccontextmanager
async def scene(coordinator: PlayedCoordinator | None = None):
    server, coordinator = grpc.aio.server(options=PINGS), coordinator or PlayedCoordinator()
    play(coordinator, server, group_pb2.DESCRIPTOR)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = PlayedClient(address)
    made = Scene(client, coordinator)
    running = asyncio.create_task(made.membership.run())
    try:
        await made.joined()
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.connection.close()
        coordinator.gate.set()
        coordinator.break_stream.set()
        await server.stop(0)


async def test_a_member_that_is_back_in_time_claims_its_queues() -> None:
    async with scene() as played:
        played.now_s += SESSION_S / 2
        played.coordinator.break_stream.set()
        await until(lambda: len(played.claims) == 2)
        await until(lambda: played.lease.until_s == played.now_s + SESSION_S)
        assert played.claims == [0, 2]
        assert played.holder.fences == 1  # before it had joined


async def test_each_loss_of_the_coordinator_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """And no wait for the next one is longer for those before, between which it was a member."""
    caplog.set_level(logging.WARNING, "duemq")
    async with scene() as played:
        for losses in range(1, 4):
            played.coordinator.break_stream.set()
            await until(lambda losses=losses: len(played.claims) == losses + 1)
            await until(lambda losses=losses: played.holder.heard == losses + 1)
            assert caplog.text.count("lost its coordinator") == losses


async def test_a_member_that_comes_back_too_late_claims_nothing() -> None:
    async with scene() as played:
        played.now_s += SESSION_S + 1
        assert played.lease.over
        played.coordinator.break_stream.set()
        await until(lambda: len(played.claims) == 2)
        await played.joined()
        assert played.claims == [0, 0]
        assert played.holder.fences == 2


async def test_a_member_that_is_fenced_has_let_go_of_all_when_it_says_goodbye() -> None:
    """From there on the coordinator may give its queues to the process that replaced it."""
    coordinator = FencingCoordinator()
    async with scene(coordinator) as played:
        coordinator.holder = played.holder
        assert played.holder.held
        coordinator.fence.set()
        await until(lambda: coordinator.held is not None)
        assert coordinator.held == frozenset()


async def test_a_claim_that_is_answered_too_late_is_taken_back() -> None:
    """The process, or its hello, was held up between the look at the clock and the answer."""
    async with scene() as played:
        played.coordinator.gate.clear()
        played.coordinator.break_stream.set()
        await until(lambda: played.claims == [0, 2])
        played.now_s += SESSION_S + 1
        played.coordinator.gate.set()
        await until(lambda: len(played.claims) == 3)
        await played.joined()
        assert played.claims == [0, 2, 0]
        assert played.holder.fences > 1


@pytest.mark.parametrize("late_s", [0.0, SESSION_S * 2])
async def test_the_answer_to_a_hello_renews_from_when_it_was_sent(late_s: float) -> None:
    async with scene() as played:
        played.now_s += SESSION_S + 1
        sent_s = played.now_s
        played.coordinator.gate.clear()
        played.coordinator.break_stream.set()
        await until(lambda: played.claims == [0, 0])
        played.now_s += late_s
        played.coordinator.gate.set()
        await until(lambda: played.lease.until_s == sent_s + SESSION_S)
        assert played.lease.over == (late_s > 0)


async def test_a_heartbeat_between_two_others_renews_from_when_it_was_sent() -> None:
    """That of a member that begins to leave."""
    coordinator = HearingCoordinator()
    async with scene(coordinator) as played:
        await until(lambda: len(coordinator.heartbeats) == 1)
        played.now_s += 1
        await played.membership.retire()
        for _ in range(2):
            coordinator.acknowledging.release()
        await until(lambda: played.lease.until_s == played.now_s + SESSION_S)
        assert [each.leaving for each in coordinator.heartbeats] == [False, True]
