"""Which shard a data directory belongs to: DIR/shard, written once, at the first start.

A shard's timers, and how far it has fetched, mean nothing to another one: started with other
numbers it would leave some queues to nobody and fire what others have fired.
"""

from __future__ import annotations

import json
import os

from duemq.errors import InvalidArgument
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk

FILE = "shard"


def check(directory: str, disk: Disk, shard: int, shards: int) -> None:
    """Raises InvalidArgument unless the directory is this shard's, or new; then it becomes so.

    Also raises CorruptFile, UnknownVersion, DiskFull, DiskFailed.
    """
    disk.makedirs(directory)
    path = os.path.join(directory, FILE)
    saved = checkpoint.load(path, disk)
    if saved is None:
        text = json.dumps({"shard": shard, "shards": shards})
        checkpoint.save(path, text.encode(), disk)
        return
    found = json.loads(saved)
    if (found["shard"], found["shards"]) != (shard, shards):
        raise InvalidArgument(
            f"{directory} is that of shard {found['shard']} of {found['shards']}, not of shard"
            f" {shard} of {shards}: start it with --shard {found['shard']} --shards"
            f" {found['shards']}, or give this shard a data directory of its own.  The number of"
            " shards of a cluster never changes",
            field="shard",
            value=f"{shard} of {shards}",
            limit=f"{found['shard']} of {found['shards']}",
        )
