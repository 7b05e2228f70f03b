"""The file `catching-up` beside a log's segments: empty, there or not.

A replica's log has it, durably, before an entry lies in it that claims more to be durable than is
on this disk (`synced_position`): a recovery must not take that for a proof.  It goes when the disk
holds what the entries claim.  A log that does not follow another one never has it.
"""

from __future__ import annotations

import os

from duemq_server.storage.disk import Disk, remove_durably

FILE_NAME = "catching-up"


def is_set(directory: str, disk: Disk) -> bool:
    """Whether the log is catching up."""
    return disk.exists(os.path.join(directory, FILE_NAME))


def set_durably(directory: str, disk: Disk) -> None:
    """Raises DiskFull, DiskFailed."""
    disk.open(os.path.join(directory, FILE_NAME), create=True).close()
    disk.fsync_dir(directory)


def clear_durably(directory: str, disk: Disk) -> None:
    """Raises DiskFull: try again; DiskFailed."""
    remove_durably(os.path.join(directory, FILE_NAME), disk)
