"""The GroupCoordinator service as a generated client in any language meets it."""

import asyncio
from contextlib import asynccontextmanager, suppress

import grpc.aio
import pytest

from duemq.errors import (
    DuemqError,
    FencedMember,
    GroupNotFound,
    InvalidArgument,
    NotCoordinator,
    NotReady,
    Overloaded,
    Unavailable,
)
from duemq.protocol import balance
from duemq.protocol.limits import SESSION_TIMEOUT_MS_MAX
from duemq.transport import channel, status
from duemq.v1 import (
    broker_pb2,
    group_admin_pb2,
    group_pb2,
    message_pb2,
    stubs,
)
from duemq_server.broker import slices
from duemq_server.broker.edge.members import messages, sessions, telling
from duemq_server.broker.groups.coordinator import Assignment
from duemq_server.broker.slices import Slices
from duemq_server.storage.replicas import epoch
from tests.service.running_broker import running_broker, topic_name
from tests.service.running_cluster import Cluster, running_cluster, until

READ_S = 60.0


class Stream:
    """A member's stream, event by event."""

    def __init__(self, call) -> None:
        self._call = call

    async def say(self, **event) -> None:
        await self._call.write(group_pb2.MemberEvent(**event))

    async def hello(self, group: str, member_id: str, *topics: str, **fields) -> None:
        subscriptions = [group_pb2.Subscription(topic=topic) for topic in topics]
        await self.say(
            hello=group_pb2.Hello(
                group=group, member_id=member_id, subscriptions=subscriptions, **fields
            )
        )

    async def hear(self) -> group_pb2.CoordinatorEvent:
        async with asyncio.timeout(READ_S):
            return await status.answer(self._call.read())

    async def assignment(self) -> tuple[int, set[tuple[str, int]]]:
        """The next one: its generation, and (broker, queue) of what shall be owned."""
        while (event := await self.hear()).WhichOneof("event") != "assignment":
            pass
        queues = {(queue.broker, queue.queue_id) for queue in event.assignment.queues}
        return event.assignment.generation, queues

    async def end(self) -> None:
        await self._call.done_writing()

    async def failure(self) -> DuemqError:
        """What the stream ends with."""
        with pytest.raises(DuemqError) as failed:
            await self._to_the_end()
        return failed.value

    async def _to_the_end(self) -> None:
        while await self.hear() is not grpc.aio.EOF:
            pass


class Coordinator:
    """The broker that coordinates a group, and another one."""

    def __init__(self, cluster: Cluster, connections: dict[str, grpc.aio.Channel]) -> None:
        self.cluster = cluster
        self._connections = connections

    def stub(self, broker: str) -> stubs.GroupCoordinatorStub:
        return stubs.GroupCoordinatorStub(self._connections[broker])

    @asynccontextmanager
    async def joined(self, broker: str):
        call = self.stub(broker).Join()
        try:
            yield Stream(call)
        finally:
            call.cancel()


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        yield cluster


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    name = topic_name()
    await cluster.create_topic(name, queues=2)
    return name


@pytest.fixture
async def coordinator(cluster: Cluster):
    connections = {n: channel.connect(b.server.address) for n, b in cluster.brokers.items()}
    yield Coordinator(cluster, connections)
    for connection in connections.values():
        await connection.close()


GROUP = "g"
HERE = balance.coordinator(GROUP, ["b0", "b1"]) or ""
THERE = "b1" if HERE == "b0" else "b0"
OTHER = next(g for g in map(str, range(99)) if balance.coordinator(g, ["b0", "b1"]) == HERE)
ALL = {(broker, queue_id) for broker in ("b0", "b1") for queue_id in (0, 1)}


async def test_hello_is_answered_by_an_assignment(coordinator, topic) -> None:
    async with coordinator.joined(HERE) as member:
        await member.hello(GROUP, "m1", topic)
        generation, queues = await member.assignment()
        assert generation > 0
        assert queues == ALL


