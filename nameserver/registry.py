"""Who is there of brokers and timer shards, and who is lost; routes.py has what they serve.

The core: no clock, no I/O.  Owned by: the event loop, which alone changes it; the thread that
serves the metrics counts what is in it.

Invariants:

- An instance is known by (kind, name) and by the version (epoch, counter) of its newest report.
  A report with an older version changes nothing, wherever it was delayed.
- A name belongs to one store (a data directory), and a store to one name, while its process is
  heard.  Only in a nameserver that has just started, and may have met the wrong one first, the
  older process displaces the younger.
- An instance vanishes when its report was not refreshed in time (`expire`), or at once when it says
  so (`deregister`).  The version of one that said so is remembered for GONE_MS, so that a heartbeat
  that it sent before, and that was overtaken, does not bring it back.
- An instance that vanished is *lost* until one of its name comes back, or LOST_MAX others were lost
  after it, or `lost_kept_ms` have passed: what it has is missing from the answers of the others,
  unless an operator has given it up (`forget`).
- Where a store's log ended is remembered beyond the life of its broker, for who comes with a copy.
- A registry that has just started knows half of the cluster: until `ready_at_ms` it answers
  nothing.  That is so much later as the nameserver sleeps meanwhile (`forgive`).
"""

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import NamedTuple

from duemq.errors import InstanceNotFound, InvalidArgument, NotReady, Overloaded, TopicNotFound
from duemq_server.nameserver.reports import (
    BrokerReport,
    Report,
    TimerReport,
    TopicQueues,
    Version,
    same_store,
    with_addresses,
)
from duemq_server.nameserver.routes import ROUTES_BYTES_MAX, Changes, Routes, Served

# Brokers and timer shards together.
INSTANCES_MAX = 1_000
# How long the version of a deregistered instance is remembered: longer than any call may take.
GONE_MS = 60_000
# Versions remembered so; of more, the oldest are forgotten.
GONE_MAX = 2 * INSTANCES_MAX
# Lost instances remembered; of more, the oldest are forgotten.
LOST_MAX = 256
# Topics of all of them, remembered to tell who gives one up.
LOST_TOPICS_MAX = 50_000
# Stores of which is remembered where their log ends, also long after they were lost.
LOG_ENDS_MAX = 2 * INSTANCES_MAX


