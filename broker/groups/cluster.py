"""The cluster as a coordinator sees it: who coordinates which group, and what can be read.  Pure.

Owned by: Coordinator.
"""

from collections.abc import Iterable, Mapping

from duemq.errors import NotCoordinator, NotReady
from duemq.protocol.balance import MessageQueue, coordinator
from duemq.protocol.names import retry_topic
from duemq.protocol.pieces import Pieces
from duemq_server.broker.groups.members import Group
from duemq_server.broker.groups.rebalance import TopicQueues


class Cluster:
    """As the nameservers told of it last."""

    def __init__(self, broker: str) -> None:
        """`broker`: this one."""
        self._broker = broker
        self._brokers: frozenset[str] = frozenset()
        self.brokers_since_ms = 0
        """When the brokers changed last."""
        self._readable: Mapping[str, Iterable[MessageQueue]] = {}
        # Sorted, of topics that are read; and as they were before the routes changed last.
        self._queues: TopicQueues = {}
        self._queues_before: TopicQueues = {}

    def set_routes(
        self, queues: Mapping[str, Iterable[MessageQueue]], brokers: Iterable[str], now_ms: int
    ) -> None:
        """The readable queues of every topic, asked for those that are read, and the brokers."""
        self._readable = queues
        self._queues_before, self._queues = self._queues, {}
        found = frozenset(brokers)
        if found != self._brokers:
            self._brokers, self.brokers_since_ms = found, now_ms

    def owner(self, group_name: str) -> str | None:
        """Answers the broker that coordinates a group; None: nobody is seen yet."""
        return coordinator(group_name, self._brokers)

    def elsewhere(self, group_name: str) -> str | None:
        """Answers the other broker that coordinates a group; None: not known of any."""
        owner = self.owner(group_name)
        return owner if owner != self._broker else None

    def check_coordinator(self, group_name: str) -> None:
        """Raises NotReady, NotCoordinator unless this broker coordinates a group."""
        owner = self.owner(group_name)
        if owner is None:
            raise NotReady("this broker does not know the cluster yet")
        if owner != self._broker:
            raise NotCoordinator(
                f"group {group_name!r} is coordinated by {owner!r}",
                field="group",
                value=group_name,
                limit=owner,
            )

    def has_sent_back(self, group_name: str) -> bool:
        """A broker has what this group gave back: it has lived, though nothing else tells so."""
        return retry_topic(group_name) in self._readable

    def queues_of(self, group: Group) -> Pieces[TopicQueues]:
        """Answers the readable queues of what a group reads."""
        topics = {topic for member in group.members.values() for topic in member.subscriptions}
        queues: TopicQueues = {}
        for topic in sorted(topics):
            if topic not in self._queues:
                yield from self._look_up(topic)
            queues[topic] = self._queues[topic]
        return queues

    def _look_up(self, topic: str) -> Pieces[None]:
        """What is as it was before stays the same object: quick to compare."""
        found = list(self._readable.get(topic, ()))
        yield
        found.sort()
        queues = tuple(found)
        yield
        before = self._queues_before.get(topic)
        self._queues[topic] = before if before is not None and before == queues else queues
        yield
