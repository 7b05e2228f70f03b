from dataclasses import replace
from zlib import crc32

import pytest

from duemq.errors import InstanceNotFound, InvalidArgument, NotReady, Overloaded, TopicNotFound
from duemq_server.nameserver import registry as module
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.reports import (
    BrokerReport,
    ReplicaReport,
    TimerReport,
    TopicQueues,
    Version,
)
from duemq_server.nameserver.routes import Served

OLD, NEW, NEXT_LIFE = Version(1, 1), Version(1, 2), Version(2, 1)


def broker(name="a", topics=("t",), queues=4, address=None):
    served = tuple(TopicQueues(topic, queues) for topic in topics)
    store_id = 7 if name == "a" else crc32(name.encode())
    return BrokerReport(name, address or f"{name}:1", served, store_id=store_id)


@pytest.fixture
def registry():
    return Registry(ready_at_ms=0, expiry_ms=30_000)


def test_a_route_is_the_brokers_that_report_the_topic_sorted_by_name(registry):
    registry.register(OLD, broker("b"), 0)
    registry.register(OLD, broker("a", queues=2), 0)
    assert registry.route("t") == (
        Served("a", "a:1", 2, True, True, store_id=7),
        Served("b", "b:1", 4, True, True, store_id=crc32(b"b")),
    )
    assert [one.report.name for one in registry.brokers] == ["a", "b"]


def test_an_unknown_topic_is_refused(registry):
    with pytest.raises(TopicNotFound) as caught:
        registry.route("t")
    assert caught.value.value == "t"


def test_an_older_report_changes_nothing(registry):
    assert registry.register(NEW, broker(topics=("t",)), 0)
    revision = registry.revision
    assert not registry.register(OLD, broker(topics=()), 29_999)
    assert registry.revision == revision
    assert registry.topics == ("t",)
    registry.expire(30_000)
    assert registry.brokers == ()


def test_the_next_life_of_a_broker_overrules_the_last_reports_of_the_former(registry):
    registry.register(Version(1, 999), broker(topics=("t", "u")), 0)
    assert registry.register(NEXT_LIFE, broker(topics=("t",)), 0)
    assert not registry.register(Version(1, 1000), broker(topics=("t", "u")), 0)
    assert registry.topics == ("t",)


def test_a_heartbeat_without_news_extends_the_life_and_is_no_change(registry):
    registry.register(OLD, broker(), 0)
    revision = registry.revision
    assert registry.register(OLD, broker(), 20_000)
    assert registry.revision == revision
    registry.expire(49_999)
    assert registry.topics == ("t",)
    registry.expire(50_000)
    assert registry.topics == ()
    assert registry.revision > revision


def test_a_report_may_bring_its_own_expiry(registry):
    registry.register(OLD, broker(), 0, expiry_ms=100)
    assert registry.expire(99) == 100
    registry.expire(100)
    assert registry.brokers == ()


def test_expire_says_when_it_must_be_called_again(registry):
    assert registry.expire(5) == 30_005
    registry.register(OLD, broker("a"), 0)
    registry.register(OLD, broker("b"), 10_000)
    assert registry.expire(20_000) == 30_000
    assert registry.expire(30_000) == 40_000


def test_a_deregistered_instance_is_gone_at_once_and_late_heartbeats_do_not_bring_it_back(registry):
    registry.register(NEW, broker(), 0)
    assert registry.deregister(BrokerReport, "a", NEW, 0)
    assert registry.topics == ()
    assert not registry.register(OLD, broker(), 1)
    assert not registry.register(NEW, broker(), 1)
    assert registry.register(NEXT_LIFE, broker(), 1)
    assert registry.topics == ("t",)


def test_a_late_goodbye_does_not_touch_the_next_life(registry):
    registry.register(NEXT_LIFE, broker(), 0)
    assert not registry.deregister(BrokerReport, "a", NEW, 0)
    assert registry.topics == ("t",)


def test_a_goodbye_before_the_first_heartbeat_counts(registry):
    assert not registry.deregister(BrokerReport, "a", NEW, 0)
    assert not registry.register(NEW, broker(), 1)


def test_goodbyes_are_forgotten_after_a_while(registry):
    registry.deregister(BrokerReport, "a", NEW, 0)
    registry.expire(module.GONE_MS)
    assert registry.register(OLD, broker(), module.GONE_MS)


