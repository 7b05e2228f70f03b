"""The file `disk_id` of a data directory: names this disk of a group for ever.

A checkpoint file (storage/checkpoint.py) of 16 random bytes.  A replica is its disk
(protocol/record.py, rule 5): whoever empties the directory, or finds at a start that something
durable is gone, has a new one.
"""

from __future__ import annotations

import os

from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import CorruptFile

FILE_NAME = "disk_id"
DISK_ID_BYTES = 16


def load_or_make(data_dir: str, disk: Disk, fresh: bytes) -> bytes:
    """The directory's id; `fresh`, 16 random bytes, if it has none.

    Raises CorruptFile, DiskFull, DiskFailed.
    """
    path = os.path.join(data_dir, FILE_NAME)
    known = checkpoint.load(path, disk)
    if known is None:
        return renew(data_dir, disk, fresh)
    if len(known) != DISK_ID_BYTES:
        raise CorruptFile(path, 0, f"{len(known)} bytes, not {DISK_ID_BYTES}", "Remove it")
    return known


def renew(data_dir: str, disk: Disk, fresh: bytes) -> bytes:
    """Gives the directory a new id, durably: before its log is opened again after a loss."""
    checkpoint.save(os.path.join(data_dir, FILE_NAME), fresh, disk)
    return fresh
