"""Prometheus metrics of consumer groups, read off when somebody asks; in that thread."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from duemq_server.broker.groups import progress
from duemq_server.broker.groups.coordinator import Coordinator
from duemq_server.broker.groups.progress import Activity
from duemq_server.broker.store.store import Store
from duemq_server.storage.errors import StorageError

_By = dict[tuple[str, str], float]


class GroupCollector(Collector):
    """How far groups are on this broker, and the members of those that it coordinates."""

    def __init__(
        self,
        store: Store,
        activity: Activity,
        coordinator: Coordinator,
        now_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._activity = activity
        self._coordinator = coordinator
        self._now_ms = now_ms

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        lag_s: _By = defaultdict(float)
        in_flight: _By = defaultdict(float)
        kept = GaugeMetricFamily(
            "duemq_broker_dead_letters_kept",
            "Messages in a group's dead-letter topic",
            labels=("group",),
        )
        now_ms = self._now_ms()
        for group in self._store.offsets.groups():
            for state in progress.states_of(self._store, self._activity, group):
                place = (group, state.queue.topic)
                with suppress(StorageError, OSError):  # one damaged file must not hide all others
                    lag_s[place] = max(lag_s[place], state.lag_ms(now_ms) / 1000)
                in_flight[place] += state.in_flight
            if letters := progress.dead_letters_kept(self._store, group):
                kept.add_metric((group,), letters)
        yield _by_topic(
            "consumer_lag_seconds", "Age of the oldest message that a group has not consumed", lag_s
        )
        yield _by_topic(
            "in_flight",
            "Messages handed out to a group and neither committed nor sent back",
            in_flight,
        )
        yield kept
        yield self._members()

    def _members(self) -> Metric:
        members = GaugeMetricFamily(
            "duemq_broker_group_members",
            "Members of a group that this broker coordinates",
            labels=("group",),
        )
        for group in list(self._coordinator.groups()):
            members.add_metric((group.name,), len(group.members))
        return members


def _by_topic(name: str, text: str, values: _By) -> Metric:
    family = GaugeMetricFamily(f"duemq_broker_{name}", text, labels=("group", "topic"))
    for place, value in values.items():
        family.add_metric(place, value)
    return family
