"""What a process gives back: memory after a burst, connections of who does not read."""