def test_a_broker_and_a_timer_may_have_one_name(registry):
    registry.register(OLD, broker("x"), 0)
    registry.register(OLD, TimerReport("x", "x:2", 1, 2), 0)
    registry.deregister(BrokerReport, "x", NEW, 0)
    assert registry.brokers == ()
    assert [one.report for one in registry.timers] == [TimerReport("x", "x:2", 1, 2)]


def test_not_ready_until_everybody_had_the_time_to_register():
    registry = Registry(ready_at_ms=10_000)
    with pytest.raises(NotReady, match=r"ready in 0\.5 s"):
        registry.check_ready(9_500)
    registry.check_ready(10_000)


def test_a_pause_before_it_is_ready_does_not_count():
    registry = Registry(ready_at_ms=10_000)
    assert registry.expire(4_000) == 10_000
    registry.forgive(late_ms=7_000, now_ms=11_500)  # it should have looked at 4,500
    with pytest.raises(NotReady, match=r"ready in 5\.5 s"):
        registry.check_ready(11_500)
    assert registry.register(NEXT_LIFE, stored(1, "b"), 12_000)
    assert registry.register(OLD, stored(1), 12_000)  # the older one may still displace it
    registry.forgive(late_ms=2_000, now_ms=19_000)  # at 17,000, which is when it is ready
    with pytest.raises(NotReady):
        registry.check_ready(18_999)
    registry.check_ready(19_000)
    registry.forgive(late_ms=3_000, now_ms=23_000)
    registry.check_ready(19_000)


def test_who_said_goodbye_is_not_brought_back_by_a_heartbeat_that_waited_in_a_pause(registry):
    registry.register(OLD, broker("a"), 0)
    registry.deregister(BrokerReport, "a", NEW, 1_000)
    late_ms = 2 * module.GONE_MS
    registry.forgive(late_ms, 1_000 + late_ms)
    registry.expire(1_000 + late_ms)
    assert not registry.register(OLD, broker("a"), 1_000 + late_ms)
    assert registry.brokers == ()


def test_the_number_of_instances_is_bounded(registry, monkeypatch):
    monkeypatch.setattr(module, "INSTANCES_MAX", 1)
    registry.register(OLD, broker("a"), 0)
    with pytest.raises(Overloaded):
        registry.register(OLD, broker("b"), 0)
    assert registry.register(NEW, broker("a"), 0)


def test_a_new_watcher_is_told_everything(registry):
    registry.register(OLD, broker(topics=("u", "t")), 0)
    changes = registry.changes_since(0)
    assert (changes.whole, changes.topics) == (True, ("t", "u"))
    assert registry.changes_since(changes.revision).topics == ()


def test_a_watcher_is_told_what_changed(registry):
    registry.register(OLD, broker(topics=("t", "u", "v")), 0)
    told = registry.revision
    registry.register(NEW, broker(topics=("t", "w"), queues=4), 0)
    changes = registry.changes_since(told)
    assert not changes.whole
    assert changes.topics == ("w",)
    assert changes.removed_topics == ("u", "v")


def test_a_new_address_changes_all_topics(registry):
    registry.register(OLD, broker(topics=("t", "u")), 0)
    told = registry.revision
    registry.register(NEW, broker(topics=("t", "u"), address="elsewhere:1"), 0)
    assert registry.changes_since(told).topics == ("t", "u")


def test_what_comes_and_goes_between_two_looks_is_told_as_it_is(registry):
    registry.register(OLD, broker("b", topics=()), 0)
    told = registry.revision
    registry.register(OLD, broker("a"), 0)
    registry.deregister(BrokerReport, "a", NEW, 0)
    assert registry.changes_since(told).removed_topics == ("t",)
    registry.register(NEXT_LIFE, broker("a"), 0)
    assert registry.changes_since(told).topics == ("t",)


def test_a_timer_and_a_restart_are_changes_without_topics(registry):
    registry.register(OLD, broker(), 0)
    told = registry.revision
    registry.register(OLD, TimerReport("x", "x:2"), 0)
    assert registry.revision == told + 1
    registry.register(NEXT_LIFE, broker(), 0)
    assert registry.revision == told + 2
    assert registry.changes_since(told).topics == ()