async def test_a_queue_is_given_to_the_next_one_when_it_is_released(coordinator, topic) -> None:
    async with coordinator.joined(HERE) as first, coordinator.joined(HERE) as second:
        await first.hello(GROUP, "m1", topic)
        await first.assignment()
        await second.hello(GROUP, "m2", topic)
        assert (await second.assignment())[1] == set()
        generation, kept = await first.assignment()
        gone = [
            message_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)
            for broker, queue_id in ALL - kept
        ]
        await first.say(released=group_pb2.Released(generation=generation, queues=gone))
        assert await second.assignment() == (generation, ALL - kept)
        await first.say(leave=group_pb2.Leave())
        assert (await second.assignment())[1] == ALL


async def test_heartbeats_are_answered_with_the_generation(coordinator, topic) -> None:
    async with coordinator.joined(HERE) as member:
        await member.hello(GROUP, "m1", topic)
        generation, _ = await member.assignment()
        await member.say(heartbeat=group_pb2.Heartbeat(generation=generation))
        assert (await member.hear()).heartbeat_ack.generation == generation


async def test_a_silent_member_loses_its_queues_and_is_told_when_it_speaks(
    coordinator, topic
) -> None:
    async with coordinator.joined(HERE) as silent, coordinator.joined(HERE) as other:
        await silent.hello(GROUP, "m1", topic, session_timeout_ms=1_000)
        await silent.assignment()
        await other.hello(GROUP, "m2", topic)
        while (await other.assignment())[1] != ALL:
            pass
        await silent.say(heartbeat=group_pb2.Heartbeat())
        assert isinstance(await silent.failure(), FencedMember)


async def test_the_newest_stream_of_a_member_counts(coordinator, topic) -> None:
    async with coordinator.joined(HERE) as old, coordinator.joined(HERE) as new:
        await old.hello(GROUP, "m1", topic)
        assert (await old.assignment())[1] == ALL
        await new.hello(GROUP, "m1", topic)
        assert (await new.assignment())[1] == ALL
        assert isinstance(await old.failure(), FencedMember)


async def test_a_newer_process_of_a_static_member_fences_the_older_out(coordinator, topic) -> None:
    async with (
        coordinator.joined(HERE) as old,
        coordinator.joined(HERE) as new,
        coordinator.joined(HERE) as late,
    ):
        await old.hello(GROUP, "pod-1", topic, incarnation=10)
        before, queues = await old.assignment()
        await new.hello(GROUP, "pod-1", topic, incarnation=11)
        generation, waiting = await new.assignment()
        assert waiting == set()
        assert generation > before
        await late.hello(GROUP, "pod-1", topic, incarnation=10, generation=before)
        error = status.from_proto((await old.hear()).error)
        for fenced in (error, await late.failure()):
            assert isinstance(fenced, FencedMember)
            assert (fenced.field, fenced.value, fenced.limit) == ("incarnation", "10", "11")
        # It may be in a callback, or begin one, until it has said that it read that.
        await old.say(heartbeat=group_pb2.Heartbeat(generation=before))
        await new.say(heartbeat=group_pb2.Heartbeat(generation=generation))
        assert (await new.hear()).WhichOneof("event") == "heartbeat_ack"
        asked = group_pb2.DescribeGroupRequest(group=GROUP)
        assert (await coordinator.stub(HERE).DescribeGroup(asked)).waits_until_ms > 0
        await old.say(leave=group_pb2.Leave())
        assert await new.assignment() == (generation, queues)
        assert isinstance(await old.failure(), FencedMember)
        description = await coordinator.stub(HERE).DescribeGroup(asked)
        assert [member.incarnation for member in description.members] == [11]
        assert description.waits_until_ms == 0


