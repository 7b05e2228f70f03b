"""The file `disk_id` of a data directory: names this disk of a group for ever.

A checkpoint file (storage/checkpoint.py), little-endian:

off  size  field  meaning
 0    16   id     random
16     8   epoch  the log has held the EPOCH entry of this one, durably; files from before it have
                  16 bytes and stand for 0

A replica is its disk (protocol/record.py, rule 5): whoever empties the directory, or finds at a
start that something durable is gone, has a new one.  A log that ends before `epoch` is gone: also
where the files that would tell of it went with it, and this one did not.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from duemq.errors import InvalidArgument
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import CorruptFile
from duemq_server.storage.replicas import DISK_ID_FILE, is_replicas

DISK_ID_BYTES = 16
_EPOCH = struct.Struct("<Q")


class DiskId(NamedTuple):
    """See the module."""

    id: bytes
    epoch: int = 0


def load_or_make(data_dir: str, disk: Disk, fresh: bytes) -> DiskId:
    """The directory's id; `fresh`, 16 random bytes, if it has none.

    Raises CorruptFile, DiskFull, DiskFailed.
    """
    path = os.path.join(data_dir, DISK_ID_FILE)
    known = checkpoint.load(path, disk)
    if known is None:
        return save(data_dir, disk, DiskId(fresh))
    if len(known) not in (DISK_ID_BYTES, DISK_ID_BYTES + _EPOCH.size):
        raise CorruptFile(path, 0, f"{len(known)} bytes, not {DISK_ID_BYTES}", "Remove it")
    epoch = _EPOCH.unpack(known[DISK_ID_BYTES:])[0] if len(known) > DISK_ID_BYTES else 0
    return DiskId(known[:DISK_ID_BYTES], epoch)


def save(data_dir: str, disk: Disk, known: DiskId) -> DiskId:
    """Durably: a new id before the log is opened again after a loss, a new epoch when it is there.

    Raises DiskFull, DiskFailed.
    """
    data = known.id + _EPOCH.pack(known.epoch)
    checkpoint.save(os.path.join(data_dir, DISK_ID_FILE), data, disk)
    return known


def check_none(data_dir: str) -> None:
    """Raises InvalidArgument for a replica's directory: whoever is to write there has no replicas.

    It may lack what was acknowledged; and what it would append alone lies in an epoch that another
    one leads, so that the group refuses the directory afterwards (running/following/stream.py).
    """
    if is_replicas(data_dir):
        path = os.path.join(data_dir, DISK_ID_FILE)
        raise InvalidArgument(
            f"data_dir: {data_dir} is a replica's: start it with its replica, replicas and"
            " lease_store. To go on without replicas for good, stop all of them, take the one that"
            f" led last, and remove {path} there; the others' directories are of no use then",
            field="replica",
        )
