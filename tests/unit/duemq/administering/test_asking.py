"""Who is asked, and who is missing."""

from types import SimpleNamespace

import pytest

from duemq.administering.asking import Answers, Asker
from duemq.administering.groups import Groups
from duemq.administering.offsets import Offsets
from duemq.administering.pending_timers import PendingTimers
from duemq.administering.topics import Topics
from duemq.errors import MissingBroker, PartialAnswer, PermissionDenied, Unavailable
from duemq.protocol.route import Broker, RouteCache
from duemq.transport import cluster_client
from duemq.v1 import group_pb2
from duemq.v1.group_admin_pb2 import GroupProgress, QueueProgress

HERE, LOST = Broker("b1", "b1:1", 1, 7), Broker("b2", "b2:1", 1, 8)
STORY = MissingBroker("b2", "it fell silent")
LISTED = [group_pb2.GroupSummary(group=name) for name in ("mine", "theirs")]


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
    async def ask(address, timeout_s, metadata):
        return address, metadata

    answers = await Asker(Client()).each(ask)
    assert answers.by_broker == {"b1": ("b1:1", HERE.meant)}
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


async def test_how_far_groups_are_is_told_of_those_that_one_may_know_it_of(monkeypatch):
    async def each(asker, method, *_):
        return Answers({"b1": group_pb2.ListGroupsResponse(groups=LISTED)}, ())

    async def progress_of(groups, name, timeout_s):
        if name == "theirs":
            raise PermissionDenied("me may not consume in group theirs")
        return Answers({"b1": GroupProgress(queues=[QueueProgress(lag=7)])}, ())

    monkeypatch.setattr(Asker, "each", each)
    monkeypatch.setattr(Groups, "_progress_of", progress_of)
    found = await Groups(Client()).groups(lag=True)
    assert [(each.name, each.lag) for each in found] == [("mine", 7), ("theirs", None)]


async def test_of_a_broker_that_is_not_there_nothing_is_said_of_others_that_were_not_asked(
    monkeypatch,
):
    async def known(*_, **__):
        return ()

    monkeypatch.setattr(Offsets, "_check_known", known)
    with pytest.raises(Unavailable) as raised:
        await Offsets(Client()).reset_offsets("g", "t", "latest", queues=[("b3", 0)])
    assert "broker b3 is not there" in str(raised.value)
    assert "the others" not in str(raised.value)
