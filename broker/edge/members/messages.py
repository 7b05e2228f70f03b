"""What members and coordinators say to one another, and what is told of groups: protobuf ⇄ plain.

Lists of queues may be long: they are worked off in slices.
"""

from collections.abc import Mapping, Sequence

from duemq.errors import InvalidArgument, NotCoordinator
from duemq.protocol import checks
from duemq.protocol.balance import MessageQueue
from duemq.protocol.pieces import parts
from duemq.protocol.route import RouteCache
from duemq.transport import status
from duemq.v1 import broker_pb2, group_pb2, message_pb2
from duemq_server.broker.edge.members.sessions import HELLO_FIRST
from duemq_server.broker.filtering.filters import Expressions, check_filter
from duemq_server.broker.groups.members import Group, Hello, check_owned
from duemq_server.broker.groups.rebalance import Assignment
from duemq_server.broker.groups.subscriptions import TopicFilter, check_count
from duemq_server.broker.slices import Slices, compiled

EVENT_QUEUES_AT_ONCE = 512  # of an assignment or a hello: about a millisecond's work


async def hello_of(event: group_pb2.MemberEvent) -> Hello:
    """Raises InvalidArgument if the event is no hello or has an illegal filter."""
    if event.WhichOneof("event") != "hello":
        raise checks.wrong("event", event.WhichOneof("event"), HELLO_FIRST)
    hello = event.hello
    check_owned("owned", len(hello.owned))
    slices = Slices()
    owned: list[MessageQueue] = []
    for part in parts(hello.owned, EVENT_QUEUES_AT_ONCE):
        owned += map(queue_of, part)
        await slices.pause()
    return Hello(
        group=hello.group,
        member_id=hello.member_id,
        subscriptions=_subscriptions_of(hello.subscriptions, await compiled(hello.subscriptions)),
        session_timeout_ms=hello.session_timeout_ms,
        strategy=hello.strategy,
        generation=hello.generation,
        owned=tuple(owned),
        client=hello.client,
        members=tuple(hello.members),
        incarnation=hello.incarnation,
        leaving=hello.leaving,
    )


def _subscriptions_of(
    said: Sequence[group_pb2.Subscription], expressions: Expressions
) -> dict[str, TopicFilter]:
    found: dict[str, TopicFilter] = {}
    if said:  # none: said below, of the whole hello
        check_count(len(said))
    for each in said:
        check_filter(each.filter, each.filter_type, expressions)
        if each.topic in found:
            raise InvalidArgument(
                f"subscriptions: topic {each.topic!r} is named twice",
                field="subscriptions",
                value=each.topic,
                limit="a topic once",
            )
        found[each.topic] = TopicFilter(each.filter, each.filter_type)
    return found


def queue_of(ref: message_pb2.QueueRef) -> MessageQueue:
    """A queue in plain types."""
    return MessageQueue(ref.topic, ref.broker, ref.queue_id)


async def assignment_event(
    told: Assignment,
    routes: RouteCache,
    slices: Slices,
    reads_for_ms: Mapping[str, int],
    *,
    outside: bool,
) -> group_pb2.CoordinatorEvent:
    """What a member shall own, where its brokers are, and how old its group is.

    `outside`: it came through the external port.
    """
    assignment = group_pb2.Assignment(
        generation=told.generation,
        members=told.members,
        waits_ms=told.waits_ms,
        reads_for_ms=reads_for_ms,
    )
    names: set[str] = set()
    for part in parts(told.queues, EVENT_QUEUES_AT_ONCE):
        names.update(queue.broker for queue in part)
        assignment.queues.extend(
            message_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)
            for topic, broker, queue_id in part
        )
        await slices.pause()
    assignment.brokers.extend(
        group_pb2.BrokerAddress(name=name, address=address)
        for name in sorted(names)
        if (address := _address(name, routes, outside=outside))
    )
    return group_pb2.CoordinatorEvent(assignment=assignment)


def elsewhere(
    error: NotCoordinator, name: str, routes: RouteCache, *, outside: bool
) -> group_pb2.CoordinatorEvent:
    """The group is that of the broker `name`; where it is, if that is known."""
    return group_pb2.CoordinatorEvent(
        error=status.to_proto(error),
        coordinator=name,
        coordinator_address=_address(name, routes, outside=outside),
    )


def _address(name: str, routes: RouteCache, *, outside: bool) -> str:
    """Where a member reaches a broker; empty: it does not, or nobody knows."""
    found = routes.broker(name)
    if found is None:
        return ""
    return found.external_address if outside else found.address


def summary(name: str, group: Group | None) -> group_pb2.GroupSummary:
    """Of a list.  None: coordinated elsewhere, or by nobody."""
    if group is None:
        return group_pb2.GroupSummary(group=name)
    return group_pb2.GroupSummary(
        group=name, coordinator=True, members=len(group.members), generation=group.generation
    )


async def description(group: Group) -> group_pb2.GroupDescription:
    """All that its coordinator knows of a group."""
    found = group_pb2.GroupDescription(
        group=group.name,
        coordinator=True,
        generation=group.generation,
        strategy=group.strategy,
        waits_until_ms=max(
            [group.hold_until_ms or 0, *(each.until_ms for each in group.replaced.values())]
        ),
    )
    members = sorted(group.members.values(), key=lambda each: each.member_id)
    slices = Slices()
    held = await slices.work(group.held())
    for member in members:
        described = found.members.add(
            member_id=member.member_id,
            client=member.client,
            subscriptions=[
                group_pb2.Subscription(
                    topic=topic,
                    filter=wanted.text,
                    filter_type=broker_pb2.FilterType.Name(wanted.filter_type),
                )
                for topic, wanted in member.subscriptions.items()
            ],
            last_heartbeat_ms=member.last_heard_ms,
            session_timeout_ms=member.session_timeout_ms,
            incarnation=member.incarnation,
            leaving=member.leaving,
        )
        for part in parts(held.get(member.member_id, ()), EVENT_QUEUES_AT_ONCE):
            described.queues.extend(
                message_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)
                for topic, broker, queue_id in part
            )
            await slices.pause()
    return found
