"""Settings of a broker."""

from dataclasses import dataclass

from duemq.protocol import checks, limits, retry_policy
from duemq.protocol.due import DEFAULT_LEVELS, parse_levels
from duemq.protocol.retry_policy import RetryPolicy
from duemq_server.broker.records.batch import BatchLimits
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.serving.settings import setting


@dataclass(frozen=True, kw_only=True)
class Settings(ReplicaSettings):
    """A DueMQ broker: stores messages and hands them out."""

    listen: str = setting("0.0.0.0:9870", "HOST:PORT to serve gRPC on; port 0: any free one")
    flush_mode: str = setting(
        "sync",
        "answer a send when it is on the disk (sync), or when the operating system has it and the"
        " disk follows within half a second (async)",
        choices=("sync", "async"),
    )
    auto_create_topics: bool = setting(True, "make a topic that something is sent to")
    default_queues: int = setting(
        4, "queues of a topic that does not say how many", minimum=1, maximum=limits.QUEUES_MAX
    )
    message_bytes_max: int = setting(
        limits.MESSAGE_BYTES_DEFAULT,
        "largest body of a message",
        unit="bytes",
        minimum=1,
        maximum=8 << 20,
    )
    batch_bytes_max: int = setting(
        limits.BATCH_BYTES_DEFAULT,
        "largest batch of messages",
        unit="bytes",
        minimum=1024,
        maximum=12 << 20,
    )
    properties_bytes_max: int = setting(
        limits.PROPERTIES_BYTES_DEFAULT,
        "largest properties of a message, encoded",
        unit="bytes",
        minimum=0,
        maximum=1 << 20,
    )
    delay_levels: str = setting(DEFAULT_LEVELS, "delay of each level, level 1 first")
    auto_create_groups: bool = setting(
        True, "take a group in that was never put; else it is refused until then"
    )
    retries_max: int = setting(
        retry_policy.DEFAULT_RETRIES,
        "deliveries after the first, of a group that does not say so itself; then a dead letter",
        minimum=0,
        maximum=retry_policy.RETRIES_MAX,
    )
    retry_delays: str = setting(
        retry_policy.DEFAULT_DELAYS, "delay before each retry, the last one for all beyond"
    )
    timer_queues: int = setting(
        4,
        "queues of %TIMER%, half of them for what is due within a minute; taken at the first start",
        minimum=1,
        maximum=limits.QUEUES_MAX,
    )
    segment_bytes: int = setting(
        1 << 30, "size of a file of the log", unit="bytes", minimum=1 << 16, maximum=1 << 40
    )
    checkpoint_interval: float = setting(
        10.0, "between two checkpoints", unit="s", minimum=0.1, maximum=3600
    )
    checkpoint_bytes: int = setting(
        256 << 20,
        "log between two checkpoints at most: it bounds a restart",
        unit="bytes",
        minimum=1 << 20,
        maximum=1 << 40,
    )
    retention_hours: float = setting(
        72.0, "how long messages are kept; 0: for ever", minimum=0, maximum=1_000_000
    )
    retention_bytes: int = setting(
        0,
        "how much is kept, with 40 bytes a message beside the log; it reaches a segment more;"
        " 0: no limit",
        unit="bytes",
        minimum=0,
    )
    free_bytes_min: int = setting(
        128 << 20, "free space below which nothing is accepted", unit="bytes", minimum=0
    )
    session_timeout: float = setting(
        10.0,
        "silence after which a group's member is dead, where it does not say so itself",
        unit="s",
        minimum=limits.SESSION_TIMEOUT_MS_MIN // 1000,
        maximum=limits.SESSION_TIMEOUT_MS_MAX // 1000,
    )
    groups_max: int = setting(
        10_000,
        "groups coordinated here; beyond, the one that is without members for longest is forgotten",
        minimum=1,
        maximum=1_000_000,
    )
    producer_memory: float = setting(
        7 * 86_400.0,
        "how long an idle producer's last batches are remembered",
        unit="s",
        minimum=60,
        maximum=366 * 86_400,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicated and self.flush_mode == "async":
            raise checks.wrong("flush_mode", "async", "sync, where there are replicas")
        self.store_settings()

    def store_settings(self) -> StoreSettings:
        """How the store treats what it is sent; raises InvalidArgument."""
        return StoreSettings(
            auto_create_topics=self.auto_create_topics,
            default_queues=self.default_queues,
            limits=BatchLimits(
                self.message_bytes_max, self.batch_bytes_max, self.properties_bytes_max
            ),
            delay_levels_ms=parse_levels(self.delay_levels),
            timer_queues=self.timer_queues,
            lane_idle_ms=int(self.producer_memory * 1000),
            auto_create_groups=self.auto_create_groups,
            retry=self._retry(),
        )

    def _retry(self) -> RetryPolicy:
        policy = RetryPolicy(
            self.retries_max, parse_levels(self.retry_delays, field="retry_delays")
        )
        policy.check()
        return policy