def test_a_watcher_behind_the_journal_is_told_everything():
    registry = Registry(ready_at_ms=0, journal_topics_max=2)
    registry.register(OLD, broker("a", topics=("t",)), 0)
    behind = registry.revision
    registry.register(OLD, broker("b", topics=("u", "v")), 0)
    near = registry.revision
    registry.register(OLD, broker("c", topics=("w",)), 0)
    assert registry.changes_since(behind).whole
    assert registry.changes_since(near).topics == ("w",)
    assert registry.changes_since(registry.revision + 1).whole


# --- lost ---------------------------------------------------------------------------------------


def lost(registry):
    return [
        (one.instance.report.name, one.lost_ms, one.stopped)
        for one in (*registry.lost_brokers, *registry.lost_timers)
    ]


def test_who_stopped_or_fell_silent_is_lost_since_then(registry):
    registry.register(OLD, broker("a"), 0, expiry_ms=100)
    registry.register(OLD, broker("b"), 0)
    registry.register(OLD, TimerReport("x", "x:1"), 0, expiry_ms=200)
    registry.deregister(BrokerReport, "b", NEW, 50)
    registry.expire(100)
    registry.expire(200)
    assert lost(registry) == [("a", 100, False), ("b", 50, True), ("x", 200, False)]
    assert registry.lost_brokers[0].instance.report.store_id == 7


def test_a_topic_that_nobody_serves_may_be_with_who_is_lost(registry):
    registry.register(OLD, broker(), 0)
    registry.deregister(BrokerReport, "a", NEW, 0)
    with pytest.raises(TopicNotFound, match="those that have it were lost lately: a") as caught:
        registry.route("t")
    assert caught.value.retryable
    with pytest.raises(TopicNotFound, match="no broker serves topic 'new'; lost lately") as caught:
        registry.route("new")
    assert not caught.value.retryable


