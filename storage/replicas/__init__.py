"""A log that others hold too: `replica_log`, its `epoch` entries, `catching_up` if behind."""

import os

DISK_ID_FILE = "disk_id"
"""In a replica's data directory, and in no other (replication/disk_id.py)."""


def is_replicas(data_dir: str) -> bool:
    """Whether a data directory is a replica's: others hold what is in it, too."""
    return os.path.exists(os.path.join(data_dir, DISK_ID_FILE))
