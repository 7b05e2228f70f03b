"""The asyncio admin client; the synchronous one is a face of it.

Each broker keeps its own topics and offsets, so most answers are asked of all of them and joined.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import grpc.aio

from duemq import timers
from duemq.aio.asking import Asker, refuse_missing
from duemq.aio.dead_letters import DeadLetters, Selection
from duemq.aio.finding import LOOKUP_TIMEOUT_S
from duemq.aio.groups import Groups
from duemq.aio.messages import Messages
from duemq.client import Addresses, Client
from duemq.dead_letters import OnSent, Resent
from duemq.descriptions import (
    BrokerDescription,
    ClusterDescription,
    FoundMessages,
    GroupDescription,
    GroupSummary,
    MessageTrace,
    NameserverDescription,
    OffsetChange,
    QueueRange,
    TimerStats,
    TopicDescription,
    TopicSummary,
)
from duemq.errors import DuemqError, InvalidArgument, TopicExists, TopicNotFound
from duemq.message import Message
from duemq.moments import Moment
from duemq.retry_policy import Delay, ExponentialDelays, RetryPolicy, policy_of
from duemq.route import Broker, TimerShard
from duemq.rpc import status
from duemq.settings import DEFAULT_NAMESERVER, ClientSettings
from duemq.timers import CancelOutcome
from duemq.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    nameserver_pb2,
    nameserver_pb2_grpc,
    timer_pb2,
    timer_pb2_grpc,
)

# To a server that may be dead, where the others' answers are worth showing without it.
PROBE_TIMEOUT_S = 2.0

T = TypeVar("T")


class Admin:
    """Topics, groups, messages, timers and the state of the cluster.

    `await start()` (or `async with`) connects.  No answer is partial in silence: a broker that is
    away is in the answer's `missing`, or the call raises Unavailable after `request_timeout_s`.
    """

    def __init__(
        self,
        nameserver: Addresses = DEFAULT_NAMESERVER,
        *,
        settings: ClientSettings | None = None,
    ) -> None:
        """`nameserver`: `host:port`, several separated by commas."""
        self._client = Client(nameserver, settings)
        self._asker = Asker(self._client)
        self._groups = Groups(self._asker)
        self._messages = Messages(self._asker)
        self._dead_letters = DeadLetters(self._asker, self._groups)

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
        self,
        name: str,
        *,
        queues: int = 0,
        message_bytes_max: int = 0,
        brokers: Iterable[str] | None = None,
    ) -> TopicSummary:
        """Makes a topic on every live broker, or on `brokers`, and waits until it can be used.

        `queues`: on each broker; 0: the broker's default.  `message_bytes_max`: of a body; 0: the
        broker's.  One queue on one broker keeps the order of all messages.  Raises InvalidArgument,
        TopicExists if no broker lacks it, Unavailable if one of them is away.
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
                return await self._asker.at(broker.name, once)
            except TopicExists as error:
                if attempts == 1:
                    return error
                # Made by an earlier attempt whose answer was lost.
                return admin_pb2.TopicDescription(topic=config, broker=broker.name)

        chosen = self._chosen(brokers)
        made = await asyncio.gather(*map(make, chosen))
        created = [each for each in made if not isinstance(each, TopicExists)]
        if not created:
            raise TopicExists(f"topic {name!r} exists", field="name", value=name)
        names = {broker.name for broker in chosen}
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

    def _chosen(self, names: Iterable[str] | None) -> Sequence[Broker]:
        if names is None:
            return self._asker.brokers()
        chosen = [self._client.broker(name) for name in sorted(set(names))]
        if not chosen:
            raise InvalidArgument(
                "brokers: none is named", field="brokers", limit="names of brokers, or None for all"
            )
        return chosen

    async def delete_topic(self, name: str) -> None:
        """Deletes a topic and its messages on every broker.  Raises TopicNotFound."""
        request = admin_pb2.DeleteTopicRequest(name=name)

        async def delete(broker: Broker) -> bool:
            try:
                await self._asker.at(
                    broker.name,
                    lambda to, left_s: admin_pb2_grpc.BrokerAdminStub(to).DeleteTopic(
                        request, timeout=left_s
                    ),
                )
            except TopicNotFound:
                return False
            return True

        if not any(await asyncio.gather(*map(delete, self._asker.brokers()))):
            raise TopicNotFound(f"no topic {name!r}", field="name", value=name)
        await self._client.wait_for(
            lambda routes: routes.route(name) is None, self._client.settings.request_timeout_s
        )

    async def topics(self, *, system: bool = False) -> list[TopicSummary]:
        """All topics, sorted by name.  `system`: with those of DueMQ itself."""
        request = admin_pb2.ListTopicsRequest(system=system)
        answers = await self._asker.all(
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
        """A topic, queue by queue.

        Brokers that do not answer are in `missing`.  Raises TopicNotFound, and Unavailable if only
        a missing broker could know it.
        """
        request = admin_pb2.DescribeTopicRequest(name=name)
        asked = await self._asker.each(
            lambda to, left_s: admin_pb2_grpc.BrokerAdminStub(to).DescribeTopic(
                request, timeout=left_s
            ),
            (TopicNotFound,),
        )
        answers = asked.by_broker
        if not answers:
            refuse_missing(asked.missing, f"the others know no topic {name!r}")
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
                    queue.in_per_s,
                )
                for broker, answer in answers.items()
                for queue in answer.queues
            ),
            asked.missing,
        )

    # ── groups ───────────────────────────────────────────────────────────────────────

    async def groups(self) -> list[GroupSummary]:
        """All consumer groups with members, offsets or settings, sorted by name."""
        return await self._groups.all()

    async def describe_group(self, name: str) -> GroupDescription:
        """A group: members, assignment, and how far it is in each queue.

        Brokers that do not answer are in `missing`; all others in the rest.  Raises GroupNotFound,
        and Unavailable if only a missing broker could know it.
        """
        return await self._groups.describe(name)

    async def put_group(
        self,
        name: str,
        *,
        retries_max: int | None = None,
        retry_delays: Sequence[Delay] | str | None = None,
        exponential: ExponentialDelays | tuple[Delay, float, Delay] | None = None,
    ) -> RetryPolicy:
        """Makes a group at every live broker, or replaces its settings; answers what is in force.

        `retries_max`: deliveries after the first.  `retry_delays`: before each retry, the last one
        for all beyond; a list, or one text as "10s 30s 1m".  `exponential` in its place:
        (initial, multiplier, longest).  What is not given is as the brokers are set.  A group need
        not be made to be used, unless the brokers are set so.  Raises InvalidArgument, and
        Unavailable if a broker is away: call again when it is back.
        """
        return await self._groups.put(name, policy_of(retries_max, retry_delays, exponential))

    async def delete_group(self, name: str) -> None:
        """Forgets a group's settings and offsets, and its retries; its dead letters stay.

        Raises GroupNotFound, InvalidArgument while it has members, and Unavailable if a broker is
        away.
        """
        await self._groups.delete(name)

    async def reset_offsets(
        self,
        group: str,
        topic: str,
        to: Moment | None = None,
        *,
        offset: int | None = None,
        queues: Iterable[tuple[str, int]] | None = None,
        dry_run: bool = False,
    ) -> list[OffsetChange]:
        """Moves a group's offsets in a topic; members go on from there, within about a second.

        `to`: "earliest", "latest", or a time (an aware datetime, epoch milliseconds, RFC 3339 text,
        "-1h"): the first message stored then or later.  `offset` in its place.  `queues`: (broker,
        queue) pairs; None: all.  `dry_run` changes nothing.  What was sent back past the new offset
        is delivered again; callbacks that are running are not stopped.

        Raises GroupNotFound, TopicNotFound, QueueNotFound, OffsetOutOfRange, InvalidArgument, and
        Unavailable if a broker is away; then, and in all these cases, nothing was changed, unless
        the error says so.
        """
        return await self._groups.reset(group, topic, to, offset, queues, dry_run)

    async def skip_backlog(
        self, group: str, topic: str | None = None, *, dry_run: bool = False
    ) -> list[OffsetChange]:
        """Moves a group to the end of a topic, or of all that it has read but its retries.

        Raises as `reset_offsets`.
        """
        return await self._groups.skip(group, topic, dry_run)

    async def clone_offsets(
        self, group: str, to_group: str, topic: str | None = None, *, dry_run: bool = False
    ) -> list[OffsetChange]:
        """Gives `to_group` the offsets that `group` has, in one topic or in all but its retries.

        Raises as `reset_offsets`.
        """
        return await self._groups.clone(group, to_group, topic, dry_run)

    # ── messages ─────────────────────────────────────────────────────────────────────

    async def find_messages(
        self,
        topic: str,
        *,
        message_id: str | None = None,
        key: str | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        broker: str | None = None,
        queue: int | None = None,
        offset: int | None = None,
        limit: int = 64,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> FoundMessages:
        """Looks messages up at all brokers, or at one; they come by store time.

        By `message_id` or `key` or neither; stored at `since` or later, and before `until` (times
        as in `reset_offsets`); of one `queue`, from an `offset` of it on.  Keys are found by their
        hashes at tens of millions of messages a second; for a message id the log of the range is
        read: name a range where you can.  Of more than `limit` (at most 10,000), those first in
        their queues are answered, and `more` is set.

        Brokers that do not answer, or not to the end within `timeout_s`, are in `missing`.  Raises
        TopicNotFound, QueueNotFound, InvalidArgument.
        """
        return await self._messages.find(
            topic,
            message_id=message_id,
            key=key,
            since=since,
            until=until,
            broker=broker,
            queue=queue,
            offset=offset,
            limit=limit,
            timeout_s=timeout_s,
        )

    async def describe_message(
        self,
        topic: str,
        message_id: str,
        *,
        since: Moment | None = None,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> MessageTrace:
        """The life of a message: where it lies, what each group has made of it, its retries.

        `since`: it was not sent before; spares reading older logs.  Brokers that do not answer, or
        not to the end within `timeout_s` a look-up, are in `missing`.  Raises InvalidArgument.
        """
        return await self._messages.trace(topic, message_id, since, timeout_s)

    # ── dead letters ─────────────────────────────────────────────────────────────────

    async def dead_letters(
        self,
        group: str,
        *,
        message_id: str | None = None,
        key: str | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        limit: int | None = None,
    ) -> AsyncGenerator[Message, None]:
        """The messages that a group has given up, by the time they died, of all brokers.

        By `message_id` or `key` or neither; that died at `since` or later, and before `until`
        (times as in `reset_offsets`); `limit` at most, None for all.  They are read as they are
        asked for.  A letter's `topic` is where it was sent to first, its `retry` says why it died.

        Raises GroupNotFound, InvalidArgument; Unavailable after the last one where a broker did not
        answer, so that not all were seen.
        """
        selection = Selection(group, message_id, key, since, until, limit)
        async with aclosing(self._dead_letters.pages(selection)) as pages:
            async for page in pages:
                for letter in page:
                    yield letter

    async def resend_dead_letters(
        self,
        group: str,
        *,
        message_id: str | None = None,
        key: str | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        limit: int | None = None,
        to_topic: str | None = None,
        on_sent: OnSent | None = None,
    ) -> Resent:
        """Sends dead letters again, as new messages with the property `duemq-dead-letter-id`.

        Chosen as by `dead_letters`; what dies meanwhile is not sent.  Each goes to the topic that
        it was sent to first, or to `to_topic`; topics are not made.  `on_sent(letter, outcome)` is
        told of each: its Receipt, or the error that it was not sent for.  The letters stay where
        they are, so that calling this again sends them again.

        Raises as `dead_letters`; what was sent by then is known by `on_sent`.
        """
        selection = Selection(group, message_id, key, since, until, limit)
        sent = failed = 0
        async with aclosing(self._dead_letters.resend(selection, to_topic)) as pages:
            async for page in pages:
                for letter, outcome in page:
                    if isinstance(outcome, DuemqError):
                        failed += 1
                    else:
                        sent += 1
                    if on_sent is not None:
                        on_sent(letter, outcome)
        return Resent(sent, failed)

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
