"""What clients outside are told: the registry, with external addresses.  Pure.

Who has told no external address cannot be reached from there.  It is listed as lost, as long as it
lives: what it has is missing from the answers of the others, which is what lost means to clients,
and they say so.  To leave it out would hide its messages; to name it without an address would send
clients of other languages to nowhere.
"""

from dataclasses import replace

from duemq.errors import TopicNotFound
from duemq_server.nameserver.registry import Instance, Lost, Registry
from duemq_server.nameserver.reports import Report
from duemq_server.nameserver.routes import Changes, Served


class OutsideView:
    """What is told of a registry, as at its external port."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def route(self, topic: str) -> tuple[Served, ...]:
        """As Registry's, of who can be reached."""
        served = self._registry.route(topic)
        found = tuple(
            replace(one, address=one.external_address) for one in served if one.external_address
        )
        if not found:
            names = ", ".join(one.broker for one in served)
            raise TopicNotFound(
                f"no broker serves topic {topic!r} out here; without an external address: {names}",
                field="topic",
                value=topic,
            )
        return found

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that have a route, sorted."""
        return tuple(filter(self._reachable, self._registry.topics))

    @property
    def brokers(self) -> tuple[Instance, ...]:
        """The live brokers that can be reached, sorted by name."""
        return _reachable(self._registry.brokers)

    @property
    def timers(self) -> tuple[Instance, ...]:
        """The live timer shards that can be reached, sorted by name."""
        return _reachable(self._registry.timers)

    @property
    def lost_brokers(self) -> tuple[Lost, ...]:
        """As Registry's, and those that cannot be reached, sorted by name."""
        return _lost(self._registry.lost_brokers, self._registry.brokers)

    @property
    def lost_timers(self) -> tuple[Lost, ...]:
        """As Registry's, and those that cannot be reached, sorted by name."""
        return _lost(self._registry.lost_timers, self._registry.timers)

    def changes_since(self, revision: int) -> Changes:
        """As Registry's: a topic is removed, too, if nobody can be reached who serves it."""
        changes = self._registry.changes_since(revision)
        hidden = [topic for topic in changes.topics if not self._reachable(topic)]
        if not hidden:
            return changes
        removed = () if changes.whole else tuple(sorted({*changes.removed_topics, *hidden}))
        return replace(
            changes,
            topics=tuple(topic for topic in changes.topics if topic not in set(hidden)),
            removed_topics=removed,
        )

    def _reachable(self, topic: str) -> bool:
        return any(one.external_address for one in self._registry.route(topic))


def unreachable(instances: tuple[Instance, ...]) -> list[Instance]:
    """Those that have told no external address."""
    return [one for one in instances if not one.report.external_address]


def _reachable(instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
    return tuple(_told(one) for one in instances if one.report.external_address)


def _lost(lost: tuple[Lost, ...], live: tuple[Instance, ...]) -> tuple[Lost, ...]:
    found = [replace(one, instance=_told(one.instance)) for one in lost]
    # Since it began, so that it is the same from one answer to the next.
    found += (
        Lost(_told(one), min(one.version.epoch, one.last_heard_ms), stopped=False)
        for one in unreachable(live)
    )
    return tuple(sorted(found, key=lambda one: one.instance.report.name))


def _told(instance: Instance) -> Instance:
    return replace(instance, report=outside(instance.report))


def outside(report: Report) -> Report:
    """A report as it is told: replicas are asked by operators, from inside."""
    return replace(
        report,
        address=report.external_address,
        external_address="",
        replicas=tuple(replace(each, address="") for each in report.replicas),
    )
