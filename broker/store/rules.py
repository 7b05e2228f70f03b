"""How a broker treats what it is sent: the part of its settings that cores know.  Pure."""

from dataclasses import dataclass, field

from duemq_server.broker.records import due_times
from duemq_server.broker.records.batch import Limits
from duemq_server.broker.store import group_configs
from duemq_server.broker.store.group_configs import RetryPolicy

DAY_MS = 86_400_000


@dataclass(frozen=True)
class Rules:
    """See settings.py for what each of them means."""

    auto_create_topics: bool = True
    default_queues: int = 4
    limits: Limits = field(default_factory=Limits)
    delay_levels_ms: tuple[int, ...] = due_times.parse_levels(due_times.DEFAULT_LEVELS)
    timer_queues: int = 4
    lane_idle_ms: int = 7 * DAY_MS
    auto_create_groups: bool = True
    retry: RetryPolicy = group_configs.DEFAULT_POLICY