async def test_a_replaced_process_whose_stream_just_ends_may_not_have_read_why(
    coordinator, topic
) -> None:
    """It gave the stream up for another reason, say, and is on its way back."""
    long = {"session_timeout_ms": SESSION_TIMEOUT_MS_MAX}
    async with (
        coordinator.joined(HERE) as old,
        coordinator.joined(HERE) as new,
        coordinator.joined(HERE) as other,
    ):
        await old.hello(GROUP, "pod-1", topic, incarnation=10, **long)
        await old.assignment()
        await new.hello(GROUP, "pod-1", topic, incarnation=11, **long)
        await new.assignment()
        await old.end()
        assert isinstance(await old.failure(), FencedMember)
        await other.hello(GROUP, "pod-2", topic, incarnation=10, **long)
        for each in new, other:
            assert (await each.assignment())[1] == set()


async def test_a_member_that_reads_something_else_is_refused(coordinator, topic) -> None:
    async with coordinator.joined(HERE) as first, coordinator.joined(HERE) as second:
        await first.hello(GROUP, "m1", topic)
        await first.assignment()
        wanted = group_pb2.Subscription(topic=topic, filter="a || b")
        hello = group_pb2.Hello(group=GROUP, member_id="m2", subscriptions=[wanted])
        await second.say(hello=hello)
        error = await second.failure()
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.value) == ("subscriptions", f"{topic}: filter 'a || b'")
        assert error.limit == f"{topic}: filter '*'"


async def test_a_newcomer_that_does_not_fit_is_turned_out_when_a_former_member_comes_back(
    coordinator, topic
) -> None:
    async with coordinator.joined(HERE) as first:
        await first.hello(GROUP, "m1", topic)
        generation, _ = await first.assignment()
    await coordinator.cluster.stop_broker(HERE)
    routes = coordinator.cluster.brokers[THERE]._routes.cache
    await until(lambda: [each.name for each in routes.brokers] == [THERE])  # else it refers to HERE
    async with coordinator.joined(THERE) as newcomer, coordinator.joined(THERE) as former:
        await newcomer.hello(GROUP, "m0", topic, strategy="sticky")
        await newcomer.assignment()
        await former.hello(GROUP, "m1", topic, generation=generation, members=["m1"])
        error = await newcomer.failure()
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.value, error.limit) == ("strategy", "sticky", "average")
        assert (await former.assignment())[1] == {(THERE, 0), (THERE, 1)}


async def test_another_broker_names_the_coordinator(coordinator, topic) -> None:
    async with coordinator.joined(THERE) as member:
        await member.hello(GROUP, "m1", topic)
        error = await member.failure()
        assert isinstance(error, NotCoordinator)
        assert error.limit == HERE


async def test_another_broker_tells_where_the_coordinator_is(cluster, coordinator, topic) -> None:
    async with coordinator.joined(THERE) as member:
        await member.hello(GROUP, "m1", topic)
        event = await member.hear()
        assert isinstance(status.from_proto(event.error), NotCoordinator)
        assert event.coordinator == HERE
        assert event.coordinator_address == cluster.brokers[HERE].server.address


async def test_an_assignment_tells_where_its_brokers_are(cluster, coordinator, topic) -> None:
    async with coordinator.joined(HERE) as member:
        await member.hello(GROUP, "m1", topic)
        while (event := await member.hear()).WhichOneof("event") != "assignment":
            pass
        assert {each.name: each.address for each in event.assignment.brokers} == {
            name: broker.server.address for name, broker in cluster.brokers.items()
        }


async def test_queues_are_not_taken_over_by_the_word_of_another_coordinator(cluster, topic) -> None:
    """As two members do whose coordinators do not know of each other."""
    request = broker_pb2.AcquireQueuesRequest(
        group=GROUP,
        member_id="m1",
        generation=5,
        queues=[message_pb2.QueueRef(topic=topic, broker=THERE, queue_id=0)],
        coordinator=THERE,
    )
    broker = cluster.clients[THERE].broker
    with pytest.raises(NotCoordinator) as refused:
        await status.answer(broker.AcquireQueues(request))
    assert (refused.value.value, refused.value.limit) == (THERE, HERE)
    assert HERE in str(refused.value)
    for allowed in (HERE, ""):
        request.coordinator = allowed
        [result] = (await status.answer(broker.AcquireQueues(request))).queues
        assert not result.HasField("error")


