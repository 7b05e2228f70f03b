"""What clients are told of who is there: a view of the registry as messages."""

from collections.abc import Sequence
from typing import Protocol

from duemq.v1 import nameserver_pb2 as pb
from duemq_server.nameserver.registry import Instance, Lost
from duemq_server.nameserver.reports import BrokerReport, ReplicaReport, TimerReport
from duemq_server.nameserver.routes import Changes, Served


class View(Protocol):
    """Of the registry: as it is, or as from outside."""

    def route(self, topic: str) -> Sequence[Served]:
        """Who serves a topic.  Raises TopicNotFound."""
        ...

    @property
    def topics(self) -> Sequence[str]:
        """The topics that have a route."""
        ...

    @property
    def brokers(self) -> Sequence[Instance]:
        """The live ones."""
        ...

    @property
    def timers(self) -> Sequence[Instance]:
        """The live ones."""
        ...

    @property
    def lost_brokers(self) -> Sequence[Lost]:
        """Who was there lately."""
        ...

    @property
    def lost_timers(self) -> Sequence[Lost]:
        """Who was there lately."""
        ...

    def changes_since(self, revision: int) -> Changes:
        """What a watcher has to be told."""
        ...


class Answers:
    """See the module."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._last: tuple[tuple[Changes, frozenset[str]], bytes] | None = None

    def route(self, topic: str) -> pb.TopicRoute:
        """Of one topic.  Raises TopicNotFound."""
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
            for one in self._view.route(topic)
        )
        return pb.TopicRoute(topic=topic, brokers=brokers)

    def cluster(self) -> pb.Cluster:
        """All that is known."""
        view = self._view
        return pb.Cluster(
            brokers=map(_broker, view.brokers),
            timers=map(_timer, view.timers),
            routes=map(self.route, view.topics),
            lost_brokers=map(_lost_broker, view.lost_brokers),
            lost_timers=map(_lost_timer, view.lost_timers),
        )

    def update_since(self, revision: int, topics: frozenset[str]) -> tuple[int, bytes]:
        """The encoded RouteUpdate for a watcher of `topics` (none: all) that was told `revision`.

        And the revision that it tells.  The last one is kept, as most watchers get the same.
        """
        changes = self._view.changes_since(revision)
        key = (changes, topics)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._update(changes, topics).SerializeToString())
        return changes.revision, self._last[1]

    def _update(self, changes: Changes, topics: frozenset[str]) -> pb.RouteUpdate:
        view = self._view
        wanted = [topic for topic in changes.topics if not topics or topic in topics]
        return pb.RouteUpdate(
            whole=changes.whole,
            routes=map(self.route, wanted),
            removed_topics=[t for t in changes.removed_topics if not topics or t in topics],
            brokers=map(_broker, view.brokers),
            timers=map(_timer, view.timers),
            lost_brokers=map(_lost_broker, view.lost_brokers),
            lost_timers=map(_lost_timer, view.lost_timers),
        )


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
        external_address=report.external_address,
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
