"""The routes that follow from brokers' reports, and the journal of their changes.  Pure.

Owned by: Registry.  `revision` counts changes.  `changes_since(revision)` tells what a watcher has
to be told; the journal behind it is bounded, and one who is behind its end gets everything.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from duemq.errors import Overloaded
from duemq_server.nameserver.reports import REASON_CHARS_MAX, BrokerReport, Report

# Of all routes together, as they travel: a message has 16 MiB at most, and a new watcher gets one.
ROUTES_BYTES_MAX = 12 << 20
# Of one broker's part in a route, or of a replica, beside the names and the address.
_SERVED_BYTES = 24
# And where it tells which topic of its name it serves.
_TOPIC_ID_BYTES = 11
# And which store it has.
_STORE_ID_BYTES = 9


@dataclass(frozen=True, slots=True)
class Served:
    """What one broker serves of a topic."""

    broker: str
    address: str
    queues: int
    readable: bool
    writable: bool
    topic_id: int = 0
    store_id: int = 0
    """Whom the address belongs to; 0: not told."""
    external_address: str = ""
    """Where clients outside reach it; empty: they do not."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a watcher has to be told to be at `revision`."""

    revision: int
    whole: bool
    topics: tuple[str, ...] = ()
    """New or changed, sorted."""
    removed_topics: tuple[str, ...] = ()


class Routes:
    """See the module."""

    def __init__(self, bytes_max: int, journal_topics_max: int) -> None:
        """`journal_topics_max`: changes of topics kept for watchers."""
        self.revision = 1
        self._bytes_max = bytes_max
        self._journal_topics_max = journal_topics_max
        self._routes: dict[str, dict[str, Served]] = {}
        self._bytes = 0
        self._journal: deque[tuple[int, str]] = deque()
        self._journal_start = 1  # the journal is complete for changes after this revision

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that have a route, sorted."""
        return tuple(sorted(self._routes))

    def of(self, topic: str) -> tuple[Served, ...]:
        """Who serves a topic, sorted by broker; nobody: none."""
        served = self._routes.get(topic, {})
        return tuple(served[broker] for broker in sorted(served))

    def check_room(self, old: Report | None, new: Report) -> None:
        """Raises Overloaded if a report in the place of another one makes them too large."""
        more = _route_bytes(new) - _route_bytes(old)
        if more > 0 and self._bytes + more > self._bytes_max:
            raise Overloaded(
                f"broker.topics: with those of {new.name!r} the routes have"
                f" {self._bytes + more} bytes, {self._bytes_max} are allowed",
                field="broker.topics",
                value=self._bytes + more,
                limit=self._bytes_max,
            )

    def changes_since(self, revision: int) -> Changes:
        """What changed after `revision` (0: never told anything)."""
        if not self._journal_start <= revision <= self.revision:
            return Changes(self.revision, whole=True, topics=self.topics)
        touched: set[str] = set()
        for changed_at, topic in reversed(self._journal):
            if changed_at <= revision:
                break
            touched.add(topic)
        return Changes(
            self.revision,
            whole=False,
            topics=tuple(sorted(touched & self._routes.keys())),
            removed_topics=tuple(sorted(touched - self._routes.keys())),
        )

    def replace(self, old: Report | None, new: Report | None) -> None:
        """Moves the routes from one report of an instance to its next; journals what differs."""
        self._bytes += _route_bytes(new) - _route_bytes(old)
        before, after = _served(old), _served(new)
        touched = [
            topic for topic in before.keys() | after.keys() if before.get(topic) != after.get(topic)
        ]
        for topic in touched:
            brokers = self._routes.setdefault(topic, {})
            if topic in after:
                brokers[after[topic].broker] = after[topic]
            else:
                brokers.pop(before[topic].broker, None)
            if not brokers:
                del self._routes[topic]
        self.record(sorted(touched))

    def record(self, topics: Iterable[str] = ()) -> None:
        """Something has changed, of these topics' routes or beside them."""
        self.revision += 1
        self._journal.extend((self.revision, topic) for topic in topics)
        while len(self._journal) > self._journal_topics_max:
            self._journal_start, _ = self._journal.popleft()


def _served(report: Report | None) -> dict[str, Served]:
    if not isinstance(report, BrokerReport):
        return {}
    return {
        one.topic: Served(
            report.name,
            report.address,
            one.queues,
            one.readable,
            one.writable,
            one.topic_id,
            report.store_id,
            report.external_address,
        )
        for one in report.topics
    }


def _route_bytes(report: Report | None) -> int:
    """About what a report makes the routes larger by."""
    if report is None:
        return 0
    each = REASON_CHARS_MAX + _SERVED_BYTES
    replicas = sum(len(one.name) + len(one.address) + each for one in report.replicas)
    if not isinstance(report, BrokerReport):
        return replicas
    address = max(len(report.address), len(report.external_address))  # each is told elsewhere
    each = len(report.name) + address + _SERVED_BYTES
    if report.store_id:
        each += _STORE_ID_BYTES
    told = sum(_TOPIC_ID_BYTES for one in report.topics if one.topic_id)
    return replicas + told + sum(len(one.topic) + each for one in report.topics)
