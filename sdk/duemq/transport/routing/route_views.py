"""What several nameservers say of one cluster, merged.  Pure: `now_ms` in, updates out.

A nameserver may be cut off from a broker that others hear.  So each is asked, and of each broker
and timer shard the newest report counts that any of them has (its version: registration.py).

- An instance is there while any view lists it.  One that said goodbye with the version that is
  listed, or a newer one, is not.
- What a broker serves is what the view with its newest version says; equal versions, equal routes.
- Of one that is lost, what is said of its newest version counts: that an operator gave it up, if
  any view says so.
- A view whose nameserver is out of reach counts on for STALE_MS, and longer while there is no
  other: with every nameserver gone, clients work on with what they know.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from duemq.protocol.route import Broker, LostBroker, LostTimer, Route, TimerShard, Update

STALE_MS = 15_000

Version = tuple[int, int]
Lost = TypeVar("Lost", LostBroker, LostTimer)


@dataclass(slots=True)
class _View:
    """What one nameserver said last."""

    routes: dict[str, Route] = field(default_factory=dict)
    brokers: dict[str, Broker] = field(default_factory=dict)
    timers: dict[str, TimerShard] = field(default_factory=dict)
    lost_brokers: dict[str, LostBroker] = field(default_factory=dict)
    lost_timers: dict[str, LostTimer] = field(default_factory=dict)
    silent_ms: int | None = None
    """Since when it is out of reach."""

    def take(self, update: Update) -> set[str]:
        """Takes an update over; the topics that may have changed."""
        routes = {route.topic: route for route in update.routes}
        touched = routes.keys() | set(update.removed_topics)
        if update.whole:
            touched |= self.routes.keys()
            self.routes = routes
        else:
            for topic in update.removed_topics:
                self.routes.pop(topic, None)
            self.routes.update(routes)
        self.brokers = {one.name: one for one in update.brokers}
        self.timers = {one.name: one for one in update.timers}
        self.lost_brokers = {one.broker.name: one for one in update.lost_brokers}
        self.lost_timers = {one.timer.name: one for one in update.lost_timers}
        self.silent_ms = None
        return touched


class _Source(NamedTuple):
    """Whose word of a broker counts."""

    view: str
    version: Version
    store_id: int


class Views:
    """The views of all nameservers."""

    def __init__(self) -> None:
        self._views: dict[str, _View] = {}
        self._routes: dict[str, Route] = {}
        self._sources: dict[str, _Source] = {}
        self._connected_ms: int | None = None  # since when any nameserver is within reach

    @property
    def connected(self) -> bool:
        """A nameserver is within reach."""
        return self._connected_ms is not None

    def brokers_of(self, address: str) -> tuple[str, ...] | None:
        """The names of the brokers that a nameserver lists, sorted; None: it never answered."""
        view = self._views.get(address)
        return None if view is None else tuple(sorted(view.brokers))

    def apply(self, address: str, update: Update, now_ms: int) -> Update:
        """A nameserver says something.  Answers what that makes of the whole."""
        if self._connected_ms is None:
            self._connected_ms = now_ms
        view = self._views.setdefault(address, _View())
        before = {name: _version(one) for name, one in view.brokers.items()}
        touched = view.take(update)
        old, self._sources = self._sources, self._choose()
        if not all(
            _tells_all(address, before.get(name), old.get(name), self._sources.get(name))
            for name in old.keys() | self._sources.keys()
        ):
            return self._whole()
        return self._merge(touched, whole=False)

    def disconnected(self, address: str, now_ms: int) -> None:
        """A nameserver is out of reach."""
        view = self._views.get(address)
        if view is not None and view.silent_ms is None:
            view.silent_ms = now_ms
        if all(each.silent_ms is not None for each in self._views.values()):
            self._connected_ms = None

    def next_ms(self) -> int | None:
        """When to call `prune`; None: not before another event."""
        if self._connected_ms is None:
            return None
        since = (
            max(view.silent_ms, self._connected_ms)
            for view in self._views.values()
            if view.silent_ms is not None
        )
        soonest = min(since, default=None)
        return None if soonest is None else soonest + STALE_MS

    def prune(self, now_ms: int) -> Update | None:
        """Drops views that do not count any more.  Answers what that makes of the whole."""
        since_ms = self._connected_ms
        if since_ms is None:
            return None
        stale = [
            address
            for address, view in self._views.items()
            if view.silent_ms is not None and max(view.silent_ms, since_ms) + STALE_MS <= now_ms
        ]
        if not stale:
            return None
        for address in stale:
            del self._views[address]
        self._sources = self._choose()
        return self._whole()

    def _choose(self) -> dict[str, _Source]:
        """Broker → whose word counts."""
        return _newest(
            (
                (address, one)
                for address, view in self._views.items()
                for one in view.brokers.values()
            ),
            (
                lost.broker
                for v in self._views.values()
                for lost in v.lost_brokers.values()
                if lost.stopped
            ),
        )

    def _whole(self) -> Update:
        topics = {topic for view in self._views.values() for topic in view.routes}
        return self._merge(topics | self._routes.keys(), whole=True)

    def _merge(self, topics: Iterable[str], *, whole: bool) -> Update:
        """The whole as it is now; of the routes those of `topics`."""
        changed, removed = [], []
        for topic in topics:
            route = self._route(topic)
            if route is not None:
                self._routes[topic] = route
                changed.append(route)
            elif self._routes.pop(topic, None) is not None:
                removed.append(topic)
        views = self._views.values()
        timers = _newest(
            (
                (address, one)
                for address, view in self._views.items()
                for one in view.timers.values()
            ),
            (lost.timer for view in views for lost in view.lost_timers.values() if lost.stopped),
        )
        return Update(
            whole=whole,
            routes=tuple(changed),
            removed_topics=tuple(removed),
            brokers=tuple(
                self._views[source.view].brokers[name]
                for name, source in sorted(self._sources.items())
            ),
            timers=tuple(
                self._views[source.view].timers[name] for name, source in sorted(timers.items())
            ),
            lost_brokers=tuple(
                min(said, key=lambda lost: _first_word(lost.broker, lost))
                for name, said in _by_name(view.lost_brokers for view in views)
                if name not in self._sources
            ),
            lost_timers=tuple(
                min(said, key=lambda lost: _first_word(lost.timer, lost))
                for name, said in _by_name(view.lost_timers for view in views)
                if name not in timers
            ),
        )

    def _route(self, topic: str) -> Route | None:
        routes = [
            (address, view.routes[topic])
            for address, view in self._views.items()
            if topic in view.routes
        ]
        served = sorted(
            (
                one
                for address, route in routes
                for one in route.brokers
                if one.broker in self._sources and self._sources[one.broker].view == address
            ),
            key=lambda one: one.broker,
        )
        for _, route in routes:
            if list(route.brokers) == served:
                return route  # shares what was computed of it
        return Route(topic, tuple(served)) if served else None


def _version(one: Broker | TimerShard) -> Version:
    return one.epoch, one.counter


def _newest(
    listed: Iterable[tuple[str, Broker | TimerShard]], stopped: Iterable[Broker | TimerShard]
) -> dict[str, _Source]:
    """Name → the newest that is listed, unless it has stopped."""
    chosen: dict[str, _Source] = {}
    for address, one in listed:
        known = chosen.get(one.name)
        if known is None or known.version < _version(one):
            chosen[one.name] = _Source(address, _version(one), one.store_id)
    for one in stopped:
        source = chosen.get(one.name)
        if source is None or source.store_id != one.store_id:
            continue
        if source.version <= _version(one):
            del chosen[one.name]
    return chosen


def _tells_all(
    address: str, before: Version | None, old: _Source | None, new: _Source | None
) -> bool:
    """Whether the topics that a view's update touches are all that change of a broker.

    `before`: the version that this view had of it.
    """
    if new is None:
        return old is None or old.view == address
    if old is None:
        return new.view == address and before is None
    return old.version == new.version or (new.view == address and before == old.version)


def _by_name(views: Iterable[Mapping[str, Lost]]) -> list[tuple[str, list[Lost]]]:
    said: dict[str, list[Lost]] = {}
    for view in views:
        for name, lost in view.items():
            said.setdefault(name, []).append(lost)
    return sorted(said.items())


def _first_word(one: Broker | TimerShard, lost: LostBroker | LostTimer) -> tuple[int, ...]:
    return -one.epoch, -one.counter, not lost.forgotten, lost.since_ms
