"""Delayed messages that are pending, many at once."""
