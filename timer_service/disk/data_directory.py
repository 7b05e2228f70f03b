"""The data directory of a timer shard, and how it is opened.

DIR/lock          one process a directory (storage/dirlock.py)
DIR/log/          the timer log (log_entries.py)
DIR/segments/     far timers (far_segments.py)
DIR/checkpoint    checkpoint_state.py
"""

from __future__ import annotations

import os
import secrets
from typing import NamedTuple

from duemq.errors import Corrupt
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk
from duemq_server.storage.log import SegmentedLog
from duemq_server.timer_service.disk import checkpoint_state
from duemq_server.timer_service.disk.housekeeping import Housekeeper
from duemq_server.timer_service.disk.recovery import Recovery
from duemq_server.timer_service.far.far_segments import FarSegments, read_bytes
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.rows import Home

LOG_GROUP_BYTES_MAX = 1 << 20


class DataDirectory(NamedTuple):
    """An opened data directory."""

    log: SegmentedLog
    scheduler: Scheduler
    housekeeper: Housekeeper
    producer_id: int
    replayed: int  # entries of the log behind the checkpoint


def open_directory(
    directory: str,
    disk: Disk,
    limits: Limits,
    now_ms: int,
    *,
    segments_type: type[FarSegments] = FarSegments,
    recovery_type: type[Recovery] = Recovery,
) -> DataDirectory:
    """Opens, recovers and checkpoints a data directory that is locked by the caller.

    The types are others where damage is set aside (set_aside.py).  Raises Corrupt, CorruptLog,
    CorruptFile, UnknownVersion, DiskFull, DiskFailed.
    """
    path = os.path.join(directory, "checkpoint")
    payload = checkpoint.load(path, disk)
    found = checkpoint_state.decode(payload) if payload is not None else None
    log = SegmentedLog.open(
        os.path.join(directory, "log"),
        disk,
        segment_bytes=limits.log_segment_bytes,
        pending_bytes_max=limits.log_pending_bytes_max,
        group_bytes_max=LOG_GROUP_BYTES_MAX,
        start_at=found.recovery_start if found else None,
    )
    segments = segments_type(os.path.join(directory, "segments"), disk)
    scheduler = Scheduler(log, segments, limits, now_ms)

    def read_body(home: Home, length: int) -> bytes:
        if home.file:
            return read_bytes(disk, segments.path(home.file), home.position, length)
        return bytes(log.read(home.position, length))

    recovery = recovery_type(scheduler, read_body, now_ms)
    position = found.position if found else 0
    for _ in log.recover(position):
        pass  # verified and cut; bodies can be read now
    if log.end_position < position:
        raise Corrupt(
            f"{directory}/log ends at {log.end_position}, its checkpoint was made at {position}:"
            " acknowledged timers are gone; restore the directory from a copy"
        )
    if found is not None:
        recovery.restore(found)
    else:
        segments.recover({}, [])
    recovery.replay(log.entries(position))
    recovery.finish()
    producer_id = found.producer_id if found else SERVICE_IDS_FROM | secrets.randbits(63)
    housekeeper = Housekeeper(scheduler, log, disk, path, producer_id, now_ms)
    if found is None:
        save_now(log, housekeeper, now_ms)
    return DataDirectory(log, scheduler, housekeeper, producer_id, recovery.replayed)


def save_now(log: SegmentedLog, housekeeper: Housekeeper, now_ms: int) -> None:
    """Makes the log durable and saves a checkpoint; no writer thread may be running."""
    save = housekeeper.save(now_ms)
    while log.write_pending():
        pass
    save.run()
    housekeeper.finish(save, now_ms)
