"""EPOCH: the entry with which a leader of replicas begins.  Little-endian.

off  size  field      meaning
 0    8    epoch      of the takeover; grows with each
 8   16    disk_id    the data directory of who leads
24    8    stored_ms  the leader's wall clock, Unix

A log that was never replicated has none.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from duemq_server.storage import record
from duemq_server.storage.disk import Buffer

KIND = record.REPLICATION_KINDS
BODY = struct.Struct("<Q16sq")
assert BODY.size == 32
ENTRY_BYTES = record.entry_bytes(BODY.size)


class Epoch(NamedTuple):
    """Body of an EPOCH entry."""

    epoch: int
    disk_id: bytes
    stored_ms: int


def encode(epoch: int, disk_id: bytes, stored_ms: int) -> bytes:
    """The entry's body.  Raises ValueError for a disk id that has not 16 bytes."""
    if len(disk_id) != 16:
        raise ValueError(f"a disk id has 16 bytes, not {len(disk_id)}")
    return BODY.pack(epoch, disk_id, stored_ms)


def decode(body: Buffer) -> Epoch:
    """Raises ValueError.  A longer body is a newer release's: what it adds is passed over."""
    if memoryview(body).nbytes < BODY.size:
        raise ValueError(f"an EPOCH entry's body has {memoryview(body).nbytes} bytes")
    return Epoch(*BODY.unpack_from(body))
