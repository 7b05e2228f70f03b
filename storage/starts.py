"""When the processes of a data directory began, in its file `started`: each later than the last.

The file is a checkpoint (checkpoint.py) of 8 bytes, little-endian: Unix time in ms.

Others tell the processes of one directory apart by that time: nameservers, and clients that hear
several of them.  A clock that was set back between two processes must not make the newer one look
older.  Owned by: the process that holds the directory's lock, once, at its start.
"""

from __future__ import annotations

import logging
import os

from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import CorruptFile, DiskFull, UnknownVersion

log = logging.getLogger(__name__)

FILE_NAME = "started"


def begin(data_dir: str, disk: Disk, now_ms: int) -> int:
    """When this process began: `now_ms`, or just after the one before it if that is later.

    A file that cannot be read counts for nothing, and on a full disk it stays as it was: neither
    keeps a process from its start.  Raises DiskFailed.
    """
    path = os.path.join(data_dir, FILE_NAME)
    began_ms = max(now_ms, _last(path, disk) + 1)
    try:
        checkpoint.save(path, began_ms.to_bytes(8, "little"), disk)
    except DiskFull as error:
        log.warning("when this process began is not kept: %s", error)
    return began_ms


def _last(path: str, disk: Disk) -> int:
    try:
        return int.from_bytes(checkpoint.load(path, disk, checkpoint.NOT_NEEDED) or b"", "little")
    except (CorruptFile, UnknownVersion) as error:
        log.warning("when the process before this one began is not known: %s", error)
        return 0
