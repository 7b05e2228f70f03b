"""A leader's snapshot takes the place of what a replica has, in durable steps.

    1  `installing`; while it is there a start empties the directory, and takes another snapshot
    2  the checkpoint goes
    3  period files are the snapshot's
    4  the log is empty and begins where it is to (ReplicaLog.begin_at)
    5  the checkpoint is the snapshot's
    6  `installing` goes

Nobody else uses the directory meanwhile.
"""

from __future__ import annotations

import dataclasses
import logging
import os

from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk
from duemq_server.storage.replicas.replica_log import ReplicaLog
from duemq_server.timer_service.disk import checkpoint_state
from duemq_server.timer_service.disk.checkpoint_state import CheckpointState
from duemq_server.timer_service.disk.data_directory import checkpoint_path, save_checkpoint
from duemq_server.timer_service.disk.snapshots import snapshot
from duemq_server.timer_service.disk.snapshots.arriving import Arriving

INSTALLING = "installing"

_log = logging.getLogger(__name__)


def install(
    data_dir: str, disk: Disk, log: ReplicaLog, taken: Arriving, log_start: int, store_id: int
) -> CheckpointState:
    """The checkpoint that is there from now on; `store_id`: the replica's until now.

    Raises ValueError before anything has changed; DiskFull, DiskFailed: a start goes on.
    """
    state = dataclasses.replace(taken.state, installed=True)
    if log_start > state.log_needed_from or log_start % 8:
        raise ValueError(
            f"a log from {log_start} on does not go with a snapshot that needs it from"
            f" {state.log_needed_from} on"
        )
    checkpoint.save(_marker(data_dir), store_id.to_bytes(8, "little"), disk)
    _remove(checkpoint_path(data_dir), disk)
    snapshot.remove_files(data_dir, disk)
    taken.move_files()
    log.begin_at(log_start)
    save_checkpoint(data_dir, disk, state)
    _remove(_marker(data_dir), disk)
    return state


def was_interrupted(data_dir: str, disk: Disk) -> bool:
    """Whether a directory is neither what it was nor what was to come: see `empty`."""
    return disk.exists(_marker(data_dir))


def empty(data_dir: str, disk: Disk, log: ReplicaLog) -> None:
    """Makes the directory an empty replica's of the same id; `log`: opened, and closed by this.

    Each step may be done again.
    """
    _log.warning("%s: a snapshot was being installed; it is fetched anew", data_dir)
    marked = checkpoint.load(_marker(data_dir), disk)
    store_id = int.from_bytes(marked or b"", "little")
    _remove(checkpoint_path(data_dir), disk)
    snapshot.remove_files(data_dir, disk)
    for _ in log.recover(log.start_position):
        pass
    log.begin_at(0)
    log.close()
    own = 0 if store_id >= SERVICE_IDS_FROM else store_id
    state = checkpoint_state.empty(store_id | SERVICE_IDS_FROM)
    save_checkpoint(data_dir, disk, dataclasses.replace(state, store_id=own))
    _remove(_marker(data_dir), disk)


def _marker(data_dir: str) -> str:
    return os.path.join(data_dir, INSTALLING)


def _remove(path: str, disk: Disk) -> None:
    if disk.exists(path):
        disk.unlink(path)
        disk.fsync_dir(os.path.dirname(path))
