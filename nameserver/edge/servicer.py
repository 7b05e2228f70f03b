"""The Nameserver service: proto ⇄ plain types around the registry.

A watcher holds nothing but the revision that it was told of: however slow it reads, it costs no
memory, and what it gets next is the sum of what it missed.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from duemq.errors import InvalidArgument, Overloaded
from duemq.protocol import checks
from duemq.protocol.limits import QUEUES_MAX, SHARDS_MAX, TOPICS_MAX
from duemq.protocol.names import SYSTEM_TOPIC_CHARACTERS_MAX
from duemq.v1 import nameserver_pb2 as pb
from duemq_server.nameserver.registry import Instance, Lost, Registry
from duemq_server.nameserver.reports import (
    REASON_CHARS_MAX,
    BrokerReport,
    ReplicaReport,
    Report,
    TimerReport,
    TopicQueues,
    Version,
)
from duemq_server.nameserver.routes import Changes
from duemq_server.serving.methods import Codec
from duemq_server.serving.settings import check_address, check_name
from duemq_server.serving.unsent import Unsent

EXPIRY_MS_MAX = 3_600_000
LOG_END_MAX = 1 << 60
# Of a WatchRoutes request.
WATCHED_TOPICS_MAX = 10_000
# Of a report: more than a group has.
REPLICAS_MAX = 16

log = logging.getLogger(__name__)

_TOPIC = re.compile(r"[!-~]+")

SERVICE = pb.DESCRIPTOR.services_by_name["Nameserver"]
OVERRIDES: dict[str, Codec] = {"WatchRoutes": (pb.WatchRoutesRequest.FromString, bytes)}


class NameserverServicer:
    """Answers from the registry, and wakes its watchers when that has changed."""

    def __init__(
        self,
        registry: Registry,
        now_ms: Callable[[], int],
        watchers_max: int,
        unsent: Unsent,
    ) -> None:
        self.watchers = 0
        """Open WatchRoutes streams."""
        self._registry = registry
        self._now_ms = now_ms
        self._watchers_max = watchers_max
        self._unsent = unsent
        self._changed = asyncio.Event()
        self._last: tuple[tuple[Changes, frozenset[str]], bytes] | None = None
        self._closed = False

    def wake(self) -> None:
        """Tells the watchers what has changed.  After every change of the registry."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Ends the watchers' streams."""
        self._closed = True
        self.wake()

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """See nameserver.proto."""
        report = _report_of(request)
        checks.between("expiry_ms", request.expiry_ms, 0, EXPIRY_MS_MAX)
        version, now_ms = _version_of(request.version), self._now_ms()
        holder = self._registry.holder(version, report, now_ms)
        if holder is not None:
            return pb.RegisterResponse(accepted=False, taken_by=_holder(holder, now_ms))
        if request.dry_run:
            known = self._registry.log_end(report.store_id)
            return pb.RegisterResponse(accepted=True, known_log_end=known)
        before = self._registry.revision
        accepted = self._registry.register(version, report, now_ms, request.expiry_ms)
        self._wake_after(before)
        return pb.RegisterResponse(accepted=accepted)

    async def Deregister(
        self, request: pb.DeregisterRequest, context: Any
    ) -> pb.DeregisterResponse:
        """See nameserver.proto."""
        kind, name = _named(request)
        before = self._registry.revision
        version = _version_of(request.version)
        self._registry.deregister(kind, name, version, self._now_ms(), request.store_id)
        self._wake_after(before)
        return pb.DeregisterResponse()

    async def Forget(self, request: pb.ForgetRequest, context: Any) -> pb.ForgetResponse:
        """See nameserver.proto."""
        self._registry.check_ready(self._now_ms())
        kind, name = _named(request)
        before = self._registry.revision
        try:
            lost = self._registry.forget(kind, name, self._now_ms(), dry_run=request.dry_run)
        finally:
            self._wake_after(before)
        if not request.dry_run:
            log.info("%s is given up and counts as lost no more", name)
        topics = (
            pb.TopicQueues(
                topic=one.topic,
                queues=one.queues,
                readable=one.readable,
                writable=one.writable,
                topic_id=one.topic_id,
            )
            for one in lost.topics or ()
        )
        return pb.ForgetResponse(
            address=lost.instance.report.address,
            lost_ms=lost.lost_ms,
            stopped=lost.stopped,
            topics=topics,
            topics_known=lost.topics is not None,
        )

    async def GetRoute(self, request: pb.GetRouteRequest, context: Any) -> pb.TopicRoute:
        """See nameserver.proto."""
        self._registry.check_ready(self._now_ms())
        return self._route(request.topic)

    async def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> pb.Cluster:
        """See nameserver.proto."""
        self._registry.check_ready(self._now_ms())
        return pb.Cluster(
            brokers=map(_broker, self._registry.brokers),
            timers=map(_timer, self._registry.timers),
            routes=map(self._route, self._registry.topics),
            lost_brokers=map(_lost_broker, self._registry.lost_brokers),
            lost_timers=map(_lost_timer, self._registry.lost_timers),
        )

    async def WatchRoutes(
        self, request: pb.WatchRoutesRequest, context: Any
    ) -> AsyncIterator[bytes]:
        """See nameserver.proto.  Answers are encoded RouteUpdates."""
        self._registry.check_ready(self._now_ms())
        checks.count("topics", len(request.topics), 0, WATCHED_TOPICS_MAX)
        if self.watchers >= self._watchers_max:
            raise Overloaded(
                f"{self.watchers} routes are watched, at most {self._watchers_max} can be",
                limit=self._watchers_max,
            )
        self.watchers += 1
        try:
            async for update in self._updates(frozenset(request.topics), context.peer()):
                yield update
        finally:
            self.watchers -= 1

    async def _updates(self, topics: frozenset[str], peer: str) -> AsyncIterator[bytes]:
        told = 0
        while not self._closed:
            changed = self._changed
            if told == self._registry.revision:
                await changed.wait()
                continue
            size = len(self._update_of(self._registry.changes_since(told), topics))
            share = await self._unsent.take(peer, size)
            try:
                # Made when it is its turn, if it had to wait: who waits holds nothing.
                changes = self._registry.changes_since(told)
                update = self._update_of(changes, topics)
                share.resize(len(update))
                told = changes.revision
                yield update
            finally:
                share.give_back()

    def _update_of(self, changes: Changes, topics: frozenset[str]) -> bytes:
        """The message for a watcher; the last one is kept, as most watchers get the same."""
        key = (changes, topics)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._make_update(changes, topics).SerializeToString())
        return self._last[1]

    def _make_update(self, changes: Changes, topics: frozenset[str]) -> pb.RouteUpdate:
        wanted = [topic for topic in changes.topics if not topics or topic in topics]
        return pb.RouteUpdate(
            whole=changes.whole,
            routes=map(self._route, wanted),
            removed_topics=[t for t in changes.removed_topics if not topics or t in topics],
            brokers=map(_broker, self._registry.brokers),
            timers=map(_timer, self._registry.timers),
            lost_brokers=map(_lost_broker, self._registry.lost_brokers),
            lost_timers=map(_lost_timer, self._registry.lost_timers),
        )

    def _route(self, topic: str) -> pb.TopicRoute:
        served = self._registry.route(topic)
        brokers = (
            pb.BrokerQueues(
                broker=one.broker,
                address=one.address,
                queues=one.queues,
                readable=one.readable,
                writable=one.writable,
                topic_id=one.topic_id,
                store_id=one.store_id,
            )
            for one in served
        )
        return pb.TopicRoute(topic=topic, brokers=brokers)

    def _wake_after(self, revision: int) -> None:
        if self._registry.revision != revision:
            self.wake()


