"""Timers of later periods, on disk.  Pure."""
