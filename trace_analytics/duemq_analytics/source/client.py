"""Reads ranges of queues over plain unary calls, without a consumer group.

Blocking: it runs in Spark's Python workers, which are forked and short-lived.  Made inside the
worker that uses it: channels do not survive a fork or a pickle.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from duemq.errors import (
    Corrupt,
    DuemqError,
    MissingBroker,
    OffsetOutOfRange,
    PartialAnswer,
    TopicNotFound,
    TopicReplaced,
    Unavailable,
)
from duemq.protocol.route import Broker, RouteCache
from duemq.settings import Tls
from duemq.transport import retrying, status
from duemq.transport.blocking_client import BlockingClient
from duemq.transport.closing import Closing
from duemq.transport.cluster_client import story_of
from duemq.transport.routing.diagnosis import diagnose
from duemq.transport.routing.route_views import Views
from duemq.transport.routing.route_watcher import FIRST_UPDATE_TIMEOUT_S, update_of
from duemq.v1 import admin_pb2, broker_pb2, message_pb2, nameserver_pb2
from duemq.v1.stubs import BrokerAdminStub, BrokerStub, NameserverStub
from duemq_analytics.options import Options
from duemq_analytics.source.plan import QueueBounds, QueueRange, first_since, require_whole

CALL_TIMEOUT_S = 15.0
"""For one call; the pull's own wait included."""

PULL_BYTES = 4 * 1024 * 1024
PULL_WAIT_MS = 1_000
"""Data that exists is answered at once; this only bounds a broker that thinks otherwise."""

EMPTY_PULLS_MAX = 5

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordRun:
    """Records of one queue with consecutive offsets and one store time."""

    offset: int
    store_ms: int
    records: list[message_pb2.Record]


class _Unknown(PartialAnswer):
    """A broker with planned messages is not there, nor listed as lost."""

    def __init__(self, routes: RouteCache) -> None:
        super().__init__("a broker with messages that were planned is not known", field="broker")
        self.routes = routes


