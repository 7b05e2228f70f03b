"""What can be asked of a shard: cores that look, and change nothing."""
