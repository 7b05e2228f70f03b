"""The data directory of a timer shard, and how it is opened.

DIR/LOCK          one process a directory (storage/dirlock.py)
DIR/log/          the timer log (log_entries.py)
DIR/segments/     far timers (far_segments.py)
DIR/checkpoint    checkpoint_state.py

A directory whose log has replicas is opened by standby.py.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from duemq.errors import Corrupt
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Buffer, Disk
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.record import Entry
from duemq_server.timer_service.disk import checkpoint_state
from duemq_server.timer_service.disk.checkpoint_state import CheckpointState
from duemq_server.timer_service.disk.housekeeping import Housekeeper, Timerlog
from duemq_server.timer_service.disk.recovery import Recovery, check_no_gap_at
from duemq_server.timer_service.far.far_segments import FarSegments
from duemq_server.timer_service.far.reading import read_bytes
from duemq_server.timer_service.scheduling.scheduler import Scheduler
from duemq_server.timer_service.timers.limits import Limits
from duemq_server.timer_service.timers.rows import Home

LOG_GROUP_BYTES_MAX = 1 << 20


class Replayable(Timerlog, Protocol):
    """A log that a shard can be made from; SegmentedLog, or a part of one (log_view.py)."""

    def append(self, kind: int, parts: Sequence[Buffer]) -> tuple[int, int]: ...  # noqa: D102
    def read(self, position: int, length: int) -> memoryview: ...  # noqa: D102
    def entries(self, first: int) -> Iterator[Entry]: ...  # noqa: D102


class Made(NamedTuple):
    """What a log and a checkpoint make."""

    scheduler: Scheduler
    housekeeper: Housekeeper
    producer_id: int
    replayed: int  # entries of the log behind the checkpoint


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
    found = load_checkpoint(directory, disk)
    log = SegmentedLog.open(
        log_path(directory),
        disk,
        segment_bytes=limits.log_segment_bytes,
        pending_bytes_max=limits.log_pending_bytes_max,
        group_bytes_max=LOG_GROUP_BYTES_MAX,
        start_at=found.recovery_start if found else None,
    )
    position = found.position if found else 0
    check_begins(directory, log, found)
    for entry in log.recover(position):  # verified and cut; bodies can be read then
        check_no_gap_at(entry, position)
    check_reaches(directory, log, position)
    made = make_shard(
        directory,
        disk,
        limits,
        now_ms,
        log,
        found,
        segments_type=segments_type,
        recovery_type=recovery_type,
    )
    if found is None:
        save_now(log, made.housekeeper, now_ms)
    return DataDirectory(log, *made)


def log_path(directory: str) -> str:
    """Where the timer log lies."""
    return os.path.join(directory, "log")


def checkpoint_path(directory: str) -> str:
    """Where the checkpoint lies."""
    return os.path.join(directory, "checkpoint")


def segments_path(directory: str) -> str:
    """Where the period files lie."""
    return os.path.join(directory, "segments")


def new_producer_id() -> int:
    """A random one, which names a data directory, or the group of those with the same log."""
    return SERVICE_IDS_FROM | secrets.randbits(63)


def load_checkpoint(directory: str, disk: Disk) -> CheckpointState | None:
    """What a directory's checkpoint says.  Raises Corrupt, CorruptFile, UnknownVersion."""
    path = checkpoint_path(directory)
    payload = checkpoint.load(path, disk)
    return checkpoint_state.decode(payload, path) if payload is not None else None


def save_checkpoint(directory: str, disk: Disk, state: CheckpointState) -> None:
    """In place of what is there, durably.  Raises DiskFull, DiskFailed."""
    checkpoint.save(checkpoint_path(directory), checkpoint_state.encode(state), disk)


def check_begins(directory: str, log: SegmentedLog, found: CheckpointState | None) -> None:
    """Raises Corrupt if a log begins behind where its checkpoint, or none, leaves off."""
    if log.start_position > (found.position if found else 0):
        said = f"its checkpoint was made at {found.position}" if found else "there is no checkpoint"
        raise Corrupt(
            f"{directory}/log begins at {log.start_position}, {said}: they are not of the same"
            " time; restore the whole directory from a copy"
        )


def check_reaches(directory: str, log: SegmentedLog, position: int) -> None:
    """Raises Corrupt if a log ends before the checkpoint was made."""
    if log.end_position < position:
        raise Corrupt(
            f"{directory}/log ends at {log.end_position}, its checkpoint was made at {position}:"
            " acknowledged timers are gone; restore the directory from a copy"
        )


def make_shard(
    directory: str,
    disk: Disk,
    limits: Limits,
    now_ms: int,
    log: Replayable,
    found: CheckpointState | None,
    *,
    segments_type: type[FarSegments] = FarSegments,
    recovery_type: type[Recovery] = Recovery,
    fired_by: Callable[[int], int] | None = None,
) -> Made:
    """The shard as of the log's end, from its checkpoint and what came behind it.

    `fired_by`: see Recovery.  Period files are cut to what the checkpoint says.  Raises Corrupt,
    CorruptLog, CorruptFile, DiskFull, DiskFailed.
    """
    segments = segments_type(segments_path(directory), disk)
    scheduler = Scheduler(log, segments, limits, now_ms)

    def read_body(home: Home, length: int) -> bytes:
        if home.file:
            return read_bytes(disk, segments.path(home.file), home.position, length)
        return bytes(log.read(home.position, length))

    recovery = recovery_type(scheduler, read_body, now_ms, fired_by)
    if found is not None:
        disk.fsync_dir(directory)  # what it does not name goes now: no older one may come back
        recovery.restore(found)
    else:
        segments.recover({}, [])
    recovery.replay(log.entries(found.position if found else 0))
    recovery.finish()
    producer_id = found.producer_id if found else new_producer_id()
    epochs = [*(found.epochs if found else ()), *recovery.epochs]
    path = checkpoint_path(directory)
    store_id = found.store_id if found else 0
    housekeeper = Housekeeper(scheduler, log, disk, path, producer_id, now_ms, epochs, store_id)
    return Made(scheduler, housekeeper, producer_id, recovery.replayed)


def save_now(log: SegmentedLog, housekeeper: Housekeeper, now_ms: int) -> None:
    """Makes the log durable and saves a checkpoint; no writer thread may be running."""
    save = housekeeper.save(now_ms)
    while log.write_pending():
        pass
    save.run()
    housekeeper.finish(save, now_ms)