async def test_members_are_told_when_the_group_moves(cluster, coordinator, topic) -> None:
    theirs = next(
        group
        for group in (f"g{n}" for n in range(100))
        if balance.coordinator(group, ["b0", "b1"]) == "b0"
        and balance.coordinator(group, ["b0", "b1", "b2"]) == "b2"
    )
    async with coordinator.joined("b0") as member:
        await member.hello(theirs, "m1", topic)
        await member.assignment()
        await cluster.start_broker("b2")
        event = await member.hear()
        assert event.coordinator == "b2"
        assert isinstance(status.from_proto(event.error), NotCoordinator)


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ({"heartbeat": group_pb2.Heartbeat()}, "event"),
        ({"hello": group_pb2.Hello(group="a b", member_id="m")}, "group"),
        ({"hello": group_pb2.Hello(group=GROUP, member_id="m")}, "subscriptions"),
        (
            {
                "hello": group_pb2.Hello(
                    group=GROUP,
                    member_id="m",
                    subscriptions=[group_pb2.Subscription(topic="t", filter="a ||")],
                )
            },
            "filter",
        ),
        (
            {
                "hello": group_pb2.Hello(
                    group=GROUP,
                    member_id="m",
                    subscriptions=[
                        group_pb2.Subscription(
                            topic="t", filter="a = ", filter_type=broker_pb2.FILTER_TYPE_SQL92
                        )
                    ],
                )
            },
            "filter",
        ),
        (
            {
                "hello": group_pb2.Hello(
                    group=GROUP,
                    member_id="m",
                    subscriptions=[group_pb2.Subscription(topic="t")] * 2,
                )
            },
            "subscriptions",
        ),
        (
            {
                "hello": group_pb2.Hello(
                    group=GROUP,
                    member_id="m",
                    subscriptions=[group_pb2.Subscription(topic="a b")],
                )
            },
            "topic",
        ),
    ],
)
async def test_a_wrong_first_event_is_refused_by_field(coordinator, event, field) -> None:
    async with coordinator.joined(HERE) as member:
        await member.say(**event)
        error = await member.failure()
        assert isinstance(error, InvalidArgument)
        assert error.field == field


async def test_hello_comes_once(coordinator, topic) -> None:
    async with coordinator.joined(HERE) as member:
        await member.hello(GROUP, "m1", topic)
        await member.assignment()
        await member.hello(GROUP, "m1", topic)
        error = await member.failure()
        assert isinstance(error, InvalidArgument)
        assert error.field == "event"


async def test_a_broker_that_knows_no_nameserver_is_not_ready(tmp_path) -> None:
    async with (
        running_broker(tmp_path) as (broker, _),
        channel.connect(broker.server.address) as connection,
    ):
        member = Stream(stubs.GroupCoordinatorStub(connection).Join())
        await member.hello(GROUP, "m1", "t")
        assert isinstance(await member.failure(), NotReady)


async def test_groups_are_listed_and_described(cluster, coordinator, topic) -> None:
    async with coordinator.joined(HERE) as member:
        await member.hello(GROUP, "m1", topic, client="a test", session_timeout_ms=90_000)
        generation, _ = await member.assignment()
        for broker, client in cluster.clients.items():
            commit = broker_pb2.OffsetCommit(topic=topic, queue_id=0, offset=0)
            await client.broker.CommitOffsets(
                broker_pb2.CommitOffsetsRequest(group=GROUP, commits=[commit])
            )
            listed = await coordinator.stub(broker).ListGroups(group_pb2.ListGroupsRequest())
            [summary] = listed.groups
            assert (summary.group, summary.coordinator) == (GROUP, broker == HERE)
            assert summary.members == (1 if broker == HERE else 0)
        request = group_pb2.DescribeGroupRequest(group=GROUP)
        description = await coordinator.stub(HERE).DescribeGroup(request)
        assert (description.generation, description.strategy) == (generation, "average")
        [described] = description.members
        assert (described.member_id, described.client) == ("m1", "a test")
        assert described.session_timeout_ms == 90_000
        assert {(queue.broker, queue.queue_id) for queue in described.queues} == ALL
        assert not (await coordinator.stub(THERE).DescribeGroup(request)).coordinator
        unknown = group_pb2.DescribeGroupRequest(group="unknown")
        with pytest.raises(GroupNotFound):
            await status.answer(coordinator.stub(HERE).DescribeGroup(unknown))


