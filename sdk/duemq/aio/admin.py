"""The asyncio admin client; the synchronous one is a face of it.

Each broker keeps its own topics and offsets, so most answers are asked of all of them and joined.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import grpc.aio

from duemq import timers
from duemq.client import Addresses, Client
from duemq.descriptions import (
    BrokerDescription,
    ClusterDescription,
    GroupDescription,
    GroupSummary,
    MemberDescription,
    NameserverDescription,
    Progress,
    QueueRange,
    TimerStats,
    TopicDescription,
    TopicSummary,
)
from duemq.errors import DuemqError, GroupNotFound, TopicExists, TopicNotFound, Unavailable
from duemq.route import Broker, TimerShard
from duemq.rpc import status
from duemq.settings import DEFAULT_NAMESERVER, ClientSettings
from duemq.timers import CancelOutcome
from duemq.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    broker_pb2,
    broker_pb2_grpc,
    group_pb2,
    group_pb2_grpc,
    nameserver_pb2,
    nameserver_pb2_grpc,
    timer_pb2,
    timer_pb2_grpc,
)

# To a server that may be dead, where the others' answers are worth showing without it.
PROBE_TIMEOUT_S = 2.0

T = TypeVar("T")


class Admin:
    """Topics, groups, timers and the state of the cluster.

    `await start()` (or `async with`) connects.  Where brokers have to answer together and one
    does not in `request_timeout_s`, calls raise Unavailable.
    """

    def __init__(
        self,
        nameserver: Addresses = DEFAULT_NAMESERVER,
        *,
        settings: ClientSettings | None = None,
    ) -> None:
        """`nameserver`: `host:port`, several separated by commas."""
        self._client = Client(nameserver, settings)

    async def start(self) -> None:
        """Connects.  Raises Unavailable if no nameserver answers."""
        await self._client.start()

    async def close(self) -> None:
        """Ends the connections.  Idempotent."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ── topics ───────────────────────────────────────────────────────────────────────

    async def create_topic(
        self, name: str, *, queues: int = 0, message_bytes_max: int = 0
    ) -> TopicSummary:
        """Makes a topic on every live broker and waits until it can be used.

        `queues`: on each broker; 0: the broker's default.  `message_bytes_max`: of a body; 0: the
        broker's.  Raises InvalidArgument, TopicExists if no broker lacks it.
        """
        config = admin_pb2.TopicConfig(
            name=name, queues=queues, message_bytes_max=message_bytes_max
        )
        request = admin_pb2.CreateTopicRequest(topic=config)

        async def make(broker: Broker) -> admin_pb2.TopicDescription | TopicExists:
            attempts = 0

            async def once(to: grpc.aio.Channel, left_s: float) -> Any:
                nonlocal attempts
                attempts += 1
                return await admin_pb2_grpc.BrokerAdminStub(to).CreateTopic(request, timeout=left_s)

            try:
                return await self._at(broker, once)
            except TopicExists as error:
                if attempts == 1:
                    return error
                # Made by an earlier attempt whose answer was lost.
                return admin_pb2.TopicDescription(topic=config, broker=broker.name)

        made = await asyncio.gather(*map(make, self._brokers()))
        created = [each for each in made if not isinstance(each, TopicExists)]
        if not created:
            raise TopicExists(f"topic {name!r} exists", field="name", value=name)
        names = {broker.name for broker in self._client.routes.brokers}
        await self._client.wait_for(
            lambda routes: (
                (route := routes.route(name)) is not None
                and {served.broker for served in route.brokers} >= names
            ),
            self._client.settings.request_timeout_s,
        )
        found = [each for each in await self.topics(system=True) if each.name == name]
        if not found:
            raise TopicNotFound(f"topic {name!r} was deleted again", field="name", value=name)
        return found[0]

    async def delete_topic(self, name: str) -> None:
        """Deletes a topic and its messages on every broker.  Raises TopicNotFound."""
        request = admin_pb2.DeleteTopicRequest(name=name)

        async def delete(broker: Broker) -> bool:
            try:
                await self._at(
                    broker,
                    lambda to, left_s: admin_pb2_grpc.BrokerAdminStub(to).DeleteTopic(
                        request, timeout=left_s
                    ),
                )
            except TopicNotFound:
                return False
            return True

        if not any(await asyncio.gather(*map(delete, self._brokers()))):
            raise TopicNotFound(f"no topic {name!r}", field="name", value=name)
        await self._client.wait_for(
            lambda routes: routes.route(name) is None, self._client.settings.request_timeout_s
        )

    async def topics(self, *, system: bool = False) -> list[TopicSummary]:
        """All topics, sorted by name.  `system`: with those of DueMQ itself."""
        request = admin_pb2.ListTopicsRequest(system=system)
        answers = await self._at_all(
            lambda to, left_s: admin_pb2_grpc.BrokerAdminStub(to).ListTopics(
                request, timeout=left_s
            )
        )
        found: defaultdict[str, dict[str, admin_pb2.TopicConfig]] = defaultdict(dict)
        for broker, answer in answers.items():
            for config in answer.topics:
                found[config.name][broker] = config
        return [
            TopicSummary(
                name,
                sum(config.queues for config in configs.values()),
                min(config.message_bytes_max for config in configs.values()),
                tuple(sorted(configs)),
            )
            for name, configs in sorted(found.items())
        ]

    async def describe_topic(self, name: str) -> TopicDescription:
        """A topic, queue by queue.  Raises TopicNotFound."""
        request = admin_pb2.DescribeTopicRequest(name=name)
        answers = await self._at_all(
            lambda to, left_s: admin_pb2_grpc.BrokerAdminStub(to).DescribeTopic(
                request, timeout=left_s
            ),
            missing=TopicNotFound,
        )
        if not answers:
            raise TopicNotFound(f"no topic {name!r}", field="name", value=name)
        return TopicDescription(
            name,
            min(answer.topic.message_bytes_max for answer in answers.values()),
            tuple(
                QueueRange(
                    broker,
                    queue.queue_id,
                    queue.min_offset,
                    queue.max_offset,
                    queue.last_store_ms or None,
                )
                for broker, answer in sorted(answers.items())
                for queue in answer.queues
            ),
        )

    # ── groups ───────────────────────────────────────────────────────────────────────

    async def groups(self) -> list[GroupSummary]:
        """All consumer groups with members or offsets, sorted by name."""
        answers = await self._at_all(
            lambda to, left_s: group_pb2_grpc.GroupCoordinatorStub(to).ListGroups(
                group_pb2.ListGroupsRequest(), timeout=left_s
            )
        )
        found: dict[str, GroupSummary] = {}
        for broker, answer in sorted(answers.items()):
            for group in answer.groups:
                if group.coordinator or group.group not in found:
                    found[group.group] = GroupSummary(
                        group.group,
                        group.members,
                        group.generation,
                        broker if group.coordinator else None,
                    )
        return [found[name] for name in sorted(found)]

    async def describe_group(self, name: str) -> GroupDescription:
        """A group: members, assignment, and how far it is in each queue.  Raises GroupNotFound."""
        request = group_pb2.DescribeGroupRequest(group=name)
        views, offsets = await asyncio.gather(
            self._at_all(
                lambda to, left_s: group_pb2_grpc.GroupCoordinatorStub(to).DescribeGroup(
                    request, timeout=left_s
                ),
                missing=GroupNotFound,
            ),
            self._at_all(
                lambda to, left_s: broker_pb2_grpc.BrokerStub(to).GetOffsets(
                    broker_pb2.GetOffsetsRequest(group=name), timeout=left_s
                ),
                missing=GroupNotFound,
            ),
        )
        progress_known = any(answer.queues for answer in offsets.values())
        if not views and not progress_known:
            raise GroupNotFound(f"no group {name!r}", field="name", value=name)
        coordinator = next((broker for broker, view in views.items() if view.coordinator), None)
        view = views[coordinator] if coordinator else group_pb2.GroupDescription(group=name)
        owners = {
            (queue.topic, queue.broker, queue.queue_id): member.member_id
            for member in view.members
            for queue in member.queues
        }
        return GroupDescription(
            name,
            coordinator,
            view.generation,
            view.strategy,
            tuple(map(_member_of, view.members)),
            tuple(_progress_of(offsets, owners)),
        )

    # ── the cluster ──────────────────────────────────────────────────────────────────

    async def cluster(self) -> ClusterDescription:
        """What runs.  Who does not answer is listed with the error."""
        nameservers, brokers, shards = await asyncio.gather(
            asyncio.gather(*map(self._nameserver, self._client.nameservers)),
            asyncio.gather(*map(self._broker, self._client.routes.brokers)),
            self.timer_stats(),
        )
        return ClusterDescription(tuple(nameservers), tuple(brokers), tuple(shards))

    async def timer_stats(self) -> list[TimerStats]:
        """The timer shards, sorted.  One that does not answer is listed with the error."""
        shards = sorted(self._client.routes.timers, key=lambda timer: timer.shard)
        return list(await asyncio.gather(*map(self._timer, shards)))

    @overload
    async def cancel(self, handle: str) -> CancelOutcome: ...
    @overload
    async def cancel(self, handle: list[str] | tuple[str, ...]) -> list[CancelOutcome]: ...
    async def cancel(
        self, handle: str | list[str] | tuple[str, ...]
    ) -> CancelOutcome | list[CancelOutcome]:
        """Cancels delayed messages.  As `duemq.Producer.cancel`."""
        timeout_s = self._client.settings.request_timeout_s
        if isinstance(handle, str):
            return (await timers.cancel(self._client, [handle], timeout_s))[0]
        return await timers.cancel(self._client, handle, timeout_s)

    # ── asking ───────────────────────────────────────────────────────────────────────

    def _brokers(self) -> Sequence[Broker]:
        brokers = self._client.routes.brokers
        if not brokers:
            raise Unavailable("the nameservers know no live broker")
        return brokers

    async def _at(
        self, broker: Broker, method: Callable[[grpc.aio.Channel, float], Awaitable[T]]
    ) -> T:
        return await self._client.call(lambda: self._client.broker(broker.name).address, method)

    async def _at_all(
        self,
        method: Callable[[grpc.aio.Channel, float], Awaitable[T]],
        missing: type[DuemqError] | None = None,
    ) -> dict[str, T]:
        """Answers by broker, without those that say `missing`."""

        async def ask(broker: Broker) -> tuple[str, T] | None:
            try:
                return broker.name, await self._at(broker, method)
            except DuemqError as error:
                if missing is not None and isinstance(error, missing):
                    return None
                raise

        answers = await asyncio.gather(*map(ask, self._brokers()))
        return dict(answer for answer in answers if answer is not None)

    async def _probe(self, address: str, call: Callable[[grpc.aio.Channel], Awaitable[T]]) -> T:
        return await status.answer(call(self._client.channel(address)), address)

    async def _nameserver(self, address: str) -> NameserverDescription:
        try:
            await self._probe(
                address,
                lambda to: nameserver_pb2_grpc.NameserverStub(to).GetCluster(
                    nameserver_pb2.GetClusterRequest(), timeout=PROBE_TIMEOUT_S
                ),
            )
        except DuemqError as error:
            return NameserverDescription(address, str(error))
        return NameserverDescription(address, None)

    async def _broker(self, broker: Broker) -> BrokerDescription:
        try:
            found = await self._probe(
                broker.address,
                lambda to: admin_pb2_grpc.BrokerAdminStub(to).DescribeBroker(
                    admin_pb2.DescribeBrokerRequest(), timeout=PROBE_TIMEOUT_S
                ),
            )
        except DuemqError as error:
            return BrokerDescription(broker.name, broker.address, str(error))
        return BrokerDescription(
            broker.name,
            broker.address,
            None,
            version=found.version,
            started_ms=found.started_ms,
            store_id=found.store_id,
            read_only=found.read_only,
            log_start_position=found.log_start_position,
            log_durable_position=found.log_durable_position,
            checkpoint_position=found.checkpoint_position,
            delay_levels_ms=tuple(found.delay_levels_ms),
        )

    async def _timer(self, timer: TimerShard) -> TimerStats:
        where = (timer.name, timer.address, timer.shard, timer.shards)
        try:
            found = await self._probe(
                timer.address,
                lambda to: timer_pb2_grpc.TimerStub(to).GetStats(
                    timer_pb2.GetStatsRequest(), timeout=PROBE_TIMEOUT_S
                ),
            )
        except DuemqError as error:
            return TimerStats(*where, str(error))
        return TimerStats(
            *where,
            None,
            accepted=found.accepted,
            pending=found.pending,
            fired=found.fired,
            cancelled=found.cancelled,
            in_flight=found.in_flight,
            near=found.near,
            next_due_ms=found.next_due_ms or None,
            lateness_p50_ms=found.lateness_p50_ms,
            lateness_p99_ms=found.lateness_p99_ms,
            lateness_max_ms=found.lateness_max_ms,
        )


def _member_of(member: group_pb2.MemberDescription) -> MemberDescription:
    return MemberDescription(
        member.member_id,
        member.client,
        {each.topic: each.filter for each in member.subscriptions},
        tuple(sorted((queue.topic, queue.broker, queue.queue_id) for queue in member.queues)),
        member.last_heartbeat_ms,
        member.session_timeout_ms,
    )


def _progress_of(
    offsets: dict[str, broker_pb2.GetOffsetsResponse],
    owners: dict[tuple[str, str, int], str],
) -> Iterable[Progress]:
    found = [
        Progress(
            result.topic,
            broker,
            result.queue_id,
            owners.get((result.topic, broker, result.queue_id)),
            None if result.offset < 0 else result.offset,
            result.min_offset,
            result.max_offset,
        )
        for broker, answer in offsets.items()
        for result in answer.queues
    ]
    return sorted(found, key=lambda each: (each.topic, each.broker, each.queue))
