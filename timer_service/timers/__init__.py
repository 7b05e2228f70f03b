"""Timers and their rows, the near wheel, entries of the timer log.  Pure."""