async def test_a_stopping_coordinator_ends_the_streams(cluster, coordinator, topic) -> None:
    async with coordinator.joined(HERE) as member:
        await member.hello(GROUP, "m1", topic)
        await member.assignment()
        stopping = asyncio.create_task(cluster.stop_broker(HERE))
        with suppress(Unavailable):  # or it hears before it stops that the nameserver let it go
            while not (event := await member.hear()).coordinator:
                pass
            assert event.coordinator == THERE
        await stopping


async def test_a_restarted_coordinator_remembers_the_members(cluster, coordinator, topic) -> None:
    async with coordinator.joined(HERE) as first, coordinator.joined(HERE) as second:
        await first.hello(GROUP, "m1", topic)
        await first.assignment()
        await second.hello(GROUP, "m2", topic)
        generation, _ = await first.assignment()
    restored = cluster.brokers[HERE]._coordinator()
    [group] = restored.groups()
    assert (group.generation, group.absent.keys()) == (generation, {"m1", "m2"})


class Gate:
    """Keeps groups when it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.open = asyncio.Event()
        self.refused: set[str] = set()

    async def save(self, groups) -> set[str]:
        changes = await Slices().work(groups.changing())
        self.asked.set()
        await self.open.wait()
        groups.not_kept(self.refused & changes.keys())
        return self.refused & changes.keys()


async def test_members_are_told_what_is_kept_and_nothing_else(cluster, coordinator, topic) -> None:
    cluster.brokers[HERE]._groups._telling._group_store = gate = Gate()
    async with coordinator.joined(HERE) as member:
        await member.hello(GROUP, "m1", topic)
        await gate.asked.wait()
        await member.say(heartbeat=group_pb2.Heartbeat())
        assert (await member.hear()).WhichOneof("event") == "heartbeat_ack"
        gate.open.set()
        assert len((await member.assignment())[1]) == 4


async def test_members_of_a_group_that_cannot_be_kept_come_again(
    cluster, coordinator, topic
) -> None:
    cluster.brokers[HERE]._groups._telling._group_store = gate = Gate()
    gate.open.set()
    gate.refused.add(GROUP)
    async with coordinator.joined(HERE) as member, coordinator.joined(HERE) as other:
        await other.hello(OTHER, "m1", topic)
        assert len((await other.assignment())[1]) == 4
        await member.hello(GROUP, "m1", topic)
        assert isinstance(await member.failure(), Unavailable)
    gate.refused.clear()
    async with coordinator.joined(HERE) as member:
        await member.hello(GROUP, "m1", topic)
        assert len((await member.assignment())[1]) == 4


async def test_what_a_disk_refused_is_kept_without_another_event(
    cluster, coordinator, topic, monkeypatch
) -> None:
    class Full:
        saves = 0

        async def save(self, groups) -> tuple[str, ...]:
            await Slices().work(groups.snapshotting())
            self.saves += 1
            if self.saves < 3:
                groups.snapshot_not_kept()
            return ()

    monkeypatch.setattr(telling, "SAVE_AGAIN_S", 0.01)
    servicer = cluster.brokers[HERE]._groups
    servicer._telling._group_store = store = Full()
    async with coordinator.joined(HERE) as member:
        await member.hello(GROUP, "m1", topic, session_timeout_ms=300_000)
        assert len((await member.assignment())[1]) == 4
        await until(lambda: store.saves >= 3 and not servicer._coordinator.table.changed)


class Context:
    """Of a stream in this process: what was written."""

    def __init__(self) -> None:
        self.told: list[group_pb2.CoordinatorEvent] = []

    async def write(self, event: group_pb2.CoordinatorEvent) -> None:
        self.told.append(event)


def events(*said: group_pb2.MemberEvent, then: asyncio.Event, last: group_pb2.MemberEvent):
    """A member's events, the last one when it may come; after it the stream stays open."""

    async def requests():
        for event in said:
            yield event
        await then.wait()
        yield last
        await asyncio.Event().wait()

    return requests()


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_goodbye_counts_though_its_stream_ends_while_a_rebalance_is_under_way(
    cluster, topic, comes_back
) -> None:
    servicer = cluster.brokers[HERE]._groups
    subscriptions = [group_pb2.Subscription(topic=topic)]
    hello = group_pb2.MemberEvent(
        hello=group_pb2.Hello(group=GROUP, member_id="m1", subscriptions=subscriptions)
    )
    leave = group_pb2.MemberEvent(leave=group_pb2.Leave())
    context, leaves, done = Context(), asyncio.Event(), asyncio.Event()
    joined = asyncio.create_task(servicer.Join(events(hello, then=leaves, last=leave), context))
    await until(lambda: bool(context.told))
    servicer._rebalancer.post(lambda slices: done.wait())
    await until(lambda: not servicer._rebalancer._waiting)
    leaves.set()
    await until(lambda: servicer._sessions[GROUP, "m1"].said_goodbye)
    joined.cancel()
    await asyncio.wait([joined])
    if comes_back:
        never = asyncio.Event()
        again = asyncio.create_task(servicer.Join(events(hello, then=never, last=leave), Context()))
        waiting = servicer._rebalancer._waiting
        await until(lambda: sum(each.group == GROUP for each in waiting) == 2)
    done.set()
    await servicer._rebalancer.idle.wait()
    assert set(servicer._coordinator.group(GROUP).members) == ({"m1"} if comes_back else set())
    if comes_back:
        again.cancel()
        await asyncio.wait([again])
    assert not servicer._sessions