class CountedName(str):
    """Counts how often one of them is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other):
        CountedName.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_who_asks_for_an_unknown_topic_has_not_those_of_the_lost_looked_through(registry):
    topics = [CountedName(f"t{number}") for number in range(1_000)]
    registry.register(OLD, broker(topics=topics), 0)
    registry.deregister(BrokerReport, "a", NEW, 0)
    CountedName.compared = 0
    with pytest.raises(TopicNotFound, match="lost lately: a"):
        registry.route("unknown")
    assert CountedName.compared < 10
    with pytest.raises(TopicNotFound, match="those that have it were lost lately: a"):
        registry.route("t999")
    assert CountedName.compared > 0


def test_who_comes_back_is_not_lost(registry):
    registry.register(OLD, broker(), 0)
    registry.deregister(BrokerReport, "a", NEW, 0)
    registry.register(NEXT_LIFE, broker(), 1)
    assert lost(registry) == []


def test_the_lost_are_forgotten_after_their_time_and_watchers_hear_of_it():
    registry = Registry(ready_at_ms=0, lost_kept_ms=1_000)
    registry.register(OLD, broker(), 0)
    registry.deregister(BrokerReport, "a", NEW, 5)
    registry.expire(1_004)
    assert lost(registry) == [("a", 5, True)]
    revision = registry.revision
    registry.expire(1_005)
    assert lost(registry) == []
    assert registry.revision > revision


def test_the_number_of_lost_is_bounded(registry, monkeypatch):
    monkeypatch.setattr(module, "LOST_MAX", 1)
    for name in ("a", "b"):
        registry.register(OLD, broker(name), 0)
        registry.deregister(BrokerReport, name, NEW, 0)
    assert lost(registry) == [("b", 0, True)]


def test_watchers_hear_of_each_version(registry):
    registry.register(OLD, broker(), 0)
    revision = registry.revision
    registry.register(NEW, broker(), 0)
    assert registry.revision > revision


# --- one store a name ---------------------------------------------------------------------------


def stored(store_id, name="a", address=None, topics=("t",)):
    return replace(broker(name, topics=topics, address=address), store_id=store_id)


def test_another_store_does_not_get_a_name_while_its_process_lives(registry):
    registry.register(OLD, stored(1), 0)
    assert not registry.register(NEXT_LIFE, stored(2, address="elsewhere:1", topics=()), 29_999)
    assert registry.route("t")[0].address == "a:1"
    holder = registry.holder(NEXT_LIFE, stored(2), 29_999)
    assert holder is not None
    assert holder.report.store_id == 1
    registry.expire(30_000)
    assert registry.register(NEXT_LIFE, stored(2), 30_000)


def test_a_timer_shard_has_its_name_alike(registry):
    registry.register(OLD, TimerReport("x", "x:1", store_id=1), 0)
    assert not registry.register(NEXT_LIFE, TimerReport("x", "x:2", store_id=2), 0)
    assert registry.register(NEXT_LIFE, TimerReport("x", "x:2", store_id=1), 0)


def test_a_store_does_not_get_another_name_while_its_process_lives(registry):
    """One has a copy of the other's data: what it stores would pass for the other's."""
    registry.register(OLD, stored(1), 0)
    copy = stored(1, "b", topics=("u",))
    assert not registry.register(NEXT_LIFE, copy, 29_999)
    assert registry.topics == ("t",)
    holder = registry.holder(NEXT_LIFE, copy, 29_999)
    assert holder is not None
    assert holder.report.name == "a"
    # Of another kind they are not compared, nor where they are not told.
    assert registry.register(OLD, TimerReport("x", "x:1", store_id=1), 29_999)
    assert registry.register(OLD, stored(0, "c"), 29_999)
    assert registry.register(OLD, stored(0, "d"), 29_999)
    registry.expire(30_000)
    assert registry.register(NEXT_LIFE, copy, 30_000)


def test_a_nameserver_that_met_a_copy_first_keeps_the_older_process():
    registry = Registry(ready_at_ms=10_000, expiry_ms=30_000)
    assert registry.register(NEXT_LIFE, stored(1, "b"), 0)
    assert registry.register(OLD, stored(1), 1)
    assert not registry.register(Version(2, 2), stored(1, "b"), 2)
    assert registry.register(NEW, stored(1), 3)


def test_whose_stores_were_seen_is_bounded(registry, monkeypatch):
    monkeypatch.setattr(module, "INSTANCES_MAX", 2)
    for number in range(1, 50):  # a name whose disk is lost again and again
        assert registry.register(Version(number, 1), stored(number), 30_000 * number)
        assert not registry.register(OLD, stored(number, "copy"), 30_000 * number)
        registry.expire(30_000 * (number + 1))
        assert registry.register(Version(number, 1), stored(0, "c"), 30_000 * (number + 1))
    assert len(registry._names) <= 2 * module.INSTANCES_MAX
    registry.deregister(BrokerReport, "a", Version(50, 1), 30_000 * 50)
    assert registry.register(OLD, stored(0, "d"), 30_000 * 50)  # not told is no store


def test_a_store_that_moves_has_its_name_at_once(registry):
    registry.register(OLD, stored(1), 0)
    assert registry.register(NEXT_LIFE, stored(1, address="elsewhere:1"), 0)
    assert registry.route("t")[0].address == "elsewhere:1"


def test_who_is_refused_takes_nobody_out_and_bars_nobody(registry):
    registry.register(OLD, stored(1), 0)
    assert not registry.deregister(BrokerReport, "a", NEXT_LIFE, 0, store_id=2)
    assert registry.topics == ("t",)
    registry.deregister(BrokerReport, "b", NEXT_LIFE, 0, store_id=2)
    assert registry.register(OLD, stored(3, "b"), 0)


def test_a_nameserver_that_just_started_gives_the_name_to_the_older_process():
    """Whichever it meets first: the younger one may be the one that others have refused."""
    registry = Registry(ready_at_ms=10)
    registry.register(NEXT_LIFE, stored(2), 0)
    assert registry.register(OLD, stored(1), 9)
    assert not registry.register(NEXT_LIFE, stored(2), 9)
    assert not registry.register(Version(0, 1), stored(3), 10)
    assert registry.brokers[0].report.store_id == 1


# --- given up -----------------------------------------------------------------------------------


def given_up(registry):
    both = (*registry.lost_brokers, *registry.lost_timers)
    return [one.instance.report.name for one in both if one.forgotten]


def test_who_watches_hears_of_a_topic_that_was_made_anew_with_all_else_as_it_was(registry):
    def served(topic_id):
        return BrokerReport("a", "a:1", (TopicQueues("t", 4, topic_id=topic_id),))

    registry.register(OLD, served(7), 0)
    revision = registry.revision
    registry.register(NEXT_LIFE, served(8), 0)
    assert registry.changes_since(revision).topics == ("t",)
    assert [one.topic_id for one in registry.route("t")] == [8]


def test_who_is_lost_can_be_given_up_and_watchers_hear_of_it(registry):
    registry.register(OLD, broker("a", topics=("t", "u")), 0, expiry_ms=100)
    revision = registry.revision
    # Nobody has looked since its report ran out: it is lost all the same.
    told = registry.forget(BrokerReport, "a", 100, dry_run=True)
    assert told.topics == {"t": TopicQueues("t", 4), "u": TopicQueues("u", 4)}
    assert (given_up(registry), told.lost_ms) == ([], 100)
    lost_at, revision = registry.revision, registry.revision - revision
    assert revision == 1
    registry.forget(BrokerReport, "a", 200)
    assert given_up(registry) == ["a"]
    assert registry.revision > lost_at
    with pytest.raises(TopicNotFound) as caught:
        registry.route("t")
    assert "lost lately" not in caught.value.message
    assert not caught.value.retryable


def test_giving_up_twice_changes_nothing_more(registry):
    registry.register(OLD, TimerReport("x", "x:1"), 0, expiry_ms=100)
    registry.forget(TimerReport, "x", 100)
    revision = registry.revision
    assert registry.forget(TimerReport, "x", 101).instance.report.name == "x"
    assert (given_up(registry), registry.revision) == (["x"], revision)


def test_who_lives_is_not_given_up(registry):
    registry.register(OLD, broker(), 0, expiry_ms=100)
    with pytest.raises(InvalidArgument, match=r"a lives: a:1 was heard of 0\.1 s ago"):
        registry.forget(BrokerReport, "a", 99)
    with pytest.raises(InstanceNotFound):
        registry.forget(TimerReport, "a", 99)
    assert registry.topics == ("t",)


def test_who_is_not_remembered_is_not_found():
    registry = Registry(ready_at_ms=0, lost_kept_ms=1_000)
    with pytest.raises(InstanceNotFound, match="no broker a was lost lately"):
        registry.forget(BrokerReport, "a", 0)
    registry.register(OLD, broker(), 0, expiry_ms=100)
    registry.expire(100)
    with pytest.raises(InstanceNotFound):
        registry.forget(BrokerReport, "a", 1_100)


def test_who_was_given_up_and_comes_back_is_there_and_can_be_lost_again(registry):
    registry.register(OLD, broker(), 0, expiry_ms=100)
    registry.forget(BrokerReport, "a", 100)
    assert registry.register(OLD, broker(), 101, expiry_ms=100)
    assert registry.topics == ("t",)
    registry.expire(201)
    assert (lost(registry), given_up(registry)) == ([("a", 201, False)], [])


def test_the_topics_of_the_lost_are_bounded(registry, monkeypatch):
    monkeypatch.setattr(module, "LOST_TOPICS_MAX", 1)
    for name in ("a", "b"):
        registry.register(OLD, broker(name), 0)
        registry.deregister(BrokerReport, name, NEW, 0)
    told = [registry.forget(BrokerReport, name, 0).topics for name in ("a", "b")]
    assert told == [{"t": TopicQueues("t", 4)}, None]


def test_an_instance_may_vanish_while_another_thread_lists_them(registry, monkeypatch):
    registry.register(OLD, broker("a"), 0)
    registry.register(OLD, broker("b"), 0)
    name = module._name

    def meanwhile(item):
        registry.deregister(BrokerReport, "a", OLD, 0, store_id=7)
        return name(item)

    monkeypatch.setattr(module, "_name", meanwhile)
    assert [one.report.name for one in registry.brokers] == ["a", "b"]
    assert [one.report.name for one in registry.brokers] == ["b"]


LEADS, FOLLOWS, LEARNS = 1, 2, 3


def replicated(*replicas, epoch=3):
    return BrokerReport("a", "a:1", store_id=7, replicas=replicas, epoch=epoch)


def test_the_ends_of_so_many_logs_are_remembered_those_told_last(registry, monkeypatch):
    monkeypatch.setattr(module, "LOG_ENDS_MAX", 2)
    told = ((1, 10), (2, 20), (1, 15), (0, 99), (2, 0), (3, 30))
    for counter, (store_id, log_end) in enumerate(told, 1):
        report = BrokerReport(f"b{store_id}", "b:1", store_id=store_id, log_end=log_end)
        assert registry.register(Version(1, counter), report, 0)
    assert [registry.log_end(store_id) for store_id in range(4)] == [0, 15, 0, 30]


def test_where_a_log_ends_is_remembered_though_its_broker_s_topics_do_not_fit():
    registry = Registry(ready_at_ms=0, routes_bytes_max=100)
    registry.register(Version(1, 1), BrokerReport("b", "b:1", store_id=7, log_end=10), 0)
    grown = BrokerReport("b", "b:1", (TopicQueues("t" * 100, 1),), store_id=7, log_end=20)
    with pytest.raises(Overloaded):
        registry.register(Version(1, 2), grown, 0)
    assert registry.log_end(7) == 20


def test_a_lag_is_taken_over_and_wakes_nobody(registry):
    leader = ReplicaReport("a", LEADS, True, 3, "a:1", since_ms=10)
    registry.register(OLD, replicated(leader, ReplicaReport("b", FOLLOWS, True, 3, "b:1")), 0)
    revision = registry.revision
    behind = ReplicaReport("b", FOLLOWS, True, 3, "b:1", 4096, 0.5, 20, "slow")
    registry.register(OLD, replicated(leader, behind), 1)
    assert registry.revision == revision
    [_, found] = registry.brokers[0].report.replicas
    assert (found.lag_bytes, found.lag_s, found.since_ms, found.reason) == (4096, 0.5, 20, "slow")


@pytest.mark.parametrize(
    "change", [{"role": LEARNS}, {"in_sync": False}, {"epoch": 4}, {"address": "b:2"}]
)
def test_what_else_changes_of_a_replica_wakes_the_watchers(registry, change):
    replica = ReplicaReport("b", FOLLOWS, True, 3, "b:1")
    registry.register(OLD, replicated(replica), 0)
    revision = registry.revision
    registry.register(OLD, replicated(replace(replica, **change)), 1)
    assert registry.revision == revision + 1


def test_replicas_count_among_the_bytes_of_the_routes():
    registry = Registry(ready_at_ms=0, routes_bytes_max=1_000)
    registry.register(OLD, replicated(*(ReplicaReport(n, FOLLOWS) for n in "abc")), 0)
    with pytest.raises(Overloaded):
        registry.register(OLD, TimerReport("t", "t:1", replicas=(ReplicaReport("a" * 400, 1),)), 0)
    registry.deregister(BrokerReport, "a", OLD, 0)
    assert registry.register(OLD, TimerReport("t", "t:1", replicas=(ReplicaReport("a", 1),)), 0)


def test_a_store_that_is_told_now_is_a_change_of_the_route(registry):
    registry.register(OLD, stored(0), 0)
    revision = registry.revision
    registry.register(NEXT_LIFE, stored(2), 0)
    assert registry.changes_since(revision).topics == ("t",)
    assert [served.store_id for served in registry.route("t")] == [2]


def test_store_ids_count_among_the_bytes_of_the_routes():
    registry = Registry(ready_at_ms=0, routes_bytes_max=10 * len("aa:1t") + 240)
    topics = [f"{number}" for number in range(10)]
    assert registry.register(OLD, stored(0, topics=topics), 0)
    with pytest.raises(Overloaded):
        registry.register(NEW, stored(1, topics=topics), 0)


def test_a_lost_broker_is_remembered_with_its_replicas(registry):
    registry.register(OLD, replicated(ReplicaReport("a", LEADS, True, 3, "a:1")), 0)
    registry.deregister(BrokerReport, "a", OLD, 0)
    [lost] = registry.lost_brokers
    assert [each.address for each in lost.instance.report.replicas] == ["a:1"]


@pytest.mark.parametrize("stops", [True, False])
def test_where_a_replica_was_is_kept_until_it_is_told_anew(registry, stops):
    registry.register(
        OLD, replicated(ReplicaReport("a", LEADS, address="a:1"), ReplicaReport("b", 4)), 0
    )
    if stops:
        registry.deregister(BrokerReport, "a", OLD, 0)
    second = replicated(ReplicaReport("a", 4), ReplicaReport("b", LEADS, address="b:1"), epoch=4)
    assert registry.register(NEXT_LIFE, second, 1)
    [found] = registry.brokers
    assert [each.address for each in found.report.replicas] == ["a:1", "b:1"]
    revision = registry.revision
    assert registry.register(NEXT_LIFE, second, 2)
    assert registry.revision == revision
    moved = replicated(ReplicaReport("a", FOLLOWS, address="a:2"), second.replicas[1], epoch=4)
    registry.register(NEXT_LIFE, moved, 3)
    [found] = registry.brokers
    assert [each.address for each in found.report.replicas] == ["a:2", "b:1"]
