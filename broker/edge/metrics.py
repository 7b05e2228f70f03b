"""Prometheus metrics of a broker."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from duemq.errors import DuemqError
from duemq_server.broker.edge.hot_metrics import HotCounter, HotHistogram
from duemq_server.broker.groups import progress

if TYPE_CHECKING:
    from duemq_server.broker.store.store import Store
    from duemq_server.storage.writer import Commit

SECONDS_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)
BYTES_BUCKETS = tuple(float(1 << shift) for shift in range(10, 25, 2))
ENTRIES_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Meters:
    """What is counted as it happens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.send_seconds = HotHistogram(
            "duemq_broker_send_seconds",
            "From a request's arrival to its durability",
            SECONDS_BUCKETS,
            registry,
        )
        self.sync_seconds = HotHistogram(
            "duemq_broker_sync_seconds",
            "Duration of fdatasync of the log",
            SECONDS_BUCKETS,
            registry,
        )
        self.commit_bytes = HotHistogram(
            "duemq_broker_commit_bytes",
            "Size of a group commit",
            BYTES_BUCKETS,
            registry,
        )
        self.commit_entries = HotHistogram(
            "duemq_broker_commit_entries",
            "Log entries of a group commit",
            ENTRIES_BUCKETS,
            registry,
        )
        self._refused = Counter(
            "duemq_broker_refused_batches", "Batches refused", ("code",), registry=registry
        )
        self._messages_out = HotCounter(
            "duemq_broker_messages_out", "Messages handed out", registry
        )
        self._bytes_out = HotCounter("duemq_broker_bytes_out", "Bytes handed out", registry)
        self.checkpoint_seconds = Gauge(
            "duemq_broker_checkpoint_seconds", "Duration of the last checkpoint", registry=registry
        )
        self.key_runs = Gauge(
            "duemq_broker_key_runs",
            "Spans of queues with a run of the key index",
            registry=registry,
        )
        self.key_runs_missing = Gauge(
            "duemq_broker_key_runs_missing",
            "Spans of queues that wait for their run of the key index",
            registry=registry,
        )
        self.disk_left_bytes = Gauge(
            "duemq_broker_disk_left_bytes",
            "Free bytes of the disk beyond free_bytes_min, when upkeep last looked",
            registry=registry,
        )

        self.clock_jumps = Counter(
            "duemq_broker_clock_jumps", "Jumps of the clock by a minute or more", registry=registry
        )
        self.upkeep_errors = Counter(
            "duemq_broker_upkeep_errors",
            "Files that upkeep could not read or remove",
            registry=registry,
        )

    def refused(self, error: DuemqError) -> None:
        """A batch was not stored."""
        self._refused.labels(error.code.name).inc()

    def pulled(self, messages: int, size: int) -> None:
        """Messages were handed out."""
        self._messages_out.value += messages
        self._bytes_out.value += size

    def committed(self, commit: "Commit") -> None:
        """The writer made a group durable; called in its thread."""
        self.sync_seconds.observe(commit.sync_seconds)
        self.commit_bytes.observe(commit.group.size_bytes)
        self.commit_entries.observe(commit.group.entries)


class StoreCollector(Collector):
    """What is read off the store when somebody asks; in the thread that serves the metrics."""

    def __init__(
        self, store: "Store", parked: Callable[[], int], parked_queues: Callable[[], int]
    ) -> None:
        self._store = store
        self._parked = parked
        self._parked_queues = parked_queues

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        store, log = self._store, self._store.log
        for name, text, value in (
            ("messages_in", "Messages stored", store.messages_in),
            ("bytes_in", "Bytes of messages stored", store.bytes_in),
            ("frames_in", "Batches stored", store.frames_in),
            ("timers_in", "Delayed messages accepted", store.timers_in),
            ("duplicates", "Batches that had been stored before", store.duplicates),
            (
                "refused_fires",
                "Due messages that became dead letters of the timer service",
                store.refused_fires,
            ),
        ):
            yield CounterMetricFamily(f"duemq_broker_{name}", text, value=value)
        for name, text, value in (
            ("topics", "Topics", len(store.topics)),
            ("producer_lanes", "Producer lanes remembered", len(store.producers)),
            ("parked_pulls", "Pulls that wait", self._parked()),
            ("parked_queues", "Queues that pulls wait for", self._parked_queues()),
            ("log_start_position", "Oldest byte of the log", log.start_position),
            ("log_durable_position", "End of the log on the disk", log.durable_position),
            ("log_pending_bytes", "Bytes that wait for the disk", log.pending_bytes),
            ("read_only", "1: nothing is accepted", int(not store.writable)),
        ):
            yield GaugeMetricFamily(f"duemq_broker_{name}", text, value=value)
        yield self._lag()
        for name, text, counts in (
            ("sent_back", "Messages sent back for another delivery", store.sent_back),
            ("dead_letters", "Messages sent to the dead letters", store.dead_letters),
        ):
            counter = CounterMetricFamily(f"duemq_broker_{name}", text, labels=("group",))
            for group, count in counts.with_zeros(store.offsets.groups()):
                counter.add_metric((group,), count)
            yield counter

    def _lag(self) -> Metric:
        lag = GaugeMetricFamily(
            "duemq_broker_consumer_lag",
            "Messages that a group has not yet committed",
            labels=("group", "topic"),
        )
        for (group, topic), messages in progress.lags(self._store).items():
            lag.add_metric((group, topic), messages)
        return lag