async def test_who_does_not_read_is_not_kept_alive_by_what_it_says(
    cluster, topic, monkeypatch
) -> None:
    class Unread:
        async def write(self, event: group_pb2.CoordinatorEvent) -> None:
            await asyncio.Event().wait()

    heard: list[int] = []

    async def talk():
        subscriptions = [group_pb2.Subscription(topic=topic)]
        yield group_pb2.MemberEvent(
            hello=group_pb2.Hello(group=GROUP, member_id="m1", subscriptions=subscriptions)
        )
        for number in range(20):
            heard.append(number)
            yield group_pb2.MemberEvent(heartbeat=group_pb2.Heartbeat())
        await asyncio.Event().wait()

    monkeypatch.setattr(sessions, "OUTBOX_EVENTS_MAX", 2)
    joined = asyncio.create_task(cluster.brokers[HERE]._groups.Join(talk(), Unread()))
    await until(lambda: len(heard) > 2)
    joined.cancel()
    await asyncio.wait([joined])
    assert len(heard) <= 5


async def test_what_waits_to_be_kept_is_bounded(cluster, coordinator, topic, monkeypatch) -> None:
    monkeypatch.setattr(sessions, "OUTBOX_EVENTS_MAX", 2)
    cluster.brokers[HERE]._groups._telling._group_store = gate = Gate()
    async with coordinator.joined(HERE) as member:
        await member.hello(GROUP, "m1", topic)
        await gate.asked.wait()
        for number in range(4):  # each makes a generation, and tells the first one
            async with coordinator.joined(HERE) as other:
                await other.hello(GROUP, f"m2-{number}", topic)
                await other.say(leave=group_pb2.Leave())
                assert await other.hear() is grpc.aio.EOF
        assert isinstance(await member.failure(), Overloaded)
        gate.open.set()


