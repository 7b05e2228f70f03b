"""From queues to answers of pulls and look-ups.  Pure."""
