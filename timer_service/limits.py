"""Bounds of a shard.  Pure."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a shard's memory and disk."""

    near_window_ms: int = 60_000  # how far ahead timers are loaded; less than the wheel's span
    near_rows_max: int = 400_000
    near_bytes_max: int = 64 << 20
    memtable_rows_max: int = 16_384
    memtable_bytes_max: int = 4 << 20
    park_rows_min: int = 1_000  # fewer due timers that wait are not worth a flush
    log_held_max: int = 256 << 20  # log kept for timers in memory; they are moved to disk then
    tombstones_max: int = 1_000_000
    tombstone_keep_ms: int = 24 * 3_600_000  # after the due time
    checkpoint_interval_ms: int = 30_000
    checkpoint_log_bytes: int = 64 << 20  # since the last checkpoint; read again by a restart
