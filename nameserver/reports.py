"""What brokers and timer shards say of themselves, and which of two reports is the newer.  Pure."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

# Of why a replica is not in sync; the rest of a longer text is dropped.
REASON_CHARS_MAX = 200


class Version(NamedTuple):
    """Orders the reports of one instance."""

    epoch: int
    counter: int


@dataclass(frozen=True, slots=True)
class TopicQueues:
    """The queues that a broker serves of a topic."""

    topic: str
    queues: int
    readable: bool = True
    writable: bool = True
    topic_id: int = 0
    """Tells it from one of its name that was deleted; 0: not told."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What the replica that leads says of one of its group.

    Lags differ from one heartbeat to the next: they, and what goes with them, make no report
    another one, so that no watcher is woken for them.
    """

    name: str
    role: int
    """As in nameserver.proto."""
    in_sync: bool = False
    epoch: int = 0
    address: str = ""
    lag_bytes: int = field(default=0, compare=False)
    lag_s: float = field(default=0.0, compare=False)
    since_ms: int = field(default=0, compare=False)
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class BrokerReport:
    """What a broker says of itself."""

    name: str
    address: str
    topics: tuple[TopicQueues, ...] = ()
    store_id: int = 0
    replicas: tuple[ReplicaReport, ...] = ()
    epoch: int = 0
    log_end: int = field(default=0, compare=False)
    """How far the store's log goes, which nobody watches; 0: it does not say."""
    external_address: str = ""
    """Where clients outside reach it; empty: they do not."""


@dataclass(frozen=True, slots=True)
class TimerReport:
    """What a timer shard says of itself."""

    name: str
    address: str
    shard: int = 0
    shards: int = 1
    store_id: int = 0
    replicas: tuple[ReplicaReport, ...] = ()
    epoch: int = 0
    key_shards: int = 0
    external_address: str = ""
    """As a broker's."""


Report = BrokerReport | TimerReport


def same_store(one: int, other: int) -> bool:
    """Whether two reports are of one store.  0: not told; then the name alone counts."""
    return one == other or not (one and other)


def with_addresses(report: Report, before: Report) -> Report:
    """A new leader does not know where replicas are that have not followed it yet: operators ask
    them where they were."""
    if all(each.address for each in report.replicas):
        return report
    known = {each.name: each.address for each in before.replicas}
    replicas = tuple(
        each if each.address else replace(each, address=known.get(each.name, ""))
        for each in report.replicas
    )
    return replace(report, replicas=replicas)
