"""The Nameserver service: proto ⇄ plain types around the registry.

A watcher holds nothing but the revision that it was told of: however slow it reads, it costs no
memory, and what it gets next is the sum of what it missed.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from duemq.errors import InvalidArgument, Overloaded
from duemq.protocol import checks
from duemq.protocol.limits import QUEUES_MAX, SHARDS_MAX, TOPICS_MAX
from duemq.protocol.names import SYSTEM_TOPIC_CHARACTERS_MAX
from duemq.v1 import nameserver_pb2 as pb
from duemq_server.nameserver.edge.answers import Answers
from duemq_server.nameserver.registry import Instance, Registry
from duemq_server.nameserver.reports import (
    REASON_CHARS_MAX,
    BrokerReport,
    ReplicaReport,
    Report,
    TimerReport,
    TopicQueues,
    Version,
)
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
        self.tells_outside = False
        """There is an external port: who has told no external address is named in the log."""
        self._registry = registry
        self._now_ms = now_ms
        self._watchers_max = watchers_max
        self._unsent = unsent
        self._changed = asyncio.Event()
        self._answers = Answers(registry)
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
        reached = self._registry.is_reached(report)
        accepted = self._registry.register(version, report, now_ms, request.expiry_ms)
        if accepted and reached and self.tells_outside and not report.external_address:
            log.warning(
                "%s has told no external address: to clients outside it is lost", report.name
            )
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
        return self.give_up(request, lambda report: report.address)

    def give_up(
        self, request: pb.ForgetRequest, address: Callable[[Report], str]
    ) -> pb.ForgetResponse:
        """As Forget; `address`: the one that is told."""
        self.check_ready()
        kind, name = _named(request)
        before = self._registry.revision
        try:
            lost = self._registry.forget(
                kind, name, self._now_ms(), dry_run=request.dry_run, address=address
            )
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
            for one in (lost.topics or {}).values()
        )
        return pb.ForgetResponse(
            address=address(lost.instance.report),
            lost_ms=lost.lost_ms,
            stopped=lost.stopped,
            topics=topics,
            topics_known=lost.topics is not None,
        )

    async def GetRoute(self, request: pb.GetRouteRequest, context: Any) -> pb.TopicRoute:
        """See nameserver.proto."""
        self.check_ready()
        return self._answers.route(request.topic)

    async def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> pb.Cluster:
        """See nameserver.proto."""
        self.check_ready()
        return self._answers.cluster()

    async def WatchRoutes(
        self, request: pb.WatchRoutesRequest, context: Any
    ) -> AsyncIterator[bytes]:
        """See nameserver.proto.  Answers are encoded RouteUpdates."""
        async with aclosing(self.watch(self._answers, request, context)) as updates:
            async for update in updates:
                yield update

    def check_ready(self) -> None:
        """Raises NotReady while answers would leave out who had no time to register."""
        self._registry.check_ready(self._now_ms())

    async def watch(
        self, answers: Answers, request: pb.WatchRoutesRequest, context: Any
    ) -> AsyncGenerator[bytes, None]:
        """One watcher's updates, as `answers` has them."""
        self.check_ready()
        checks.count("topics", len(request.topics), 0, WATCHED_TOPICS_MAX)
        if self.watchers >= self._watchers_max:
            raise Overloaded(
                f"{self.watchers} routes are watched, at most {self._watchers_max} can be",
                limit=self._watchers_max,
            )
        self.watchers += 1
        try:
            topics = frozenset(request.topics)
            async for update in self._updates(answers, topics, context.peer()):
                yield update
        finally:
            self.watchers -= 1

    async def _updates(
        self, answers: Answers, topics: frozenset[str], peer: str
    ) -> AsyncIterator[bytes]:
        told = 0
        while not self._closed:
            changed = self._changed
            if told == self._registry.revision:
                await changed.wait()
                continue
            size = len(answers.update_since(told, topics)[1])
            share = await self._unsent.take(peer, size)
            try:
                # Made when it is its turn, if it had to wait: who waits holds nothing.
                revision, update = answers.update_since(told, topics)
                share.resize(len(update))
                told = revision
                yield update
            finally:
                share.give_back()

    def _wake_after(self, revision: int) -> None:
        if self._registry.revision != revision:
            self.wake()


def _holder(instance: Instance, now_ms: int) -> pb.Holder:
    return pb.Holder(
        address=instance.report.address,
        version=pb.Version(epoch=instance.version.epoch, counter=instance.version.counter),
        store_id=instance.report.store_id,
        heard_ago_ms=now_ms - instance.last_heard_ms,
    )


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
    external = getattr(request, kind).external_address
    if external:
        check_address(f"{kind}.external_address", external)
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
            external,
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
        external,
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
