"""Bounds of a shard's memory, disk and time.  Pure."""

from __future__ import annotations

import dataclasses

from duemq_recurring.schedules import BYTES_MAX as SCHEDULE_BYTES_MAX
from duemq_recurring.schedules import SCHEDULES_MAX

# So long before they are due timers are dispatched, so that the sync of that is over in time.
# From then on a cancel answers FIRED.
AHEAD_MS = 6


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a shard's memory and disk."""

    near_window_ms: int = 60_000  # how far ahead timers are loaded; less than the wheel's span
    near_rows_max: int = 400_000
    near_bytes_max: int = 64 << 20
    memtable_rows_max: int = 16_384
    memtable_bytes_max: int = 4 << 20
    tick_rows_max: int = 8_192  # timers taken off the wheel at once
    tick_batches_max: int = 8  # batches built at once: some 4 ms of work
    park_rows_min: int = 1_000  # fewer due timers that wait are not worth a flush
    log_segment_bytes: int = 64 << 20
    # Fetched frames wait at the broker, not here, when the disk is slow.
    log_pending_bytes_max: int = 4 << 20
    log_held_max: int = 256 << 20  # log kept for timers in memory; they are moved to disk then
    # Below it nothing is taken over: what fires and makes room again needs space too.
    free_bytes_min: int = 24 << 20
    tombstones_max: int = 1_000_000
    requests_max: int = 500_000  # remembered, with their answers (request_memory.py)
    request_bytes_max: int = 128 << 20  # of the answers
    schedules_max: int = SCHEDULES_MAX
    schedule_bytes_max: int = SCHEDULE_BYTES_MAX  # in memory
    tombstone_keep_ms: int = 24 * 3_600_000  # after the due time
    checkpoint_interval_ms: int = 30_000
    checkpoint_log_bytes: int = 64 << 20  # since the last checkpoint; read again by a restart
    # Where there are replicas.
    standby_interval_ms: int = 300_000  # between two checkpoints of a replica that follows
    log_kept_bytes: int = 0  # of the log before a checkpoint: replicas that come back need it
    uncommitted_max: int = 16 << 20  # bytes of the log that replicas do not have; then it waits
