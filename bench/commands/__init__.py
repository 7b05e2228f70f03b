"""What `duemq bench` has, by subject."""
