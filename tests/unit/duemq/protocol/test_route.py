from dataclasses import replace

from duemq.protocol.route import (
    Broker,
    BrokerQueues,
    LostBroker,
    LostTimer,
    Queue,
    Route,
    RouteCache,
    TimerShard,
    Update,
)
from duemq.transport.routing.route_watcher import route_of
from duemq.v1 import nameserver_pb2


def route(topic="t", *brokers):
    return Route(topic, tuple(BrokerQueues(name, f"{name}:1", 2) for name in brokers))


def test_queues_are_sorted_by_broker_and_number():
    found = Route("t", (BrokerQueues("b", "b:1", 1), BrokerQueues("a", "a:1", 2, writable=False)))
    assert [served.broker for served in found.brokers] == ["a", "b"]
    assert found.writable == (Queue("b", 0),)
    assert found.readable == (Queue("a", 0), Queue("a", 1), Queue("b", 0))


def test_queues_are_listed_for_who_asks_only():
    """A registration of a few hundred KiB may name ten million of them."""
    cache = RouteCache()
    wide = Route("t", (BrokerQueues("a", "a:1", 1_024),))
    cache.apply(Update(True, (wide,), brokers=(Broker("a", "a:1"),)))
    found = cache.route("t")
    assert not {"readable", "writable"} & vars(found).keys()
    assert len(found.readable) == len(found.writable) == 1_024


def test_a_broker_has_no_more_queues_than_it_can_have():
    pushed = nameserver_pb2.TopicRoute(
        topic="t", brokers=[nameserver_pb2.BrokerQueues(broker="a", queues=(1 << 31) - 1)]
    )
    assert route_of(pushed).brokers[0].queues == 1_024


def test_a_whole_update_replaces_and_a_later_one_adds_and_removes():
    cache = RouteCache()
    assert cache.apply(
        Update(True, (route("t", "a"), route("u", "a")), brokers=(Broker("a", "x"),))
    )
    assert cache.topics == ("t", "u")
    assert cache.apply(Update(False, (route("v", "a"),), ("t",), (Broker("a", "x"),)))
    assert cache.topics == ("u", "v")
    assert cache.route("t") is None
    assert cache.apply(Update(True, (route("t", "b"),)))
    assert cache.topics == ("t",)
    assert cache.brokers == ()


def test_an_update_without_news_is_no_change_but_the_first_one_is():
    cache = RouteCache()
    assert cache.apply(Update(True))
    assert cache.version == 1
    assert not cache.apply(Update(True))
    assert not cache.apply(Update(False, removed_topics=("t",)))
    assert cache.version == 1


def test_a_shard_with_other_data_at_the_same_address_is_another_one():
    """Its going may have been told together with its coming."""
    cache = RouteCache()
    before = TimerShard("s0", "s:1", 0, 1, store_id=11)
    cache.apply(Update(True, timers=(before,)))
    assert not cache.apply(Update(False, timers=(replace(before, epoch=2, counter=7),)))
    assert cache.apply(Update(False, timers=(replace(before, store_id=22),)))
    assert [each.store_id for each in cache.timers] == [22]


def test_instances_are_found():
    cache = RouteCache()
    brokers = (Broker("b", "b:1", 1, 77), Broker("a", "a:1", 1, 66))
    timers = (TimerShard("t-0", "t0:1", 0, 2), TimerShard("t-1", "t1:1", 1, 2))
    cache.apply(Update(True, brokers=brokers, timers=timers))
    assert [broker.name for broker in cache.brokers] == ["a", "b"]
    assert cache.broker("b") == brokers[0]
    assert cache.broker("c") is None
    assert [cache.timer_of(queue_id).name for queue_id in range(4)] == ["t-0", "t-1"] * 2


def test_no_shard_no_timer():
    cache = RouteCache()
    cache.apply(Update(True, timers=(TimerShard("t-0", "t0:1", 0, 2),)))
    assert cache.timer_of(1) is None