def _broker(instance: Instance) -> pb.BrokerInstance:
    report = instance.report
    assert isinstance(report, BrokerReport)
    return pb.BrokerInstance(
        name=report.name,
        address=report.address,
        version=pb.Version(epoch=instance.version.epoch, counter=instance.version.counter),
        last_heard_ms=instance.last_heard_ms,
        store_id=report.store_id,
        replicas=map(_replica, report.replicas),
        epoch=report.epoch,
    )


def _timer(instance: Instance) -> pb.TimerInstance:
    report = instance.report
    assert isinstance(report, TimerReport)
    return pb.TimerInstance(
        name=report.name,
        address=report.address,
        version=pb.Version(epoch=instance.version.epoch, counter=instance.version.counter),
        last_heard_ms=instance.last_heard_ms,
        shard=report.shard,
        shards=report.shards,
        store_id=report.store_id,
        replicas=map(_replica, report.replicas),
        epoch=report.epoch,
        key_shards=report.key_shards,
    )


def _replica(report: ReplicaReport) -> pb.ReplicaReport:
    return pb.ReplicaReport(
        name=report.name,
        role=report.role,  # type: ignore[arg-type]  # a newer release may have more
        in_sync=report.in_sync,
        epoch=report.epoch,
        lag_bytes=report.lag_bytes,
        lag_s=report.lag_s,
        address=report.address,
        since_ms=report.since_ms,
        reason=report.reason,
    )


