from dataclasses import replace

from duemq.protocol.route import (
    Broker,
    BrokerQueues,
    LostBroker,
    LostTimer,
    Route,
    RouteCache,
    TimerShard,
    Update,
)
from duemq.transport.routing.route_views import STALE_MS, Views


def broker(name="a", epoch=1, counter=1):
    return Broker(name, f"{name}:{epoch}", epoch, counter=counter)


def says(*brokers, topics=("t",), lost=(), **more):
    """A whole update: each broker serves the topics."""
    routes = [
        Route(topic, tuple(BrokerQueues(one.name, one.address, 2) for one in brokers))
        for topic in topics
        if brokers
    ]
    return Update(True, tuple(routes), brokers=brokers, lost_brokers=lost, **more)


class Client:
    def __init__(self):
        self.views, self.cache, self.now_ms = Views(), RouteCache(), 1_000

    def hears(self, nameserver, update):
        return self.cache.apply(self.views.apply(nameserver, update, self.now_ms))

    @property
    def brokers(self):
        return [(one.name, one.epoch) for one in self.cache.brokers]

    def later(self, wait_ms):
        self.now_ms += wait_ms
        update = self.views.prune(self.now_ms)
        if update is not None:
            self.cache.apply(update)


def test_a_broker_that_only_one_nameserver_hears_is_there():
    client = Client()
    client.hears("n1", says(broker("a"), broker("c")))
    client.hears("n2", says(broker("a"), lost=(LostBroker(broker("c"), 5, stopped=False),)))
    assert client.brokers == [("a", 1), ("c", 1)]
    assert client.cache.lost_brokers == ()
    assert [served.broker for served in client.cache.route("t").brokers] == ["a", "c"]


def test_of_a_broker_that_restarted_the_newest_life_counts_whoever_tells_of_it():
    client = Client()
    client.hears("n1", says(broker(epoch=2), topics=["u"]))
    client.hears("n2", says(broker(epoch=1), topics=["t"]))
    assert client.brokers == [("a", 2)]
    assert client.cache.topics == ("u",)


def test_who_was_given_up_at_one_nameserver_is_lost_nowhere():
    client = Client()
    client.hears("n1", says(broker()))
    lost = LostBroker(broker(), 5, stopped=False)
    client.hears("n1", says(lost=(lost,)))
    client.hears("n2", says(lost=(lost,)))
    assert (client.cache.lost_brokers, client.cache.away) == ((lost,), ("a",))
    client.hears("n2", says(lost=(replace(lost, since_ms=6, forgotten=True),)))
    assert (client.cache.lost_brokers, client.cache.away) == ((), ())


def test_giving_up_one_life_says_nothing_of_the_next():
    client = Client()
    given_up = LostBroker(broker(epoch=1), 5, stopped=False, forgotten=True)
    client.hears("n1", says(lost=(given_up,)))
    again = LostBroker(broker(epoch=2), 9, stopped=False)
    client.hears("n2", says(lost=(again,)))
    assert client.cache.lost_brokers == (again,)
    client.hears("n2", says(broker(epoch=2)))
    assert client.brokers == [("a", 2)]


def test_a_goodbye_that_one_nameserver_heard_is_enough_until_the_next_life():
    client = Client()
    stopped = (LostBroker(broker(), 5, stopped=True),)
    client.hears("n1", says(broker(), topics=["t", "u"]))
    client.hears("n2", says(lost=stopped))
    assert client.brokers == []
    assert client.cache.topics == ()
    assert client.cache.lost_brokers == stopped
    # Of the new life, n1 names only what it did not have of the last one.
    again = broker(epoch=2)
    served = Route("v", (BrokerQueues("a", "a:1", 2),))
    client.hears("n1", Update(False, (served,), brokers=(again,)))
    assert client.brokers == [("a", 2)]
    assert client.cache.topics == ("t", "u", "v")


def test_a_goodbye_of_an_older_life_is_none():
    client = Client()
    client.hears("n1", says(broker(epoch=2)))
    client.hears("n2", says(lost=(LostBroker(broker(epoch=1), 5, stopped=True),)))
    assert client.brokers == [("a", 2)]
    assert client.cache.lost_brokers == ()


def test_a_goodbye_of_another_store_is_none():
    client = Client()
    client.hears("n1", says(Broker("a", "a:1", 1, store_id=1)))
    other = Broker("a", "a:2", 2, store_id=2)
    client.hears("n2", says(lost=(LostBroker(other, 5, stopped=True),)))
    assert client.brokers == [("a", 1)]


def test_timer_shards_are_merged_alike():
    client = Client()
    shards = [TimerShard("x", f"x:{life}", 0, 1, epoch=life) for life in (1, 2)]
    client.hears("n1", says(timers=(shards[1],)))
    client.hears("n2", says(timers=(shards[0],)))
    assert client.cache.timers == (shards[1],)
    client.hears("n2", says(lost_timers=(LostTimer(shards[1], 5, stopped=True),)))
    assert client.cache.timers == ()
    assert [lost.timer.name for lost in client.cache.lost_timers] == ["x"]


def test_what_a_nameserver_said_counts_for_a_while_after_it_is_gone():
    client = Client()
    client.hears("n1", says(broker("a"), broker("c")))
    client.hears("n2", says(broker("a")))
    client.views.disconnected("n1", client.now_ms)
    client.later(STALE_MS - 1)
    assert client.brokers == [("a", 1), ("c", 1)]
    assert client.views.next_ms() == client.now_ms + 1
    client.later(1)
    assert client.brokers == [("a", 1)]
    assert client.views.next_ms() is None


def test_without_any_nameserver_everything_stays():
    client = Client()
    client.hears("n1", says(broker("a")))
    client.hears("n2", says(broker("c")))
    for nameserver in ("n1", "n2"):
        client.views.disconnected(nameserver, client.now_ms)
    assert not client.views.connected
    client.later(10 * STALE_MS)
    assert client.brokers == [("a", 1), ("c", 1)]
    # The first to come back does not outvote the other at once: that one may be back in a moment.
    client.hears("n1", says(broker("a")))
    assert client.brokers == [("a", 1), ("c", 1)]
    client.later(STALE_MS)
    assert client.brokers == [("a", 1)]


def test_the_route_that_is_there_is_used_and_not_made_again():
    client, update = Client(), says(broker())
    client.hears("n1", update)
    client.hears("n2", says(broker()))
    assert client.cache.route("t") is update.routes[0]