@dataclass(frozen=True, slots=True)
class Instance:
    """A live broker or timer shard."""

    report: Report
    version: Version
    last_heard_ms: int
    expires_ms: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A broker or timer shard that was there lately."""

    instance: Instance
    """As it was last; without the topics."""
    lost_ms: int
    stopped: bool
    """It said goodbye.  False: it fell silent."""
    topics: Mapping[str, TopicQueues] | None = None
    """What it served, by topic; None: too much to remember."""
    forgotten: bool = False
    """An operator gave it up: it is missing from no answer."""


class _Key(NamedTuple):
    kind: type[Report]
    name: str


@dataclass(slots=True)
class _Gone:
    version: Version
    store_id: int
    until_ms: int


@dataclass(slots=True)
class Registry:
    """The state of a nameserver."""

    ready_at_ms: int
    """Until then it answers no questions."""
    expiry_ms: int = 30_000
    """How long a report holds that does not say so itself."""
    lost_kept_ms: int = 3_600_000
    """How long a lost instance is remembered."""
    journal_topics_max: InitVar[int] = 50_000
    """Changes of topics kept for watchers."""
    routes_bytes_max: InitVar[int] = ROUTES_BYTES_MAX
    _instances: dict[_Key, Instance] = field(default_factory=dict)
    _names: dict[tuple[type[Report], int], str] = field(default_factory=dict)
    """Who said last that a store is its own."""
    _gone: dict[_Key, _Gone] = field(default_factory=dict)
    _lost: dict[_Key, Lost] = field(default_factory=dict)  # the oldest first
    _log_ends: dict[int, int] = field(default_factory=dict)  # by store; told lately last
    _routes: Routes = field(init=False)

    def __post_init__(self, journal_topics_max: int, routes_bytes_max: int) -> None:
        self._routes = Routes(routes_bytes_max, journal_topics_max)

    def holder(self, version: Version, report: Report, now_ms: int) -> Instance | None:
        """Who has the report's name for another store, or its store under another name, and keeps
        it; None: it can be had."""
        known = self._instances.get(_Key(type(report), report.name))
        if known is None or same_store(known.report.store_id, report.store_id):
            known = self._with_store_of(report)
        if known is None:
            return None
        displaced = not self.is_ready(now_ms) and version.epoch < known.version.epoch
        return None if displaced else known

    def _with_store_of(self, report: Report) -> Instance | None:
        """Another one with a copy of its data: what is known by its store would be mixed up."""
        name = self._names.get((type(report), report.store_id), report.name)
        other = self._instances.get(_Key(type(report), name))
        if name == report.name or other is None:
            return None
        return other if other.report.store_id == report.store_id else None

    def _note_store(self, report: Report) -> None:
        if not report.store_id:
            return
        if len(self._names) >= 2 * INSTANCES_MAX:  # of stores that are gone
            self._names = {
                (key.kind, one.report.store_id): key.name
                for key, one in self._instances.items()
                if one.report.store_id
            }
        self._names[type(report), report.store_id] = report.name
        if isinstance(report, BrokerReport) and report.log_end:
            self._log_ends.pop(report.store_id, None)
            self._log_ends[report.store_id] = report.log_end
            if len(self._log_ends) > LOG_ENDS_MAX:
                del self._log_ends[next(iter(self._log_ends))]

    def register(self, version: Version, report: Report, now_ms: int, expiry_ms: int = 0) -> bool:
        """Takes a report in.  False: an older one than the known, or name or store is another's.

        Then nothing was changed.  Raises Overloaded if there are too many instances, or too many
        routes: then the instance is alive, and what it said before holds.
        """
        if self.holder(version, report, now_ms) is not None:
            return False
        key = _Key(type(report), report.name)
        known, gone = self._instances.get(key), self._gone.get(key)
        overtaken = (known and version < known.version) or (gone and version <= gone.version)
        last = known.report.store_id if known else gone.store_id if gone else 0
        if overtaken and same_store(last, report.store_id):
            return False
        if known is None and len(self._instances) >= INSTANCES_MAX:
            raise Overloaded(
                f"{len(self._instances)} instances are registered, at most {INSTANCES_MAX} can be",
                field="report",
                value=report.name,
                limit=INSTANCES_MAX,
            )
        lost = self._lost.get(key)
        before = known or (lost.instance if lost is not None else None)
        if before is not None:
            report = with_addresses(report, before.report)
        expires_ms = now_ms + (expiry_ms or self.expiry_ms)
        self._note_store(report)
        if known is None or known.report != report:
            try:
                self._routes.check_room(known.report if known else None, report)
            except Overloaded:
                if known is not None:
                    self._instances[key] = replace(
                        known, last_heard_ms=now_ms, expires_ms=expires_ms
                    )
                raise
        self._gone.pop(key, None)
        self._lost.pop(key, None)
        self._instances[key] = Instance(report, version, now_ms, expires_ms)
        # Watchers merge what several nameservers say by the version: it is part of what they see.
        if known is None or known.version != version or known.report != report:
            self._routes.replace(known.report if known else None, report)
        return True

    def is_reached(self, report: Report) -> bool:
        """Whether one of the report's name is not known, or has an external address."""
        known = self._instances.get(_Key(type(report), report.name))
        return known is None or bool(known.report.external_address)

    def log_end(self, store_id: int) -> int:
        """Where the store's log ended as its broker said last; 0: it never did."""
        return self._log_ends.get(store_id, 0)

    def deregister(
        self, kind: type[Report], name: str, version: Version, now_ms: int, store_id: int = 0
    ) -> bool:
        """Takes an instance out that stops.

        False: a newer one of its name lives, or another store's, or none is known.
        """
        key = _Key(kind, name)
        known = self._instances.get(key)
        if known and not same_store(known.report.store_id, store_id):
            return False
        if known and version < known.version:
            return False
        gone = self._gone.get(key)
        if gone is None or gone.version <= version:
            self._gone.pop(key, None)
            self._gone[key] = _Gone(version, store_id, now_ms + GONE_MS)
            if len(self._gone) > GONE_MAX:
                del self._gone[next(iter(self._gone))]
        if known is None:
            return False
        self._lose(key, version, now_ms, stopped=True)
        return True

    def forget(
        self,
        kind: type[Report],
        name: str,
        now_ms: int,
        *,
        dry_run: bool = False,
        address: Callable[[Report], str] = lambda report: report.address,
    ) -> Lost:
        """Gives up a lost instance for good; who it was.  Idempotent.  `address`: that is told.

        Raises InvalidArgument while it lives, InstanceNotFound if it is not remembered.
        """
        self.expire(now_ms)
        key, what = _Key(kind, name), "broker" if kind is BrokerReport else "timer"
        known = self._instances.get(key)
        if known is not None:
            seconds, who = (now_ms - known.last_heard_ms) / 1000, address(known.report) or "it"
            raise InvalidArgument(
                f"{what} {name} lives: {who} was heard of {seconds:.1f} s ago; stop it first",
                field=what,
                value=name,
                limit=f"a {what} that is lost",
            )
        lost = self._lost.get(key)
        if lost is None:
            raise InstanceNotFound(f"no {what} {name} was lost lately", field=what, value=name)
        if not (dry_run or lost.forgotten):
            self._lost[key] = replace(lost, forgotten=True)
            self._routes.record()
        return lost

    def expire(self, now_ms: int) -> int:
        """Drops what was not refreshed in time.

        Returns when to call again at the latest, in ms.
        """
        for key in [key for key, one in self._instances.items() if one.expires_ms <= now_ms]:
            self._lose(key, self._instances[key].version, now_ms, stopped=False)
        for key in [key for key, gone in self._gone.items() if gone.until_ms <= now_ms]:
            del self._gone[key]
        self._forget_lost(now_ms)
        ends = [one.expires_ms for one in self._instances.values()]
        if not self.is_ready(now_ms):
            ends.append(self.ready_at_ms)
        return min([*ends, now_ms + self.expiry_ms])

    def forgive(self, late_ms: int, now_ms: int) -> None:
        """This nameserver slept until now, and not those who report.

        All reports hold so much longer; who had yet to register has so much longer, too.  So does
        a goodbye: a heartbeat that it overtook may have waited here.
        """
        for gone in self._gone.values():
            gone.until_ms += late_ms
        for key, one in self._instances.items():
            self._instances[key] = replace(one, expires_ms=one.expires_ms + late_ms)
        if self.ready_at_ms >= now_ms - late_ms:  # when it should have looked it had not been ready
            self.ready_at_ms += late_ms

    def _forget_lost(self, now_ms: int) -> None:
        old = [k for k, one in self._lost.items() if one.lost_ms + self.lost_kept_ms <= now_ms]
        for key in old:
            del self._lost[key]
        if old:
            self._routes.record()

    def is_ready(self, now_ms: int) -> bool:
        """Whether everybody had the time to register."""
        return now_ms >= self.ready_at_ms

    def check_ready(self, now_ms: int) -> None:
        """Raises NotReady while not everybody had the time to register."""
        if not self.is_ready(now_ms):
            seconds = (self.ready_at_ms - now_ms) / 1000
            raise NotReady(f"just started, ready in {seconds:.1f} s; ask another nameserver")

    def route(self, topic: str) -> tuple[Served, ...]:
        """Who serves the topic, sorted by broker.

        Raises TopicNotFound: `retryable` if somebody has it who is lost, and not given up.
        """
        served = self._routes.of(topic)
        if not served:
            lost = [one for one in self.lost_brokers if not one.forgotten]
            having = [one for one in lost if topic in (one.topics or ())]
            names = ", ".join(one.instance.report.name for one in having or lost)
            told = f"; {'those that have it were ' * bool(having)}lost lately: {names}"
            raise TopicNotFound(
                f"no broker serves topic {topic!r}" + (told if names else ""),
                field="topic",
                value=topic,
                retryable=bool(having),
            )
        return served

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that have a route, sorted."""
        return self._routes.topics

    @property
    def brokers(self) -> tuple[Instance, ...]:
        """The live brokers, sorted by name."""
        return self._of(BrokerReport)

    @property
    def timers(self) -> tuple[Instance, ...]:
        """The live timer shards, sorted by name."""
        return self._of(TimerReport)

    @property
    def lost_brokers(self) -> tuple[Lost, ...]:
        """Brokers that were there lately, also those given up, sorted by name."""
        return self._lost_of(BrokerReport)

    @property
    def lost_timers(self) -> tuple[Lost, ...]:
        """Timer shards that were there lately, also those given up, sorted by name."""
        return self._lost_of(TimerReport)

    @property
    def revision(self) -> int:
        """How many changes watchers could have been told of."""
        return self._routes.revision

    def changes_since(self, revision: int) -> Changes:
        """What changed after `revision` (0: never told anything)."""
        return self._routes.changes_since(revision)

    def _of(self, kind: type[Report]) -> tuple[Instance, ...]:
        # The items as they are now: another thread may count them while one vanishes.
        return tuple(
            one for key, one in sorted(self._instances.items(), key=_name) if key.kind is kind
        )

    def _lost_of(self, kind: type[Report]) -> tuple[Lost, ...]:
        return tuple(one for key, one in sorted(self._lost.items(), key=_name) if key.kind is kind)

    def _lose(self, key: _Key, version: Version, now_ms: int, *, stopped: bool) -> None:
        last = self._instances.pop(key)
        report, topics = last.report, tuple[TopicQueues, ...]()
        if isinstance(report, BrokerReport):
            report, topics = replace(report, topics=()), report.topics
        remembered = sum(len(one.topics or ()) for one in self._lost.values())
        self._lost[key] = Lost(
            replace(last, report=report, version=version),
            now_ms,
            stopped,
            {one.topic: one for one in topics}
            if remembered + len(topics) <= LOST_TOPICS_MAX
            else None,
        )
        if len(self._lost) > LOST_MAX:
            del self._lost[next(iter(self._lost))]
        self._routes.replace(last.report, None)


def _name(item: tuple[_Key, object]) -> str:
    return item[0].name
