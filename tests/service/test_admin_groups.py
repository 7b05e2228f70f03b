"""The admin client on groups of two brokers: looked at, moved while members run, put, deleted."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

import duemq
from duemq.administering.offsets import Offsets
from duemq.aio import Admin, PullConsumer, PushConsumer
from duemq.consumer import push
from duemq.consumer.group import membership
from duemq.consumer.settings import ConsumerSettings
from duemq.descriptions import OffsetChange
from duemq.errors import (
    GroupNotFound,
    InvalidArgument,
    OffsetOutOfRange,
    QueueNotFound,
    TopicNotFound,
    Unavailable,
)
from duemq.protocol import balance
from duemq.protocol.balance import MessageQueue
from duemq.protocol.limits import SESSION_TIMEOUT_MS_MAX
from duemq.protocol.retry_policy import ExponentialDelays
from duemq.settings import ClientSettings
from duemq.transport import channel
from duemq.v1 import admin_pb2, broker_pb2, group_pb2, stubs
from tests.service.running_broker import topic_name
from tests.service.running_cluster import WAIT_S, Cluster, running_cluster, soon_given_up, until

GROUP = "billing"
BROKERS = ("b0", "b1")


@pytest.fixture(autouse=True)
def _patient_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is given up is never said again, and its member is listed for a session longer."""
    monkeypatch.setattr(membership, "LEAVE_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(push, "LEAVE_TIMEOUT_S", WAIT_S)


async def test_a_broker_that_came_later_has_the_settings_when_they_are_put_again(tmp_path) -> None:
    async with running_cluster(tmp_path, "b1") as cluster, Admin(cluster.nameserver) as admin:
        policy = await admin.put_group(GROUP, retries_max=3, exponential=("1s", 2.0, "1m"))
        assert (await admin.describe_group(GROUP)).without_settings == ()
        await cluster.start_broker("b0")
        await cluster.create_topic("orders", queues=1)
        queue = MessageQueue("orders", "b0", 0)
        async with PullConsumer(GROUP, nameserver=cluster.nameserver) as reader:
            await reader.commit({queue: 0})  # so that b0 has heard of the group
        found = await admin.describe_group(GROUP)
        assert (found.retry, found.without_settings) == (policy, ("b0",))
        await admin.put_group(GROUP, retries_max=3, exponential=("1s", 2.0, "1m"))
        found = await admin.describe_group(GROUP)
        assert (found.retry, found.without_settings) == (policy, ())


async def test_where_groups_must_be_put_a_broker_that_came_later_takes_them_when_put_again(
    tmp_path,
) -> None:
    async with (
        running_cluster(tmp_path, "b1", auto_create_groups=False) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        await admin.put_group(GROUP)
        await cluster.start_broker("b0")
        await cluster.create_topic("orders", queues=1)
        queues = [MessageQueue("orders", broker, 0) for broker in BROKERS]
        async with PullConsumer(GROUP, nameserver=cluster.nameserver) as reader:
            await reader.commit({queues[1]: 0})
            with pytest.raises(GroupNotFound):
                await reader.commit({queues[0]: 0})
            assert (await admin.describe_group(GROUP)).without_settings == ("b0",)
            await admin.put_group(GROUP)
            await reader.commit({queues[0]: 0})


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, *BROKERS) as made:
        yield made


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    """Two queues on each broker, with five messages each."""
    name = topic_name()
    await cluster.create_topic(name, queues=2)
    for broker in BROKERS:
        for queue in (0, 1):
            bodies = [f"{broker}/{queue}/{number}".encode() for number in range(5)]
            await cluster.send(name, bodies, broker=broker, queue_id=queue)
    return name


@pytest.fixture
async def admin(cluster: Cluster) -> AsyncIterator[Admin]:
    async with Admin(cluster.nameserver) as made:
        yield made


@pytest.fixture
async def impatient(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Admin]:
    """For when b1 is away: each question to it takes all of its time."""
    soon_given_up(monkeypatch, "b1")
    async with Admin(cluster.nameserver) as made:
        yield made


def consumer(cluster: Cluster, topic: str, callback, **settings) -> PushConsumer:
    return PushConsumer(
        GROUP,
        topic,
        callback,
        nameserver=cluster.nameserver,
        settings=ConsumerSettings(
            **{"start_from": "earliest", "commit_interval_s": 0.05, **settings}
        ),
    )


async def consumed(cluster: Cluster, topic: str, admin: Admin) -> None:
    """Has the group read everything; nobody is left in it."""
    async with consumer(cluster, topic, lambda message: None):
        await until(lambda: all_read(admin, topic))


async def all_read(admin: Admin, topic: str) -> bool:
    """Not only a lag of 0: a group has that too before it has taken a queue over."""
    try:
        return await offsets(admin, GROUP, topic) == all_at(5)
    except GroupNotFound:
        return False


async def lag_is(admin: Admin, lag: int) -> bool:
    """Of all queues of the topic; before they are taken over there is no lag."""
    try:
        found = await admin.describe_group(GROUP)
    except GroupNotFound:
        return False
    known = [each for each in found.progress if each.offset is not None]
    return len(known) >= len(all_at(0)) and found.lag == lag


async def offsets(admin: Admin, group: str, topic: str) -> dict[tuple[str, int], int | None]:
    found = await admin.describe_group(group)
    return {
        (each.broker, each.queue): each.offset for each in found.progress if each.topic == topic
    }


def all_at(offset: int) -> dict[tuple[str, int], int]:
    return {(broker, queue): offset for broker in BROKERS for queue in (0, 1)}


def moves(changes: list[OffsetChange]) -> dict[tuple[str, int], tuple[int | None, int]]:
    return {(each.broker, each.queue): (each.before, each.after) for each in changes}


# --- looking ----------------------------------------------------------------------------------


async def test_a_group_is_joined_from_coordinator_and_brokers(cluster, topic, admin) -> None:
    with pytest.raises(GroupNotFound):
        await admin.describe_group(GROUP)
    gate = asyncio.Event()

    async def hold(message) -> None:
        await gate.wait()

    async with consumer(cluster, topic, hold):

        async def all_in_flight() -> bool:
            return (await admin.describe_group(GROUP)).in_flight == 20

        await until(all_in_flight)
        found = await admin.describe_group(GROUP)
        [member] = found.members
        assert found.coordinator in BROKERS
        assert found.lag == 20
        assert found.lag_ms > 0
        mine = [each for each in found.progress if each.topic == topic]
        assert {each.member_id for each in mine} == {member.member_id}
        assert {each.generation for each in mine} == {found.generation}
        assert found.missing == ()
        registry = cluster.brokers[found.coordinator].server.registry
        assert registry.get_sample_value("duemq_broker_group_members", {"group": GROUP}) == 1
        assert found.retry is not None
        assert found.retry.retries_max == 16
        gate.set()
        await until(lambda: lag_is(admin, 0))
    found = await admin.describe_group(GROUP)
    assert (found.members, found.lag_ms, found.in_flight) == ((), 0, 0)
    assert all(each.last_commit_ms for each in found.progress if each.topic == topic)


async def test_a_broker_that_is_away_is_named(cluster, topic, impatient) -> None:
    await consumed(cluster, topic, impatient)
    # It vanishes without a word: the nameserver still lists it.
    await cluster.silence_broker("b1")
    # Side by side: each asks b1 until its time is over.
    found, described = await asyncio.gather(
        impatient.describe_group(GROUP), impatient.describe_topic(topic)
    )
    assert [each.name for each in found.missing] == ["b1"]
    assert {each.broker for each in found.progress if each.topic == topic} == {"b0"}
    assert [each.name for each in described.missing] == ["b1"]
    assert {queue.broker for queue in described.queues} == {"b0"}
    answers = await asyncio.gather(
        impatient.reset_offsets(GROUP, topic, "earliest"),
        impatient.skip_backlog(GROUP),
        impatient.clone_offsets(GROUP, "other"),
        impatient.delete_group(GROUP),
        impatient.describe_group("nobody-knows"),
        return_exceptions=True,
    )
    for answer in answers:
        assert isinstance(answer, Unavailable)
        assert "b1" in str(answer)
    assert [answer.value for answer in answers[:4]] == ["b1"] * 4
    assert set((await offsets(impatient, GROUP, topic)).values()) == {5}


async def test_a_broker_that_left_is_named_by_who_knew_it(cluster, topic, admin) -> None:
    await cluster.stop_broker("b1")

    async def named() -> bool:
        return [each.name for each in (await admin.describe_topic(topic)).missing] == ["b1"]

    await until(named)


# --- moved ------------------------------------------------------------------------------------


async def test_a_dry_run_changes_nothing(cluster, topic, admin) -> None:
    await consumed(cluster, topic, admin)
    changes = await admin.reset_offsets(GROUP, topic, "earliest", dry_run=True)
    assert moves(changes) == dict.fromkeys(all_at(0), (5, 0))
    assert await offsets(admin, GROUP, topic) == all_at(5)


async def test_a_reset_moves_a_group_that_sleeps(cluster, topic, admin) -> None:
    await consumed(cluster, topic, admin)
    await admin.reset_offsets(GROUP, topic, "earliest")
    assert await offsets(admin, GROUP, topic) == all_at(0)
    changes = await admin.reset_offsets(GROUP, topic, offset=3, queues=[("b0", 1), ("b1", 0)])
    assert moves(changes) == {("b0", 1): (0, 3), ("b1", 0): (0, 3)}
    assert await offsets(admin, GROUP, topic) == all_at(0) | {("b0", 1): 3, ("b1", 0): 3}
    await admin.reset_offsets(GROUP, topic, "latest")
    assert await offsets(admin, GROUP, topic) == all_at(5)
    await admin.reset_offsets(GROUP, topic, datetime(2001, 1, 1, tzinfo=UTC))
    assert await offsets(admin, GROUP, topic) == all_at(0)
    await admin.reset_offsets(GROUP, topic, "now")
    assert set((await offsets(admin, GROUP, topic)).values()) <= {0, 5}
    await admin.reset_offsets(GROUP, topic, "-1h")
    received: list[bytes] = []
    async with consumer(cluster, topic, lambda message: received.append(message.body)):
        await until(lambda: len(received) == 20)
    assert len(set(received)) == 20


async def test_a_reset_while_members_run_brings_all_again_and_skips_nothing(
    cluster, topic, admin
) -> None:
    received: list[bytes] = []
    async with consumer(cluster, topic, lambda message: received.append(message.body)) as running:
        await until(lambda: len(received) == 20)
        await until(lambda: lag_is(admin, 0))
        before = running.queues
        await admin.reset_offsets(GROUP, topic, "earliest", queues=[("b0", 0), ("b1", 1)])
        again = {f"{place}/{n}".encode() for place in ("b0/0", "b1/1") for n in range(5)}
        await until(lambda: len(received) >= 30)
        await until(lambda: running.queues == before)
        await cluster.send(topic, [b"new"], broker="b0", queue_id=0)
        await cluster.send(topic, [b"other"], broker="b0", queue_id=1)
        await until(lambda: {b"new", b"other"} <= set(received))
        counts = Counter(received)
    assert {body for body, count in counts.items() if count == 2} == again
    assert {counts[body] for body in set(counts) - again} == {1}


async def test_a_running_member_skips_the_backlog(cluster, topic, admin) -> None:
    gate = asyncio.Event()
    received: list[bytes] = []

    async def slow(message) -> None:
        await gate.wait()
        received.append(message.body)

    async with consumer(
        cluster, topic, slow, queue_messages_max=1, queue_span_max=1, release_timeout_s=0.1
    ):

        async def in_hand() -> bool:
            return (await admin.describe_group(GROUP)).in_flight == 4

        await until(in_hand)
        changes = await admin.skip_backlog(GROUP)
        assert moves(changes) == dict.fromkeys(all_at(0), (0, 5))
        gate.set()
        for broker in BROKERS:
            await cluster.send(topic, [f"new {broker}".encode()], broker=broker)
        await until(lambda: {b"new b0", b"new b1"} <= set(received))
        await until(lambda: lag_is(admin, 0))
    # What was in hand was finished; nothing else of the backlog came.
    assert len([body for body in received if not body.startswith(b"new")]) <= 4


async def test_what_cannot_be_moved_is_refused_and_nothing_is_moved(cluster, topic, admin) -> None:
    with pytest.raises(GroupNotFound):
        await admin.reset_offsets(GROUP, topic, "earliest")
    await consumed(cluster, topic, admin)
    for arguments, options, kind in (
        (("nowhere", "earliest"), {}, TopicNotFound),
        ((topic,), {}, InvalidArgument),
        ((topic, "earliest"), {"offset": 1}, InvalidArgument),
        ((topic, "yesterday"), {}, InvalidArgument),
        ((topic, datetime(2030, 1, 1)), {}, InvalidArgument),
        ((topic, "earliest"), {"queues": []}, InvalidArgument),
        ((topic, "earliest"), {"queues": [("b0", -1)]}, InvalidArgument),
        ((topic, "earliest"), {"queues": [("b0", 0), ("b0", 7)]}, QueueNotFound),
        ((topic,), {"offset": 6}, OffsetOutOfRange),
        ((topic,), {"offset": -1}, InvalidArgument),
    ):
        with pytest.raises(kind):
            await admin.reset_offsets(GROUP, *arguments, **options)
    hasty = ClientSettings(request_timeout_s=0.5)  # a broker that nobody knows is waited for
    async with Admin(cluster.nameserver, settings=hasty) as other:
        with pytest.raises(Unavailable):
            await other.reset_offsets(GROUP, topic, "earliest", queues=[("b7", 0)])
    assert await offsets(admin, GROUP, topic) == all_at(5)


async def test_what_is_gone_after_the_dry_run_is_said_with_what_was_done(
    cluster, topic, admin, monkeypatch
) -> None:
    await consumed(cluster, topic, admin)
    ask = Offsets._ask_to_move

    async def purged_first(self, brokers, method, absent, dry_run):
        if not dry_run:
            cut = admin_pb2.QueueCut(queue_id=0, before_offset=5)
            request = admin_pb2.PurgeTopicRequest(name=topic, cuts=[cut])
            await cluster.clients["b1"].admin.PurgeTopic(request)
        return await ask(self, brokers, method, absent, dry_run)

    monkeypatch.setattr(Offsets, "_ask_to_move", purged_first)
    with pytest.raises(OffsetOutOfRange) as raised:
        await admin.reset_offsets(GROUP, topic, offset=1)
    assert raised.value.message.endswith("; all other queues were changed")
    assert await offsets(admin, GROUP, topic) == all_at(1) | {("b1", 0): 5}


async def test_an_empty_topic_is_refused_and_is_never_all_topics(cluster, topic, admin) -> None:
    await admin.put_group(GROUP)
    await admin.reset_offsets(GROUP, topic, "earliest")
    for move in (
        admin.reset_offsets(GROUP, "", "latest"),
        admin.skip_backlog(GROUP, ""),
        admin.clone_offsets(GROUP, "other", ""),
    ):
        with pytest.raises(InvalidArgument) as refused:
            await move
        assert refused.value.field == "topic"
    with pytest.raises(GroupNotFound):
        await admin.describe_group("other")


async def test_offsets_are_cloned_for_a_group_to_come(cluster, topic, admin) -> None:
    await consumed(cluster, topic, admin)
    assert moves(await admin.clone_offsets(GROUP, "billing-2", dry_run=True)) == dict.fromkeys(
        all_at(5), (None, 5)
    )
    with pytest.raises(GroupNotFound):
        await admin.describe_group("billing-2")
    await admin.clone_offsets(GROUP, "billing-2", topic)
    assert await offsets(admin, "billing-2", topic) == all_at(5)
    with pytest.raises(GroupNotFound):
        await admin.clone_offsets("nobody", "billing-2")
    with pytest.raises(TopicNotFound):
        await admin.clone_offsets(GROUP, "billing-2", "nowhere")


# --- settings ---------------------------------------------------------------------------------


async def test_a_group_is_put_at_every_broker(cluster, topic, admin) -> None:
    policy = await admin.put_group(GROUP, retries_max=3, retry_delays="1s 1m")
    assert (policy.retries_max, policy.delays_ms) == (3, (1_000, 60_000))
    assert (await admin.describe_group(GROUP)).retry == policy
    assert GROUP in {each.name for each in await admin.groups()}
    for client in cluster.clients.values():
        request = broker_pb2.GetOffsetsRequest(group=GROUP)
        assert not (await client.broker.GetOffsets(request)).queues
    exponential = ExponentialDelays(1_000, 2.0, 60_000)
    assert (await admin.put_group(GROUP, exponential=("1s", 2.0, "1m"))).exponential == exponential
    # Before its first member: where it shall start.
    await admin.reset_offsets(GROUP, topic, offset=4)
    received: list[bytes] = []
    async with consumer(cluster, topic, lambda message: received.append(message.body)):
        await until(lambda: len(received) == 4)
        with pytest.raises(InvalidArgument, match="members"):
            await admin.delete_group(GROUP)
    assert {body[-1:] for body in received} == {b"4"}
    await admin.delete_group(GROUP)
    with pytest.raises(GroupNotFound):
        await admin.describe_group(GROUP)
    with pytest.raises(GroupNotFound):
        await admin.delete_group(GROUP)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"retries_max": -1}, "retries_max"),
        ({"retries_max": 1 << 40}, "retries_max"),
        ({"retry_delays": "soon"}, "retry_delays"),
        ({"retry_delays": ["1s"], "exponential": ("1s", 2.0, "1m")}, "exponential"),
        ({"exponential": ("1s", 0.1, "1m")}, "multiplier"),
        ({"retry_delays": [1] * 300}, "delays_ms"),
    ],
)
async def test_illegal_settings(admin: Admin, options, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await admin.put_group(GROUP, **options)
    assert caught.value.field == field
    with pytest.raises(InvalidArgument):
        await admin.put_group("no spaces")


async def test_a_reset_keeps_the_order_of_what_is_in_hand(cluster, topic, admin) -> None:
    running: set[tuple[str, int]] = set()
    gate = asyncio.Event()
    overlaps: list[bytes] = []
    received: list[bytes] = []

    async def one_at_a_time(message) -> None:
        place = (message.broker, message.queue)
        if place in running:
            overlaps.append(message.body)
        running.add(place)
        await gate.wait()
        received.append(message.body)
        running.discard(place)

    settings = ConsumerSettings(start_from="earliest", commit_interval_s=0.05)
    async with PushConsumer(
        GROUP, topic, one_at_a_time, order="queue", nameserver=cluster.nameserver, settings=settings
    ):
        await until(lambda: len(running) == 4)
        await admin.reset_offsets(GROUP, topic, "earliest")

        async def fenced() -> bool:
            found = await admin.describe_group(GROUP)
            return all(p.in_flight == 0 or p.generation == found.generation for p in found.progress)

        await until(fenced)
        gate.set()
        await until(lambda: lag_is(admin, 0))
    assert overlaps == []
    for place in (f"{broker}/{queue}" for broker in BROKERS for queue in (0, 1)):
        mine = [body.decode() for body in received if body.decode().startswith(place)]
        assert mine in (
            [f"{place}/{n}" for n in (0, 0, 1, 2, 3, 4)],
            [f"{place}/{n}" for n in range(5)],
        )


async def test_retries_and_dead_letters_are_counted(cluster, topic, admin) -> None:
    async def refuse(message: duemq.Message) -> None:
        if message.body.endswith(b"/1"):
            raise duemq.RetryLater("1h")
        if message.body.endswith(b"/2"):
            raise duemq.DeadLetter("unreadable")

    async with consumer(cluster, topic, refuse):
        # The dead letters are no backlog of the group; its %RETRY% topics are empty yet.
        await until(lambda: lag_is(admin, 0))
        found = await admin.describe_group(GROUP)
    assert (found.dead_letters, found.dead_letters_kept) == (4, 4)
    assert (found.sent_back, found.retries_waiting) == (4, 4)
    kept = (
        broker.server.registry.get_sample_value("duemq_broker_dead_letters_kept", {"group": GROUP})
        for broker in cluster.brokers.values()
    )
    assert sum(value or 0 for value in kept) == 4


async def test_a_topic_that_only_one_broker_has(cluster, topic, admin) -> None:
    only = topic_name()
    await admin.create_topic(only, queues=1, brokers=["b0"])
    await cluster.send(only, [b"a", b"b"], broker="b0")
    await consumed(cluster, topic, admin)
    changes = await admin.reset_offsets(GROUP, only, "latest")
    assert moves(changes) == {("b0", 0): (None, 2)}
    await admin.clone_offsets(GROUP, "billing-2", only)
    assert await offsets(admin, "billing-2", only) == {("b0", 0): 2}
    assert [m.body for m in (await admin.find_messages(only)).messages] == [b"a", b"b"]
    await admin.skip_backlog(GROUP, only)


async def test_a_group_whose_members_are_awaited_is_not_deleted(cluster, topic, admin) -> None:
    """After a start of its coordinator they are on their way back, and would have no offsets."""
    await admin.put_group(GROUP)
    name = balance.coordinator(GROUP, BROKERS)
    assert name is not None
    hello = group_pb2.Hello(
        group=GROUP,
        member_id="left",
        subscriptions=[group_pb2.Subscription(topic=topic)],
        session_timeout_ms=SESSION_TIMEOUT_MS_MAX,
        generation=7,
        members=["left", "still-away"],
    )
    connection = channel.connect(cluster.brokers[name].server.address)
    try:
        stream = stubs.GroupCoordinatorStub(connection).Join()
        await stream.write(group_pb2.MemberEvent(hello=hello))
        await stream.write(group_pb2.MemberEvent(leave=group_pb2.Leave()))
        await stream.done_writing()
        async for _ in stream:
            """Until it has left."""
    finally:
        await connection.close()
    assert not (await admin.describe_group(GROUP)).members
    with pytest.raises(InvalidArgument, match="awaits"):
        await admin.delete_group(GROUP)
    assert (await admin.describe_group(GROUP)).without_settings == ()
