"""What the admin client answers: topics, groups, the cluster, as plain values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TopicSummary:
    """A topic and where it is served."""

    name: str
    queues: int
    """On all brokers together."""
    message_bytes_max: int
    """Of a message's body; where brokers differ, the least."""
    brokers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueueRange:
    """A queue of a topic and the messages that it holds: from `min_offset` below `max_offset`."""

    broker: str
    queue: int
    min_offset: int
    max_offset: int
    last_store_ms: int | None
    """Of the newest message."""


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic, queue by queue."""

    name: str
    message_bytes_max: int
    queues: tuple[QueueRange, ...]

    @property
    def messages(self) -> int:
        """Kept now."""
        return sum(queue.max_offset - queue.min_offset for queue in self.queues)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A consumer group."""

    name: str
    members: int
    generation: int
    coordinator: str | None
    """The broker that shares its queues out; None: nobody now."""


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member of a group."""

    member_id: str
    client: str
    topics: dict[str, str]
    """Subscriptions: topic → tag filter."""
    queues: tuple[tuple[str, str, int], ...]
    """Assigned: (topic, broker, queue)."""
    last_heartbeat_ms: int
    session_timeout_ms: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a group is in a queue."""

    topic: str
    broker: str
    queue: int
    member_id: str | None
    """Who has the queue now."""
    offset: int | None
    """The next message to consume; None: nothing committed yet."""
    min_offset: int
    max_offset: int

    @property
    def lag(self) -> int | None:
        """Messages not consumed yet."""
        return None if self.offset is None else max(0, self.max_offset - self.offset)


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A consumer group, its members and its progress."""

    name: str
    coordinator: str | None
    generation: int
    strategy: str
    members: tuple[MemberDescription, ...]
    progress: tuple[Progress, ...]

    @property
    def lag(self) -> int:
        """Of all queues with a committed offset."""
        return sum(queue.lag or 0 for queue in self.progress)


@dataclass(frozen=True, slots=True)
class NameserverDescription:
    """A nameserver of this client's list."""

    address: str
    error: str | None
    """Why it did not answer."""


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """A broker that the nameservers list.  With `error`, all after it is unknown: 0."""

    name: str
    address: str
    error: str | None
    version: str = ""
    started_ms: int = 0
    store_id: int = 0
    read_only: bool = False
    log_start_position: int = 0
    log_durable_position: int = 0
    checkpoint_position: int = 0
    delay_levels_ms: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TimerStats:
    """A timer shard.  accepted = pending + fired + cancelled.  With `error`, counts are 0."""

    name: str
    address: str
    shard: int
    shards: int
    error: str | None
    accepted: int = 0
    pending: int = 0
    fired: int = 0
    cancelled: int = 0
    in_flight: int = 0
    """Fired and not yet acknowledged by a broker."""
    near: int = 0
    """Pending ones in memory."""
    next_due_ms: int | None = None
    lateness_p50_ms: float = 0.0
    """Of the last minute's fires, against the broker's store time."""
    lateness_p99_ms: float = 0.0
    lateness_max_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """Everything that runs."""

    nameservers: tuple[NameserverDescription, ...]
    brokers: tuple[BrokerDescription, ...]
    timers: tuple[TimerStats, ...]
