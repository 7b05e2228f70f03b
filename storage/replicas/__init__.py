"""A log that others hold too: `replica_log`, its `epoch` entries, `catching_up` if behind."""

DISK_ID_FILE = "disk_id"
"""In a replica's data directory, and in no other (replication/disk_id.py)."""
