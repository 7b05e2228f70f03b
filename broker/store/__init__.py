"""All that a broker keeps: topics, queues, offsets, producers; replayed from the log.  Pure."""