def test_the_lost_are_known_with_since_when():
    cache = RouteCache()
    lost = LostBroker(Broker("a", "a:1"), since_ms=5, stopped=False)
    shard = LostTimer(TimerShard("x", "x:1", 0, 1), since_ms=6, stopped=True)
    assert cache.apply(Update(True))
    assert cache.apply(Update(False, lost_brokers=(lost,), lost_timers=(shard,)))
    assert (cache.lost_brokers, cache.lost_timers) == ((lost,), (shard,))
    assert cache.apply(Update(False))
    assert cache.lost_brokers == ()


# --- the queues of ordering keys ------------------------------------------------------------


def there(*brokers: str, topics: tuple[str, ...] = ("t",), queues: int = 2) -> Update:
    """A whole update with these brokers, each serving the topics."""
    routes = tuple(
        Route(topic, tuple(BrokerQueues(name, f"{name}:1", queues) for name in brokers))
        for topic in topics
        if brokers
    )
    return Update(True, routes, brokers=tuple(Broker(name, f"{name}:1") for name in brokers))


BOTH = (Queue("a", 0), Queue("a", 1), Queue("b", 0), Queue("b", 1))


def test_keys_are_spread_over_all_queues_also_of_brokers_that_take_nothing_now():
    cache = RouteCache()
    full = BrokerQueues("a", "a:1", 2, writable=False)
    brokers = (Broker("a", "a:1"), Broker("b", "b:1"))
    cache.apply(Update(True, (Route("t", (full, BrokerQueues("b", "b:1", 2))),), brokers=brokers))
    assert cache.keyed("t") == BOTH
    assert cache.keyed("unknown") == ()


def test_keys_stay_where_they_are_while_brokers_are_away():
    cache = RouteCache()
    cache.apply(there("a", "b"))
    cache.apply(there("b"))
    assert cache.route("t").writable == (Queue("b", 0), Queue("b", 1))
    assert cache.keyed("t") == BOTH
    cache.apply(there())
    assert cache.route("t") is None
    assert cache.keyed("t") == BOTH
    cache.apply(there("a"))
    assert cache.keyed("t") == BOTH
    cache.apply(there("a", "b"))
    assert cache.keyed("t") == BOTH


def test_keys_leave_a_broker_that_was_given_up():
    cache = RouteCache()
    cache.apply(there("a", "b"))
    cache.apply(there("b"))
    given_up = LostBroker(Broker("a", "a:1"), 5, stopped=True, forgotten=True)
    cache.apply(replace(there("b"), lost_brokers=(given_up,)))
    assert cache.keyed("t") == (Queue("b", 0), Queue("b", 1))
    cache.apply(there("b"))
    assert cache.away == ()


def test_keys_stay_through_updates_piece_by_piece():
    cache = RouteCache()
    cache.apply(there("a", "b"))
    cache.apply(Update(False, (), ("t",), brokers=()))
    cache.apply(Update(False, (route("t", "b"),), brokers=(Broker("b", "b:1"),)))
    assert cache.keyed("t") == BOTH


def test_a_broker_that_comes_back_says_itself_what_it_serves():
    cache = RouteCache()
    cache.apply(there("a", "b"))
    cache.apply(there("b"))
    back = Update(False, (), brokers=(Broker("a", "a:1", 2), Broker("b", "b:1")))
    cache.apply(back)
    assert cache.keyed("t") == (Queue("b", 0), Queue("b", 1))


def test_a_topic_that_is_deleted_where_its_brokers_live_is_forgotten():
    cache = RouteCache()
    cache.apply(there("a", "b", topics=("t", "u")))
    cache.apply(there("b", topics=("t", "u")))
    cache.apply(there("b", topics=("u",)))
    assert cache.keyed("t") == ()
    assert cache.keyed("u") == BOTH


def test_only_so_many_brokers_are_remembered(monkeypatch):
    monkeypatch.setattr("duemq.protocol.route.AWAY_BROKERS_MAX", 1)
    cache = RouteCache()
    cache.apply(there("a", "b", "c"))
    cache.apply(there("b", "c"))
    cache.apply(there("c"))
    assert {queue.broker for queue in cache.keyed("t")} == {"b", "c"}
