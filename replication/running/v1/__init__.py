"""Generated from protos/replication."""
