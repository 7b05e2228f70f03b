"""Two nameservers that hear different brokers, and one client that watches both of them."""

from contextlib import suppress

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duemq.errors import InstanceNotFound, InvalidArgument
from duemq.protocol.route import Broker, BrokerQueues, LostBroker, Route, RouteCache, Update
from duemq.transport.routing.route_views import STALE_MS, Views
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.reports import BrokerReport, TopicQueues, Version

EXPIRY_MS = 3_000
BROKERS = ("a", "b", "c")
NAMESERVERS = ("n1", "n2")
ONE_BROKER = st.sampled_from(BROKERS)
ONE_NAMESERVER = st.sampled_from(NAMESERVERS)
TOPICS = st.dictionaries(st.sampled_from(["t", "u", "v"]), st.integers(1, 3))


def broker_of(instance):
    report, (epoch, counter) = instance.report, instance.version
    return Broker(report.name, report.address, epoch, report.store_id, counter)


def update_of(registry, since):
    """What a nameserver pushes to a watcher that was told of `since`."""
    changes = registry.changes_since(since)
    routes = tuple(
        Route(
            topic,
            tuple(BrokerQueues(s.broker, s.address, s.queues) for s in registry.route(topic)),
        )
        for topic in changes.topics
    )
    return Update(
        changes.whole,
        routes,
        changes.removed_topics,
        tuple(map(broker_of, registry.brokers)),
        (),
        tuple(
            LostBroker(broker_of(one.instance), one.lost_ms, one.stopped, one.forgotten)
            for one in registry.lost_brokers
        ),
    )


class Partitions(RuleBasedStateMachine):
    """Every link between a broker and a nameserver, and of the client to them, can be cut."""

    def __init__(self):
        super().__init__()
        self.now_ms = 1
        self.registries = {
            name: Registry(ready_at_ms=0, expiry_ms=EXPIRY_MS, lost_kept_ms=20_000)
            for name in NAMESERVERS
        }
        self.cut = set()
        self.told = dict.fromkeys(NAMESERVERS, 0)
        self.connected = set(NAMESERVERS)
        self.views, self.cache = Views(), RouteCache()
        # Broker → its version and topics, as it would report now; none: it is down.
        self.up = {}
        self.lives = 0

    def report(self, broker):
        version, topics = self.up[broker]
        queues = tuple(TopicQueues(topic, count) for topic, count in sorted(topics.items()))
        report = BrokerReport(broker, f"{broker}:{version.epoch}", queues)
        for name, registry in self.registries.items():
            if (broker, name) not in self.cut:
                registry.register(version, report, self.now_ms)

    def look(self):
        for name in self.connected:
            registry = self.registries[name]
            if self.told[name] != registry.revision:
                update = update_of(registry, self.told[name])
                self.told[name] = registry.revision
                self.cache.apply(self.views.apply(name, update, self.now_ms))

    @rule(broker=ONE_BROKER, topics=TOPICS)
    def start(self, broker, topics):
        self.lives += 1
        self.up[broker] = Version(self.lives, 1), topics
        self.report(broker)

    @rule(broker=ONE_BROKER, topics=TOPICS)
    def change(self, broker, topics):
        if broker in self.up:
            version, _ = self.up[broker]
            self.up[broker] = version._replace(counter=version.counter + 1), topics
            self.report(broker)

    @rule(broker=ONE_BROKER)
    def stop(self, broker):
        if broker in self.up:
            version, _ = self.up.pop(broker)
            for name, registry in self.registries.items():
                if (broker, name) not in self.cut:
                    registry.deregister(BrokerReport, broker, version, self.now_ms)

    @rule(broker=ONE_BROKER)
    def die(self, broker):
        self.up.pop(broker, None)

    @rule(broker=ONE_BROKER, nameservers=st.sets(ONE_NAMESERVER, min_size=1))
    def give_up(self, broker, nameservers):
        for name in nameservers:
            with suppress(InvalidArgument, InstanceNotFound):
                self.registries[name].forget(BrokerReport, broker, self.now_ms)

    @rule(broker=ONE_BROKER, nameserver=ONE_NAMESERVER)
    def cut_broker(self, broker, nameserver):
        self.cut ^= {(broker, nameserver)}

    @rule(nameserver=ONE_NAMESERVER)
    def cut_client(self, nameserver):
        if nameserver in self.connected:
            self.connected.remove(nameserver)
            self.views.disconnected(nameserver, self.now_ms)
        else:
            self.connected.add(nameserver)
            self.told[nameserver] = 0

    @rule()
    def look_now(self):
        self.look()

    @rule(passed_ms=st.sampled_from([1, EXPIRY_MS // 2, EXPIRY_MS, STALE_MS]))
    def time_passes(self, passed_ms):
        self.look()
        self.now_ms += passed_ms
        for broker in self.up:
            self.report(broker)
        for registry in self.registries.values():
            registry.expire(self.now_ms)
        next_ms = self.views.next_ms()
        if next_ms is not None and next_ms <= self.now_ms:
            self.cache.apply(self.views.prune(self.now_ms))
            assert self.views.next_ms() != next_ms
        self.look()

    @rule()
    def heal(self):
        self.cut.clear()
        for name in NAMESERVERS:
            if name not in self.connected:
                self.cut_client(name)
        for _ in range(3):
            self.time_passes(EXPIRY_MS)
        assert [broker.name for broker in self.cache.brokers] == sorted(self.up)
        for topic in ("t", "u", "v"):
            served = tuple(
                BrokerQueues(broker, f"{broker}:{version.epoch}", topics[topic])
                for broker, (version, topics) in sorted(self.up.items())
                if topic in topics
            )
            assert self.cache.route(topic) == (Route(topic, served) if served else None)

    @invariant()
    def small_steps_lead_where_one_look_leads(self):
        """The cache is what a client sees that is told everything at once."""
        fresh, cache = Views(), RouteCache()
        views = self.views._views
        for name, view in views.items():
            whole = Update(
                True,
                tuple(view.routes.values()),
                (),
                tuple(view.brokers.values()),
                (),
                tuple(view.lost_brokers.values()),
            )
            cache.apply(fresh.apply(name, whole, self.now_ms))
        assert self.cache.brokers == cache.brokers
        assert self.cache.lost_brokers == cache.lost_brokers
        assert {t: self.cache.route(t) for t in self.cache.topics} == {
            t: cache.route(t) for t in cache.topics
        }

    @invariant()
    def whom_a_nameserver_hears_is_there(self):
        self.look()
        for broker, (version, _) in self.up.items():
            heard = any(
                one.report.name == broker and one.version == version
                for name in self.connected
                for one in self.registries[name].brokers
            )
            if heard:
                found = self.cache.broker(broker)
                assert found is not None
                assert found.address == f"{broker}:{version.epoch}"


TestPartitions = Partitions.TestCase
