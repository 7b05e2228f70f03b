"""A shard's data directory: checkpoint, recovery, housekeeping."""
