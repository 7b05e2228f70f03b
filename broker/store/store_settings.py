"""How a broker treats what it is sent: the part of its settings that cores know.  Pure."""

from dataclasses import dataclass, field

from duemq.protocol.due import DEFAULT_LEVELS, parse_levels
from duemq.protocol.retry_policy import DEFAULT_POLICY, RetryPolicy
from duemq_server.broker.records.batch import BatchLimits

DAY_MS = 86_400_000


@dataclass(frozen=True)
class StoreSettings:
    """See settings.py for what each of them means."""

    auto_create_topics: bool = True
    default_queues: int = 4
    limits: BatchLimits = field(default_factory=BatchLimits)
    delay_levels_ms: tuple[int, ...] = parse_levels(DEFAULT_LEVELS)
    timer_queues: int = 4
    lane_idle_ms: int = 7 * DAY_MS
    auto_create_groups: bool = True
    retry: RetryPolicy = DEFAULT_POLICY
