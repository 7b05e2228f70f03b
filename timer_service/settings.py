"""Settings of a timer shard."""

from __future__ import annotations

from dataclasses import dataclass

from duemq.protocol.limits import SHARDS_MAX
from duemq_recurring.schedules import BYTES_MAX, SCHEDULES_MAX
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.serving.settings import setting
from duemq_server.timer_service.timers.limits import Limits


@dataclass(frozen=True, kw_only=True)
class Settings(ReplicaSettings):
    """A DueMQ timer shard: holds delayed messages until they are due."""

    listen: str = setting("0.0.0.0:9872", "HOST:PORT to serve gRPC on; port 0: any free one")
    shard: int = setting(0, "number of this shard, from 0", minimum=0, maximum=SHARDS_MAX - 1)
    shards: int = setting(
        1,
        "shards of the cluster, the same everywhere; lowered below this one's number, it leaves:"
        " it takes nothing over any more, and fires what it holds",
        minimum=1,
        maximum=SHARDS_MAX,
    )
    clock_difference_max: float = setting(
        0.25,
        "of this machine's clock and a broker's, before it is said",
        unit="s",
        minimum=0.01,
        maximum=3600,
    )
    near_window: float = setting(
        60.0, "how far ahead timers are loaded into memory", unit="s", minimum=1, maximum=65
    )
    near_rows_max: int = setting(
        400_000, "timers in memory at most", minimum=10_000, maximum=10_000_000
    )
    near_bytes_max: int = setting(
        64 << 20, "bodies of timers in memory at most", unit="bytes", minimum=1 << 20
    )
    memtable_bytes_max: int = setting(
        4 << 20, "far timers in memory before they are written out", unit="bytes", minimum=1 << 16
    )
    memtable_rows_max: int = setting(
        16_384, "far timers in memory before they are written out", minimum=64, maximum=1 << 20
    )
    checkpoint_interval: float = setting(
        30.0, "between two checkpoints", unit="s", minimum=0.1, maximum=3600
    )
    checkpoint_bytes: int = setting(
        64 << 20,
        "log between two checkpoints at most: it bounds a restart",
        unit="bytes",
        minimum=1 << 20,
        maximum=1 << 32,
    )
    free_bytes_min: int = setting(
        24 << 20,
        "free space below which no more delayed messages are taken over",
        unit="bytes",
        minimum=0,
    )
    cancel_memory: float = setting(
        86_400.0,
        "how long after its due time a timer is known to be cancelled or fired",
        unit="s",
        minimum=1,
        maximum=366 * 86_400,
    )
    cancelled_max: int = setting(
        1_000_000,
        "timers cancelled in memory that are remembered one by one; further ones by a bit",
        minimum=1_000,
        maximum=100_000_000,
    )

    schedules_max: int = setting(
        SCHEDULES_MAX, "schedules of this shard at most", minimum=1, maximum=1_000_000
    )
    schedule_bytes_max: int = setting(
        BYTES_MAX, "schedules in memory at most", unit="bytes", minimum=1 << 20
    )

    def limits(self) -> Limits:
        """The bounds of the core."""
        return Limits(
            near_window_ms=int(self.near_window * 1000),
            near_rows_max=self.near_rows_max,
            near_bytes_max=self.near_bytes_max,
            memtable_rows_max=self.memtable_rows_max,
            memtable_bytes_max=self.memtable_bytes_max,
            free_bytes_min=self.free_bytes_min,
            tombstones_max=self.cancelled_max,
            schedules_max=self.schedules_max,
            schedule_bytes_max=self.schedule_bytes_max,
            tombstone_keep_ms=int(self.cancel_memory * 1000),
            checkpoint_interval_ms=int(self.checkpoint_interval * 1000),
            checkpoint_log_bytes=self.checkpoint_bytes,
        )
