"""A registry against a plain model of it, and route caches that follow it at their own pace."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duemq.protocol.route import Broker, BrokerQueues, Route, RouteCache, Update
from duemq_server.nameserver import registry as module
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.reports import BrokerReport, TopicQueues, Version

EXPIRY_MS = 1_000
NAMES = st.sampled_from(["a", "b", "c"])
VERSIONS = st.builds(Version, st.integers(1, 3), st.integers(1, 3))
TOPICS = st.dictionaries(st.sampled_from(["t", "u", "v"]), st.integers(1, 3))


class Registrations(RuleBasedStateMachine):
    """Brokers report, leave and fall silent; two watchers look now and then."""

    def __init__(self):
        super().__init__()
        self.now_ms = 0
        self.registry = Registry(ready_at_ms=0, expiry_ms=EXPIRY_MS, journal_topics_max=4)
        # The model: name → (version, topics, expires_ms), and the versions of those that left.
        self.live = {}
        self.gone = {}
        self.caches = [RouteCache(), RouteCache()]
        self.told = [0, 0]

    @rule(name=NAMES, version=VERSIONS, topics=TOPICS)
    def report(self, name, version, topics):
        queues = tuple(TopicQueues(topic, count) for topic, count in sorted(topics.items()))
        report = BrokerReport(name, f"{name}:1", queues)
        accepted = self.registry.register(version, report, self.now_ms)
        known, left = self.live.get(name), self.gone.get(name)
        assert accepted == (
            (known is None or version >= known[0]) and (left is None or version > left[0])
        )
        if accepted:
            self.live[name] = (version, topics, self.now_ms + EXPIRY_MS)
            self.gone.pop(name, None)

    @rule(name=NAMES, version=VERSIONS)
    def leave(self, name, version):
        self.registry.deregister(BrokerReport, name, version, self.now_ms)
        known, left = self.live.get(name), self.gone.get(name)
        if known is not None and version < known[0]:
            return
        self.live.pop(name, None)
        if left is None or left[0] <= version:
            self.gone[name] = (version, self.now_ms + module.GONE_MS)

    @rule(passed_ms=st.sampled_from([1, EXPIRY_MS // 2, EXPIRY_MS, module.GONE_MS]))
    def time_passes(self, passed_ms):
        self.now_ms += passed_ms
        next_ms = self.registry.expire(self.now_ms)
        self.live = {name: one for name, one in self.live.items() if one[2] > self.now_ms}
        self.gone = {name: one for name, one in self.gone.items() if one[1] > self.now_ms}
        assert next_ms > self.now_ms
        assert all(next_ms <= one[2] for one in self.live.values())

    @rule(watcher=st.sampled_from([0, 1]))
    def look(self, watcher):
        changes = self.registry.changes_since(self.told[watcher])
        self.told[watcher] = changes.revision
        self.caches[watcher].apply(
            Update(
                changes.whole,
                tuple(map(self.route, changes.topics)),
                changes.removed_topics,
                tuple(Broker(one.report.name, "") for one in self.registry.brokers),
            )
        )
        routes = {topic: self.caches[watcher].route(topic) for topic in ("t", "u", "v")}
        assert routes == {topic: self.expected(topic) for topic in routes}

    def route(self, topic):
        return Route(
            topic,
            tuple(
                BrokerQueues(one.broker, one.address, one.queues)
                for one in self.registry.route(topic)
            ),
        )

    def expected(self, topic):
        brokers = tuple(
            BrokerQueues(name, f"{name}:1", topics[topic])
            for name, (_, topics, _) in sorted(self.live.items())
            if topic in topics
        )
        return Route(topic, brokers) if brokers else None

    @invariant()
    def the_live_are_listed(self):
        assert [one.report.name for one in self.registry.brokers] == sorted(self.live)


TestRegistrations = Registrations.TestCase
