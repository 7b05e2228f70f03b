"""A log that others hold too: `replica_log`, its `epoch` entries, `catching_up` if behind."""