def _holder(instance: Instance, now_ms: int) -> pb.Holder:
    return pb.Holder(
        address=instance.report.address,
        version=pb.Version(epoch=instance.version.epoch, counter=instance.version.counter),
        store_id=instance.report.store_id,
        heard_ago_ms=now_ms - instance.last_heard_ms,
    )


def _lost_broker(lost: Lost) -> pb.BrokerInstance:
    message = _broker(lost.instance)
    message.lost_ms, message.stopped = lost.lost_ms, lost.stopped
    message.forgotten = lost.forgotten
    return message


def _lost_timer(lost: Lost) -> pb.TimerInstance:
    message = _timer(lost.instance)
    message.lost_ms, message.stopped = lost.lost_ms, lost.stopped
    message.forgotten = lost.forgotten
    return message


def _version_of(version: pb.Version) -> Version:
    return Version(version.epoch, version.counter)


def _named(request: pb.DeregisterRequest | pb.ForgetRequest) -> tuple[type[Report], str]:
    if bool(request.broker) == bool(request.timer):
        raise InvalidArgument("either broker or timer must be given", field="broker")
    check_name("broker" if request.broker else "timer", request.broker or request.timer)
    return (BrokerReport, request.broker) if request.broker else (TimerReport, request.timer)


def _report_of(request: pb.RegisterRequest) -> Report:
    kind = request.WhichOneof("report")
    if kind is None:
        raise InvalidArgument("report is missing: broker or timer", field="report")
    name, address = getattr(request, kind).name, getattr(request, kind).address
    check_name(f"{kind}.name", name)
    if not request.dry_run:
        check_address(f"{kind}.address", address)
    replicas = _replicas_of(kind, getattr(request, kind).replicas)
    if kind == "broker":
        broker = request.broker
        checks.between("broker.log_end", broker.log_end, 0, LOG_END_MAX)
        return BrokerReport(
            name,
            address,
            _topics_of(broker),
            broker.store_id,
            replicas,
            broker.epoch,
            broker.log_end,
        )
    timer = request.timer
    checks.between("timer.shards", timer.shards, 1, SHARDS_MAX)
    checks.between("timer.shard", timer.shard, 0, SHARDS_MAX - 1)
    checks.between("timer.key_shards", timer.key_shards, 0, SHARDS_MAX)
    return TimerReport(
        name,
        address,
        timer.shard,
        timer.shards,
        timer.store_id,
        replicas,
        timer.epoch,
        timer.key_shards,
    )


def _replicas_of(kind: str, replicas: Sequence[pb.ReplicaReport]) -> tuple[ReplicaReport, ...]:
    field = f"{kind}.replicas"
    checks.count(field, len(replicas), 0, REPLICAS_MAX)
    for one in replicas:
        check_name(f"{field}.name", one.name)
        if one.address:
            check_address(f"{field}.address", one.address)
    return tuple(
        ReplicaReport(
            one.name,
            one.role,
            one.in_sync,
            one.epoch,
            one.address,
            one.lag_bytes,
            one.lag_s,
            one.since_ms,
            one.reason[:REASON_CHARS_MAX],
        )
        for one in sorted(replicas, key=lambda one: one.name)
    )


def _topics_of(report: pb.BrokerReport) -> tuple[TopicQueues, ...]:
    checks.count("broker.topics", len(report.topics), 0, TOPICS_MAX)
    return tuple(
        TopicQueues(_topic_name(one.topic), _queues(one), one.readable, one.writable, one.topic_id)
        for one in sorted(report.topics, key=lambda one: one.topic)
    )


def _topic_name(topic: str) -> str:
    checks.length("broker.topics.topic", topic, 1, SYSTEM_TOPIC_CHARACTERS_MAX)
    checks.matches("broker.topics.topic", topic, _TOPIC, "letters, digits and signs of ASCII")
    return topic


def _queues(topic: pb.TopicQueues) -> int:
    checks.between("broker.topics.queues", topic.queues, 0, QUEUES_MAX)
    return topic.queues
