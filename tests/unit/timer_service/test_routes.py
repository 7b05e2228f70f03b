"""What a shard makes of routes."""

import logging

import pytest

from duemq.protocol.route import Broker, BrokerQueues, Route, RouteCache, Update
from duemq_server.timer_service.edge import broker_links
from duemq_server.timer_service.scheduling.clocks import BrokerClock
from tests.manual_loop import ManualLoop
from tests.unit.timer_service.test_set_clock import linked
from tests.unit.timer_service.test_shard import Quiet, loop, run

__all__ = ["loop"]

BROKERS = (Broker("b1", "h:1"), Broker("b2", "h:2"))


def route(topic: str, *queues: int) -> Route:
    """So many at b1, at b2."""
    served = zip(BROKERS, queues, strict=False)
    return Route(topic, tuple(BrokerQueues(b.name, b.address, n) for b, n in served))


def said(routes: RouteCache, *changed: Route, removed: tuple[str, ...] = ()) -> None:
    routes.apply(Update(whole=False, routes=changed, removed_topics=removed, brokers=BROKERS))


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "duemq_server.timer_service.edge")
    return caplog


def test_a_route_that_did_not_change_is_not_looked_into_again(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 10,000 topics at 20 brokers each new one held up all that was due for 0.1 s."""

    async def main(quiet: Quiet) -> None:
        links = linked(quiet, monkeypatch, BrokerClock())
        links.by_name.clear()
        dispatcher = quiet.shard.scheduler.dispatcher
        said(links._routes, route("a", 4, 2), route("b", 1), route("c", 1))
        links.changed()
        first = dispatcher.queues("a")
        said(links._routes, route("b", 3), route("d", 1), removed=("c",))
        links.changed()
        assert first == {"b1": 4, "b2": 2}
        assert dispatcher.queues("a") is first
        assert dispatcher.queues("b") == {"b1": 3}
        assert dispatcher.queues("c") == {}
        assert dispatcher.queues("d") == {"b1": 1}

    run(loop, main)


def test_fewer_queues_than_there_were_are_said_once(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    async def main(quiet: Quiet) -> None:
        links = linked(quiet, monkeypatch, BrokerClock())
        links.by_name.clear()
        for queues in (4, 2, 2, 3):
            said(links._routes, route("a", queues))
            links.changed()
        said(links._routes, removed=("a",))
        links.changed()
        said(links._routes, route("a", 1))
        links.changed()

    run(loop, main)

    assert [record.args[:4] for record in warned.records if record.args] == [
        ("a", 2, "b1", 4),
        ("a", 1, "b1", 3),
    ]


def test_of_topics_that_are_gone_the_oldest_are_forgotten(
    loop: ManualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(quiet: Quiet) -> None:
        monkeypatch.setattr(broker_links, "GONE_MAX", 2)
        links = linked(quiet, monkeypatch, BrokerClock())
        links.by_name.clear()
        said(links._routes, route("stays", 1))
        for topic in ("a", "b", "c"):
            said(links._routes, route(topic, 1))
            links.changed()
            said(links._routes, removed=(topic,))
            links.changed()
        assert list(links._queues) == ["stays", "b", "c"]

    run(loop, main)
