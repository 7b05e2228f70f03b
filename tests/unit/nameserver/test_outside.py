"""What clients outside are told of a registry."""

from dataclasses import replace

import pytest

from duemq.errors import TopicNotFound
from duemq_server.nameserver.outside import OutsideView, outside, unreachable
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.reports import (
    BrokerReport,
    ReplicaReport,
    TimerReport,
    TopicQueues,
    Version,
)

FIRST, SECOND = Version(5, 1), Version(5, 2)


def broker(name: str, external: str = "", topics: tuple[str, ...] = ("t",)) -> BrokerReport:
    served = tuple(TopicQueues(topic, 4) for topic in topics)
    return BrokerReport(name, f"{name}:1", served, external_address=external)


@pytest.fixture
def registry() -> Registry:
    return Registry(ready_at_ms=0, expiry_ms=30_000)


@pytest.fixture
def view(registry: Registry) -> OutsideView:
    return OutsideView(registry)


def test_a_route_has_the_external_addresses(registry: Registry, view: OutsideView) -> None:
    registry.register(FIRST, broker("a", "out:1"), 10)
    assert [one.address for one in view.route("t")] == ["out:1"]
    assert [one.address for one in registry.route("t")] == ["a:1"]
    [live] = view.brokers
    assert (live.report.address, live.report.external_address) == ("out:1", "")
    assert live.version == FIRST


def test_who_has_none_is_lost_as_long_as_it_lives(registry: Registry, view: OutsideView) -> None:
    registry.register(FIRST, broker("a", "out:1"), 10)
    registry.register(FIRST, broker("b"), 10)
    registry.register(FIRST, TimerReport("x", "x:1"), 10)
    assert [one.broker for one in view.route("t")] == ["a"]
    assert [one.report.name for one in view.brokers] == ["a"]
    assert view.timers == ()
    for lost, name in zip((*view.lost_brokers, *view.lost_timers), "bx", strict=True):
        assert lost.instance.report.name == name
        assert lost.instance.report.address == ""
        assert (lost.lost_ms, lost.stopped, lost.forgotten) == (FIRST.epoch, False, False)
    assert [one.report.name for one in unreachable(registry.brokers)] == ["b"]


def test_since_when_is_never_later_than_it_was_heard(registry: Registry, view: OutsideView) -> None:
    registry.register(Version(1 << 63, 1), broker("b"), 10)
    [lost] = view.lost_brokers
    assert lost.lost_ms == 10


def test_who_is_lost_has_the_address_that_it_had_outside(
    registry: Registry, view: OutsideView
) -> None:
    registry.register(FIRST, broker("b", "out:2"), 0)
    registry.register(FIRST, broker("a"), 0)
    registry.deregister(BrokerReport, "b", FIRST, 1)
    lost = view.lost_brokers
    assert [(one.instance.report.name, one.stopped) for one in lost] == [("a", False), ("b", True)]
    assert lost[1].instance.report.address == "out:2"


def test_a_topic_of_nobody_who_can_be_reached_says_who_has_it(
    registry: Registry, view: OutsideView
) -> None:
    registry.register(FIRST, broker("b"), 0)
    with pytest.raises(TopicNotFound, match="without an external address: b"):
        view.route("t")
    with pytest.raises(TopicNotFound, match="no broker serves topic 'u'"):
        view.route("u")
    assert view.topics == ()
    assert registry.topics == ("t",)


def test_a_change_of_the_external_address_is_a_change(
    registry: Registry, view: OutsideView
) -> None:
    registry.register(FIRST, broker("a", "out:1"), 0)
    before = registry.revision
    registry.register(SECOND, broker("a", "out:2"), 0)
    assert view.changes_since(before).topics == ("t",)
    assert [one.address for one in view.route("t")] == ["out:2"]


def test_a_topic_is_removed_when_the_last_external_address_goes(
    registry: Registry, view: OutsideView
) -> None:
    registry.register(FIRST, broker("a", "out:1", ("t", "u")), 0)
    registry.register(FIRST, broker("b", "out:2"), 0)
    before = registry.revision
    registry.register(SECOND, broker("a", "", ("t", "u")), 0)
    changes = view.changes_since(before)
    assert (changes.topics, changes.removed_topics) == (("t",), ("u",))
    whole = view.changes_since(0)
    assert (whole.whole, whole.topics, whole.removed_topics) == (True, ("t",), ())


def test_replicas_have_no_address_outside(registry: Registry) -> None:
    report = replace(broker("a", "out:1"), replicas=(ReplicaReport("r", 1, address="r:1"),))
    [told] = outside(report).replicas
    assert (told.name, told.address) == ("r", "")


def test_routes_have_room_for_the_longer_address() -> None:
    registry = Registry(ready_at_ms=0, routes_bytes_max=200)
    registry.register(FIRST, broker("a", "out:1"), 0)
    long = broker("a", "o" * 200 + ":1")
    with pytest.raises(Exception, match="routes have"):
        registry.register(SECOND, long, 0)
