"""The file `formers` of a data directory: store ids that the group had before it accepted losses.

A checkpoint file (storage/checkpoint.py): 8 bytes an id, little-endian, the oldest first.

The group's record has them, too.  This is for when it is gone, or was set back: whoever is adopted
then still knows the handles of its timers before a loss, and replicas that come back know its log.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk

FORMERS_FILE = "formers"
ID_BYTES = 8


def load(data_dir: str, disk: Disk) -> tuple[int, ...]:
    """None of them if the file is not there.  Raises CorruptFile, UnknownVersion."""
    path = os.path.join(data_dir, FORMERS_FILE)
    known = checkpoint.load(path, disk, f"Remove {path}: the group's record has it, too") or b""
    parts = (known[at : at + ID_BYTES] for at in range(0, len(known), ID_BYTES))
    return tuple(int.from_bytes(part, "little") for part in parts)


def save(data_dir: str, disk: Disk, formers: Sequence[int]) -> None:
    """Durably.  Raises DiskFull, DiskFailed."""
    known = b"".join(each.to_bytes(ID_BYTES, "little") for each in formers)
    checkpoint.save(os.path.join(data_dir, FORMERS_FILE), known, disk)