async def test_a_log_that_had_replicas_keeps_its_groups(tmp_path) -> None:
    async with running_cluster(tmp_path, "b0") as cluster:
        await cluster.create_topic("orders")
        store = cluster.brokers["b0"].store
        entry = epoch.encode(1, bytes(16), 1_700_000_000_000)
        store.tables.epochs.note(1, store.log.append(epoch.KIND, [entry])[0])
        await cluster.stop_broker("b0")
        await cluster.start_broker("b0")
        member = Stream(call := cluster.clients["b0"].groups.Join())
        await member.hello(GROUP, "m1", "orders")
        queues: set[tuple[str, int]] = set()
        while len(queues) < 4:  # the topic may not be known yet
            generation, queues = await member.assignment()
        call.cancel()
        await cluster.stop_broker("b0")
        assert not (tmp_path / "b0" / "groups").exists()
        await cluster.start_broker("b0")
        [group] = cluster.brokers["b0"]._coordinator().groups()
        assert group.absent.keys() == {"m1"}
        assert group.generation >= generation  # at its end the broker left the routes


async def test_where_groups_must_be_made_first_joining_makes_none(tmp_path) -> None:
    async with running_cluster(tmp_path, "b0", auto_create_groups=False) as cluster:
        await cluster.create_topic("orders")
        groups = cluster.clients["b0"].groups
        member = Stream(groups.Join())
        await member.hello(GROUP, "m1", "orders")
        error = await member.failure()
        assert isinstance(error, GroupNotFound)
        assert (error.field, error.value) == ("group", GROUP)
        async with channel.connect(cluster.brokers["b0"].server.address) as connection:
            admin = stubs.GroupAdminStub(connection)
            config = group_admin_pb2.GroupConfig(group=GROUP)
            await admin.PutGroup(group_admin_pb2.PutGroupRequest(group=config))
        listed = await groups.ListGroups(group_pb2.ListGroupsRequest())
        assert [each.group for each in listed.groups] == [GROUP]
        member = Stream(call := groups.Join())
        await member.hello(GROUP, "m1", "orders")
        assert len((await member.assignment())[1]) == 4
        call.cancel()


async def test_a_release_of_more_queues_than_there_are_ends_the_stream(
    cluster: Cluster, topic: str, coordinator
) -> None:
    """It is refused before anything is made of it."""
    owner = cluster.brokers[balance.coordinator("g", cluster.brokers)]
    async with channel.connect(owner.server.address) as connection:
        stream = stubs.GroupCoordinatorStub(connection).Join()
        subscriptions = [group_pb2.Subscription(topic=topic)]
        hello = group_pb2.Hello(group="g", member_id="m", subscriptions=subscriptions)
        await stream.write(group_pb2.MemberEvent(hello=hello))
        assert isinstance(await stream.read(), group_pb2.CoordinatorEvent)
        queues = [message_pb2.QueueRef(topic=topic, broker="b0")] * 1_025
        released = group_pb2.Released(generation=1, queues=queues)
        await stream.write(group_pb2.MemberEvent(released=released))

        async def read_all() -> None:
            while True:
                await status.answer(stream.read())

        with pytest.raises(InvalidArgument) as refused:
            await read_all()
        assert (refused.value.field, refused.value.value) == ("released.queues", "1025")


async def test_others_have_turns_while_a_long_assignment_is_written(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "EVENT_QUEUES_AT_ONCE", 2)
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    routes = cluster.brokers["b0"]._routes.cache
    queues = tuple(
        balance.MessageQueue("t", broker, n) for broker in ("b0", "b1") for n in range(3)
    )
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    told = Assignment("g", "m1", 7, queues, ("m1", "m2"))
    written = await messages.assignment_event(told, routes, Slices(), {"t": 5}, outside=False)
    counting.cancel()
    assert turns >= 2
    assignment = written.assignment
    assert tuple(map(messages.queue_of, assignment.queues)) == queues
    assert [each.name for each in assignment.brokers] == ["b0", "b1"]
    assert (assignment.generation, list(assignment.members)) == (7, ["m1", "m2"])
    assert dict(assignment.reads_for_ms) == {"t": 5}
