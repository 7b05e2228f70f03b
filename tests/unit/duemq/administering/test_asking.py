"""Who is asked, and who is missing."""

from types import SimpleNamespace

import pytest

from duemq.administering.asking import Answers, Asker
from duemq.administering.pending_timers import PendingTimers
from duemq.administering.topics import Topics
from duemq.errors import MissingBroker, PartialAnswer, Unavailable
from duemq.protocol.route import Broker, RouteCache
from duemq.transport import cluster_client

HERE, LOST = Broker("b1", "b1:1", 1, 7), Broker("b2", "b2:1", 1, 8)
STORY = MissingBroker("b2", "it fell silent")


class Client(cluster_client.Client):
    """Of two brokers; one is lost as soon as somebody asks it."""

    settings = SimpleNamespace(request_timeout_s=0.05)
    routes = SimpleNamespace(brokers=(HERE, LOST))
    missing = ()

    def __init__(self):
        """Connects to nobody."""

    def broker(self, name):
        if name == HERE.name:
            return HERE
        self.missing = (STORY,)
        raise Unavailable(f"broker {name} is not there")

    def channel(self, address):
        return address


async def test_a_broker_that_is_lost_while_it_is_asked_is_missing_once():
    async def ask(address, timeout_s):
        return address

    answers = await Asker(Client()).each(ask)
    assert answers.by_broker == {"b1": "b1:1"}
    assert answers.missing == (STORY,)


async def test_who_changes_a_topic_waits_for_a_broker_that_gets_another_leader(monkeypatch):
    """As long as for other changes: what is only shown does without it sooner."""
    asked_s = []

    async def gather(asker, methods, absent, timeout_s):
        asked_s.append(timeout_s)
        return Answers({}, (STORY,))

    monkeypatch.setattr(Asker, "gather", gather)
    monkeypatch.setattr(Client.settings, "request_timeout_s", 20.0)
    topics = Topics(Client())
    for change in (topics.delete_topic, topics.purge_topic):
        with pytest.raises(PartialAnswer, match="fell silent"):
            await change("orders")
    assert asked_s == [20.0, 20.0]
    with pytest.raises(PartialAnswer, match="fell silent"):
        await topics.purge_topic("orders", dry_run=True)
    assert asked_s[2] < 20.0


async def test_where_nobody_is_there_nothing_is_counted_as_none():
    client = Client()
    client.routes = RouteCache()
    admin = PendingTimers(client)
    for asked in (admin.count_timers, admin.timer_histogram, lambda: admin.cancel_pending("t")):
        with pytest.raises(Unavailable, match="no live broker"):
            await asked()
