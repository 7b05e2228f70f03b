"""Timers of a topic, or of keys of it, that are kept back for a while."""