class QueueClient(Closing):
    """A connection to the cluster for reading."""

    def __init__(
        self, nameservers: tuple[str, ...], timeout_s: float, tls: Tls | None = None
    ) -> None:
        self._client = BlockingClient(nameservers, CALL_TIMEOUT_S, tls)
        self._timeout_s = timeout_s
        self._tls = tls
        self._moved: dict[str, str] = {}
        """Brokers → addresses, of those that were found elsewhere than they were planned."""

    @classmethod
    def of(cls, options: Options) -> QueueClient:
        """To the cluster that the options name."""
        return cls(options.nameservers, options.timeout_s, options.tls)

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()

    def queues(self, options: Options, planned: Collection[str] = ()) -> list[QueueBounds]:
        """The topic's queues on all brokers that serve it, with the offsets there now.

        `planned`: brokers whose messages a micro-batch was planned to have; those are waited for
        also where no nameserver knows of them.  Raises TopicNotFound, PartialAnswer when a broker
        is lost and does not come back in time (see `plan.require_whole`) or none is there, or
        Unavailable when no server answered in time.
        """
        topic = options.topic
        try:
            routes = self._retried(partial(self._whole_routes, options, planned))
        except _Unknown as error:
            routes = error.routes
        except PartialAnswer:
            raise
        except Unavailable as error:
            raise self._explained(error) from error
        route = routes.route(topic)
        if route is None:
            raise TopicNotFound(
                f"topic {topic!r} does not exist: no broker serves it", field="topic", value=topic
            )
        found: list[QueueBounds] = []
        for served in route.brokers:
            known = routes.broker(served.broker) or Broker(served.broker, served.address)
            found += self._bounds(topic, known)
        return found

    def starts_since(
        self, topic: str, queues: Sequence[QueueBounds], since_ms: int
    ) -> dict[str, dict[str, int]]:
        """Broker → queue → first offset of what was stored then or later, as `startingOffsets`."""
        found: dict[str, dict[str, int]] = {}
        for queue in queues:
            store_ms_of = partial(self._store_ms, topic, queue)
            offset = first_since(queue, since_ms, store_ms_of)
            found.setdefault(queue.broker, {})[str(queue.queue)] = offset
        return found

    def _store_ms(self, topic: str, queue: QueueBounds, offset: int) -> int:
        """Of a record; of one that a log has lost that of the next, 0 of one that is gone.

        Where nothing is answered nothing may be passed over: what is read from there tells.
        """
        wanted = queue.between(offset, queue.past)
        try:
            answer = self._pulled(topic, wanted, offset, records=1)
        except OffsetOutOfRange:  # retention was faster: it is older than all that is there
            return 0
        return answer.run_store_ms[0] if answer.run_store_ms else sys.maxsize

    def read(
        self, topic: str, wanted: QueueRange, *, fail_on_data_loss: bool = True
    ) -> Iterator[RecordRun]:
        """All records of the range, in order.

        Raises TopicReplaced if the topic was made anew since its bounds were asked for, and
        OffsetOutOfRange where offsets are gone; without `fail_on_data_loss` a warning names
        those that a log has lost or that retention was faster with.  No record is silently left
        out.
        """
        offset, empty = wanted.start, 0
        while offset < wanted.end:
            at = offset
            try:
                answer = self._pulled(topic, wanted, at)
            except OffsetOutOfRange as error:
                if fail_on_data_loss or (first := self._first(topic, wanted)) <= at:
                    raise
                _logger.warning("%s; going on with offset %d", error.message, first)
                offset = min(first, wanted.end)
                continue
            for run in runs(answer, offset, wanted.end, fail_on_data_loss=fail_on_data_loss):
                offset = run.offset + len(run.records)
                yield run
            if not fail_on_data_loss:  # what is asked for may end in what is lost
                offset = max(offset, min(answer.next_offset, wanted.end))
            empty = 0 if offset > at else empty + 1
            if empty >= EMPTY_PULLS_MAX:
                raise Unavailable(
                    f"{wanted.address}: {topic}/{wanted.queue} has offset {offset} but does "
                    f"not answer it (asked {empty} times)",
                    field="offset",
                    value=offset,
                )

    def _explained(self, error: Unavailable) -> Unavailable:
        """As other clients say it: what is where a nameserver should be."""
        found = asyncio.run(diagnose(self._client.nameservers[0], self._tls))
        return Unavailable(f"{found.text} ({error.message})", retryable=error.retryable)

    def _whole_routes(self, options: Options, planned: Collection[str]) -> RouteCache:
        """A broker that is started anew is lost for a moment: PartialAnswer may be asked again."""
        routes = self._routes(options.topic)
        lost = tuple(MissingBroker(x.broker.name, story_of(x)) for x in routes.lost_brokers)
        served = routes.route(options.topic) is not None
        require_whole(lost, options, served=served, planned=planned)
        if not routes.brokers:  # after a power failure a nameserver may be there first
            raise PartialAnswer(
                f"topic {options.topic!r} cannot be read: no broker is there",
                missing=(),
                field="topic",
                value=options.topic,
            )
        if not {broker.name for broker in routes.brokers}.issuperset(planned):
            raise _Unknown(routes)  # a nameserver that has just started may not know of it yet
        return routes

    def _routes(self, topic: str) -> RouteCache:
        """The topic's route and who is lost, as all nameservers together know."""
        views, routes = Views(), RouteCache()
        failures: list[DuemqError] = []
        request = nameserver_pb2.WatchRoutesRequest(topics=[topic])
        for address in self._client.nameservers:
            try:
                pushed: nameserver_pb2.RouteUpdate = self._client.first(
                    address,
                    lambda to: NameserverStub(to).WatchRoutes,
                    request,
                    FIRST_UPDATE_TIMEOUT_S,
                )
            except DuemqError as error:
                failures.append(error)
            else:
                routes.apply(views.apply(address, update_of(pushed), now_ms=0))
        if routes.version == 0:
            raise failures[0]
        return routes

    def _bounds(self, topic: str, broker: Broker) -> list[QueueBounds]:
        described = self._asked(topic, broker, partial(self._described, topic))
        return [
            QueueBounds(
                broker.name,
                self._moved.get(broker.name, broker.address),
                q.queue_id,
                q.min_offset,
                q.max_offset,
                described.topic_id,
                broker.store_id,
            )
            for q in described.queues
        ]

    def _described(self, topic: str, broker: Broker) -> admin_pb2.TopicDescription:
        request = admin_pb2.DescribeTopicRequest(name=topic)
        return self._client.call(
            broker.address,
            lambda to: partial(BrokerAdminStub(to).DescribeTopic, metadata=broker.meant),
            request,
        )

    def _first(self, topic: str, wanted: QueueRange) -> int:
        """The oldest offset that its queue has now; 0: it is not there."""
        queues = self._bounds(topic, _broker_of(wanted))
        return next((each.first for each in queues if each.queue == wanted.queue), 0)

    def _pulled(
        self, topic: str, wanted: QueueRange, offset: int, records: int = 0
    ) -> broker_pb2.QueueRecords:
        pull = partial(self._pull, topic, wanted, offset, records)
        return self._asked(topic, _broker_of(wanted), pull)

    def _pull(
        self, topic: str, wanted: QueueRange, offset: int, records: int, broker: Broker
    ) -> broker_pb2.QueueRecords:
        queue = broker_pb2.QueuePull(
            topic=topic, queue_id=wanted.queue, offset=offset, topic_id=wanted.topic_id
        )
        request = broker_pb2.PullRequest(
            queues=[queue],
            max_bytes=PULL_BYTES,
            max_records=records,
            wait_ms=PULL_WAIT_MS,
        )
        answer: broker_pb2.PullResponse = self._client.call(
            broker.address, lambda to: partial(BrokerStub(to).Pull, metadata=broker.meant), request
        )
        for found in answer.queues:
            if found.HasField("error"):
                raise status.from_proto(found.error)
            return found
        return broker_pb2.QueueRecords(next_offset=offset)

    def _asked(self, topic: str, broker: Broker, ask: Callable[[Broker], T]) -> T:
        """Asks a broker until it answers: after a failure where it is by then.

        It may have been started elsewhere, or another replica leads.
        """

        def attempt() -> T:
            address = self._moved.get(broker.name, broker.address)
            try:
                return ask(replace(broker, address=address))
            except DuemqError as error:
                if error.retryable:
                    self._look_up(topic, broker)
                raise

        return self._retried(attempt)

    def _look_up(self, topic: str, broker: Broker) -> None:
        """Where it is now; where nobody tells, it stays where it was.

        Raises TopicReplaced if another one has its name by now: its offsets are others.
        """
        try:
            known = self._routes(topic).broker(broker.name)
        except DuemqError as error:
            _logger.info("broker %s is asked where it was: %s", broker.name, error)
            return
        if known is None:
            return
        if 0 not in (known.store_id, broker.store_id) and known.store_id != broker.store_id:
            raise TopicReplaced(
                f"topic {topic!r} on broker {broker.name!r} is not what was planned: the broker "
                "came back with another store",
                field="store_id",
                value=broker.store_id,
                limit=known.store_id,
            )
        self._moved[broker.name] = known.address

    def _retried(self, call: Callable[[], T]) -> T:
        return retrying.until_blocking(time.monotonic() + self._timeout_s, call)


def _broker_of(wanted: QueueRange) -> Broker:
    return Broker(wanted.broker, wanted.address, store_id=wanted.store_id)


def runs(
    answer: broker_pb2.QueueRecords, expected: int, end: int, *, fail_on_data_loss: bool = True
) -> Iterator[RecordRun]:
    """The answer's records below `end`; raises OffsetOutOfRange if `expected` is left out."""
    if sum(answer.run_counts) != len(answer.records.records) or not (
        len(answer.run_offsets) == len(answer.run_counts) == len(answer.run_store_ms)
    ):
        raise Corrupt("an answer's runs do not add up to its records", field="run_counts")
    records = list(answer.records.records)
    taken = 0
    for offset, count, store_ms in zip(
        answer.run_offsets, answer.run_counts, answer.run_store_ms, strict=True
    ):
        if offset != expected:
            gone = f"offset {expected} was asked for and {offset} came: what is between is gone"
            if fail_on_data_loss:
                raise OffsetOutOfRange(gone, field="offset", value=expected, limit=offset)
            _logger.warning("%s", gone)
        kept = min(count, end - offset)
        if kept <= 0:
            return
        yield RecordRun(offset, store_ms, records[taken : taken + kept])
        taken += count
        expected = offset + count
